"""One claim an attempt: which job, and which restart of it, may write to the run."""

import os
from pathlib import Path

from worker.contract.files import Message, encode, make_folder, publish_message, read_message, sync_folder


class FencedError(Exception):
    """The run belongs to somebody else now: leave, and write nothing more."""


class Claim(Message):
    """claim.json: written by rank 0's agent at its start."""

    job_id: str
    name: str
    restart: int
    host: str
    pid: int
    started_ticks: int
    time: float


def read_claim(path: Path) -> Claim | None:
    """The attempt's claim, None where nobody has claimed it."""
    return read_message(path, Claim)


def take_claim(path: Path, claim: Claim) -> Claim | None:
    """Claim an attempt, or take it over from the same job with a lower restart; the claim that stood before.

    FencedError where the claim is another job's, a newer restart's, or another process's of the same restart.
    """
    if _create(path, claim):
        return None
    before = read_claim(path)
    if before is None:
        raise FencedError(f"{path} came and went while it was read")
    if before.job_id != claim.job_id:
        raise FencedError(f"job {before.job_id} holds this attempt")
    if before.restart > claim.restart:
        raise FencedError(f"restart {before.restart} of this job holds this attempt")
    if before.restart == claim.restart and _process_of(before) != _process_of(claim):
        raise FencedError(f"process {before.pid} on {before.host} holds this attempt for the same restart")
    publish_message(path, claim)
    return before


def _process_of(claim: Claim) -> tuple[str, int, int]:
    return claim.host, claim.pid, claim.started_ticks


def _create(path: Path, claim: Claim) -> bool:
    """Create the claim whole and exclusively: a full temporary file, then a link that fails where one is."""
    make_folder(path.parent, within=path.parents[2])
    temporary = path.with_name(f".tmp-claim-{claim.host}-{claim.pid}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(encode(claim.model_dump(mode="json")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    sync_folder(path.parent)
    return True


def check_claim(path: Path, job_id: str, restart: int) -> None:
    """Return while the claim is this start's own; FencedError otherwise."""
    claim = read_claim(path)
    if claim is None:
        raise FencedError(f"{path} is gone")
    if (claim.job_id, claim.restart) != (job_id, restart):
        raise FencedError(f"job {claim.job_id}, restart {claim.restart}, holds the attempt now")


def start_ticks(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since boot; None where it is not there (any more).

    A pid alone names a process only until it is given out again; pid and ticks name it for good.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped by a signal, as Ctrl-Z does, and waits for SIGCONT."""
    fields = _stat(pid)
    return fields is not None and fields[0] == b"T"


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat from the state on: [0] state, [19] start time in ticks; None where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat[stat.rindex(b")") + 2 :].split()
