"""directive.json: what an attempt is to do, from the supervisor to the worker."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from worker.contract.files import Message, publish_message, read_message
from worker.contract.rehearsal import Fault

Cause = Literal[
    "first",
    "spike",
    "divergence",
    "nonfinite",
    "preempted",
    "drained",
    "node_failed",
    "time_limit",
    "hang",
    "crash",
    "out_of_memory",
    "vanished",
    "refused",
    "resumed",
    "rollback",
    "adopted",
]


class LearningRateRamp(Message):
    """scale = ``lr_scale`` up to ``from_step + hold_steps``, linear to ``to`` over ``ramp_steps``, then ``to``."""

    from_step: int
    hold_steps: int
    ramp_steps: int
    to: float = Field(gt=0)


class SkippedBatches(Message):
    """``count`` whole global batches from ``first``, in the epoch's own order, that are left out."""

    epoch: int
    first: int
    count: int


class Directive(Message):
    """One attempt: where it begins, at which rate, and what is asked of a worker that runs."""

    format: Literal[1] = 1
    attempt: int = Field(ge=1)
    stop: Literal["save", "now"] | None = None
    pinned: tuple[int, ...] = ()
    accept_level: float | None = None
    resume_from: str | None = None
    on_requeue: Literal["continue", "wait"] = "continue"
    new_job: bool = False
    lr_scale: float = Field(default=1.0, gt=0)
    lr_ramp: LearningRateRamp | None = None
    skip_batches: tuple[SkippedBatches, ...] = ()
    reset_moments: bool = False
    rewarm_steps: int | None = None
    reset_from: int | None = None
    rehearse: tuple[Fault, ...] | None = None
    cause: Cause
    reason: str
    time: float


def scale_at(directive: Directive, step: int) -> float:
    """The factor on the configured rate for the update that makes ``step`` the number of finished steps."""
    ramp = directive.lr_ramp
    if ramp is None:
        return directive.lr_scale
    past = step - (ramp.from_step + ramp.hold_steps)
    if past <= 0:
        return directive.lr_scale
    if past >= ramp.ramp_steps:
        return ramp.to
    return directive.lr_scale + (ramp.to - directive.lr_scale) * past / ramp.ramp_steps


def read_directive(path: Path) -> Directive | None:
    """The directive at ``path``, None where there is none yet; UnusableFileError where it cannot be read."""
    return read_message(path, Directive)


def publish_directive(path: Path, directive: Directive) -> None:
    """Put a directive in place, whole and durably."""
    publish_message(path, directive)
