"""A supervisor's own job that ended before it began to supervise: which one, and its last words."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.journal import Event, ResumeRequested, RunCreated, Submitted, SupervisorStarted
from worker.contract.files import UnusableFileError, read_data
from worker.contract.run_dir import RunDir

_ERRORS: Final = "_0_log.err"


@dataclass(frozen=True)
class NeverBegan:
    """The job, whose end only the scheduler knows."""

    job_id: str
    file: Path
    """What it wrote to stderr."""
    said: str
    """The last line of that; empty where it wrote nothing."""


def never_began(run_dir: RunDir, events: Sequence[Event]) -> NeverBegan | None:
    """The newest job other than the worker's since somebody asked for a supervisor, where none has begun since then.

    Only files are looked at: such a job may live, and then it begins yet. None where there is none.
    """
    turns = [event for event in events if isinstance(event, RunCreated | ResumeRequested | SupervisorStarted)]
    if not turns or isinstance(turns[-1], SupervisorStarted):
        return None
    workers = {event.job_id for event in events if isinstance(event, Submitted)}
    logs = [path for path in run_dir.jobs.glob(f"*{_ERRORS}") if path.name.removesuffix(_ERRORS) not in workers]
    dated = [(written, path) for written, path in _dated(logs) if written >= turns[-1].time]
    if not dated:
        return None
    path = max(dated)[1]
    return NeverBegan(path.name.removesuffix(_ERRORS), path, _last_line(path))


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
