"""rehearse: short copies of a run, supervised by processes of their own, with faults thrown in.

Whatever ends it, no job and no process goes on.

``python -m supervisor.rehearse RUN_DIR`` is such a supervisor: a process that may be killed, and is started again.
"""

import contextlib
import getpass
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from slurm.commands import python_environment
from slurm.job import JobState
from slurm.scheduler import LocalScheduler, Scheduler, SchedulerError
from supervisor.report.screen import printing_cannot_fail
from supervisor.requests import Request
from supervisor.run_state import RunState
from supervisor.runs import RunError
from supervisor.supervise import read_state, supervise
from worker.contract.files import publish_message
from worker.contract.loss_history import last_record
from worker.contract.rehearsal import FROM_OUTSIDE, Fault, note_fault
from worker.contract.run_dir import RunDir, is_run_name

SUPERVISOR = "supervisor.rehearse"
_LOOK_S: Final = 0.05
_ASK_EVERY_S: Final = 2.0
"""Between two questions to the scheduler."""
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAST_WORDS: Final = 600
_LONGEST_NAME: Final = 70


def free_name(runs: Path, name: str) -> str:
    """A name for a rehearsal of the run ``name`` that no folder under ``runs`` begins with yet."""
    base = f"{name[:_LONGEST_NAME]}-rehearsal"
    number = 1
    while any(runs.glob(f"{base}-{number}")) or any(runs.glob(f"{base}-{number}-*")):
        number += 1
    assert is_run_name(f"{base}-{number}")
    return f"{base}-{number}"


@dataclass
class Rehearsed:
    """One run of a rehearsal, with the process that supervises it."""

    run_dir: RunDir
    scheduler: Scheduler
    faults: tuple[Fault, ...] = ()
    is_quiet: bool = False
    """What its supervisor prints goes to logs/supervisor.log, and not to our stderr."""
    process: subprocess.Popen[bytes] | None = None
    done: list[Fault] = field(default_factory=list)
    """Those of the faults from outside that came."""
    asked_at: float = -math.inf
    """When the scheduler was last asked, on the monotonic clock."""

    def start(self) -> None:
        """Start its supervisor; a Ctrl-C in the terminal does not reach it."""
        with open(self.run_dir.supervisor_log, "ab") as log:
            output = log if self.is_quiet else sys.stderr
            self.process = subprocess.Popen(
                [sys.executable, "-m", SUPERVISOR, str(self.run_dir.path)],
                env=python_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,
            )

    def kill(self) -> None:
        """SIGKILL to its supervisor."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def carry_out(runs: Sequence[Rehearsed]) -> list[RunState]:
    """Supervise the runs beside each other to their ends, throw the faults in, and say where each stands then.

    Whatever ends this, no job and no process of theirs goes on. RunError where a supervisor cannot go on.
    """
    heard = {number: signal.getsignal(number) for number in _ENDING}
    with contextlib.ExitStack() as afterwards:
        for run in runs:
            afterwards.callback(_end, run)
        afterwards.callback(_hear_no_more)  # the first to be called: nothing cuts the clean-up short
        for run in runs:
            run.start()
        while going := [run for run in runs if not _is_over(run)]:
            for run in going:
                _throw(run)
            time.sleep(_LOOK_S)
    for number, handler in heard.items():
        signal.signal(number, handler)
    return [read_state(run.run_dir) for run in runs]


def _is_over(run: Rehearsed) -> bool:
    """Whether its supervisor has left it; RunError where that was not the run's end."""
    assert run.process is not None
    code = run.process.poll()
    if code is None:
        return False
    if not read_state(run.run_dir).is_over:
        log = run.run_dir.supervisor_log
        said = log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:] if log.exists() else ""
        raise RunError(f"{run.run_dir.path}: its supervisor ended by itself with exit code {code}; {said}")
    return True


def _throw(run: Rehearsed) -> None:
    """Do those faults from outside whose step has come."""
    last = last_record(run.run_dir.history)
    step = last.step if last is not None else 0
    for fault in run.faults:
        if fault.kind in FROM_OUTSIDE and fault not in run.done and fault.step <= step:
            if fault.kind == "preempt":
                _preempt(run, fault, step)
            else:
                _lose_supervisor(run, fault, step)


def _preempt(run: Rehearsed, fault: Fault, step: int) -> None:
    """Ask for the job's requeue once it is seen to run; the next look tries again where nobody answers."""
    if time.monotonic() - run.asked_at < _ASK_EVERY_S:
        return
    run.asked_at = time.monotonic()
    job_id = read_state(run.run_dir).job_id
    is_local = isinstance(run.scheduler, LocalScheduler)
    means = f"SIGTERM, then SIGKILL, to job {job_id}, as without a queue" if is_local else f"scontrol requeue {job_id}"
    try:
        job = run.scheduler.look([job_id]).get(job_id) if job_id is not None else None
        if job is None or job.state is not JobState.RUNNING:
            return
        run.scheduler.requeue(job.job_id)
    except SchedulerError as error:
        if error.answered:
            run.done.append(fault)
            note_fault(run.run_dir, fault, step, means, " ".join(str(error).split()))
        return
    run.done.append(fault)
    note_fault(run.run_dir, fault, step, means)


def _lose_supervisor(run: Rehearsed, fault: Fault, step: int) -> None:
    run.kill()
    run.done.append(fault)
    pid = run.process.pid if run.process is not None else 0
    note_fault(run.run_dir, fault, step, f"SIGKILL to the supervisor, pid {pid}, which was started again")
    run.start()


def _end(run: Rehearsed) -> None:
    """Leave nothing of a run behind that is not over: its supervisor, its job, the journal without an ending."""
    run.kill()
    state = read_state(run.run_dir)
    if state.is_over:
        return
    name = run.run_dir.path.name
    print(f"ends {name}: its job is to be cancelled; this takes a moment", file=sys.stderr, flush=True)
    publish_message(run.run_dir.request, Request(verb="stop", by=getpass.getuser(), asked_at=time.time()))
    for job in run.scheduler.find(state.job_name):
        run.scheduler.cancel(job.job_id)
    with open(os.devnull, "w", encoding="utf-8") as nobody:
        supervise(run.run_dir, nobody)  # until its job is over
    print(f"{name}: its job is cancelled", file=sys.stderr, flush=True)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within, the first SIGINT, SIGTERM or SIGHUP ends everything, and what comes after it changes nothing.

    Nor does it while the process is on its way out. What is ignored, as by nohup, stays ignored.
    """
    before = {number: signal.getsignal(number) for number in _ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    is_interrupted = False
    try:
        yield
    except KeyboardInterrupt:
        is_interrupted = True
        raise
    finally:
        for number, handler in before.items() if not is_interrupted else ():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    _hear_no_more()
    raise KeyboardInterrupt


def _hear_no_more() -> None:
    """Ignore what would end us; so do the scheduler's programs, which a Ctrl-C in the terminal reaches too."""
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)


def main() -> None:
    """Supervise the run of argv to its end."""
    with printing_cannot_fail():
        supervise(RunDir(Path(sys.argv[1])), sys.stdout)


if __name__ == "__main__":
    main()
