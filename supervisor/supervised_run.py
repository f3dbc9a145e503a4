"""A run in the hands of this process, and the one way in which it writes down what happens to it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from slurm.scheduler import Scheduler
from supervisor.fold import apply
from supervisor.journal import Event, Journal, SubmitIntended, SupervisorStarted
from supervisor.lease import Lease, OwnJob
from supervisor.run_state import RunState
from worker.contract.config import Config
from worker.contract.run_dir import RunDir


@dataclass
class SupervisedRun:
    """One run in the hands of this process: its folder, its lease, its scheduler, and its state so far."""

    config: Config
    run_dir: RunDir
    scheduler: Scheduler
    lease: Lease
    clock: Callable[[], float]
    tell: Callable[[Event], None]
    state: RunState
    has_next_job: bool = False
    """Whether this process has queued the job after the one that it shares with the worker."""
    introduction: SupervisorStarted | None = None
    """Written ahead of the first other event, so that a pass in which nothing happens leaves no line."""
    looked_at: float = 0.0
    """When this process last asked the scheduler for a job by the run's name, whether that answered or not."""
    looked_in_vain_at: float | None = None
    """When it last answered, and had none, though a submission without an answer may have made one."""
    silent_s: float = 0.0
    """For how long its worker, in the middle of training, gave no sign of life; 0 where that is nothing unusual."""
    journal: Journal = field(init=False)
    inherited: SubmitIntended | None = field(init=False)
    """The submission that a predecessor died over: nobody knows whether it was made."""

    def __post_init__(self) -> None:
        self.journal = Journal(self.run_dir.journal, self.clock, self.lease.check)
        intent = self.state.open_intent
        self.inherited = intent if isinstance(intent, SubmitIntended) else None

    @property
    def own(self) -> OwnJob:
        """The job that this process runs in, if any."""
        return self.lease.own

    def introduce(self) -> None:
        """Write down who supervises, once."""
        if self.introduction is not None:
            introduction, self.introduction = self.introduction, None
            self.record(introduction)

    def record(self, event: Event, attempt: int | None = None) -> None:
        """Write an event, fold it into the state, show it."""
        self.introduce()
        number = self.state.attempt if attempt is None else attempt
        stamped = self.journal.record(event, number, self.lease.term)
        self.state = apply(self.state, stamped)
        self.tell(stamped)
