"""What the rules of the detector share: judgements, streaks, an accepted level, medians."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from worker.contract.loss_history import Verdict

GRAVITY: Final[tuple[Verdict, ...]] = ("ok", "pending", "suspect", "skipped", "divergence", "spike", "nonfinite")


@dataclass(frozen=True)
class Judgement:
    """What one step's numbers mean; ``onset_step`` is the first step of the streak and ``level`` the reference."""

    verdict: Verdict
    onset_step: int | None = None
    level: float | None = None
    warnings: tuple[str, ...] = ()


OK: Final = Judgement("ok")
"""What nearly every step says."""


@dataclass
class Streak:
    """Steps in a row of one kind."""

    first: int | None = None
    length: int = 0

    def extend(self, step: int) -> int:
        """Count one more; the streak's first step."""
        self.first = step if self.first is None else self.first
        self.length += 1
        return self.first

    def end(self) -> None:
        """The next one begins anew."""
        self.first, self.length = None, 0

    def is_due(self, patience: int) -> bool:
        """Whether this is the ``patience``-th step, or as many again later (in observe mode nobody acts)."""
        return self.length > 0 and self.length % patience == 0

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"first": self.first, "length": self.length}


class Window:
    """The last ``length`` numbers, none of them NaN, at hand by time and by size."""

    def __init__(self, length: int) -> None:
        self.by_time: deque[float] = deque(maxlen=length)
        self.by_size: list[float] = []

    def __len__(self) -> int:
        return len(self.by_size)

    def append(self, value: float) -> None:
        """Take in one more; the oldest one goes where there are too many."""
        if len(self.by_size) == self.by_time.maxlen:
            del self.by_size[bisect_left(self.by_size, self.by_time[0])]
        self.by_time.append(value)
        insort(self.by_size, value)

    def extend(self, values: Iterable[float]) -> None:
        """Take in one after the other."""
        for value in values:
            self.append(value)

    def state(self) -> list[float]:
        """As JSON, by time."""
        return list(self.by_time)


class Rule(Protocol):
    """A way to judge losses; each keeps its outliers out of its own reference."""

    def judge(self, step: int, loss: float, *, has_witness: bool = False) -> Judgement:
        """Judge a loss that is a number or +inf; a witness is a gradient norm that left its own band."""

    def unknown(self) -> Judgement:
        """What a step says whose loss is not known: an open streak stays open, and nothing is learned."""

    def state(self) -> dict[str, Any]:
        """Everything the next judgement depends on, as finite JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""


class AcceptedLevel:
    """A level that was accepted is the least reference until the window has come up to within ``share`` of it.

    From then on the window speaks for itself.
    """

    def __init__(self, accepted: float | None, share: float) -> None:
        self._accepted = self.floor = accepted
        self._share = share

    def raised(self, level: float | None) -> float | None:
        """The reference, where the window's own is ``level`` (None: it has none yet)."""
        if level is not None and self.floor is not None and level + self._share * abs(level) >= self.floor:
            self.floor = None
        if level is None or self.floor is None:
            return self.floor if level is None else level
        return max(level, self.floor)

    def state(self) -> dict[str, float | None]:
        """As JSON."""
        return {"accept_level": self._accepted, "floor": self.floor}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, unless another level was accepted since."""
        if self._accepted in (None, state["accept_level"]):
            self._accepted, self.floor = state["accept_level"], state["floor"]


def worse(one: Judgement, other: Judgement) -> Judgement:
    """The graver of two judgements of one step, with the warnings of both."""
    if other == OK:
        return one
    graver = max(one, other, key=lambda said: GRAVITY.index(said.verdict))
    return Judgement(graver.verdict, graver.onset_step, graver.level, one.warnings + other.warnings)


def learned(losses: Window, loss: float) -> Judgement:
    """Take a loss that is within the band into the reference."""
    if math.isfinite(loss):
        losses.append(loss)
        return OK
    return Judgement("ok", warnings=("an infinite loss with a finite gradient, before there is a level",))


def median(values: Iterable[float]) -> float:
    """The median of one finite value or more, finite too."""
    return middle_of(sorted(values))


def middle_of(ordered: list[float]) -> float:
    """The middle of sorted values; halves are added, because a sum may overflow."""
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else low / 2 + high / 2
