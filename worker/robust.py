"""The default rule: a clean reference, its noise, and the best level that was ever held."""

import sys
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from worker.contract.recovery_config import SpikeConfig
from worker.judgement import OK, AcceptedLevel, Judgement, Streak, Window, learned, median, middle_of, worse

FAR_SPREADS: Final = 5.0
"""Beyond the noise: nine losses of ten are within one spread above their level."""
RAISED_SPREADS: Final = 3.0
"""The same for a level that stays raised, which is better evidence than a few losses."""
RAISED_SHARE: Final = 0.25
"""A raised level: this share of the way to ``ratio``, a quarter above the best level by default."""
NOTHING: Final = 0.02
"""A rise of less than this is none, and losses that start this close to zero are not what is minimised."""
WILD: Final = 5.0
"""Times the band that a loss has to leave while there are fewer than ``warmup`` losses."""
_FAST: Final = 5
_SOON: Final = 3
_LARGEST: Final = sys.float_info.max


@dataclass(frozen=True)
class Level:
    """Where losses lie: their middle, and how far above it nine of ten of them are."""

    middle: float
    spread: float

    def limit(self, share: float, spreads: float, times: float = 1.0) -> float:
        """The end of the band: ``share`` of the level higher, beyond the noise, and by more than nothing."""
        return min(self.middle + times * max(share * abs(self.middle), spreads * self.spread, NOTHING), _LARGEST)


class Rise:
    """Whether the level has left the best one that it ever held; a slow rise counts, although a window slides with it.

    A rise opens when the median of five losses leaves the band of the best level, and ends when it is back at half of
    that.  It begins where it was last at half.  It is ``suspect``, and a ``divergence`` once it has lasted for
    ``patience + confirm`` steps with most of their losses above the band; or for three times ``patience`` with most of
    them as far above as a spike, which in a noisy run may never be so ``patience`` times in a row.
    """

    def __init__(self, rules: SpikeConfig) -> None:
        self._rules = rules
        self._recent = Window(max(rules.patience + rules.confirm, _SOON * rules.patience, rules.warmup, _FAST))
        self._steps: deque[int] = deque(maxlen=_FAST // 2 + 1)
        self._best: Level | None = None
        self._high = Streak()
        self._is_open = False

    def judge(self, step: int, loss: float, level: Level, floor: float | None, *, has_witness: bool) -> Judgement:
        """Judge one more loss, beside a window whose level is ``level``; no best level is below ``floor``."""
        self._steps.append(step)
        self._recent.append(min(loss, _LARGEST))
        best = self._best_from(floor)
        if best is None or self._recent_median(_FAST) <= self._band(best) / 2 + best.middle / 2:
            self.end()
            self._improve(level)
            return OK
        self._high.extend(self._steps[0])
        self._is_open = self._is_open or self._recent_median(_FAST) > self._band(best)
        rules, far = self._rules, best.limit(self._rules.ratio - 1, FAR_SPREADS)
        confirm = rules.confirm // 2 if has_witness else rules.confirm
        if self._has_lasted(rules.patience + confirm, self._band(best)) or self._has_lasted(
            _SOON * rules.patience, far
        ):
            self._high.length = 0
            return Judgement("divergence", self._high.first, best.middle)
        return self.unknown()

    def _has_lasted(self, count: int, limit: float) -> bool:
        lasted = self._high.length + len(self._steps) - 1
        return self._is_open and lasted >= count and self._recent_median(count) > limit

    def _best_from(self, floor: float | None) -> Level | None:
        if self._best is None or floor is None or floor <= self._best.middle:
            return self._best
        return Level(floor, self._best.spread)

    def unknown(self) -> Judgement:
        """What is said of a loss that is not known."""
        if not self._is_open or self._best is None:
            return OK
        return Judgement("suspect", self._high.first, self._best.middle)

    def end(self) -> None:
        """The level is back."""
        self._high.end()
        self._is_open = False

    def forget(self) -> None:
        """Another level is the best from here on."""
        self.end()
        self._best = None

    def _improve(self, level: Level) -> None:
        if len(self._recent) < min(self._rules.warmup, self._rules.window):
            return
        middle = middle_of(self._recent.by_size)
        if self._best is None or middle < self._best.middle:
            self._best = Level(middle, level.spread)

    def _band(self, best: Level) -> float:
        return best.limit(RAISED_SHARE * (self._rules.ratio - 1), RAISED_SPREADS)

    def _recent_median(self, count: int) -> float:
        return median(islice(reversed(self._recent.by_time), count))

    def state(self) -> dict[str, Any]:
        """As JSON."""
        best = self._best
        return {
            "recent": self._recent.state(),
            "steps": list(self._steps),
            "best": None if best is None else [best.middle, best.spread],
            "high": self._high.state(),
            "is_open": self._is_open,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self._recent.extend(state["recent"])
        self._steps.extend(state["steps"])
        self._best = None if state["best"] is None else Level(*state["best"])
        self._high, self._is_open = Streak(**state["high"]), state["is_open"]


class Robust:
    """A loss far above its level, ``patience`` in a row, is a spike; a raised level that stays is a divergence.

    Far above: beyond ``ratio`` times the median of the last ``window`` clean losses and beyond their noise.  Raised:
    see ``Rise``.  Before ``warmup`` losses are known only what is wildly above them counts.  Losses that start at
    nothing, as a policy gradient's do, are not what is minimised: no such loss is judged, and never will be.
    """

    def __init__(
        self,
        rules: SpikeConfig,
        accept_level: float | None = None,
        *,
        share: float | None = None,
        is_loss: bool = True,
        is_minimised: bool = True,
    ) -> None:
        """``share`` of the level is far above it, ``ratio - 1`` by default; what is not minimised has no best level."""
        self._rules = rules
        self._share = rules.ratio - 1 if share is None else share
        self._is_minimised = is_minimised
        self._accepted = AcceptedLevel(accept_level, RAISED_SHARE * (rules.ratio - 1))
        self._clean = Window(rules.window)
        self._above = Streak()
        self._rise = Rise(rules)
        self._has_signal = None if is_loss else True

    def judge(self, step: int, loss: float, *, has_witness: bool = False) -> Judgement:
        level = self._level()
        if level is None:
            return self._judge_early(step, loss)
        if self._has_signal is False:
            return learned(self._clean, loss)
        said = self._judge_spike(step, loss, level)
        if not self._is_minimised:
            return said
        return worse(said, self._rise.judge(step, loss, level, self._accepted.floor, has_witness=has_witness))

    def _judge_early(self, step: int, loss: float) -> Judgement:
        if len(self._clean) < self._rules.patience:
            return learned(self._clean, loss)
        return self._judge_spike(step, loss, level_of(self._clean), WILD)

    def _judge_spike(self, step: int, loss: float, level: Level, times: float = 1.0) -> Judgement:
        if loss <= level.limit(self._share, FAR_SPREADS, times):
            self._above.end()
            return learned(self._clean, loss)
        onset = self._above.extend(step)
        return Judgement("spike" if self._above.is_due(self._rules.patience) else "pending", onset, level.middle)

    def unknown(self) -> Judgement:
        said = OK
        if self._above.first is not None:
            level = self._level()
            said = Judgement("pending", self._above.first, None if level is None else level.middle)
        return worse(said, self._rise.unknown())

    def _level(self) -> Level | None:
        is_known = len(self._clean) >= min(self._rules.warmup, self._rules.window)
        own = level_of(self._clean) if is_known else None
        if own is not None and self._has_signal is None:
            self._has_signal = abs(own.middle) > NOTHING
        was_waited_for = self._accepted.floor is not None
        middle = self._accepted.raised(None if own is None else own.middle)
        if was_waited_for and self._accepted.floor is None:
            self._rise.forget()
        if middle is None:
            return None
        return Level(middle, 0.0 if own is None else own.spread)

    def state(self) -> dict[str, Any]:
        return {
            **self._accepted.state(),
            "clean": self._clean.state(),
            "above": self._above.state(),
            "rise": self._rise.state(),
            "has_signal": self._has_signal,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._clean.extend(state["clean"])
        self._above = Streak(**state["above"])
        self._rise.restore(state["rise"])
        self._has_signal = state["has_signal"]
        self._accepted.restore(state)


def level_of(values: Window) -> Level:
    """The level of one finite value or more."""
    ordered = values.by_size
    middle = middle_of(ordered)
    return Level(middle, min(ordered[(len(ordered) - 1) * 9 // 10] - middle, _LARGEST))
