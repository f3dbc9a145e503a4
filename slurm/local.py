"""The local stand-in: the same protocol without Slurm, for a laptop, a demo and the tests."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from slurm import commands, local_record, processes
from slurm.commands import SchedulerError
from slurm.hardware import Hardware
from slurm.job import JobRequest, JobState, JobStatus, Node, RequestError, Reservation
from slurm.local_record import Record

KILL_WAIT_S = 10.0
"""From SIGTERM to SIGKILL; Slurm's default is 30, but here nobody waits for the node."""


class LocalScheduler:
    """Jobs are processes of this machine; all that is known about them is in the jobs/ folders it was given.

    One job of a name runs at a time in a folder, a later one is PENDING (singleton). Other than on Slurm a job is
    started once: `requeue` ends it as preempted, `start_now`, `change` and `release` have no effect, there are no
    reservations, and `restarts` stays 0. Node names to exclude are ignored: there is one node.
    """

    def __init__(self, *folders: Path, kill_wait_s: float = KILL_WAIT_S) -> None:
        self._folders = list(folders)
        self._kill_wait_s = kill_wait_s

    def submit(self, job: JobRequest) -> str:
        """Start the job in a session of its own; a Ctrl-C or a closed terminal does not reach it."""
        if job.resources.nodes > 1:
            raise RequestError(f"the local stand-in is one node, and {job.resources.nodes} are asked for")
        if job.folder not in self._folders:
            self._folders.append(job.folder)
        return commands.submit("local", job, kill_wait_s=self._kill_wait_s)[0]

    def find(self, name: str) -> list[JobStatus]:
        """Live jobs of this name."""
        looks = (self._status(folder, record) for folder, record in self._records() if record.name == name)
        return [status for status in looks if not status.state.is_over]

    def look(self, job_ids: Collection[str]) -> Mapping[str, JobStatus]:
        """What is known of each job; one without a record is absent."""
        found = ((folder, local_record.read(folder, job_id)) for job_id in job_ids for folder in self._folders)
        return {record.job_id: self._status(folder, record) for folder, record in found if record}

    def message_timeout_s(self) -> float:
        """None at all: a submission here is known at once."""
        return 0.0

    def nodes(self, names: Collection[str]) -> Mapping[str, Node]:
        """None: whoever asks runs on the only one."""
        return {}

    def hardware(self, partition: str | None) -> tuple[Hardware, ...]:
        """None: whoever asks runs on the only one."""
        return ()

    def cancel(self, job_id: str) -> None:
        """SIGTERM now, SIGKILL after `kill_wait_s`; at once, if the job has lost its controller."""
        for folder, record in self._of(job_id):
            if not local_record.is_running(record):
                continue
            by = {"by": str(os.getuid()), "time": time.time()}
            local_record.write_json(local_record.cancel_path(folder, job_id), by)
            if processes.is_alive(record.process):
                processes.signal_process(record.process, signal.SIGTERM)
            else:
                processes.signal_members(record.process, signal.SIGKILL)

    def cancelled_by(self, job_id: str) -> str | None:
        """The uid of who cancelled it through a LocalScheduler."""
        for folder, _ in self._of(job_id):
            try:
                by = json.loads(local_record.cancel_path(folder, job_id).read_text(encoding="utf-8"))["by"]
            except FileNotFoundError:
                continue
            return str(by)
        return None

    def start_now(self, job_id: str) -> None:
        """No effect: nothing delays a start here."""

    def change(
        self,
        job_id: str,
        *,
        exclude_nodes: Collection[str] | None = None,
        time_limit: str | None = None,
        partition: str | None = None,
        qos: str | None = None,
    ) -> None:
        """No effect: a pending job here waits for its predecessor alone."""

    def release(self, job_id: str) -> None:
        """No effect: nothing is ever held here."""

    def requeue(self, job_id: str) -> None:
        """End it as a preemption without a queue does: SIGTERM now, SIGKILL after `kill_wait_s`, PREEMPTED for good."""
        for _, record in self._of(job_id):
            processes.signal_process(record.process, local_record.PREEMPT)

    def reservations(self) -> list[Reservation]:
        """None, ever."""
        return []

    def test_only(self, job: JobRequest) -> str:
        """What would happen, or RequestError."""
        if job.resources.nodes > 1:
            raise RequestError(f"the local stand-in is one node, and {job.resources.nodes} are asked for")
        if socket.gethostname() in job.exclude_nodes:
            raise RequestError("the local stand-in is one node, and it is excluded")
        return f"{job.name} would start at once on {socket.gethostname()} (local stand-in, no Slurm)"

    def _records(self) -> Iterator[tuple[Path, Record]]:
        return ((folder, record) for folder in self._folders for record in local_record.read_all(folder))

    def _of(self, job_id: str) -> Iterator[tuple[Path, Record]]:
        found = ((folder, local_record.read(folder, job_id)) for folder in self._folders)
        return ((folder, record) for folder, record in found if record)

    def _status(self, folder: Path, record: Record) -> JobStatus:
        state, why = _state(folder, record)
        limit = None if record.started is None or record.limit_s is None else record.started + record.limit_s
        return JobStatus(
            job_id=record.job_id,
            name=record.name,
            state=state,
            why=why,
            nodes=(record.process.host,),
            starts_at=record.started,
            ends_at=record.ended or limit,
            exit_code=record.exit_code,
            source="local",
        )


def _state(folder: Path, record: Record) -> tuple[JobState, str]:
    """The record's word while something of the job lives or when it says that it is over; else what must have been."""
    if record.state.is_over:
        return record.state, ""
    if record.process.boot_id != processes.boot_id():
        if record.process.host != socket.gethostname():
            raise SchedulerError(f"local job {record.job_id} runs on {record.process.host}; look at it from there")
        return JobState.FAILED, "the machine was started anew"
    if local_record.is_running(record):
        cancelled = local_record.cancel_path(folder, record.job_id).exists()
        waits = record.state is JobState.PENDING and any(local_record.live_before(folder, record))
        return (JobState.COMPLETING, "cancelled") if cancelled else (record.state, "Dependency" if waits else "")
    again = local_record.read(folder, record.job_id)
    if again is not None and again.state.is_over:  # Its controller ended between our two looks.
        return again.state, ""
    if local_record.cancel_path(folder, record.job_id).exists():
        return JobState.CANCELLED, ""
    return JobState.FAILED, "its processes are gone, and nobody wrote down how they ended"
