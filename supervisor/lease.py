"""lease.json: one supervisor a run, and how the next one knows that the last is dead.

A beat is compared with itself on the *reader's* monotonic clock: clocks of two hosts are never compared.  The lock file
only makes a take-over orderly where file locks work; correctness is in the holder's look at lease.json before each
line of the journal.
"""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import filelock

from worker.contract.claim import is_stopped, start_ticks
from worker.contract.files import Message, UnusableFileError, publish_message, read_message, refuse_what_is_no_file
from worker.contract.run_dir import RunDir

BEAT_EVERY_S: Final = 10.0
DEAD_AFTER_S: Final = 60.0
_LOOK_EVERY_S: Final = 1.0
_LOCK_TIMEOUT_S: Final = 10.0


class LeaseFile(Message):
    """Who supervises the run; ``beat`` grows while it lives. An empty ``holder`` is nobody: the term is kept."""

    holder: str
    host: str
    pid: int
    started_ticks: int | None = None
    job_id: str | None = None
    restart: int = 0
    term: int
    beat: int


@dataclass(frozen=True)
class OwnJob:
    """The job that a supervisor runs in, and how often Slurm has started that again."""

    job_id: str
    restart: int = 0
    tasks_over: Path | None = None
    """Made when the worker's tasks in it are over; None where the job is the supervisor's alone."""

    def is_workers(self, job_id: str | None) -> bool:
        """Whether that job is this one, and the supervisor lives in it beside the worker."""
        return self.tasks_over is not None and job_id == self.job_id

    def has_lost_its_worker(self, job_id: str | None) -> bool:
        """Whether that job is this one, and goes on for the supervisor's sake alone."""
        return self.tasks_over is not None and job_id == self.job_id and self.tasks_over.exists()


NO_JOB: Final = OwnJob("")
"""Of a supervisor that runs in none."""


class HeldError(Exception):
    """Another supervisor holds the run; the message says who."""


class SupersededError(HeldError):
    """A later start of our own job has held the run: Slurm has given this one up, with its node."""


class LostError(Exception):
    """The lease is somebody else's by now; write nothing more."""


@dataclass
class Lease:
    """A lease that is held. ``beat`` as often as you like; ``check`` before each line of the journal."""

    run_dir: RunDir
    file: LeaseFile
    beaten_at: float
    own: OwnJob = field(default_factory=lambda: NO_JOB)
    """The job that the holder runs in."""
    free_since: float | None = None
    """The last sign of the holder before, UTC seconds of the disk's clock; None where there was none."""

    @property
    def term(self) -> int:
        """Grows by one with each holder."""
        return self.file.term

    def check(self) -> None:
        """Return while the lease is our own; LostError otherwise. A file that was spoilt is written again."""
        try:
            found = read_message(self.run_dir.lease, LeaseFile)
        except UnusableFileError:
            publish_message(self.run_dir.lease, self.file)
            return
        if found is None and not self.run_dir.path.exists():
            how = "what trained in it ends by itself, and a run that was moved goes on by `higgsfield resume`"
            raise LostError(f"{self.run_dir.path}: the folder is gone, moved or removed; {how}")
        if found is None or found.holder != self.file.holder:
            raise LostError(f"{found.holder if found else 'nobody'} holds {self.run_dir.path.name} now")

    def beat(self) -> None:
        """Show that the holder lives, every 10 s at most.

        Not durable: a host that crashes has no holder any more, and a thousand runs would keep a disk busy with it.
        """
        now = time.monotonic()
        if now - self.beaten_at < BEAT_EVERY_S:
            return
        self.check()
        self.file = self.file.model_copy(update={"beat": self.file.beat + 1})
        publish_message(self.run_dir.lease, self.file, is_durable=False)
        self.beaten_at = now

    def give_up(self) -> None:
        """Leave the run to the next supervisor, at once."""
        with contextlib.suppress(LostError, UnusableFileError, OSError):
            self.check()
            publish_message(self.run_dir.lease, self.file.model_copy(update={"holder": ""}))

    def give_back(self) -> None:
        """Leave the run as if it had not been held: the last sign of a holder is the one before."""
        self.give_up()
        if self.free_since is not None:
            with contextlib.suppress(OSError):
                os.utime(self.run_dir.lease, (self.free_since, self.free_since))


def take_lease(
    run_dir: RunDir,
    *,
    job_is_over: Callable[[str], bool] = lambda job_id: False,
    sleep: Callable[[float], None] = time.sleep,
    patience_s: float = DEAD_AFTER_S,
    own: OwnJob = NO_JOB,
    nobody: Container[str] = (),
) -> Lease:
    """The run's lease, taken over from a holder that is dead; HeldError where one lives, UnusableFileError where it
    is a folder or a pipe.

    A holder on another host is watched for ``patience_s`` before it counts as dead. One that an earlier start of our
    ``own`` job left behind is not waited for: Slurm has given it up, with its node, and its next look makes it leave.
    SupersededError for such an earlier start itself, whoever holds the run.
    ``nobody``: holders that are no more.
    """
    refuse_what_is_no_file(run_dir.lease)
    known = _read(run_dir)
    if known is not None and known.job_id == own.job_id and known.restart > own.restart:
        raise SupersededError(f"{run_dir.path}: job {own.job_id} was started again, and this start is no more")
    before = known if known is not None and known.holder and known.holder not in nobody else None
    if before is not None and not _is_superseded(before, own):
        _wait_until_dead(run_dir, before, job_is_over, sleep, patience_s)
    with _orderly(run_dir):
        now = read_holder(run_dir)
        if now is not None and now.holder not in nobody and (before is None or now.holder != before.holder):
            raise _held(run_dir, now)
        last, free_since = _read(run_dir), _last_sign(run_dir)
        return replace(_write(run_dir, (last.term if last else 0) + 1, own), free_since=free_since)


def _last_sign(run_dir: RunDir) -> float | None:
    """When the lease was last written: a beat, or a holder that gave it up."""
    try:
        return run_dir.lease.stat().st_mtime
    except OSError:
        return None


def _is_superseded(holder: LeaseFile, own: OwnJob) -> bool:
    return holder.job_id == own.job_id and holder.restart < own.restart


def _write(run_dir: RunDir, term: int, own: OwnJob) -> Lease:
    host, pid = socket.gethostname(), os.getpid()
    file = LeaseFile(
        holder=f"{host}:{pid}:{secrets.token_hex(4)}",
        host=host,
        pid=pid,
        started_ticks=start_ticks(pid),
        job_id=own.job_id or None,
        restart=own.restart,
        term=term,
        beat=0,
    )
    publish_message(run_dir.lease, file)
    lease = Lease(run_dir, file, time.monotonic(), own)
    lease.check()
    return lease


@contextlib.contextmanager
def _orderly(run_dir: RunDir) -> Iterator[None]:
    """Hold lease.lock where file locks work; elsewhere go on without, the look before each append decides."""
    lock = filelock.FileLock(run_dir.lease_lock, timeout=_LOCK_TIMEOUT_S)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise HeldError(f"{run_dir.path}: another process takes over this run at this moment") from None
    except (OSError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        lock.release()


def _read(run_dir: RunDir) -> LeaseFile | None:
    try:
        return read_message(run_dir.lease, LeaseFile)
    except UnusableFileError:
        return None


def read_holder(run_dir: RunDir) -> LeaseFile | None:
    """Who holds the run; None for nobody, or for a lease that cannot be read."""
    file = _read(run_dir)
    return file if file is not None and file.holder else None


def describe(file: LeaseFile, what: str = "this run") -> str:
    """The holder, for a person."""
    job = f", job {file.job_id}" if file.job_id else ""
    but = f", and is suspended; to let it go on: kill -CONT {file.pid}" if is_suspended(file) else ""
    return f"a supervisor on {file.host} (process {file.pid}{job}) holds {what}{but}"


def _held(run_dir: RunDir, holder: LeaseFile) -> HeldError:
    what = "this run" if run_dir.journal.exists() else "the runs of this folder"
    return HeldError(f"{run_dir.path}: {describe(holder, what)}")


def is_gone(file: LeaseFile) -> bool:
    """Whether the holder is known to be dead at once: its process on this very host is no more."""
    if file.host != socket.gethostname():
        return False
    ticks = start_ticks(file.pid)
    return ticks is None or (file.started_ticks is not None and ticks != file.started_ticks)


def is_suspended(file: LeaseFile) -> bool:
    """Whether the holder is known to do nothing until it is let go on: its process on this very host is stopped."""
    return file.host == socket.gethostname() and not is_gone(file) and is_stopped(file.pid)


def _wait_until_dead(
    run_dir: RunDir,
    before: LeaseFile,
    job_is_over: Callable[[str], bool],
    sleep: Callable[[float], None],
    patience_s: float,
) -> None:
    if is_gone(before) or (before.job_id is not None and job_is_over(before.job_id)):
        return
    if before.host == socket.gethostname():
        raise _held(run_dir, before)
    begun = time.monotonic()
    while time.monotonic() - begun < patience_s:
        sleep(_LOOK_EVERY_S)
        now = read_holder(run_dir)
        if now is None:
            return
        if (now.holder, now.beat) != (before.holder, before.beat):
            raise _held(run_dir, now)
