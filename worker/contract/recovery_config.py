"""What counts as a spike, which checkpoints are kept, and what a fault leads to; one documented field a setting."""

from typing import Annotated, Literal

from pydantic import Field

from worker.contract.section import NotNegative, Positive, Section


class SpikeConfig(Section):
    """When a loss counts as a spike."""

    rule: Literal["robust", "median_ratio"] = "robust"
    """robust: level, noise and the best level; median_ratio: the median of the window alone."""
    window: Positive = 50
    """Losses in the reference window."""
    ratio: Annotated[float, Field(gt=1)] = 2.0
    """A loss above this multiple of the reference level is above the band."""
    warmup: Positive = 20
    """Losses that make a level; until then only a non-finite one is judged, and, robust only, one that is five times
    the band above the others."""
    patience: Positive = 3
    """Losses above the band in a row that make a spike."""
    confirm: Positive = 25
    """Steps after ``patience`` that a level raised by less than ``ratio`` has to come back; robust only."""
    nonfinite_patience: Positive = 2
    """Non-finite steps in a row that are acted on."""
    metrics: dict[str, Literal["fall", "rise"]] = Field(default_factory=dict)
    """Other numbers that the Trainer logs, and which way is bad: ``{reward: fall, kl: rise}``."""


class CheckpointConfig(Section):
    """What is saved and kept."""

    every_steps: Positive = 500
    """Optimizer steps between checkpoints."""
    keep: Positive = 3
    """Newest checkpoints kept."""
    keep_healthy: Positive = 2
    """Newest healthy checkpoints kept, whatever ``keep`` says."""
    keep_every: Positive | None = None
    """Keep every checkpoint whose step is a multiple of this."""
    keep_quarantined: NotNegative = 1
    """Checkpoints of abandoned branches kept in quarantine."""
    healthy_after: NotNegative = 25
    """Steps without a verdict after a checkpoint that make it healthy."""
    background: bool = False
    """Train on while a copy of the state is written; takes main memory for it; not with FSDP or DeepSpeed."""


class SpikeRecovery(Section):
    """What a spike or divergence leads to."""

    lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the rate scale at each rollback."""
    max_rollbacks: NotNegative = 5
    """Rollbacks without a new healthy checkpoint before the run gives up."""
    min_lr_scale: Annotated[float, Field(gt=0, le=1)] = 0.03125
    """The rate scale never goes below this."""
    hold_steps: NotNegative | None = None
    """Steps that the lowered rate is held before it ramps back; null = for good."""
    ramp_steps: Positive | None = None
    """Steps of the way back to ``ramp_to``; needs ``hold_steps``."""
    ramp_to: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Where the ramp ends."""
    reset_moments: bool = False
    """Drop the optimizer's moments at each rollback."""
    rewarm_steps: Positive | None = None
    """Warm the rate up again over so many steps after each rollback; null = off."""
    skip: Literal["repeat", "always", "never"] = "repeat"
    """Whether the batches of a spike are left out: when it comes again at the same ones, at once, or never; at most
    1 % of all batches of the run."""
    skip_before: NotNegative = 20
    """Batches ahead of the onset that are left out too: a harmful batch shows later than it was trained on."""


class LrFactor(Section):
    """What one kind of event does to the rate."""

    lr_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the rate scale."""


class RecoveryConfig(Section):
    """What is done when something goes wrong."""

    mode: Literal["act", "observe"] = "act"
    """observe: write down what would be done, touch nothing, and train on through verdicts."""
    spike: SpikeRecovery = SpikeRecovery()
    nonfinite: LrFactor = LrFactor(lr_factor=0.5)
    preemption: LrFactor = LrFactor(lr_factor=1.0)
    max_attempts_without_progress: Positive = 10
    """Attempts without a new healthy checkpoint before the run gives up."""
    directive_wait_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that agents keep the allocation while they wait for a decision."""
    relaunches_in_allocation: NotNegative = 2
    """Relaunches in one allocation without a new healthy checkpoint; then a fresh job."""
    max_submissions_per_hour: Positive = 6
    """Jobs submitted within any hour; the next waits."""
    max_gpu_hours: Annotated[float, Field(gt=0)] | None = None
    """GPU hours after which the run saves and gives up, counted from the times at which its jobs were seen to run."""
    hang_timeout_s: Annotated[float, Field(ge=1)] = 1800.0
    """Seconds without progress that are a hang; longer where the run's own steps and saves take long, and in phases
    of which little is known."""
    absent_grace_s: Annotated[float, Field(ge=0)] = 120.0
    """Seconds that a preempted or failed job may be out of Slurm's sight before it counts as over."""
    node_strikes: Positive = 2
    """Attempts that a node may spoil before it is excluded."""
    node_ban_h: Annotated[float, Field(gt=0)] = 24.0
    """Hours that a node stays excluded, and that a strike against it counts."""
