"""Other numbers that a Trainer logs, judged like losses: ``spike.metrics: {reward: fall, kl: rise}``."""

import math
from collections.abc import Mapping
from typing import Any

from worker.contract.loss_history import ACTED
from worker.contract.recovery_config import SpikeConfig
from worker.judgement import OK, Judgement, worse
from worker.robust import Robust


class Watched:
    """The rules of the watched numbers, and what they said last.

    One that must not fall is judged upside down, and below half of its level (at ``ratio`` 2) counts as far.  One that
    must not rise is compared with its window only: it may grow slowly for ever, as the distance to a reference policy
    does.
    """

    def __init__(self, rules: SpikeConfig) -> None:
        self._signs = {name: -1.0 if way == "fall" else 1.0 for name, way in rules.metrics.items()}
        self._rules = {
            name: Robust(
                rules, share=1 - 1 / rules.ratio if way == "fall" else None, is_loss=False, is_minimised=way == "fall"
            )
            for name, way in rules.metrics.items()
        }
        self._said: dict[str, Judgement] = {}
        self._step: int | None = None

    def judge(self, step: int, logged: Mapping[str, Any]) -> None:
        """Judge those that are among ``logged``, once a step."""
        if step == self._step or self._rules.keys().isdisjoint(logged):
            return
        self._step = step
        for name, rule in self._rules.items():
            value = logged.get(name)
            if isinstance(value, int | float) and math.isfinite(value):
                self._said[name] = self._judged(name, rule.judge(step, self._signs[name] * value), value)

    def _judged(self, name: str, said: Judgement, value: float) -> Judgement:
        if said.verdict == "ok" or said.level is None:
            return OK
        level = self._signs[name] * said.level
        return Judgement(said.verdict, said.onset_step, level, (f"{name} is {value:.6g}, its level was {level:.6g}",))

    def take_alarm(self) -> Judgement:
        """The gravest of what they said; a verdict is handed out once and is ``pending`` from then on."""
        alarm = OK
        for name, said in self._said.items():
            alarm = worse(alarm, said)
            if said.verdict in ACTED:
                self._said[name] = Judgement("pending", said.onset_step, said.level, said.warnings)
        return alarm

    def state(self) -> dict[str, Any]:
        """As JSON; what was said and not handed out yet is said again after the next log."""
        return {"step": self._step, "rules": {name: rule.state() for name, rule in self._rules.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``."""
        self._step = state["step"]
        for name, rule in self._rules.items():
            rule.restore(state["rules"][name])
