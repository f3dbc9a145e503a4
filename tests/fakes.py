"""Stand-ins that a test steers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from slurm.commands import SchedulerError
from slurm.hardware import Hardware
from slurm.job import JobRequest, JobState, JobStatus, Node, Reservation
from slurm.parsing import duration_s


class FakeScheduler:
    """A scheduler in memory: nothing runs, every state is what a test sets.

    A submitted job is PENDING with reason Priority, or with reason Dependency while another of its name lives
    (singleton). Every call is noted in `calls`. `fail(method, times)` lets the next calls of a method raise; with
    `after=True` the effect happens all the same, as when an answer is lost on its way.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, JobStatus] = {}
        self.requests: dict[str, JobRequest] = {}
        self.calls: list[tuple[str, str]] = []
        self.node_names = ("n1",)
        self.message_timeout = 0.0
        self.kinds_of_nodes: tuple[Hardware, ...] = ()
        self.node_states: dict[str, Node] = {}
        self.known_reservations: list[Reservation] = []
        self.cancellers: dict[str, str] = {}
        self._failures: dict[str, list[bool]] = {}
        self._next_id = 1
        self.says = "Unable to contact slurm controller"
        self.allows_one_job = False
        """Whether a second job of a name is refused while one lives."""

    # What a test does to it.

    def set_state(self, job_id: str, state: JobState, **changes: object) -> None:
        """Put a job into a state; `why`, `nodes`, `restarts`, `exit_code` and the times may be given with it."""
        self.jobs[job_id] = replace(self.jobs[job_id], state=state, **{"why": "", **changes})  # type: ignore[arg-type]

    def forget(self, job_id: str) -> None:
        """The scheduler knows the job no more."""
        del self.jobs[job_id]

    def fail(self, method: str, times: int = 1, *, after: bool = False) -> None:
        """Let the next `times` calls of `method` raise SchedulerError; with `after`, once their effect has happened."""
        self._failures.setdefault(method, []).extend([after] * times)

    # What the supervisor asks of it.

    def submit(self, job: JobRequest) -> str:
        failing = self._begin("submit", job.name)
        waits = any(other.name == job.name and not other.state.is_over for other in self.jobs.values())
        if waits and self.allows_one_job:
            raise SchedulerError("sbatch: error: Job violates accounting/QOS policy", ["sbatch"])
        job_id, self._next_id = str(self._next_id), self._next_id + 1
        why = "Dependency" if waits else "Priority"
        self.jobs[job_id] = JobStatus(job_id, job.name, JobState.PENDING, why, source="fake")
        self.requests[job_id] = job
        self._finish(failing)
        return job_id

    def find(self, name: str) -> list[JobStatus]:
        self._finish(self._begin("find", name))
        return [job for job in self.jobs.values() if job.name == name and not job.state.is_over]

    def look(self, job_ids: Collection[str]) -> Mapping[str, JobStatus]:
        self._finish(self._begin("look", ",".join(job_ids)))
        return {job_id: self.jobs[job_id] for job_id in job_ids if job_id in self.jobs}

    def message_timeout_s(self) -> float:
        self._finish(self._begin("message_timeout_s", ""))
        return self.message_timeout

    def nodes(self, names: Collection[str]) -> Mapping[str, Node]:
        self._finish(self._begin("nodes", ",".join(sorted(names))))
        return {name: self.node_states[name] for name in names if name in self.node_states}

    def hardware(self, partition: str | None) -> tuple[Hardware, ...]:
        self._finish(self._begin("hardware", str(partition)))
        return self.kinds_of_nodes

    def cancel(self, job_id: str) -> None:
        failing = self._begin("cancel", job_id)
        if job_id in self.jobs and not self.jobs[job_id].state.is_over:
            self.set_state(job_id, JobState.CANCELLED)
        self._finish(failing)

    def start_now(self, job_id: str) -> None:
        failing = self._begin("start_now", job_id)
        if job_id in self.jobs and self.jobs[job_id].why == "BeginTime":
            self.set_state(job_id, JobState.PENDING, why="Priority")
        self._finish(failing)

    def change(
        self,
        job_id: str,
        *,
        exclude_nodes: Collection[str] | None = None,
        time_limit: str | None = None,
        partition: str | None = None,
        qos: str | None = None,
    ) -> None:
        failing = self._begin("change", job_id, must_exist=True)
        request = self.requests.get(job_id)
        if request is not None:
            given = {"time_limit": time_limit, "partition": partition, "qos": qos}
            resources = replace(request.resources, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
            if time_limit is not None:
                self.jobs[job_id] = replace(self.jobs[job_id], limit_s=duration_s(time_limit))
            excluded = request.exclude_nodes if exclude_nodes is None else tuple(exclude_nodes)
            self.requests[job_id] = replace(request, resources=resources, exclude_nodes=excluded)
        self._finish(failing)

    def release(self, job_id: str) -> None:
        failing = self._begin("release", job_id, must_exist=True)
        if job_id in self.jobs and self.jobs[job_id].state is JobState.HELD:
            self.set_state(job_id, JobState.PENDING, why="Priority")
        self._finish(failing)

    def requeue(self, job_id: str) -> None:
        failing = self._begin("requeue", job_id, must_exist=True)
        job = self.jobs.get(job_id)
        if job is not None and not job.state.is_over:
            self.set_state(job_id, JobState.PENDING, why="BeginTime", restarts=job.restarts + 1, nodes=())
        self._finish(failing)

    def reservations(self) -> list[Reservation]:
        self._finish(self._begin("reservations", ""))
        return list(self.known_reservations)

    def test_only(self, job: JobRequest) -> str:
        self._finish(self._begin("test_only", job.name))
        if len(set(self.node_names) - set(job.exclude_nodes)) < job.resources.nodes:
            raise SchedulerError("sbatch: error: Requested node configuration is not available", ["sbatch"])
        return f"{job.name} would start at once"

    def cancelled_by(self, job_id: str) -> str | None:
        self._finish(self._begin("cancelled_by", job_id))
        return self.cancellers.get(job_id)

    def _begin(self, method: str, about: str, *, must_exist: bool = False) -> bool:
        """Note the call; raise if it is to fail before its effect; True if it is to fail after it."""
        self.calls.append((method, about))
        if must_exist and about not in self.jobs:
            raise SchedulerError(f"{method}: Invalid job id specified", ["fake"], "Invalid job id specified")
        pending = self._failures.get(method)
        if not pending:
            return False
        if pending.pop(0):
            return True
        raise SchedulerError(f"{method}: the fake does not answer", ["fake", method], self.says)

    @staticmethod
    def _finish(failing: bool) -> None:
        if failing:
            raise SchedulerError("the fake's answer got lost", ["fake"], "Socket timed out on send/recv operation")
