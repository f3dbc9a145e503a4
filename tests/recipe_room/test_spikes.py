"""The detector: the article's rule, steps that are not finite, the cases of public reports, and what it remembers."""

import json
import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.contract.loss_history import ACTED
from worker.contract.recovery_config import SpikeConfig
from worker.judgement import Judgement, Window, median
from worker.spikes import Detector

NAN, INF = math.nan, math.inf
RULES = SpikeConfig(rule="median_ratio")


def judged(losses: list[Any], rules: SpikeConfig = RULES, norm: float | None = 1.0, **more: Any) -> list[Judgement]:
    detector = Detector(rules, **more)
    return [detector.judge(step, loss, norm) for step, loss in enumerate(losses, start=1)]


def verdicts(losses: list[Any], rules: SpikeConfig = RULES, norm: float | None = 1.0, **more: Any) -> list[str]:
    return [one.verdict for one in judged(losses, rules, norm, **more)]


@given(st.integers(1, 9), st.lists(st.one_of(st.floats(allow_nan=False), st.sampled_from([0.0, -0.0, 1.0]))))
def test_a_window_by_size_is_bit_for_bit_what_sorting_it_gives(length: int, values: list[float]) -> None:
    window, last = Window(length), deque[float](maxlen=length)
    for value in values:
        window.append(value)
        last.append(value)
        assert list(map(repr, window.by_size)) == list(map(repr, sorted(last)))
        assert list(map(repr, window.state())) == list(map(repr, last))
        assert len(window) == len(last)


class TestMedianRatio:
    def test_three_in_a_row_above_twice_the_median_are_a_spike(self) -> None:
        said = judged([2.0] * 30 + [4.1, 4.2, 4.3])
        assert [one.verdict for one in said[30:]] == ["pending", "pending", "spike"]
        assert {(one.onset_step, one.level) for one in said[30:]} == {(31, 2.0)}

    @pytest.mark.parametrize("loss", [4.0, 3.9, 0.1, 0.0])
    def test_what_is_not_above_twice_the_median_is_ok(self, loss: float) -> None:
        assert verdicts([2.0] * 30 + [loss] * 10) == ["ok"] * 40

    def test_a_transient_is_noted_and_forgotten(self) -> None:
        said = judged([0.8] * 30 + [0.8022, 4.2653, 0.77, 4.3, 4.3, 0.8])
        assert [one.verdict for one in said[30:]] == ["ok", "pending", "ok", "pending", "pending", "ok"]
        assert [one.onset_step for one in said[30:]] == [None, 32, None, 34, 34, None]

    def test_nothing_is_judged_before_the_warmup(self) -> None:
        assert verdicts([1.0] * 19 + [50.0] * 3) == ["ok"] * 20 + ["pending"] * 2

    def test_a_warmup_longer_than_the_window_ends_when_the_window_is_full(self) -> None:
        rules = SpikeConfig(rule="median_ratio", window=5, warmup=20)
        assert verdicts([1.0] * 5 + [3.0] * 3, rules) == ["ok"] * 5 + ["pending", "pending", "spike"]

    def test_the_reference_is_the_window_and_not_the_whole_run(self) -> None:
        losses = [8.0] * 60 + [2.0] * 50 + [5.0] * 3
        assert verdicts(losses)[-3:] == ["pending", "pending", "spike"]

    def test_outliers_never_enter_the_reference(self) -> None:
        bursts = [2.0] * 40 + [9.0, 9.0, 2.0] * 200
        said = judged(bursts)
        assert not {one.verdict for one in said} & ACTED
        assert {one.level for one in said if one.level is not None} == {2.0}

    def test_a_level_that_never_returns_is_a_spike_again_and_again(self) -> None:
        """In observe mode nobody acts: the streak keeps its onset and says so every ``patience`` steps."""
        said = judged([2.0] * 30 + [50.0] * 9)
        assert [one.verdict for one in said[30:]] == ["pending", "pending", "spike"] * 3
        assert {one.onset_step for one in said[30:]} == {31}

    @pytest.mark.parametrize("level", [0.0, -1.0, -1e-9])
    def test_no_ratio_is_taken_of_a_level_at_or_below_zero(self, level: float) -> None:
        assert verdicts([level] * 30 + [5.0] * 10) == ["ok"] * 40

    def test_infinity_with_a_finite_gradient_is_above_every_band(self) -> None:
        assert verdicts([2.0] * 30 + [INF] * 3) == ["ok"] * 30 + ["pending", "pending", "spike"]

    def test_infinity_before_there_is_a_level_is_noted(self) -> None:
        said = judged([INF])[0]
        assert said.verdict == "ok"
        assert "infinite" in said.warnings[0]

    def test_the_run_that_explodes(self) -> None:
        losses = [4.5 + 0.02 * (60 - n) for n in range(60)] + [27.0, 120.0, 4500.0]
        assert verdicts(losses)[-3:] == ["pending", "pending", "spike"]

    def test_values_up_to_the_end_of_the_floats(self) -> None:
        assert verdicts([1e308] * 30 + [1.7e308] * 3) == ["ok"] * 33
        assert verdicts([2.0] * 30 + [5e19] * 3)[-1] == "spike"


class TestAcceptedLevel:
    def test_it_is_the_level_from_the_first_step(self) -> None:
        assert verdicts([11.0] * 3, accept_level=5.0) == ["pending", "pending", "spike"]
        assert verdicts([9.0] * 30, accept_level=5.0) == ["ok"] * 30

    def test_a_plateau_that_was_accepted_does_not_act_when_it_comes_again(self) -> None:
        losses = [2.0] * 40 + [5.0] * 200
        assert set(verdicts(losses, accept_level=5.0)) == {"ok"}
        assert "spike" in verdicts(losses)

    def test_the_window_speaks_for_itself_once_it_has_come_up(self) -> None:
        losses = [5.0] * 60 + [1.0] * 60 + [2.5] * 3
        assert verdicts(losses, accept_level=5.0)[-1] == "spike"

    def test_a_level_accepted_after_a_restore_counts(self) -> None:
        before = Detector(RULES)
        for step in range(1, 41):
            before.judge(step, 2.0, 1.0)
        after = Detector(RULES, accept_level=6.0)
        after.restore(before.state())
        assert [after.judge(41 + n, 6.0, 1.0).verdict for n in range(100)] == ["ok"] * 100

    def test_a_restart_does_not_bring_back_a_level_that_was_left_behind(self) -> None:
        before = Detector(RULES, accept_level=5.0)
        for step, loss in enumerate([5.0] * 60 + [1.0] * 60, start=1):
            before.judge(step, loss, 1.0)
        after = Detector(RULES, accept_level=5.0)
        after.restore(before.state())
        assert [after.judge(121 + n, 2.5, 1.0).verdict for n in range(3)] == ["pending", "pending", "spike"]


class TestNotFinite:
    def test_two_gradients_in_a_row_act(self) -> None:
        said = judged([2.0, 2.0], norm=NAN)
        assert [(one.verdict, one.onset_step) for one in said] == [("skipped", 1), ("nonfinite", 1)]

    @pytest.mark.parametrize("norm", [NAN, INF, -INF])
    def test_one_gradient_is_skipped_and_the_streak_ends_with_a_finite_one(self, norm: float) -> None:
        detector = Detector(RULES)
        norms = [1.0, norm, 1.0, norm, 1.0]
        said = [detector.judge(step, 2.0, norm).verdict for step, norm in enumerate(norms)]
        assert said == ["ok", "skipped", "ok", "skipped", "ok"]

    def test_it_needs_no_warmup_and_no_level(self) -> None:
        assert verdicts([NAN, NAN], norm=None) == ["skipped", "nonfinite"]

    def test_a_nan_loss_with_a_finite_gradient_is_noted(self) -> None:
        said = judged([2.0] * 30 + [NAN] * 10)
        assert {one.verdict for one in said} == {"ok"}
        assert all("nan" in one.warnings[0] for one in said[30:])

    @pytest.mark.parametrize("loss", [NAN, None])
    def test_twenty_steps_without_a_loss_in_which_nothing_was_learned_act(self, loss: float | None) -> None:
        said = judged([loss] * 40, norm=0.0)
        assert [(n, one.onset_step) for n, one in enumerate(said, start=1) if one.verdict == "nonfinite"] == [
            (20, 1),
            (40, 1),
        ]
        assert "nothing was learned in 20 steps" in said[19].warnings[1]
        assert {one.verdict for one in said[:19]} == {"pending"}

    @pytest.mark.parametrize("row", [(2.0, 0.0), (NAN, 1.0), (NAN, NAN)])
    def test_a_step_that_learns_or_fails_in_between_begins_them_anew(self, row: tuple[float, float]) -> None:
        detector = Detector(RULES)
        rows = [(NAN, 0.0)] * 19 + [row] + [(NAN, 0.0)] * 19
        assert not {detector.judge(step, *one).verdict for step, one in enumerate(rows)} & ACTED

    def test_a_nan_loss_within_a_streak_neither_ends_nor_feeds_it(self) -> None:
        said = judged([2.0] * 30 + [9.0, NAN, 9.0, 9.0])
        assert [one.verdict for one in said[30:]] == ["pending", "pending", "pending", "spike"]
        assert {one.onset_step for one in said[30:]} == {31}

    @pytest.mark.parametrize("rule", ["robust", "median_ratio"])
    @pytest.mark.parametrize(
        ("norms", "expected"),
        [
            ([1.0, NAN, 1.0], ["pending", "skipped", "spike"]),
            ([1.0, 1.0, NAN], ["pending", "pending", "nonfinite"]),
            ([1.0, NAN, NAN], ["pending", "skipped", "nonfinite"]),
        ],
    )
    def test_a_gradient_within_a_streak_is_above_the_band_too(
        self, rule: Any, norms: list[float], expected: list[str]
    ) -> None:
        detector = Detector(SpikeConfig(rule=rule))
        for step in range(30):
            detector.judge(step, 2.0, 1.0)
        said = [detector.judge(30 + n, 9.0, norm) for n, norm in enumerate(norms)]
        assert [(one.verdict, one.onset_step) for one in said] == [(verdict, 30) for verdict in expected]

    def test_more_than_one_percent_of_the_last_thousand_steps(self) -> None:
        assert self.first_acted(every=100, steps=3000) is None
        assert self.first_acted(every=99, steps=3000) == (11 - 1) * 99

    def first_acted(self, every: int, steps: int) -> int | None:
        detector = Detector(RULES)
        for step in range(steps):
            said = detector.judge(step, 2.0, NAN if step % every == 0 else 1.0)
            if said.verdict in ACTED:
                assert said == Judgement("nonfinite", step, None, said.warnings)
                return step
        return None

    def test_steps_that_the_scaler_skipped_are_not_counted(self) -> None:
        detector = Detector(RULES)
        said = [detector.judge(step, NAN, INF, scaler_skipped=True).verdict for step in range(2000)]
        assert set(said) == {"skipped"}
        assert detector.judge(2000, 2.0, NAN).verdict == "skipped"

    def test_patience_is_a_setting(self) -> None:
        said = verdicts([NAN] * 4, SpikeConfig(nonfinite_patience=4), norm=None)
        assert said == ["skipped"] * 3 + ["nonfinite"]


class TestPublicReports:
    """The numbers are from public issues; CASES 1 to 6 and 8."""

    @pytest.mark.parametrize("first", [(0.2051, NAN), (1.968, NAN)])
    def test_zero_loss_with_a_nan_norm(self, first: tuple[float, float]) -> None:
        detector = Detector(RULES)
        rows = [first, (0.0, NAN), (0.0, NAN)]
        said = [detector.judge(step, *row).verdict for step, row in enumerate(rows)]
        assert said == ["skipped", "nonfinite", "skipped"]

    def test_zero_loss_after_a_positive_level_and_no_norm(self) -> None:
        assert verdicts([2.7044, 0.0, 0.0], norm=None) == ["ok", "skipped", "nonfinite"]

    @pytest.mark.parametrize("losses", [[0.003, 0.0004, 0.0, 0.0, 0.0], [0.0] * 30, [-0.2, 0.0, 0.01, 0.0, 0.0]])
    def test_an_honest_zero(self, losses: list[float]) -> None:
        assert set(verdicts(losses, norm=None)) == {"ok"}

    def test_zero_with_a_known_finite_norm_is_a_number(self) -> None:
        assert set(verdicts([2.7, 0.0, 0.0, 0.0])) == {"ok"}

    def test_a_zero_right_after_a_restart(self) -> None:
        before, after = Detector(RULES), Detector(RULES)
        before.judge(1, 2.7, None)
        after.restore(before.state())
        assert [after.judge(step, 0.0, None).verdict for step in (2, 3)] == ["skipped", "nonfinite"]

    def test_a_line_whose_loss_is_gone(self) -> None:
        assert verdicts([None, None], norm=NAN) == ["skipped", "nonfinite"]
        assert verdicts([None, None], norm=None) == ["skipped", "nonfinite"]

    def test_one_large_norm_with_an_unmoved_loss(self) -> None:
        detector = Detector(RULES)
        norms = [0.4] * 30 + [237.0] + [0.4] * 5
        said = [detector.judge(step, 0.1, norm).verdict for step, norm in enumerate(norms)]
        assert set(said) == {"ok"}

    def test_a_step_twice_is_counted_once(self) -> None:
        detector = Detector(RULES)
        for step in range(30):
            detector.judge(step, 2.0, 1.0)
        said = [detector.judge(step, 9.0, 1.0).verdict for step in (30, 30, 31, 31, 32)]
        assert said == ["pending", "ok", "pending", "ok", "spike"]

    def test_a_step_that_goes_back_begins_anew(self) -> None:
        detector = Detector(RULES)
        for step in range(10_000, 10_050):
            detector.judge(step, 2.0, 1.0)
        said = [detector.judge(step, 9.0, 1.0).verdict for step in range(9_000, 9_050)]
        assert set(said) == {"ok"}


numbers = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1.0, 2.0, 2.1, 2.7, 4.5, 9.0, NAN, INF]))
rows = st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=120)
rules = st.builds(
    SpikeConfig,
    rule=st.sampled_from(["robust", "median_ratio"]),
    window=st.integers(1, 20),
    warmup=st.integers(1, 20),
    patience=st.integers(1, 4),
    confirm=st.integers(1, 9),
    nonfinite_patience=st.integers(1, 3),
)
accepted = st.one_of(st.none(), st.floats(-100, 100))


@given(rows, rules, accepted, st.integers(0, 120))
def test_never_raises_and_goes_on_from_its_state(
    rows: list[tuple[Any, Any, bool]], rules: SpikeConfig, accept_level: float | None, cut: int
) -> None:
    whole, first = Detector(rules, accept_level), Detector(rules, accept_level)
    expected = [whole.judge(n, loss, norm, scaler_skipped=skip) for n, (loss, norm, skip) in enumerate(rows)]
    found = [first.judge(n, loss, norm, scaler_skipped=skip) for n, (loss, norm, skip) in enumerate(rows[:cut])]
    state = json.loads(json.dumps(first.state(), allow_nan=False))
    second = Detector(rules, accept_level)
    second.restore(state)
    for n, (loss, norm, skip) in enumerate(rows[cut:], start=cut):
        found.append(second.judge(n, loss, norm, scaler_skipped=skip))
    assert found == expected
    assert second.state() == whole.state()
    assert first.restore(state)


@given(rows, rules)
def test_what_is_not_ok_says_since_when(rows: list[tuple[Any, Any, bool]], rules: SpikeConfig) -> None:
    detector = Detector(rules)
    for step, (loss, norm, skip) in enumerate(rows):
        said = detector.judge(step, loss, norm, scaler_skipped=skip)
        assert (said.onset_step is None) == (said.verdict == "ok")
        assert said.onset_step is None or said.onset_step <= step


def numbers_in(state: Any) -> int:
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(map(numbers_in, parts)) if isinstance(state, dict | list) else 1


@pytest.mark.parametrize("rule", ["robust", "median_ratio"])
def test_the_state_does_not_grow(rule: Any) -> None:
    detector = Detector(SpikeConfig(rule=rule))
    sizes = set()
    for step in range(5000):
        detector.judge(step, 2.0 + step % 3, NAN if step % 7 == 0 else 1.0)
        if step >= 1000 and step % 500 == 0:
            sizes.add(numbers_in(detector.state()))
    assert max(sizes) < 200


@pytest.mark.parametrize("change", [{"rule": "robust"}, {"window": 40}, {"metrics": {"reward": "fall"}}])
def test_a_state_of_other_settings_is_left_aside(change: dict[str, Any]) -> None:
    detector = Detector(RULES)
    for step in range(30):
        detector.judge(step, 2.0, 1.0)
    other = Detector(RULES.model_copy(update=change))
    assert not other.restore(detector.state())
    assert not other.restore({"rule": "median_ratio", "step": 3})
    assert [other.judge(30 + n, 50.0, 1.0).verdict for n in range(3)] == ["ok"] * 3


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False), min_size=1))
def test_the_median_is_finite_and_within_the_values(values: list[float]) -> None:
    assert min(values) <= median(values) <= max(values)
