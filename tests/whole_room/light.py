"""The whole without the weight: the real command, agents and cluster, and a trainer that only counts steps.

`python -m tests.whole_room.light VERB ...` is the command; its worker's jobs start the agent of `light_trainer`.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm.job import JobRequest
from slurm.scheduler import SlurmScheduler
from supervisor import cli, job_actions, job_request, place, rehearse
from supervisor.verbs import going

COMMAND = (sys.executable, "-m", "tests.whole_room.light")
DIE = "LIGHT_DIE"
"""Variable of the command: `before submit`, `after cancel` and the like, where it is killed."""


def main() -> int:
    """The command, whose worker's jobs run the light agent; or, of a run's folder, a rehearsal's supervisor."""
    lighten()
    if Path(sys.argv[1]).is_dir():
        rehearse.main()
        return 0
    return cli.main(sys.argv[1:])


def lighten() -> None:
    """Have this process submit jobs that run the light agent and our supervisor, and die where a test wants it."""
    if DIE in os.environ:
        _die(*os.environ[DIE].split())
    job_actions.worker_request = light_request
    rehearse.SUPERVISOR = "tests.whole_room.light"
    going.supervisor_request = place.supervisor_request = light_supervisor_request


def _die(when: str, method: str) -> None:
    """Have a call of Slurm's scheduler kill this process, `before` or `after` its effect."""
    call = getattr(SlurmScheduler, method)

    def dying(*args: Any, **kwargs: Any) -> None:
        if when == "after":
            call(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(SlurmScheduler, method, dying)


def supervisor_main(run_dir: str, start: dict[str, Any]) -> int:
    """The supervisor in a job of its own."""
    lighten()
    return cli.job_main(run_dir, start)


def beside_main(run_dir: str, start: dict[str, Any]) -> int:
    """The supervisor in the worker's job."""
    lighten()
    return cli.beside_main(run_dir, start)


def light_supervisor_request(*args: Any, **kwargs: Any) -> JobRequest:
    return replace(job_request.supervisor_request(*args, **kwargs), entry="tests.whole_room.light:supervisor_main")


def light_request(*args: Any, **kwargs: Any) -> JobRequest:
    request = job_request.worker_request(*args, **kwargs)
    beside = ("tests.whole_room.light:beside_main", *request.beside[1:]) if request.beside else ()
    return replace(request, entry="tests.whole_room.light_trainer:agent_main", beside=beside)


if __name__ == "__main__":
    sys.exit(main())
