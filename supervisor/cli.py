"""The command line: its verbs, and what becomes of the errors that a person can cause."""

import argparse
import errno
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from slurm.job import RequestError
from slurm.scheduler import SchedulerError
from supervisor.arguments import parser_of
from supervisor.config import ConfigError
from supervisor.lease import HeldError, LostError
from supervisor.place import supervise_beside_worker, supervise_in_job
from supervisor.report.log_text import SinceError
from supervisor.report.screen import printing_cannot_fail
from supervisor.run_state import RunState
from supervisor.runs import RunError
from supervisor.verbs.diagnosing import diagnose
from supervisor.verbs.exits import HELD, INTERRUPTED, OK, UNFORESEEN, WRONG_INPUT, complain, exit_code_of
from supervisor.verbs.going import adopt, resume, run, stop, submit
from supervisor.verbs.levers import pin, rollback
from supervisor.verbs.looking import doctor, log, report, status, watch
from supervisor.verbs.rehearsing import rehearse
from supervisor.verbs.trying import check, detect, infer
from worker.contract.files import UnusableFileError
from worker.contract.run_dir import RunDir

_A_PERSONS_DISK: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT})
_A_PERSONS_NAME: Final = frozenset({errno.ENAMETOOLONG, errno.ELOOP})


def job_main(run_dir: str, start: dict[str, Any]) -> int:
    """The supervisor inside its own job: what it prints is logs/supervisor.log."""
    return _supervise_in_job(RunDir(Path(run_dir)), lambda folder: supervise_in_job(folder, start))


def beside_main(run_dir: str, start: dict[str, Any]) -> int:
    """The supervisor inside the worker's job; 0 = it need not be started again there."""
    code = _supervise_in_job(RunDir(Path(run_dir)), lambda folder: supervise_beside_worker(folder, start))
    return code if code in (HELD, UNFORESEEN) else OK


def _supervise_in_job(folder: RunDir, act: Callable[[RunDir], RunState | None]) -> int:
    with open(folder.supervisor_log, "a", buffering=1, encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    with printing_cannot_fail():
        return _guarded(lambda: exit_code_of(act(folder)))


VERBS: Final = (
    run,
    submit,
    adopt,
    check,
    rehearse,
    detect,
    status,
    watch,
    log,
    diagnose,
    report,
    stop,
    resume,
    rollback,
    pin,
    infer,
    doctor,
)
_ONLY_LOOK: Final = (check, detect, status, watch, log, diagnose, report, infer, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; errors that a person can cause are one line on stderr."""
    if _is_installed("supervisor"):
        print(
            "the PyPI package `supervisor` has the same import name; install higgsfield-supervisor without it",
            file=sys.stderr,
        )
        return WRONG_INPUT
    parser = parser_of(VERBS)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for the words that may stand here
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(argv)
    if args.act in _ONLY_LOOK:
        return _guarded(lambda: _look(args))
    with printing_cannot_fail():
        return _guarded(lambda: int(args.act(args)))


def _look(args: argparse.Namespace) -> int:
    """A verb that only looks; where nobody reads on, it has shown enough."""
    try:
        code = int(args.act(args))
        print(end="", flush=True)
    except BrokenPipeError:
        _leave_stdout()
        return OK
    return code


def _leave_stdout() -> None:
    """What is still to be written there would fail once more when the interpreter ends."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _guarded(act: Callable[[], int]) -> int:
    try:
        return act()
    except ConfigError as error:
        print("\n".join(str(finding) for finding in error.findings), file=sys.stderr)
        return WRONG_INPUT
    except (RunError, RequestError, SchedulerError, SinceError, UnusableFileError) as error:
        complain(str(error))
        return WRONG_INPUT
    except (HeldError, LostError) as error:
        complain(str(error))
        return HELD
    except OSError as error:
        is_name = error.errno in _A_PERSONS_NAME
        if not is_name and error.errno not in _A_PERSONS_DISK:
            raise
        _leave_stdout()
        mend = "use one that you may read and write, with room on its disk"
        complain(f"{error.filename or 'the disk'}: {error.strerror}" + ("" if is_name else f"; {mend}"))
        return WRONG_INPUT
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
