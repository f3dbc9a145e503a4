"""A program of the worker's room asked something: on this machine, or as a job; it tells lines of JSON as they come."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from slurm import reasons
from slurm.commands import python_environment
from slurm.job import JobRequest, JobStatus
from slurm.scheduler import Scheduler
from supervisor.runs import RunError
from worker.contract.told import Line

_LOOK_S = 0.2
_ASK_EVERY = 10
"""Looks at the file for each question to the scheduler."""
_GONE_AFTER_S = 10.0
"""A job that is over may have written its last line on a disk that shows it late."""

AnyLine = TypeVar("AnyLine", bound=Line)


def told_here(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], kind: type[AnyLine]
) -> Iterator[AnyLine]:
    """What ``python -m module`` tells on this machine; it ends with this generator."""
    argv = [sys.executable, "-m", module, *arguments]
    own = python_environment(dict(environment))
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=own) as program:
        assert program.stdout is not None
        try:
            for line in program.stdout:
                yield kind.model_validate_json(line)
        finally:
            program.terminate()
    if program.returncode > 0:
        raise RunError(f"the program {module} ended with exit code {program.returncode}")


def told_by_job(
    job: JobRequest, scheduler: Scheduler, kind: type[AnyLine], clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[AnyLine]:  # fmt: skip
    """What a job tells, from its submission on, into the file that its last argument names.

    The job ends with this generator, whatever ends it, and its files are removed.
    """
    out = Path(job.args[-1])
    job_id = scheduler.submit(job)
    try:
        yield from _follow(out, job, job_id, scheduler, kind, clock, sleep)
    finally:
        scheduler.cancel(job_id)
        for path in (out, job.environment_file):
            path.unlink(missing_ok=True)


def _follow(
    out: Path, job: JobRequest, job_id: str, scheduler: Scheduler, kind: type[AnyLine],
    clock: Callable[[], float], sleep: Callable[[float], None],
) -> Iterator[AnyLine]:  # fmt: skip
    offset, said, over_since, looks = 0, "", None, 0
    while True:
        lines, offset = _new_lines(out, offset)
        for line in lines:
            told = kind.model_validate_json(line)
            yield told
            if told.is_last or told.error is not None:
                return
        if looks % _ASK_EVERY == 0 and not lines:
            status = scheduler.look([job_id]).get(job_id)
            now = _where_it_stands(job_id, status)
            if now != said:
                yield kind(note=now)
            said = now
            if status is None or status.state.is_over:
                over_since = clock() if over_since is None else over_since
                if clock() - over_since > _GONE_AFTER_S:
                    raise RunError(f"{now}, and it left no answer; its output is in {job.folder}/{job_id}_0_log.err")
        looks += 1
        sleep(_LOOK_S)


def _where_it_stands(job_id: str, status: JobStatus | None) -> str:
    """What the job does, and why it waits, for a person."""
    if status is None:
        return f"job {job_id} is gone"
    why = reasons.explain(status)
    return f"job {job_id} waits: {why} ({status.why})" if why else f"job {job_id} is {status.state.value}"


def _new_lines(path: Path, offset: int) -> tuple[list[bytes], int]:
    """The whole lines from byte ``offset`` on, and where the next one begins; none where there is no file yet."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            whole, newline, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return [], offset
    return whole.splitlines(), offset + len(whole) + len(newline)
