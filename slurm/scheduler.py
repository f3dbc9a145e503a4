"""What the supervisor may ask of a cluster, and which cluster it is."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from slurm import commands, hardware, parsing
from slurm.commands import SchedulerError
from slurm.hardware import Hardware
from slurm.job import JobRequest, JobStatus, Node, Reservation
from slurm.local import LocalScheduler

__all__ = ["LocalScheduler", "Scheduler", "SchedulerError", "SlurmScheduler", "choose", "slurm_is_configured"]


class Scheduler(Protocol):
    """A cluster. A query that fails raises SchedulerError; what is not there is absent, and neither is an ending."""

    def submit(self, job: JobRequest) -> str:
        """The id of the submitted job. After a SchedulerError it may be queued all the same: `find` it by name."""
        ...

    def find(self, name: str) -> list[JobStatus]:
        """Live jobs of this name and user; [] is none."""
        ...

    def look(self, job_ids: Collection[str]) -> Mapping[str, JobStatus]:
        """One query for all of them; an id that is absent from the answer is not known any more."""
        ...

    def message_timeout_s(self) -> float:
        """How long the scheduler may take over one request; an unanswered submission may show up for twice as long."""
        ...

    def nodes(self, names: Collection[str]) -> Mapping[str, Node]:
        """How these nodes are, by name; one that is absent from the answer is not known."""
        ...

    def hardware(self, partition: str | None) -> tuple[Hardware, ...]:
        """The kinds of nodes in a partition, None being the default one; () where nothing is known of nodes."""
        ...

    def cancel(self, job_id: str) -> None:
        """End the job. One that is over, or not known, needs nothing and is no error."""
        ...

    def start_now(self, job_id: str) -> None:
        """Take away a pending job's begin time. No effect is no error: look, and ask again."""
        ...

    def change(
        self,
        job_id: str,
        *,
        exclude_nodes: Collection[str] | None = None,
        time_limit: str | None = None,
        partition: str | None = None,
        qos: str | None = None,
    ) -> None:
        """Change a pending job; None leaves as it is, an empty `exclude_nodes` excludes nobody any more."""
        ...

    def release(self, job_id: str) -> None:
        """Let a held job start."""
        ...

    def requeue(self, job_id: str) -> None:
        """End the job's processes and put it back into the queue under its id."""
        ...

    def reservations(self) -> list[Reservation]:
        """What is reserved, now and later."""
        ...

    def test_only(self, job: JobRequest) -> str:
        """The scheduler's own opinion of a request, expected start included; SchedulerError where it would refuse."""
        ...

    def cancelled_by(self, job_id: str) -> str | None:
        """The uid of who cancelled the job; None where only accounting would know."""
        ...


_NOT_KNOWN = re.compile(r"invalid job id", re.IGNORECASE)
_TOO_LATE = re.compile(r"invalid job id|completing or completed|no longer pending|not pending", re.IGNORECASE)


class SlurmScheduler:
    """Slurm, through its own programs.

    `clusters` are those of `sbatch --clusters`, where there are several; a cluster that sbatch names is asked later on.
    """

    def __init__(self, clusters: str | None = None) -> None:
        self._clusters = clusters

    def submit(self, job: JobRequest) -> str:
        """Submit through submitit, which runs sbatch."""
        job_id, cluster = commands.submit("slurm", job)
        self._clusters = self._clusters or cluster
        return job_id

    def find(self, name: str) -> list[JobStatus]:
        """Live jobs of this name, and of this user."""
        return [job for job in self._queue(f"--name={name}") if not job.state.is_over and job.name == name]

    def look(self, job_ids: Collection[str]) -> Mapping[str, JobStatus]:
        """From one squeue for all; what is not in it from scontrol, then from accounting where there is some."""
        queued = {job.job_id: job for job in self._queue()} if job_ids else {}
        looks = {job_id: queued.get(job_id) or self._detail(job_id) for job_id in job_ids}
        return {job_id: status for job_id, status in looks.items() if status}

    def message_timeout_s(self) -> float:
        """Slurm's MessageTimeout."""
        return parsing.message_timeout_s(commands.query(["scontrol", *self._where(), "show", "config"]))

    def nodes(self, names: Collection[str]) -> Mapping[str, Node]:
        """From one sinfo for all of them."""
        if not names:
            return {}
        argv = [
            "sinfo",
            "--noheader",
            "--Node",
            f"--format={parsing.NODE_FORMAT}",
            f"--nodes={','.join(sorted(names))}",
        ]
        return parsing.node_states(commands.query([*argv, *self._where()]))

    def hardware(self, partition: str | None) -> tuple[Hardware, ...]:
        """From one sinfo."""
        argv = ["sinfo", "--noheader", f"--format={hardware.FORMAT}"]
        return hardware.kinds_of_nodes(commands.query([*argv, *self._where()]), partition)

    def _queue(self, *arguments: str) -> list[JobStatus]:
        # Never by id: one that is purged makes squeue fail as an outage does.
        argv = ["squeue", "--me", "--states=all", "--noheader", f"--Format={parsing.SQUEUE_FORMAT}", *arguments]
        return parsing.squeue(commands.query([*argv, *self._where()]), self._clusters)

    def _detail(self, job_id: str) -> JobStatus | None:
        try:
            answer = commands.query(["scontrol", *self._where(), "show", "--oneliner", "job", job_id])
        except SchedulerError as error:
            if not _NOT_KNOWN.search(error.stderr):
                raise
            return self._accounted(job_id)
        return parsing.scontrol_job(answer, self._clusters)

    def _accounted(self, job_id: str) -> JobStatus | None:
        answer = self._sacct(job_id, parsing.SACCT_FIELDS)
        return parsing.sacct(answer, self._clusters).get(job_id)

    def _sacct(self, job_id: str, columns: str) -> str:
        """Accounting is a bonus: where there is none, or it does not answer, it knows nothing."""
        argv = ["sacct", "--duplicates", "--allocations", "--parsable2", "--noheader", f"--format={columns}"]
        try:
            return commands.query([*argv, f"--jobs={job_id}", *self._where()])
        except SchedulerError:
            return ""

    def cancel(self, job_id: str) -> None:
        """scancel: SIGTERM, and SIGKILL after the cluster's KillWait."""
        self._tell(["scancel", *self._where(), job_id], unless=_TOO_LATE)

    def start_now(self, job_id: str) -> None:
        """It takes once the job is PENDING with reason BeginTime, and not yet while it completes."""
        self._update(job_id, "StartTime=now", unless=_TOO_LATE)

    def change(
        self,
        job_id: str,
        *,
        exclude_nodes: Collection[str] | None = None,
        time_limit: str | None = None,
        partition: str | None = None,
        qos: str | None = None,
    ) -> None:
        """Change a pending job. Raises SchedulerError where Slurm does not allow it."""
        changes = {
            "ExcNodeList": None if exclude_nodes is None else ",".join(exclude_nodes),
            "TimeLimit": time_limit,
            "Partition": partition,
            "QOS": qos,
        }
        given = [f"{key}={value}" for key, value in changes.items() if value is not None]
        if given:
            self._update(job_id, *given)

    def release(self, job_id: str) -> None:
        """Let a job start that its owner, or a failed launch, holds; an administrator's hold raises SchedulerError."""
        self._tell(["scontrol", *self._where(), "release", job_id])

    def requeue(self, job_id: str) -> None:
        """scontrol requeue: SIGTERM at once, PENDING again afterwards."""
        self._tell(["scontrol", *self._where(), "requeue", job_id])

    def _update(self, job_id: str, *changes: str, unless: re.Pattern[str] | None = None) -> None:
        self._tell(["scontrol", *self._where(), "update", f"JobId={job_id}", *changes], unless)

    def _tell(self, argv: list[str], unless: re.Pattern[str] | None = None) -> None:
        """Run a command on a job; what Slurm says `unless` is no error, because the next look tells as much."""
        try:
            commands.query(argv)
        except SchedulerError as error:
            if unless is None or not unless.search(error.stderr):
                raise

    def reservations(self) -> list[Reservation]:
        """What `scontrol show reservation` lists; every user may ask."""
        argv = ["scontrol", *self._where(), "show", "--oneliner", "reservation"]
        try:
            return parsing.reservations(commands.query(argv))
        except parsing.ParseError as error:
            raise SchedulerError(str(error), argv) from error

    def test_only(self, job: JobRequest) -> str:
        """What sbatch --test-only says of the same batch text, in a clean environment."""
        argv = ["sbatch", "--test-only", *self._where()]
        text = sbatch_text(job).encode()
        stdout, stderr = commands.call(argv, commands.clean_environment(os.environ, job.flags()), stdin=text)
        return " ".join((stdout + stderr).replace("sbatch: ", "").split())

    def cancelled_by(self, job_id: str) -> str | None:
        """The uid that accounting names, where there is accounting."""
        words = self._sacct(job_id, "State").splitlines()
        return parsing.cancelled_by(words[-1]) if words else None

    def _where(self) -> list[str]:
        return [f"--clusters={self._clusters}"] if self._clusters else []


def sbatch_text(job: JobRequest) -> str:
    """The batch text that `SlurmScheduler.submit` hands to sbatch, to the letter; nothing is submitted."""
    from slurm.submission import sbatch_text as text

    return text(job)


def slurm_is_configured() -> bool:
    """Is there an sbatch on this machine, and a configuration for it? SLURM_CONF that names no file is an error."""
    return commands.is_configured()


def choose(kind: str, *folders: Path, clusters: str | None = None) -> Scheduler:
    """The scheduler of `cluster.kind`: slurm, local or auto. `folders` are the jobs/ of runs that the stand-in knows.

    The controller is not asked: one that is configured and does not answer makes the first query fail, and is never
    taken for "no Slurm here".
    """
    if kind not in {"auto", "slurm", "local"}:
        raise ValueError(f"cluster.kind is {kind!r}; it is auto, slurm or local")
    if kind == "local" or (kind == "auto" and not slurm_is_configured()):
        return LocalScheduler(*folders)
    if not slurm_is_configured():
        raise SchedulerError("cluster.kind is slurm, but there is no sbatch with a configuration on this machine")
    return SlurmScheduler(clusters)
