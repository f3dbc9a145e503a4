"""The kinds that a run's time is made of, and a stretch of one of them."""

from dataclasses import dataclass
from typing import Final, Literal, get_args

Kind = Literal["training", "repeated", "evaluating", "saving", "finishing", "starting", "queued", "lost", "paused"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
MEANING: Final[dict[Kind, str]] = {
    "training": "steps that count",
    "repeated": "steps that were undone and made again",
    "evaluating": "the loss on held-out text",
    "saving": "writing checkpoints",
    "finishing": "after the last step: its evaluation, the finished weights",
    "starting": "loading, restoring, proving",
    "queued": "waiting in the queue",
    "lost": "noticing, deciding, no job, or a job that does not train",
    "paused": "over, until a person let it go on",
}


@dataclass(frozen=True)
class Span:
    """A stretch of one kind; times are UTC seconds, ``nodes`` is what was allocated to the run meanwhile."""

    begin: float
    end: float
    kind: Kind
    attempt: int
    nodes: int

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end - self.begin
