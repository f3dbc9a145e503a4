"""The detector: judges each optimizer step's loss and gradient norm, on plain floats and in constant memory.

Two judges in one order.  A step that is not finite is counted by ``NonFinite``; every other loss goes to the rule
that the configuration names (see ``worker/spike_rules.py``).  Other numbers that a Trainer logs have rules of their
own and speak through ``alarm``.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from worker.contract.loss_history import ACTED
from worker.contract.recovery_config import SpikeConfig
from worker.judgement import OK, AcceptedLevel, Judgement, Rule, Streak, Window, learned, median, middle_of, worse
from worker.robust import FAR_SPREADS, Robust, level_of
from worker.watched import Watched

_RATE_SPAN = 1_000
_RATE_LIMIT = 10  # 1 % of the span: one more within it is acted on
_FORMAT = 2
_NOTHING_LEARNED = 20
"""Steps in a row: batches of which no label is left come one by one."""
_RECENT = 3
_FAST = 5
_CLEARLY_POSITIVE = 0.1  # losses printed with four digits reach 0.0 honestly, but from below this, not in one step


class MedianRatio:
    """A loss above ``ratio`` times the median of the last ``window`` losses, ``patience`` in a row, is a spike.

    Judged once ``warmup`` losses are known.  A ratio means nothing on a level at or below zero, so there every loss
    is within the band.
    """

    def __init__(self, rules: SpikeConfig, accept_level: float | None = None) -> None:
        self._rules = rules
        self._accepted = AcceptedLevel(accept_level, rules.ratio - 1)
        self._losses = Window(rules.window)
        self._above = Streak()

    def judge(self, step: int, loss: float, *, has_witness: bool = False) -> Judgement:
        level = self._level()
        if level is None or level <= 0 or loss <= self._rules.ratio * level:
            self._above.end()
            return learned(self._losses, loss)
        onset = self._above.extend(step)
        return Judgement("spike" if self._above.is_due(self._rules.patience) else "pending", onset, level)

    def unknown(self) -> Judgement:
        if self._above.first is None:
            return OK
        return Judgement("pending", self._above.first, self._level())

    def _level(self) -> float | None:
        is_known = len(self._losses) >= min(self._rules.warmup, self._rules.window)
        return self._accepted.raised(middle_of(self._losses.by_size) if is_known else None)

    def state(self) -> dict[str, Any]:
        return {**self._accepted.state(), "losses": self._losses.state(), "above": self._above.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self._losses.extend(state["losses"])
        self._above = Streak(**state["above"])
        self._accepted.restore(state)


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


class Witness:
    """The gradient norm: it confirms what the loss says, and never acts alone."""

    def __init__(self, rules: SpikeConfig) -> None:
        self._rules = rules
        self._clean = Window(rules.window)
        self._last: deque[float] = deque(maxlen=_FAST)

    def speaks(self, grad_norm: float | None) -> bool:
        """Whether the norms of the last steps are above their band; an outlier never enters the reference."""
        if grad_norm is None:
            return False
        self._last.append(grad_norm)
        if len(self._clean) < min(self._rules.warmup, self._rules.window):
            self._clean.append(grad_norm)
            return False
        limit = level_of(self._clean).limit(self._rules.ratio - 1, FAR_SPREADS)
        if grad_norm <= limit:
            self._clean.append(grad_norm)
        return median(self._last) > limit

    def state(self) -> dict[str, list[float]]:
        """As JSON."""
        return {"clean": self._clean.state(), "last": list(self._last)}

    def restore(self, state: dict[str, list[float]]) -> None:
        """Go on from ``state``."""
        self._clean.extend(state["clean"])
        self._last.extend(state["last"])


_RULES: Final = {"robust": Robust, "median_ratio": MedianRatio}


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
        self._unlearned = Streak()
        self._rule: Rule = _RULES[self._rules.rule](self._rules, self._accept_level)
        self._witness = Witness(self._rules)
        self._watched = Watched(self._rules)
        self._loss_tells = True

    def judge(
        self, step: int, loss: float | None, grad_norm: float | None, *, scaler_skipped: bool = False
    ) -> Judgement:
        """The judgement of ``step``; ``None`` is a number that is not known.

        Not finite is a gradient that is not, or a loss that is not (or is unknown, or the exact 0.0 that a filter
        puts in its place) beside an unknown gradient.  A step that the fp16 scaler skipped is its way of working:
        ``skipped``, and counted nowhere.  With a finite gradient a NaN harms nothing and is noted; beside one of
        exactly 0 it is ``pending``, as nothing was learned, and the 20th in a row acts.  +inf is above every band,
        as is a step that is not finite after losses above theirs.
        """
        if self._step is not None and step < self._step:
            self._begin()
        if step == self._step:
            return Judgement("ok", warnings=("this step was judged before and is not counted twice",))
        self._step = step
        if scaler_skipped:
            return Judgement("skipped", step, warnings=("the fp16 scaler skipped this step",))
        is_unknown = loss is None or math.isnan(loss) or loss == -math.inf
        if not is_unknown or grad_norm != 0:
            self._unlearned.end()
        if self._is_nonfinite(loss, grad_norm):
            return self._judge_nonfinite(step)
        self._nonfinite.streak.end()
        has_witness = self._witness.speaks(grad_norm)
        if loss is None or is_unknown:
            return self._noted(step, loss, grad_norm)
        if math.isfinite(loss):
            self._recent.append(loss)
        if not self._loss_tells:
            return OK
        return self._rule.judge(step, loss, has_witness=has_witness)

    def _judge_nonfinite(self, step: int) -> Judgement:
        """Counted, and above every band where losses are above theirs already: both together may be due."""
        said = self._nonfinite.count(step)
        if not self._loss_tells or self._rule.unknown().verdict == "ok":
            return said
        above = self._rule.judge(step, math.inf)
        is_due = said.verdict in ACTED or above.verdict in ACTED
        return Judgement("nonfinite" if is_due else "skipped", above.onset_step, above.level, said.warnings)

    def _is_nonfinite(self, loss: float | None, grad_norm: float | None) -> bool:
        if grad_norm is not None:
            return not math.isfinite(grad_norm)
        if loss is None or not math.isfinite(loss):
            return True
        return loss == 0.0 and len(self._recent) > 0 and min(self._recent) > _CLEARLY_POSITIVE

    def _noted(self, step: int, loss: float | None, grad_norm: float | None) -> Judgement:
        said = self._rule.unknown()
        warning = f"the loss is {'unknown' if loss is None else loss} and the gradient is finite"
        if grad_norm == 0:
            onset = self._unlearned.extend(step)
            said = said if said.verdict != "ok" else Judgement("pending", onset)
            if self._unlearned.is_due(_NOTHING_LEARNED):
                learned_nothing = f"nothing was learned in {_NOTHING_LEARNED} steps: no loss, and a gradient of 0"
                return Judgement("nonfinite", onset, said.level, (warning, learned_nothing))
        return Judgement(said.verdict, said.onset_step, said.level, (warning,))

    def judge_logged(
        self,
        step: int,
        loss: float | None,
        grad_norm: float | None,
        logged: Mapping[str, Any],
        *,
        scaler_skipped: bool = False,
    ) -> Judgement:
        """The judgement of a step that was logged with all of its numbers at once, the watched ones among them."""
        said = self.judge(step, loss, grad_norm, scaler_skipped=scaler_skipped)
        self.watch(step, logged)
        return worse(said, self.take_alarm())

    def watch(self, step: int, logged: Mapping[str, Any]) -> None:
        """Judge what a Trainer logged beside the loss, by the names of ``spike.metrics``.

        Whoever logs a ``reward`` trains by it, and the loss tells nothing: from here on it acts only when it is not
        finite.
        """
        self._loss_tells = self._loss_tells and not isinstance(logged.get("reward"), int | float)
        self._watched.judge(step, logged)

    def take_alarm(self) -> Judgement:
        """What the watched numbers say; a verdict is handed out once."""
        return self._watched.take_alarm()

    def state(self) -> dict[str, Any]:
        """Everything the next judgement depends on, as finite JSON."""
        return {
            "format": _FORMAT,
            "rules": self._rules.model_dump(mode="json"),
            "step": self._step,
            "recent": list(self._recent),
            "nonfinite": {"streak": self._nonfinite.streak.state(), "steps": list(self._nonfinite.steps)},
            "unlearned": self._unlearned.state(),
            "reference": self._rule.state(),
            "witness": self._witness.state(),
            "watched": self._watched.state(),
            "loss_tells": self._loss_tells,
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Go on from what ``state`` returned; False, and anew, where that was of other settings."""
        self._begin()
        if (state.get("format"), state.get("rules")) != (_FORMAT, self._rules.model_dump(mode="json")):
            return False
        self._step = state["step"]
        self._recent.extend(state["recent"])
        self._nonfinite.streak = Streak(**state["nonfinite"]["streak"])
        self._nonfinite.steps.extend(state["nonfinite"]["steps"])
        self._unlearned = Streak(**state.get("unlearned", {}))
        self._rule.restore(state["reference"])
        self._witness.restore(state["witness"])
        self._watched.restore(state["watched"])
        self._loss_tells = state["loss_tells"]
        return True
