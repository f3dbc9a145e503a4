"""The fold of a run's journal, as far as it is about jobs and nodes.  Pure."""

from dataclasses import replace

from slurm.job import JobState
from supervisor.journal import (
    CancelIntended,
    Cancelled,
    Event,
    JobSeen,
    NodeExcluded,
    SubmitFailed,
    SubmitIntended,
    Submitted,
)
from supervisor.run_state import MAY_COME_BACK, RunState, State
from worker.contract.exit_report import WAITS_FOR_A_DIRECTIVE

HOLDS_NODES = frozenset({JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING})


def count_busy(run: RunState, event: Event) -> RunState:
    """Count for how long the run's job held its nodes; a job that was not seen yet, or not any more, holds none."""
    holds = run.job is not None and not run.is_over and JobState(run.job.state) in HOLDS_NODES
    if run.busy_since is None:
        return replace(run, busy_since=event.time) if holds else run
    if holds:
        return run
    return replace(run, busy_s=run.busy_s + max(0.0, event.time - run.busy_since), busy_since=None)


def apply_job(run: RunState, event: SubmitIntended | Submitted | SubmitFailed | CancelIntended | Cancelled) -> RunState:
    """The state after the run's job was submitted or cancelled, or is about to be."""
    match event:
        case SubmitIntended():
            return replace(run, state=run.unless_stopping("queued"), open_intent=event)
        case Submitted():
            times = run.submitted_times if event.adopted else (*run.submitted_times, event.time)
            return replace(
                run,
                job_id=event.job_id,
                job_since=event.time,
                job=None,
                restarts_at_begin=event.restarts,
                ended_or_cancelled=run.ended_or_cancelled - {event.job_id},
                cancelled_by_us=run.cancelled_by_us - {event.job_id},
                submitted_times=times[-100:],
                failed_submissions=0,
                last_submit_failed_at=0.0,
                unanswered_since=None,
                open_intent=None,
            )
        case SubmitFailed():
            return replace(
                run,
                failed_submissions=run.failed_submissions + event.answered,
                last_submit_failed_at=event.time,
                unanswered_since=None if event.answered else event.time,
                open_intent=None,
            )
        case CancelIntended():
            return replace(run, cancelled_by_us=run.cancelled_by_us | {event.job_id}, open_intent=event)
        case Cancelled():
            return replace(run, open_intent=None)


def see_job(run: RunState, event: JobSeen) -> RunState:
    """The state after a look at the run's job; one at any other changes nothing."""
    if event.job_id != run.job_id:
        return run
    state = JobState(event.state)
    is_over = state.is_over and state not in MAY_COME_BACK
    ended = run.ended_or_cancelled | {event.job_id} if is_over else run.ended_or_cancelled - {event.job_id}
    is_back = run.job is not None and event.restarts > run.job.restarts
    after = replace(run, job=event, state=_state_with_job(run, state), ended_or_cancelled=ended)
    is_awaited = (
        run.left is not None and run.left.outcome in WAITS_FOR_A_DIRECTIVE
    )  # by the agents of its next start too
    return replace(after, left=None, hang=None) if is_back and not is_awaited else after


def _state_with_job(run: RunState, job: JobState) -> State:
    if job is JobState.PENDING and run.state in ("starting", "training"):
        return "recovering"
    if job is JobState.RUNNING and run.state in ("queued", "recovering"):
        return "starting"
    return run.state


def exclude(run: RunState, event: NodeExcluded) -> RunState:
    """Leave a node out, and give back what its strikes cost: the attempts and jobs that came to nothing there."""
    strikes = tuple(strike for strike in run.strikes if strike.node != event.node)
    exclusions = (*(each for each in run.exclusions if each.node != event.node), event)
    if event.until is None:
        return replace(run, strikes=strikes, exclusions=exclusions)  # not struck again for the same attempt
    spent = {s.attempt: s.spent_job_id for s in run.strikes if s.node == event.node and s.spent_job_id is not None}
    times = run.submitted_times
    return replace(
        run,
        strikes=strikes,
        exclusions=exclusions,
        exclusions_since_progress=run.exclusions_since_progress + 1,
        attempts_since_progress=max(0, run.attempts_since_progress - len(spent)),
        submitted_times=times[: max(0, len(times) - len(set(spent.values())))],
    )
