"""Where a run stands: the fold of its journal.  Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from slurm.job import JobState
from supervisor.job_memory import JobMemory, remember
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
    Plan,
    Preempted,
    ProgressMade,
    ResumeRequested,
    RollbackRequested,
    RolledBack,
    RunCreated,
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
from worker.contract.exit_report import WAITS_FOR_A_DIRECTIVE, ErrorDetail, Outcome
from worker.contract.rehearsal import Fault

State = Literal["created", "queued", "starting", "training", "recovering", "stopping", "finished", "stopped", "gave_up"]
OVER: frozenset[State] = frozenset({"finished", "stopped", "gave_up"})


@dataclass(frozen=True)
class Strike:
    """One attempt that a node spoilt; it counts towards its exclusion for a while."""

    node: str
    attempt: int
    time: float
    evidence: str
    spent_job_id: str | None
    """The job that came to nothing with it; None where the attempt had made steps."""


@dataclass(frozen=True)
class RunState:
    """Everything that deciding needs to remember; steps are finished optimizer steps, times UTC seconds."""

    state: State = "created"
    since: float = 0.0
    """When ``state`` began."""
    reason: str = ""
    """The last reason given, for a person."""
    run_id: str = ""
    rehearse: tuple[Fault, ...] | None = None
    """The faults that are thrown into it; None = it is no rehearsal."""
    attempt: int = 0
    term: int = 0
    awaits_attempt: bool = True
    """Whether the next attempt is to be decided without a cause: at the beginning, and after a person's resume."""
    plan: Plan | None = None
    """The attempt as last decided; what directive.json says."""
    decided_at: float = 0.0
    job_id: str | None = None
    """The job that the attempt was given; None = none yet."""
    job_since: float = 0.0
    """When that job was submitted, or adopted."""
    job: JobSeen | None = None
    memory: JobMemory = field(default_factory=JobMemory)
    """What else is remembered of that job."""
    segment: int | None = None
    segment_started: SegmentStarted | None = None
    has_stepped: bool = False
    """Whether the present attempt made an optimizer step."""
    healthy_step: int = 0
    """Step of the newest checkpoint that was ever found healthy."""
    rollbacks: int = 0
    rollbacks_since_progress: int = 0
    attempts_since_progress: int = 0
    out_of_memory_since_progress: int = 0
    """Attempts that memory ran out in."""
    busy_s: float = 0.0
    """For how long the run's jobs were seen to hold their nodes, without the present stretch."""
    busy_since: float | None = None
    """When the present stretch began."""
    restarts_at_begin: int = 0
    """Slurm's restart count when the attempt was decided."""
    relaunches_in_job: int = 0
    """Attempts that were started again in the present allocation since the last progress."""
    verdict: VerdictSeen | None = None
    """The verdict of the present attempt, as long as it is unanswered."""
    observed: VerdictSeen | None = None
    """The present attempt's last verdict that was written down and nothing more, in ``recovery.mode: observe``."""
    end_noted: bool = False
    """Whether it is written down what would have been done about the worker's end, in ``recovery.mode: observe``."""
    last_verdicts: tuple[VerdictSeen, ...] = ()
    """Verdicts that were answered, and whose steps no healthy checkpoint has passed yet."""
    rolled_back_to: int | None = None
    """Step of the last rollback's target; None = none since the last progress."""
    tried: tuple[str, ...] = ()
    """The reasons of the rollbacks since the last progress."""
    left: WorkerLeft | None = None
    """How the present attempt's worker left, as long as it is unanswered."""
    hang: HangSeen | None = None
    """The hang of the present attempt, as long as it is unanswered."""
    crash_signature: str | None = None
    """Signature of a crash before any step, of this attempt or of the one before."""
    previous_crash_signature: str | None = None
    strikes: tuple[Strike, ...] = ()
    """Evidence against nodes that are not excluded."""
    exclusions: tuple[NodeExcluded, ...] = ()
    """The newest of each node, also those that are over by now."""
    exclusions_since_progress: int = 0
    ended_or_cancelled: frozenset[str] = frozenset()
    """Jobs that are over, or that we cancelled: never adopted again."""
    cancelled_by_us: frozenset[str] = frozenset()
    submitted_times: tuple[float, ...] = ()
    failed_submissions: int = 0
    """Refused submissions in a row."""
    last_submit_failed_at: float = 0.0
    unanswered_since: float | None = None
    """When a submission got no answer, so that a job may show up; None once one is known, or was refused."""
    start_moved: tuple[str, int] | None = None
    """Job and restart count whose start was last asked to be now."""
    preempted: tuple[str, int] | None = None
    """Job and restart count of the last preemption that was told."""
    stop_by: str | None = None
    """Who asked for a stop that is not carried out yet."""
    rollback_asked: RollbackRequested | None = None
    """A person's rollback that is not carried out yet."""
    last_asked_at: float | None = None
    """When the newest rollback in the journal was asked for: what tells it from the next one."""
    pinned: tuple[int, ...] = ()
    """Steps of the checkpoints that a person wants to be kept."""
    look_failed_at: float | None = None
    """When the scheduler began not to answer."""
    open_intent: AttemptDecided | SubmitIntended | CancelIntended | ChangeIntended | None = None
    job_name: str = ""
    final_step: int | None = None

    def busy_until(self, now: float) -> float:
        """Seconds for which the run's jobs held their nodes until ``now``, since the last resume."""
        return self.busy_s + (max(0.0, now - self.busy_since) if self.busy_since is not None else 0.0)

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens without a person's word."""
        return self.state in OVER

    def excluded(self, now: float) -> dict[str, NodeExcluded]:
        """The nodes that are left out at ``now``, the oldest exclusion first."""
        return {each.node: each for each in self.exclusions if each.until is not None and each.until > now}

    @property
    def has_live_job(self) -> bool:
        """Whether the run has a job that is not known to be over."""
        return self.job_id is not None and self.job_id not in self.ended_or_cancelled


MAY_COME_BACK = frozenset({JobState.PREEMPTED, JobState.NODE_FAIL})
"""Over, unless Slurm shows the same job again within a while."""


HOLDS_NODES = frozenset({JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED, JobState.COMPLETING})


def replay(events: Iterable[Event]) -> RunState:
    """The state after all of ``events``."""
    run = RunState()
    for event in events:
        run = apply(run, event)
    return run


def apply(run: RunState, event: Event) -> RunState:
    """The state after one more event."""
    after = replace(_count_busy(_apply(run, event), event), memory=remember(run.memory, event))
    if after.state != run.state:
        after = replace(after, since=event.time)
    if isinstance(event, JobSeen) and not event.reason and run.job is not None and run.reason == run.job.reason:
        return replace(after, reason=f"job {event.job_id} is {event.state}")  # why it waited is no news any more
    return replace(after, reason=event.reason) if event.reason and _says_why(run, after, event) else after


def _says_why(run: RunState, after: RunState, event: Event) -> bool:
    """Whether an event's reason is why the run stands where it stands; what comes after an ending is not."""
    if isinstance(event, ProgressMade | Pinned):
        return False  # a healthy checkpoint every few minutes would soon hide what else there is to know
    return not (run.is_over and after.state == run.state)


Ending = Finished | Stopped | GaveUp


def ending_of(events: Sequence[Event]) -> Ending | None:
    """The event that ended the run; None where it is not over. Requests may follow it, such as a pin."""
    if not replay(events).is_over:
        return None
    return next((event for event in reversed(events) if isinstance(event, Ending)), None)


def _count_busy(run: RunState, event: Event) -> RunState:
    """Count for how long the run's job held its nodes; a job that was not seen yet, or not any more, holds none."""
    holds = run.job is not None and not run.is_over and JobState(run.job.state) in HOLDS_NODES
    if run.busy_since is None:
        return replace(run, busy_since=event.time) if holds else run
    if holds:
        return run
    return replace(run, busy_s=run.busy_s + max(0.0, event.time - run.busy_since), busy_since=None)


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
            return _apply_job(run, event)
        case JobSeen():
            return _see_job(run, event)
        case Preempted():
            return replace(run, preempted=(event.job_id, event.restart))
        case HangSeen():
            return replace(run, hang=event)
        case NodeStruck():
            spent = None if run.has_stepped else run.job_id
            strike = Strike(event.node, event.attempt, event.time, event.evidence, spent)
            return replace(run, strikes=(*run.strikes, strike))
        case NodeExcluded():
            return _exclude(run, event)
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
        state=_unless_stopping(run, "training"),
        segment=event.segment,
        segment_started=event,
        end_noted=False,
        has_stepped=True,
        left=None,
        hang=None,
        crash_signature=None,
        previous_crash_signature=None,
    )


def _unless_stopping(run: RunState, state: State) -> State:
    return "stopping" if run.stop_by else state


def _begin_attempt(run: RunState, event: RolledBack | Continued) -> RunState:
    keeps_job = event.where != "new_job"
    return replace(
        _remember_rollback(run, event) if isinstance(event, RolledBack) else run,
        state=_unless_stopping(run, "starting" if keeps_job else "queued"),
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


def _apply_job(
    run: RunState, event: SubmitIntended | Submitted | SubmitFailed | CancelIntended | Cancelled
) -> RunState:
    match event:
        case SubmitIntended():
            return replace(run, state=_unless_stopping(run, "queued"), open_intent=event)
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


def _see_job(run: RunState, event: JobSeen) -> RunState:
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


def _note_crash(run: RunState, event: WorkerLeft) -> RunState:
    """Keep the signature of a crash of the trainer's own before any step, and the one before it."""
    error = event.error
    if event.outcome is not Outcome.CRASHED or run.has_stepped or error is None:
        return run
    if error.type == "Signal" or error.points_at_node:
        return run  # somebody killed it, or its node failed: the same start may go well
    return replace(run, previous_crash_signature=run.crash_signature, crash_signature=crash_signature(error))


def crash_signature(error: ErrorDetail) -> str:
    """What makes two crashes the same one: the error's type and the last frame of its traceback."""
    frames = [line.strip() for line in error.traceback.splitlines() if line.lstrip().startswith("File ")]
    return f"{error.type} {frames[-1] if frames else ''}".strip()


def _exclude(run: RunState, event: NodeExcluded) -> RunState:
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
