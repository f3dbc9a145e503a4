"""What is known about a job of the local stand-in, in jobs/: a record on disk, and whether its processes still live.

A pid is used again some day, so a process is its pid, its start time in clock ticks and the boot that it belongs to.
Files of one job: `<id>_local.json` (written at submission, then by its controller alone) and `<id>_cancel.json`
(written by whoever cancels).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from slurm.job import JobState


@dataclass(frozen=True)
class Process:
    """One process of one boot of one machine."""

    pid: int
    started_ticks: int
    boot_id: str
    host: str


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
    try:
        fields = json.loads(path(folder, job_id).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Record(**{**fields, "process": Process(**fields["process"]), "state": JobState(fields["state"])})


def read_all(folder: Path) -> list[Record]:
    """Every job of this folder, oldest first."""
    ids = [file.name.removesuffix("_local.json") for file in folder.glob("[0-9]*_local.json")]
    records = (read(folder, job_id) for job_id in ids)
    return sorted((record for record in records if record), key=lambda record: record.order)


def next_order(folder: Path) -> int:
    """One more than any job here has; the caller holds the folder's lock."""
    return max((record.order for record in read_all(folder)), default=0) + 1


def identify(pid: int) -> Process:
    """The process that has this pid now. Raises ProcessLookupError if there is none."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"no process {pid}")
    return Process(pid, int(fields[19]), boot_id(), socket.gethostname())


def boot_id() -> str:
    """Which boot of which machine this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def is_alive(process: Process) -> bool:
    """Does exactly this process still run? A zombie does not."""
    fields = _stat(process.pid)
    return fields is not None and fields[0] not in "ZX" and int(fields[19]) == process.started_ticks


def session_members(leader: Process) -> list[int]:
    """Live pids of the leader's session, the leader among them; nothing of a later process with the same pid."""
    taken = _stat(leader.pid)
    if taken is not None and int(taken[19]) != leader.started_ticks:
        return []
    found = ((int(entry.name), _stat(int(entry.name))) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [pid for pid, fields in found if fields and fields[0] not in "ZX" and int(fields[3]) == leader.pid]


def signal_members(leader: Process, number: signal.Signals) -> None:
    """Signal every process of the job but its controller, as Slurm does with a step."""
    for pid in session_members(leader):
        if pid != leader.pid:
            _signal(pid, number)


def signal_process(process: Process, number: signal.Signals) -> None:
    """Signal this process if it still runs."""
    if is_alive(process):
        _signal(process.pid, number)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: [0] state, [3] session, [19] start time in ticks."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


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
