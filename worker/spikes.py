"""The detector: judges each optimizer step's loss and gradient norm, on plain floats and in constant memory.

Two judges in one order.  A step that is not finite is counted by ``NonFinite``; every other loss goes to the rule
that the configuration names, which holds a reference level and says when losses above its band make a spike.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from worker.contract.config import SpikeConfig
from worker.contract.loss_history import Verdict

_RATE_SPAN = 1_000
_RATE_LIMIT = 10  # 1 % of the span: one more within it is acted on
_RECENT = 3
_CLEARLY_POSITIVE = 0.1  # losses printed with four digits reach 0.0 honestly, but from below this, not in one step


@dataclass(frozen=True)
class Judgement:
    """What one step's numbers mean; ``onset_step`` is the first step of the streak and ``level`` the reference."""

    verdict: Verdict
    onset_step: int | None = None
    level: float | None = None
    warnings: tuple[str, ...] = ()


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


class Rule(Protocol):
    """A way to judge losses; each keeps its outliers out of its own reference."""

    def judge(self, step: int, loss: float) -> Judgement:
        """Judge a loss that is a number or +inf."""

    def unknown(self) -> Judgement:
        """What a step says whose loss is not known: an open streak stays open, and nothing is learned."""

    def state(self) -> dict[str, Any]:
        """Everything the next judgement depends on, as finite JSON."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""


class MedianRatio:
    """A loss above ``ratio`` times the median of the last ``window`` losses, ``patience`` in a row, is a spike.

    Judged once ``warmup`` losses are known.  A ratio means nothing on a level at or below zero, so there every loss
    is within the band.  An accepted level is the least reference, until the window has come up so far that the
    accepted level lies within its band: from then on the window speaks for itself.
    """

    name = "median_ratio"

    def __init__(self, rules: SpikeConfig, accept_level: float | None) -> None:
        self._rules = rules
        self._accept_level = accept_level
        self._floor = accept_level
        self._losses: deque[float] = deque(maxlen=rules.window)
        self._above = Streak()

    def judge(self, step: int, loss: float) -> Judgement:
        level = self._level()
        if level is None or level <= 0 or loss <= self._rules.ratio * level:
            self._above.end()
            return self._learn(loss)
        onset = self._above.extend(step)
        return Judgement("spike" if self._above.is_due(self._rules.patience) else "pending", onset, level)

    def unknown(self) -> Judgement:
        if self._above.first is None:
            return Judgement("ok")
        return Judgement("pending", self._above.first, self._level())

    def _learn(self, loss: float) -> Judgement:
        if math.isfinite(loss):
            self._losses.append(loss)
            return Judgement("ok")
        return Judgement("ok", warnings=("an infinite loss with a finite gradient, before there is a level",))

    def _level(self) -> float | None:
        if len(self._losses) < min(self._rules.warmup, self._rules.window):
            return self._floor
        level = median(self._losses)
        if self._floor is not None and level * self._rules.ratio >= self._floor:
            self._floor = None
        return level if self._floor is None else max(level, self._floor)

    def state(self) -> dict[str, Any]:
        return {
            "accept_level": self._accept_level,
            "floor": self._floor,
            "losses": list(self._losses),
            "above": self._above.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self._rules.window)
        self._above = Streak(**state["above"])
        if self._accept_level in (None, state["accept_level"]):
            self._accept_level, self._floor = state["accept_level"], state["floor"]


@dataclass
class NonFinite:
    """Counts steps that are not finite: in a row, and among the last 1,000."""

    patience: int
    streak: Streak = field(default_factory=Streak)
    steps: deque[int] = field(default_factory=lambda: deque(maxlen=_RATE_LIMIT + 1))

    def count(self, step: int) -> Judgement:
        """``skipped``, or ``nonfinite`` when it is time to act."""
        onset = self.streak.extend(step)
        self.steps.append(step)
        if self.streak.is_due(self.patience):
            return Judgement("nonfinite", onset)
        if len(self.steps) > _RATE_LIMIT and step - self.steps[0] < _RATE_SPAN:
            self.steps.clear()
            return Judgement("nonfinite", onset, warnings=("more than 1 % of the last 1,000 steps were not finite",))
        return Judgement("skipped", onset)


class Detector:
    """Judges a run's steps one after the other; never raises on any number, and goes on bit by bit from its state.

    A step that lies before the last one judged is another branch: everything starts anew.
    """

    def __init__(self, rules: SpikeConfig, accept_level: float | None = None) -> None:
        self._rules = rules
        self._accept_level = accept_level
        self._begin()

    def _begin(self) -> None:
        self._step: int | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._nonfinite = NonFinite(self._rules.nonfinite_patience)
        self._rule: Rule = MedianRatio(self._rules, self._accept_level)

    def judge(
        self, step: int, loss: float | None, grad_norm: float | None, *, scaler_skipped: bool = False
    ) -> Judgement:
        """The judgement of ``step``; ``None`` is a number that is not known.

        Not finite is a gradient that is not, or a loss that is not (or is unknown, or the exact 0.0 that a filter
        puts in its place) beside an unknown gradient.  A step that the fp16 scaler skipped is its way of working:
        ``skipped``, and counted nowhere.  With a finite gradient a NaN harms nothing and is noted; +inf is above
        every band.
        """
        if self._step is not None and step < self._step:
            self._begin()
        if step == self._step:
            return Judgement("ok", warnings=("this step was judged before and is not counted twice",))
        self._step = step
        if scaler_skipped:
            return Judgement("skipped", step, warnings=("the fp16 scaler skipped this step",))
        if self._is_nonfinite(loss, grad_norm):
            return self._nonfinite.count(step)
        self._nonfinite.streak.end()
        if loss is None or math.isnan(loss) or loss == -math.inf:
            return self._noted(loss)
        if math.isfinite(loss):
            self._recent.append(loss)
        return self._rule.judge(step, loss)

    def _is_nonfinite(self, loss: float | None, grad_norm: float | None) -> bool:
        if grad_norm is not None:
            return not math.isfinite(grad_norm)
        if loss is None or not math.isfinite(loss):
            return True
        return loss == 0.0 and len(self._recent) > 0 and min(self._recent) > _CLEARLY_POSITIVE

    def _noted(self, loss: float | None) -> Judgement:
        said = self._rule.unknown()
        warning = f"the loss is {'unknown' if loss is None else loss} and the gradient is finite"
        return Judgement(said.verdict, said.onset_step, said.level, (warning,))

    def state(self) -> dict[str, Any]:
        """Everything the next judgement depends on, as finite JSON."""
        return {
            "rule": self._rules.rule,
            "step": self._step,
            "recent": list(self._recent),
            "nonfinite": {"streak": self._nonfinite.streak.state(), "steps": list(self._nonfinite.steps)},
            "reference": self._rule.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` returned; a reference of another rule is left aside and built anew."""
        self._begin()
        self._step = state["step"]
        self._recent.extend(state["recent"])
        self._nonfinite.streak = Streak(**state["nonfinite"]["streak"])
        self._nonfinite.steps.extend(state["nonfinite"]["steps"])
        if state["rule"] == self._rules.rule:
            self._rule.restore(state["reference"])


def median(values: Iterable[float]) -> float:
    """The median of one finite value or more, finite too: halves are added, because a sum may overflow."""
    ordered = sorted(values)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return low if low == high else low / 2 + high / 2
