"""The default rule: what is noise, what is a spike, what is a level that does not come back."""

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from worker.contract.loss_history import ACTED
from worker.contract.recovery_config import SpikeConfig
from worker.judgement import Judgement
from worker.spikes import Detector

RULES = SpikeConfig()


def judged(
    losses: Sequence[float], norms: Sequence[float] | None = None, rules: SpikeConfig = RULES, **more: Any
) -> list[Judgement]:
    detector = Detector(rules, **more)
    numbers = zip(losses, norms or [1.0] * len(losses), strict=True)
    return [detector.judge(step, loss, norm) for step, (loss, norm) in enumerate(numbers, start=1)]


def acted(losses: Sequence[float], *more: Any, **others: Any) -> list[tuple[int, str, int | None]]:
    said = judged(losses, *more, **others)
    return [(step, one.verdict, one.onset_step) for step, one in enumerate(said, start=1) if one.verdict in ACTED]


def noise(level: float, share: float, count: int, seed: int = 1) -> list[float]:
    draw = random.Random(seed)
    return [level * (1 + share * draw.gauss(0, 1)) for _ in range(count)]


class TestSpike:
    def test_three_in_a_row_above_twice_the_level_are_a_spike(self) -> None:
        assert acted([*noise(2.0, 0.02, 60), 4.5, 5.0, 6.0]) == [(63, "spike", 61)]

    def test_fewer_are_a_transient(self) -> None:
        said = judged([*noise(2.0, 0.02, 60), 5.0, 5.0, 2.0, 9.0, 2.0, 2.0])
        assert [one.verdict for one in said[60:63]] == ["pending", "pending", "ok"]
        assert not {one.verdict for one in said} & ACTED
        assert said[-1].verdict == "ok"

    def test_a_heavy_tail_is_noise(self) -> None:
        """A small batch of mixed lengths: one loss in four is more than twice the level, often several in a row."""
        draw = random.Random(3)
        assert acted([draw.expovariate(1.0) for _ in range(20_000)]) == []

    def test_the_same_tail_does_not_hide_an_explosion(self) -> None:
        draw = random.Random(3)
        assert acted([*(draw.expovariate(1.0) for _ in range(200)), 40.0, 90.0, 1e4]) == [(203, "spike", 201)]

    def test_a_steep_early_descent_is_none(self) -> None:
        assert acted([1.7 + 9 * math.exp(-step / 30) for step in range(400)]) == []

    def test_an_explosion_before_there_is_a_level(self) -> None:
        assert acted([2.3, 2.2, 2.4, 2.1, 1e4, 1e6, 1e9]) == [(7, "spike", 5)]

    def test_a_rough_start_without_warmup_is_none(self) -> None:
        assert acted([10.9, 12.2, 19.0, 25.0, 14.0, *noise(8.0, 0.05, 40)]) == []

    def test_bursts_that_grow_and_never_stay_long_keep_out_of_the_reference(self) -> None:
        losses = noise(0.2, 0.3, 100)
        for height in range(2, 20):
            losses += [10.0**height, 10.0**height, *noise(0.2, 0.3, 6, seed=height)]
        said = judged(losses)
        levels = {round(one.level, 1) for one in said if one.level is not None}
        assert levels <= {0.1, 0.2, 0.3}

    @pytest.mark.parametrize("level", [-1.5, -0.3, 40.0, 1e-1])
    def test_any_level_has_its_explosion(self, level: float) -> None:
        after = [level + 50 * abs(level) + 5] * 3
        assert acted([*noise(level, 0.05, 80), *after]) == [(83, "spike", 81)]


class TestDivergence:
    def test_a_raised_level_that_stays(self) -> None:
        said = judged([*noise(2.0, 0.02, 100), *noise(2.8, 0.02, 60, seed=2)])
        assert acted([*noise(2.0, 0.02, 100), *noise(2.8, 0.02, 40, seed=2)]) == [(128, "divergence", 101)]
        assert {one.verdict for one in said[104:127]} == {"suspect"}
        assert {one.onset_step for one in said[104:127]} == {101}

    def test_one_that_comes_back_in_time(self) -> None:
        said = judged([*noise(2.0, 0.02, 100), *noise(2.8, 0.02, 20, seed=2), *noise(2.05, 0.02, 60, seed=3)])
        assert not {one.verdict for one in said} & ACTED
        assert {one.verdict for one in said[130:]} == {"ok"}

    def test_a_small_rise_is_none(self) -> None:
        """A memorised epoch ends, the data get harder, the rate is warmed up again: 15 % of the level."""
        assert acted([*noise(2.0, 0.02, 100), *noise(2.3, 0.02, 400, seed=2)]) == []

    def test_a_rise_within_the_noise_is_none(self) -> None:
        assert acted([*noise(2.0, 0.3, 300), *noise(2.6, 0.3, 300, seed=2)]) == []

    def test_a_slow_one_with_which_every_window_slides(self) -> None:
        losses = [*noise(2.0, 0.02, 100), *(2.0 * 1.002**step for step in range(1000))]
        (step, verdict, onset), *_ = acted(losses)
        assert verdict == "divergence"
        assert 100 + 56 < (onset or 0) < step < 100 + 170

    def test_a_noisy_one_that_is_never_high_three_times_in_a_row(self) -> None:
        losses = [*noise(0.5, 0.15, 100), *[1.4, 1.5, 0.9] * 10]
        assert acted(losses)[0] == (109, "divergence", 101)

    def test_a_gradient_that_is_raised_too_halves_the_wait(self) -> None:
        losses, norms = [*noise(2.0, 0.02, 100), *noise(2.8, 0.02, 40)], [*noise(1.0, 0.1, 100), *noise(9.0, 0.1, 40)]
        assert acted(losses, norms)[0] == (115, "divergence", 101)

    def test_a_gradient_never_acts_alone(self) -> None:
        assert acted(noise(2.0, 0.02, 200), [*noise(1.0, 0.1, 100), *noise(500.0, 0.1, 100)]) == []

    def test_it_is_said_again_and_again_where_nobody_acts(self) -> None:
        found = acted([*noise(2.0, 0.02, 100), *noise(2.8, 0.02, 120, seed=2)])
        assert {one[2] for one in found} == {101}
        assert len(found) == 4


class TestAcceptedLevel:
    @pytest.mark.parametrize("level", [2.7, 5.0])
    def test_what_was_accepted_does_not_act_when_it_comes_again(self, level: float) -> None:
        losses = [*noise(2.0, 0.02, 100), *noise(level, 0.02, 200, seed=2)]
        assert acted(losses) != []
        assert acted(losses, accept_level=level) == []

    def test_what_leaves_the_accepted_level_acts(self) -> None:
        losses = [*noise(2.0, 0.02, 100), *noise(2.7, 0.02, 100, seed=2), *noise(4.0, 0.02, 60, seed=3)]
        assert acted(losses, accept_level=2.7)[0] == (228, "divergence", 201)

    def test_it_is_the_level_from_the_first_step(self) -> None:
        assert acted([11.0] * 3, accept_level=5.0) == [(3, "spike", 1)]
        assert acted([9.0] * 60, accept_level=5.0) == []

    def test_an_accepted_level_below_zero(self) -> None:
        losses = [*noise(-2.0, 0.02, 100), *noise(-1.0, 0.02, 200, seed=2)]
        assert acted(losses) != []
        assert acted(losses, accept_level=-1.0) == []


class TestLossesThatTellNothing:
    def test_a_policy_gradient_that_starts_at_nothing(self) -> None:
        draw = random.Random(5)
        losses = [0.0] * 20 + [abs(draw.gauss(0, 1)) * step / 2000 for step in range(2000)]
        assert acted([*losses, *[5.0] * 50]) == []

    def test_it_acts_when_it_is_not_finite(self) -> None:
        assert acted([0.0] * 40 + [math.nan] * 2, norms=[1.0] * 40 + [math.nan] * 2) == [(42, "nonfinite", 41)]

    def test_whoever_logs_a_reward_trains_by_it(self) -> None:
        detector = Detector(RULES)
        for step in range(100):
            detector.watch(step, {"reward": 0.5})
            assert detector.judge(step, 1.0 if step < 50 else 90.0, 1.0).verdict == "ok"

    def test_a_level_near_zero_moves_by_nothing(self) -> None:
        assert acted([*(0.6 * 0.97**step for step in range(300)), *[0.019] * 60]) == []


class TestWatchedNumbers:
    RULES = SpikeConfig(metrics={"reward": "fall", "kl": "rise"})

    def alarms(self, name: str, values: Sequence[float | None]) -> list[tuple[int, Judgement]]:
        detector, found = Detector(self.RULES), []
        for step, value in enumerate(values, start=1):
            detector.watch(step, {name: value, "loss": 0.0})
            alarm = detector.take_alarm()
            if alarm.verdict in ACTED:
                found.append((step, alarm))
            assert detector.take_alarm().verdict not in ACTED
        return found

    def test_a_reward_that_falls(self) -> None:
        (step, alarm), *_ = self.alarms("reward", [*noise(0.8, 0.05, 60), *noise(0.3, 0.05, 5)])
        assert (step, alarm.verdict, alarm.onset_step) == (63, "spike", 61)
        assert alarm.level == pytest.approx(0.8, abs=0.05)
        assert "reward is 0.3" in alarm.warnings[0]

    def test_a_reward_that_falls_by_less_and_stays_there(self) -> None:
        (step, alarm), *_ = self.alarms("reward", [*noise(0.8, 0.05, 60), *noise(0.5, 0.05, 40)])
        assert (step, alarm.verdict, alarm.onset_step) == (88, "divergence", 61)

    def test_a_reward_that_rises(self) -> None:
        assert self.alarms("reward", [step / 300 for step in range(300)]) == []

    def test_a_distance_that_grows_from_nothing_and_one_that_jumps(self) -> None:
        grown = [0.1 * step / 200 for step in range(200)]
        assert self.alarms("kl", grown) == []
        assert [step for step, _ in self.alarms("kl", [*grown, 2.0, 3.0, 5.0])] == [203]

    def test_what_is_no_number_is_left_aside(self) -> None:
        assert self.alarms("kl", [*[0.1] * 40, None, math.nan, math.inf, *[0.1] * 10]) == []

    def test_its_state_goes_on(self) -> None:
        values = [*noise(0.8, 0.05, 60), *noise(0.3, 0.05, 5)]
        before, after = Detector(self.RULES), Detector(self.RULES)
        for step, value in enumerate(values[:61]):
            before.watch(step, {"reward": value})
        assert after.restore(json.loads(json.dumps(before.state(), allow_nan=False)))
        for step, value in enumerate(values[61:63], start=61):
            after.watch(step, {"reward": value})
        assert after.take_alarm().verdict == "spike"
