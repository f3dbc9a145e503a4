"""The decisions that there are: frozen values, each with its reason."""

from dataclasses import dataclass
from typing import Literal

from supervisor.journal import AttemptDecided, RequestRefused


@dataclass(frozen=True)
class Wait:
    reason: str


@dataclass(frozen=True)
class Begin:
    """Decide the next attempt: quarantine what lies past its start, publish its directive."""

    plan: AttemptDecided


@dataclass(frozen=True)
class WouldDo:
    """Write down what would be begun if ``recovery.mode`` were ``act``."""

    plan: AttemptDecided


@dataclass(frozen=True)
class Refuse:
    """Leave undone what a person asked for, and go on as before."""

    event: RequestRefused


@dataclass(frozen=True)
class Submit:
    reason: str
    warning_s: int | None = None
    """How many seconds ahead of its time limit the worker is to be told."""


@dataclass(frozen=True)
class Cancel:
    job_id: str
    reason: str


@dataclass(frozen=True)
class StartNow:
    job_id: str
    reason: str


@dataclass(frozen=True)
class ChangeJob:
    """Change one thing about a job in the queue; ``old`` and ``new`` are for a person."""

    job_id: str
    what: Literal["time_limit", "exclude", "partition", "qos", "released"]
    reason: str
    old: str | None = None
    new: str | None = None
    partition: str | None = None
    qos: str | None = None


@dataclass(frozen=True)
class Exclude:
    """Leave a node out of the jobs to come, if the request still fits without it."""

    node: str
    until: float | None
    """None: it may be used again from now on."""
    evidence: str
    reason: str


@dataclass(frozen=True)
class AskToStop:
    """Ask the worker to save and leave."""

    reason: str


@dataclass(frozen=True)
class Finish:
    final_step: int
    reason: str


@dataclass(frozen=True)
class EndStopped:
    saved_step: int | None
    by: str | None
    reason: str


@dataclass(frozen=True)
class GiveUp:
    reason: str
    tried: tuple[str, ...] = ()
    error: str | None = None


Decision = (
    Wait
    | Begin
    | WouldDo
    | Refuse
    | Submit
    | Cancel
    | StartNow
    | ChangeJob
    | Exclude
    | AskToStop
    | Finish
    | EndStopped
    | GiveUp
)
