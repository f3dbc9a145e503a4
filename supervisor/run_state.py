"""Where a run stands: a value, made by ``supervisor.fold`` from its journal."""

from dataclasses import dataclass, field
from typing import Literal

from slurm.job import JobState
from supervisor.job_memory import JobMemory
from supervisor.journal import (
    AttemptDecided,
    CancelIntended,
    ChangeIntended,
    HangSeen,
    JobSeen,
    NodeExcluded,
    Plan,
    RollbackRequested,
    SegmentStarted,
    SubmitIntended,
    VerdictSeen,
    WorkerLeft,
)
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
    """When the newest rollback in the journal, refused or not, was asked for: what tells it from the next one."""
    save_answered_at: float = 0.0
    """When the newest checkpoint that a file SAVE asked for, and that is told, was made."""
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

    def unless_stopping(self, state: State) -> State:
        """``state``, or that it stops, where somebody asked for that."""
        return "stopping" if self.stop_by else state


MAY_COME_BACK = frozenset({JobState.PREEMPTED, JobState.NODE_FAIL})
"""Over, unless Slurm shows the same job again within a while."""
