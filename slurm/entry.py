"""The first of our code inside a job: hands Slurm's facts, in our words, to the entry point that was asked for."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypedDict

TASKS_OVER: Final = "tasks-over"


class Start(TypedDict):
    """What an entry point is told about the process that it is."""

    job_id: str
    name: str
    restart: int
    """How often the scheduler has started this job again; 0 on the local stand-in."""
    rank: int
    world: int
    local_rank: int
    requeue: list[str] | None
    """Puts this job back into the queue if it is being preempted, and only then; None where there is none."""


def run(entry: str, args: tuple[str, ...], name: str, one_process: bool) -> None:
    """Call `entry` as `function(*args, start)`; what it returns, if it returns, is the exit code of the process."""
    start = read_start(name, one_process)
    module, _, attribute = entry.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    # Last, for a SIGTERM to a process that has no handler yet ends it, and a job that ends by itself is not requeued.
    restore_signals()
    code = function(*args, start)
    if code:
        sys.exit(code)


def tasks_over(jobs: Path, job_id: str, restart: int) -> Path:
    """The file that a job's batch step makes when the tasks of this start are over and `JobRequest.beside` goes on."""
    return jobs / f"{TASKS_OVER}-{job_id}-{restart}"


def main(argv: Sequence[str]) -> None:
    """`python -m slurm.entry ENTRY NAME ARGUMENT...`: what a job runs in its batch step, beside its tasks."""
    entry, name, *args = argv
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"
    run(entry, tuple(args), name, one_process=True)


def read_start(name: str, one_process: bool) -> Start:
    """Where this process stands in its job. A job without srun is one process, whatever Slurm counts as its tasks."""
    from submitit import JobEnvironment

    here = JobEnvironment()
    return Start(
        job_id=here.job_id,
        name=name,
        restart=int(os.environ.get("SLURM_RESTART_COUNT", "0")) if here.cluster == "slurm" else 0,
        rank=0 if one_process else here.global_rank,
        world=1 if one_process else here.num_tasks,
        local_rank=0 if one_process else here.local_rank,
        requeue=_requeue_command(here.job_id) if here.cluster == "slurm" else None,
    )


def _requeue_command(job_id: str) -> list[str] | None:
    return [sys.executable, "-m", "slurm.requeue", job_id] if shutil.which("scontrol") else None


def restore_signals() -> None:
    """Undo submitit's handlers: they ignore SIGTERM, and act on SIGUSR2 in the middle of anything."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main(sys.argv[1:])
