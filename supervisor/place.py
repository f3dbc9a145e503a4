"""A supervisor that nobody watches lives in a job: it leaves that in order, and not before the next one is queued."""

import signal
import sys
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

from slurm import requeue
from slurm.entry import tasks_over
from slurm.job import JobRequest
from slurm.scheduler import Scheduler, SchedulerError
from supervisor.job_request import supervisor_request
from supervisor.lease import OwnJob, SupersededError
from supervisor.run_state import RunState
from supervisor.supervise import JobEndsError, own_job_name, supervise
from supervisor.supervised_run import SupervisedRun
from worker.contract.exit_report import STAY_S
from worker.contract.run_dir import RunDir

_ASK_EVERY_S: Final = 10.0
"""Between two attempts to queue the next job, while the scheduler does not answer."""


class JobSignals:
    """What a job's scheduler says by signals, as flags: to end (SIGTERM), that the time limit is near (SIGUSR2)."""

    def __init__(self) -> None:
        self.is_ending = self.limit_is_near = False
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_ending |= number == signal.SIGTERM
        self.limit_is_near |= number == signal.SIGUSR2


def supervise_in_job(run_dir: RunDir, start: Mapping[str, Any]) -> RunState | None:
    """Supervise from a job of the supervisor's own; None where that job ends and another one goes on."""
    own = OwnJob(str(start["job_id"]), int(start["restart"]))
    signals, asked_at = JobSignals(), float("-inf")

    def leaves(run: SupervisedRun) -> bool:
        nonlocal asked_at
        if signals.is_ending or not signals.limit_is_near or time.monotonic() - asked_at < _ASK_EVERY_S:
            return signals.is_ending
        asked_at = time.monotonic()
        request = supervisor_request(run.config, run_dir, own_job_name(run.state))
        return _say_what_comes(run.scheduler, request, own)

    try:
        return supervise(run_dir, sys.stdout, own=own, leaves=leaves)
    except JobEndsError:
        if signals.is_ending and start["requeue"] is not None:
            _make_room(own)
        return None


def supervise_beside_worker(run_dir: RunDir, start: Mapping[str, Any]) -> RunState | None:
    """Supervise from the batch step of the worker's own job; None where that job ends and another one goes on.

    The next job brings the next supervisor, and is queued when the worker's tasks in this one are over.
    """
    job_id, restart = str(start["job_id"]), int(start["restart"])
    own, signals = OwnJob(job_id, restart, tasks_over(run_dir.jobs, job_id, restart)), JobSignals()
    try:
        return supervise(run_dir, sys.stdout, own=own, leaves=lambda run: signals.is_ending or run.has_next_job)
    except (JobEndsError, SupersededError):
        return None


def _say_what_comes(scheduler: Scheduler, request: JobRequest, own: OwnJob) -> bool:
    """Whether another job will go on from here; False while the scheduler does not answer."""
    try:
        print(f"the time limit is near: {queue_next(scheduler, request, own)}", flush=True)
    except SchedulerError as error:
        print(f"the time limit is near, and no next job can be queued: {error}", flush=True)
        return False
    return True


def queue_next(scheduler: Scheduler, request: JobRequest, own: OwnJob) -> str:
    """Queue the job that goes on when this one is over, and say which; SchedulerError where none can be had.

    A fresh one of the same name, which starts as soon as this one ends; where the site allows no second one, this one
    again, which Slurm starts no sooner than two minutes later.
    """
    waiting = [job.job_id for job in scheduler.find(request.name) if job.job_id != own.job_id]
    if waiting:
        return f"job {waiting[0]} goes on"
    try:
        return f"job {scheduler.submit(request)} goes on"
    except SchedulerError as error:
        if not error.answered:
            raise
        scheduler.requeue(own.job_id)
        return f"job {own.job_id} is put back into the queue, for a second one is not allowed ({error})"


def _make_room(own: OwnJob) -> None:
    """Have a job that is being preempted put back into the queue, and stay until it is killed."""
    if requeue.main([own.job_id]) == 0:
        time.sleep(STAY_S)
