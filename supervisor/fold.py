"""Folds a run's journal into where the run stands.  Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from supervisor.job_fold import apply_job, count_busy, exclude, see_job
from supervisor.job_memory import remember
from supervisor.journal import (
    AttemptDecided,
    CancelIntended,
    Cancelled,
    ChangeIntended,
    Continued,
    Event,
    Finished,
    GaveUp,
    HangSeen,
    JobChanged,
    JobSeen,
    LookFailed,
    LookRecovered,
    NodeExcluded,
    NodeStruck,
    Pinned,
    Preempted,
    ProgressMade,
    RequestRefused,
    ResumeRequested,
    RollbackRequested,
    RolledBack,
    RunCreated,
    SaveAnswered,
    SegmentStarted,
    StartMoved,
    Stopped,
    StopRequested,
    SubmitFailed,
    SubmitIntended,
    Submitted,
    SupervisorStarted,
    VerdictSeen,
    WorkerLeft,
    WouldHaveDone,
)
from supervisor.run_state import RunState, Strike
from worker.contract.exit_report import ErrorDetail, Outcome


def replay(events: Iterable[Event]) -> RunState:
    """The state after all of ``events``."""
    run = RunState()
    for event in events:
        run = apply(run, event)
    return run


def apply(run: RunState, event: Event) -> RunState:
    """The state after one more event."""
    after = replace(count_busy(_apply(run, event), event), memory=remember(run.memory, event))
    if after.state != run.state:
        after = replace(after, since=event.time)
    if isinstance(event, JobSeen) and not event.reason and run.job is not None and run.reason == run.job.reason:
        return replace(after, reason=f"job {event.job_id} is {event.state}")  # why it waited is no news any more
    return replace(after, reason=event.reason) if event.reason and _says_why(run, after, event) else after


def _says_why(run: RunState, after: RunState, event: Event) -> bool:
    """Whether an event's reason is why the run stands where it stands; what comes after an ending is not."""
    if isinstance(event, ProgressMade | Pinned | SaveAnswered):
        return False  # a healthy checkpoint every few minutes would soon hide what else there is to know
    if isinstance(event, RequestRefused) and run.rollback_asked is None:
        return False  # nothing was begun; otherwise the rollback that was asked for would seem to be under way
    return not (run.is_over and after.state == run.state)


Ending = Finished | Stopped | GaveUp


def ending_of(events: Sequence[Event]) -> Ending | None:
    """The event that ended the run; None where it is not over. Requests may follow it, such as a pin."""
    if not replay(events).is_over:
        return None
    return next((event for event in reversed(events) if isinstance(event, Ending)), None)


def _apply(run: RunState, event: Event) -> RunState:
    match event:
        case RunCreated():
            name = f"hf-{event.run_id[:8]}"
            return replace(run, run_id=event.run_id, job_name=name, since=event.time, rehearse=event.rehearse)
        case SupervisorStarted():
            return replace(run, term=event.term)
        case AttemptDecided():
            return replace(run, state="recovering" if run.attempt else "created", open_intent=event)
        case RolledBack() | Continued():
            return _begin_attempt(run, event)
        case SubmitIntended() | Submitted() | SubmitFailed() | CancelIntended() | Cancelled():
            return apply_job(run, event)
        case JobSeen():
            return see_job(run, event)
        case Preempted():
            return replace(run, preempted=(event.job_id, event.restart))
        case HangSeen():
            return replace(run, hang=event)
        case NodeStruck():
            spent = None if run.has_stepped else run.job_id
            strike = Strike(event.node, event.attempt, event.time, event.evidence, spent)
            return replace(run, strikes=(*run.strikes, strike))
        case NodeExcluded():
            return exclude(run, event)
        case ChangeIntended():
            return replace(run, open_intent=event)
        case JobChanged():
            return replace(run, open_intent=None)
        case StartMoved():
            return replace(run, start_moved=(event.job_id, run.job.restarts if run.job else 0))
        case SegmentStarted():
            return _begin_segment(run, event)
        case WouldHaveDone():
            return _note_what_would_be(run)
        case VerdictSeen():
            return replace(run, verdict=event)
        case WorkerLeft():
            return _note_crash(replace(run, left=event), event)
        case ProgressMade():
            ahead = tuple(each for each in run.last_verdicts if each.step > event.healthy_step)
            return replace(_refill(run), healthy_step=event.healthy_step, last_verdicts=ahead)
        case LookFailed():
            return replace(run, look_failed_at=event.time)
        case LookRecovered():
            return replace(run, look_failed_at=None)
        case StopRequested():
            return replace(run, state="stopping", stop_by=event.by)
        case RollbackRequested():
            return _ask_rollback(run, event)
        case Pinned():
            return replace(run, pinned=tuple(sorted({*run.pinned, event.to})))
        case RequestRefused(verb="rollback"):
            return replace(run, rollback_asked=None, last_asked_at=event.asked_at)
        case SaveAnswered():
            return replace(run, save_answered_at=event.saved_at)
        case ResumeRequested():
            return _reopen(run)
        case Finished():
            return replace(run, state="finished", final_step=event.final_step, rollback_asked=None)
        case Stopped():
            return replace(run, state="stopped", stop_by=None, rollback_asked=None)
        case GaveUp():
            return replace(run, state="gave_up", rollback_asked=None)
        case _:
            return run


def _begin_segment(run: RunState, event: SegmentStarted) -> RunState:
    return replace(
        run,
        state=run.unless_stopping("training"),
        segment=event.segment,
        segment_started=event,
        end_noted=False,
        has_stepped=True,
        left=None,
        hang=None,
        crash_signature=None,
        previous_crash_signature=None,
    )


def _begin_attempt(run: RunState, event: RolledBack | Continued) -> RunState:
    keeps_job = event.where != "new_job"
    return replace(
        _remember_rollback(run, event) if isinstance(event, RolledBack) else run,
        state=run.unless_stopping("starting" if keeps_job else "queued"),
        attempt=event.attempt,
        awaits_attempt=False,
        plan=event,
        restarts_at_begin=run.job.restarts if keeps_job and run.job is not None else 0,
        decided_at=event.time,
        job_id=run.job_id if keeps_job else None,
        job=run.job if keeps_job else None,
        attempts_since_progress=run.attempts_since_progress + 1,
        out_of_memory_since_progress=run.out_of_memory_since_progress + (event.cause == "out_of_memory"),
        relaunches_in_job=run.relaunches_in_job + 1 if event.where == "same_allocation" else 0,
        verdict=None,
        rollback_asked=None,
        observed=None,
        end_noted=False,
        left=None,
        hang=None,
        crash_signature=None if event.cause == "node_failed" else run.crash_signature,  # the crash was the node's
        has_stepped=False,
        open_intent=None,
        ended_or_cancelled=run.ended_or_cancelled
        if keeps_job or not run.job_id
        else run.ended_or_cancelled | {run.job_id},
    )


def _remember_rollback(run: RunState, event: RolledBack) -> RunState:
    verdicts = run.last_verdicts if run.verdict is None else (*run.last_verdicts, run.verdict)
    run = replace(run, rollbacks=run.rollbacks + 1, last_verdicts=verdicts)
    if event.cause == "rollback":  # a person's: it costs no budget, and progress begins anew where it goes to
        return replace(run, healthy_step=min(run.healthy_step, event.to_step))
    return replace(
        run,
        rollbacks_since_progress=run.rollbacks_since_progress + 1,
        rolled_back_to=event.to_step,
        tried=(*run.tried, event.reason),
    )


def _note_what_would_be(run: RunState) -> RunState:
    if run.verdict is not None and run.verdict.observed:
        return replace(run, observed=run.verdict, verdict=None)
    return replace(run, end_noted=True)


def _refill(run: RunState) -> RunState:
    """Every budget full again."""
    return replace(
        run,
        rollbacks_since_progress=0,
        attempts_since_progress=0,
        exclusions_since_progress=0,
        out_of_memory_since_progress=0,
        relaunches_in_job=0,
        rolled_back_to=None,
        tried=(),
        crash_signature=None,
        previous_crash_signature=None,
    )


def _note_crash(run: RunState, event: WorkerLeft) -> RunState:
    """Keep the signature of a crash of the trainer's own before any step, and the one before it."""
    error = event.error
    if event.outcome is not Outcome.CRASHED or run.has_stepped or error is None:
        return run
    if error.type == "Signal" or error.points_at_node or error.points_at_disk:
        return run  # somebody killed it, or its node or its disk failed: the same start may go well
    return replace(run, previous_crash_signature=run.crash_signature, crash_signature=crash_signature(error))


def crash_signature(error: ErrorDetail) -> str:
    """What makes two crashes the same one: the error's type and the last frame of its traceback."""
    frames = [line.strip() for line in error.traceback.splitlines() if line.lstrip().startswith("File ")]
    return f"{error.type} {frames[-1] if frames else ''}".strip()


def _reopen(run: RunState) -> RunState:
    """A person wants a run to go on that was over: budgets begin anew, the next attempt is to be decided.

    A verdict that was not answered stays, so that the next attempt begins before it.
    """
    return replace(
        _refill(run),
        state="created",
        awaits_attempt=True,
        stop_by=None,
        left=None,
        hang=None,
        failed_submissions=0,
        submitted_times=(),
        busy_s=0.0,
    )


def _ask_rollback(run: RunState, event: RollbackRequested) -> RunState:
    """A person's rollback opens a run that was over; budgets begin anew."""
    opened = _reopen(run) if run.is_over else _refill(run)
    return replace(opened, rollback_asked=event, last_asked_at=event.asked_at)
