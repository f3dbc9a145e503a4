"""What the scheduler is asked, for all runs together and as seldom as they allow."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from slurm import reasons
from slurm.job import JobState, JobStatus, Node, Reservation
from slurm.parsing import duration_s
from slurm.scheduler import Scheduler, SchedulerError
from supervisor.supervised_run import SupervisedRun

QUIET_LOOK_S: Final = 60.0
"""Between looks at the jobs and their nodes while all runs train: two calls a minute, whatever their number."""
BUSY_LOOK_S: Final = 2.0
"""Between looks while something is about to change."""
_SHARE_OF_A_WAIT: Final = 0.1
"""Of the time that a job has waited, or its worker been silent: from ten minutes on, that is a quiet place too."""
LONGEST_SILENCE_S: Final = 60.0
"""Between looks at a scheduler that has not answered for a while."""


class JobLooks:
    """Job statuses of all runs, asked for with one query, as seldom as the runs allow."""

    def __init__(self, scheduler: Scheduler, quiet_s: float, busy_s: float, fresh_s: float = 0.0) -> None:
        """``fresh_s``: how old an answer may be to be acted upon."""
        self.scheduler = scheduler
        self._quiet_s = quiet_s
        self._busy_s = busy_s
        self._fresh_s = fresh_s
        self._looked_at = float("-inf")
        self._silences = 0
        self.asked: frozenset[str] = frozenset()
        self.found: Mapping[str, JobStatus] = {}
        self.nodes: Mapping[str, Node] = {}
        """Those that the jobs run on, or ran on before they were put back into the queue."""
        self.reservations: Sequence[Reservation] = ()
        """Asked for where one may keep a job from starting, or did."""
        self.error: str | None = None
        self._edition = 0
        """Of what is known beside the jobs."""

    def answer(self, job_id: str | None) -> object:
        """What is known to a run with that job; equal to an earlier answer where nothing of it is new."""
        return job_id in self.asked, self.found.get(job_id or ""), self._edition

    def look_if_due(self, runs: Sequence[SupervisedRun]) -> None:
        """Look again when the last look is old enough for what is going on; less often the longer nobody answers."""
        due_s = min((self._due_s(run) for run in runs), default=self._quiet_s)
        if self._is_older_than(due_s):
            self.look(runs)

    def _due_s(self, run: SupervisedRun) -> float:
        """Between looks for this run: the longer it waits in the queue or is silent, the fewer."""
        if not is_about_to_change(run):
            return self._quiet_s
        job = run.state.job
        waits_s = run.clock() - job.time if job is not None and job.state == JobState.PENDING.value else run.silent_s
        return min(self._quiet_s, max(self._busy_s, waits_s * _SHARE_OF_A_WAIT))

    def _is_older_than(self, due_s: float) -> bool:
        if self._silences > 1:
            due_s = max(due_s, min(LONGEST_SILENCE_S, due_s * 2.0**self._silences))
        return time.monotonic() - self._looked_at >= due_s

    def refresh(self, runs: Iterable[SupervisedRun]) -> None:
        """Ask again before something is done, unless the last answer is fresh."""
        if self._is_older_than(self._fresh_s):
            self.look(list(runs))

    def look(self, runs: Sequence[SupervisedRun]) -> None:
        """Ask the scheduler now."""
        ids = [run.state.job_id for run in runs if run.state.job_id is not None]
        beside = self.nodes, self.reservations, self.error
        self.found, self.error = _look_up(self.scheduler, ids)
        self._silences = 0 if self.error is None else self._silences + 1
        self.asked = frozenset(ids)
        self._look_at_nodes(runs)
        self._edition += (self.nodes, self.reservations, self.error) != beside
        self._looked_at = time.monotonic()

    def _look_at_nodes(self, runs: Sequence[SupervisedRun]) -> None:
        self.nodes, self.reservations = {}, ()
        with suppress(SchedulerError):  # They are a bonus: without them nothing is taken for lost.
            self.nodes = self.scheduler.nodes(self._node_names(runs))
            if any(_may_be_reserved_away(run, self.found) for run in runs):
                self.reservations = self.scheduler.reservations()

    def _node_names(self, runs: Iterable[SupervisedRun]) -> set[str]:
        if self.error is not None:
            return set()
        names = {name for run in runs for name in run.state.memory.ran_on}
        return names.union(*(job.nodes for job in self.found.values() if not job.state.is_over))


def _look_up(scheduler: Scheduler, job_ids: Sequence[str]) -> tuple[Mapping[str, JobStatus], str | None]:
    """One query for all jobs: their statuses, and the error where the scheduler did not answer."""
    if not job_ids:
        return {}, None
    try:
        return scheduler.look(job_ids), None
    except SchedulerError as error:
        return {}, str(error)


def is_about_to_change(run: SupervisedRun) -> bool:
    """Whether it does anything else than train, or does not seem to train any more."""
    state = run.state
    is_leaving = state.job is not None and state.job.state not in (JobState.RUNNING.value, JobState.SUSPENDED.value)
    is_silent = run.silent_s > 0.0
    return state.state != "training" or state.left is not None or state.verdict is not None or is_leaving or is_silent


def _may_be_reserved_away(run: SupervisedRun, found: Mapping[str, JobStatus]) -> bool:
    job = found.get(run.state.job_id or "")
    if job is None or job.state is not JobState.PENDING:
        return False
    full_s = duration_s(run.config.cluster.time_limit)
    is_shortened = full_s is not None and job.limit_s is not None and job.limit_s < full_s
    return is_shortened or reasons.waits_for_maintenance(job)
