"""What is done to a run's job and its nodes: each effect can be repeated, or found by the job's name."""

from collections.abc import Collection
from functools import partial
from typing import Final

from slurm.job import JobRequest, JobStatus, RequestError
from slurm.scheduler import SchedulerError
from supervisor.decision import (
    ChangeJob,
    Exclude,
    StartNow,
)
from supervisor.exclusion import can_spare, fits, fitting
from supervisor.job_request import worker_request
from supervisor.journal import (
    CancelIntended,
    Cancelled,
    ChangeIntended,
    JobChanged,
    NodeExcluded,
    StartMoved,
    SubmitFailed,
    SubmitIntended,
    Submitted,
)
from supervisor.supervised_run import SupervisedRun

_LOOKS_APART_S: Final = 1.0
"""Between two looks for a job that a predecessor may have submitted before it died."""
_UNANSWERED_LOOKS_APART_S: Final = 10.0
"""Between two looks for one that a loaded controller may have queued without saying so."""


def submit(run: SupervisedRun) -> None:
    """Adopt the run's live job, or submit one; a refusal is an event, silence leaves the intent open."""
    name, asked_at = run.state.job_name, _asked_without_answer(run)
    if asked_at is not None and _looked_just_now(run):
        return
    run.looked_at = run.clock()
    ended = run.state.ended_or_cancelled | run.state.cancelled_by_us
    known = [job for job in run.scheduler.find(name) if _may_adopt(run, job, ended)]
    if known:
        _adopt(run, known[0])
        return
    if asked_at is not None and not _is_surely_absent(run, asked_at):
        return
    try:
        request, without = fitting(run.scheduler, partial(_request, run), list(run.state.excluded(run.clock())))
        job_id = run.scheduler.submit(request)
    except (SchedulerError, RequestError) as error:
        answered = not isinstance(error, SchedulerError) or error.answered
        if answered and run.own.tasks_over is not None:
            _put_back(run, error)
            return
        run.record(
            SubmitFailed(name=name, error=str(error), answered=answered, reason=f"the submission failed: {error}")
        )
        return
    run.has_next_job = True
    left_out = f", without {', '.join(without)}" if without else ""
    reason = f"job {job_id} is submitted for attempt {run.state.attempt}{left_out}"
    run.record(Submitted(name=name, job_id=job_id, reason=reason))


def _may_adopt(run: SupervisedRun, job: JobStatus, ended: Collection[str]) -> bool:
    """Whether a live job of the run's name is the one that its attempt is to have."""
    if run.own.is_workers(job.job_id):
        return not run.own.has_lost_its_worker(job.job_id)
    return job.job_id not in ended and not job.state.is_over


def _adopt(run: SupervisedRun, job: JobStatus) -> None:
    is_own = run.own.is_workers(job.job_id)
    restarts, reason = (run.own.restart, "it is the job that this runs in") if is_own else (0, "found by its name")
    run.has_next_job = not is_own
    run.record(Submitted(name=run.state.job_name, job_id=job.job_id, adopted=True, restarts=restarts, reason=reason))


def _put_back(run: SupervisedRun, refusal: Exception) -> None:
    """Give the attempt the job that this runs in once more, where no second one is allowed beside it."""
    own = run.own
    run.scheduler.requeue(own.job_id)
    run.has_next_job = True
    reason = f"job {own.job_id} is put back into the queue, for a second one is not allowed ({refusal})"
    run.record(Submitted(name=run.state.job_name, job_id=own.job_id, restarts=own.restart + 1, reason=reason))


def _asked_without_answer(run: SupervisedRun) -> float | None:
    """When a submission was asked for that may have made a job, as far as anybody knows; None = there was none."""
    inherited = run.inherited is not None and run.state.open_intent == run.inherited
    return run.state.open_intent.time if inherited and run.state.open_intent else run.state.unanswered_since


def _looked_just_now(run: SupervisedRun) -> bool:
    apart_s = _LOOKS_APART_S if run.state.unanswered_since is None else _UNANSWERED_LOOKS_APART_S
    return run.clock() - run.looked_at < apart_s


def _is_surely_absent(run: SupervisedRun, asked_at: float) -> bool:
    """Whether the job of a submission without an answer will not show up any more.

    One empty look proves nothing on a loaded controller: it takes two, and twice its MessageTimeout.
    """
    before, run.looked_in_vain_at = run.looked_in_vain_at, run.clock()
    was_looked_for = before is not None and before >= asked_at
    return was_looked_for and run.clock() - asked_at >= 2 * run.scheduler.message_timeout_s()


def _request(run: SupervisedRun, exclude: Collection[str]) -> JobRequest:
    intent = run.state.open_intent
    warning = intent.warning_s if isinstance(intent, SubmitIntended) else None
    return worker_request(run.config, run.run_dir, run.state.job_name, run.state.attempt, exclude, warning)


def exclude(run: SupervisedRun, decision: Exclude) -> None:
    """Leave a node out of the jobs to come; where the request would not fit without it, say so and keep it."""
    nodes = {*run.state.excluded(run.clock()), decision.node}
    can_be_spared = decision.until is None or can_spare(run.scheduler, partial(_request, run), nodes)
    kept = "" if can_be_spared else ", but jobs may still go there: the request would not fit without it"
    until = decision.until if can_be_spared else None
    reason = f"{decision.reason}{kept}"
    run.record(NodeExcluded(node=decision.node, until=until, evidence=decision.evidence, reason=reason))


def cancel(run: SupervisedRun, job_id: str, reason: str) -> None:
    """Cancel the job: the intent, the effect, the outcome."""
    run.record(CancelIntended(job_id=job_id, reason=reason))
    end_job(run, job_id)
    run.record(Cancelled(job_id=job_id, reason=f"job {job_id}: {reason}"))


def end_job(run: SupervisedRun, job_id: str) -> None:
    """Cancel the job; of the one that this supervisor shares with the worker the tasks alone, which are its step 0."""
    run.scheduler.cancel(f"{job_id}.0" if run.own.is_workers(job_id) else job_id)


def start_now(run: SupervisedRun, decision: StartNow) -> None:
    """Ask for it at each pass until it takes; told once, and before: a successor asks, too, while it has not taken."""
    restarts = run.state.job.restarts if run.state.job is not None else 0
    if run.state.start_moved != (decision.job_id, restarts):
        run.record(StartMoved(job_id=decision.job_id, reason=decision.reason))
    run.scheduler.start_now(decision.job_id)


def change_job(run: SupervisedRun, decision: ChangeJob) -> None:
    """Change a job in the queue: the intent, the effect, the outcome."""
    intent = ChangeIntended(**vars(decision))
    run.record(intent)
    finish_change(run, intent)


def finish_change(run: SupervisedRun, intent: ChangeIntended) -> None:
    """Change a job in the queue; what the scheduler does not allow is an event too, and is not tried again."""
    error = None
    try:
        _apply_change(run, intent)
    except SchedulerError as refusal:
        if not refusal.answered:
            raise
        error = str(refusal)
    reason = intent.reason if error is None else f"not changed ({error}): {intent.reason}"
    changed = JobChanged(
        job_id=intent.job_id, what=intent.what, old=intent.old, new=intent.new, error=error, reason=reason
    )
    run.record(changed)


def _apply_change(run: SupervisedRun, change: ChangeIntended) -> None:
    match change.what:
        case "released":
            run.scheduler.release(change.job_id)
        case "exclude":
            nodes = (change.new or "").split(",")
            if not fits(run.scheduler, _request(run, nodes)):
                raise SchedulerError("the request would not fit without it", ["test_only"])
            own = run.config.cluster.exclude  # the scheduler keeps one list, and the person's own is in it
            run.scheduler.change(change.job_id, exclude_nodes=[*([own] if own else []), *nodes])
        case "time_limit":
            run.scheduler.change(change.job_id, time_limit=change.new)
        case "partition" | "qos":
            run.scheduler.change(change.job_id, partition=change.partition, qos=change.qos)
