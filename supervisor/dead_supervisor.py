"""A supervisor's own job that is over although the run is not: whether it ever began, and its last words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.journal import Event, ResumeRequested, RunCreated, Submitted, SupervisorStarted
from worker.contract.files import UnusableFileError, read_data
from worker.contract.run_dir import RunDir

_ERRORS: Final = "_0_log.err"


@dataclass(frozen=True)
class DeadSupervisor:
    """The job, whose end only the scheduler knows."""

    job_id: str
    began: bool
    """Whether it supervised the run, and ended later."""
    file: Path
    """Where its last words are: its stderr, and once it had begun logs/supervisor.log."""
    said: str
    """The last line of its stderr; empty where it wrote nothing."""


def last_supervisor(run_dir: RunDir, events: Sequence[Event]) -> DeadSupervisor | None:
    """The newest job of a supervisor, by what files say of it; it may live all the same.

    None where there is none since the last supervisor began or somebody asked for one.
    """
    turns = [event for event in events if isinstance(event, RunCreated | ResumeRequested | SupervisorStarted)]
    if not turns:
        return None
    known = {event.job_id for event in events if isinstance(event, Submitted | SupervisorStarted)}
    logs = [path for path in run_dir.jobs.glob(f"*{_ERRORS}") if _job_of(path) not in known and _may_supervise(path)]
    dated = [(written, path) for written, path in _dated(logs) if written >= turns[-1].time]
    if dated:
        path = max(dated)[1]
        return DeadSupervisor(_job_of(path), False, path, _last_line(path))
    last = turns[-1]
    if not isinstance(last, SupervisorStarted) or last.job_id is None:
        return None
    return DeadSupervisor(
        last.job_id, True, run_dir.supervisor_log, _last_line(run_dir.jobs / f"{last.job_id}{_ERRORS}")
    )


def _job_of(log: Path) -> str:
    return log.name.removesuffix(_ERRORS)


def _may_supervise(log: Path) -> bool:
    """Whether the batch script of a log's job does not say that it is another one: a worker's, or one for ``infer``."""
    try:
        script = read_data(log.with_name(f"{_job_of(log)}_submission.sh")).decode(errors="replace")
    except (OSError, UnusableFileError):
        return True
    return "--job-name=" not in script or "--job-name=hs-" in script


def _dated(paths: Iterable[Path]) -> list[tuple[float, Path]]:
    """When each was last written, UTC seconds; without those that are gone, or closed to us."""
    found = []
    for path in paths:
        try:
            found.append((path.lstat().st_mtime, path))
        except OSError:
            continue
    return found


def _last_line(path: Path) -> str:
    try:
        lines = read_data(path).decode(errors="replace").split("\n")
    except (OSError, UnusableFileError):
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
