"""What is known about a job of the local stand-in, in jobs/: a record, and whether its processes still live.

Files of one job: `<id>_local.json` (written at submission, then by its controller alone) and `<id>_cancel.json`
(written by whoever cancels).
"""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm.commands import SchedulerError
from slurm.job import JobState
from slurm.processes import Process, boot_id, is_alive, session_members

PREEMPT = signal.SIGUSR1
"""Tells a job's controller to end it as preempted."""


@dataclass(frozen=True)
class Record:
    """One local job, as its controller last wrote it."""

    job_id: str
    name: str
    comment: str | None
    process: Process
    """The controller: leader of a session that holds the whole job."""
    order: int
    """Jobs of one name run one after the other in this order."""
    submitted: float
    limit_s: float | None
    warn_signal: str
    warn_before_s: float
    kill_wait_s: float
    state: JobState = JobState.PENDING
    started: float | None = None
    ended: float | None = None
    exit_code: int | None = None


def path(folder: Path, job_id: str) -> Path:
    """Where the record of a job is."""
    return folder / f"{job_id}_local.json"


def cancel_path(folder: Path, job_id: str) -> Path:
    """Exists once somebody has cancelled the job."""
    return folder / f"{job_id}_cancel.json"


def publish(folder: Path, record: Record) -> None:
    """Write the record whole, or not at all."""
    write_json(path(folder, record.job_id), {**asdict(record), "state": record.state.value})


def write_json(target: Path, value: object) -> None:
    """Publish `value` at `target` whole: a reader sees the old file or the new one."""
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    with staged.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(target)


def read(folder: Path, job_id: str) -> Record | None:
    """The record of a job, or None if this folder has none."""
    file = path(folder, job_id)
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError("no regular file")
        fields = json.loads(file.read_text(encoding="utf-8"))
        return Record(**{**fields, "process": Process(**fields["process"]), "state": JobState(fields["state"])})
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        raise SchedulerError(
            f"{file}: is no record of a job ({type(error).__name__}); remove it if its job is over"
        ) from None


def read_all(folder: Path) -> list[Record]:
    """Every job of this folder, oldest first."""
    ids = [file.name.removesuffix("_local.json") for file in folder.glob("[0-9]*_local.json")]
    records = (read(folder, job_id) for job_id in ids)
    return sorted((record for record in records if record), key=lambda record: record.order)


def next_order(folder: Path) -> int:
    """One more than any job here has; the caller holds the folder's lock."""
    return max((record.order for record in read_all(folder)), default=0) + 1


def live_before(folder: Path, record: Record) -> Iterator[Record]:
    """Earlier jobs of the same name of which something still runs: the singleton waits for them."""
    for other in read_all(folder):
        if other.name == record.name and other.order < record.order and is_running(other):
            yield other


def is_running(record: Record) -> bool:
    """Does anything of the job live? Its tasks count without their controller, which may have been killed."""
    if record.state.is_over or record.process.boot_id != boot_id():
        return False
    return is_alive(record.process) or bool(session_members(record.process))
