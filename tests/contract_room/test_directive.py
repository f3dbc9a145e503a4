"""The directive's rate, the names in a run's folder, and what exit codes mean."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.contract.directive import Directive, LearningRateRamp, publish_directive, read_directive, scale_at
from worker.contract.exit_report import EXIT_CODE_OF_OUTCOME, Outcome, outcome_of
from worker.contract.files import UnusableFileError
from worker.contract.run_dir import RunDir, checkpoint_name, checkpoint_step, is_run_name


def directive(**fields: Any) -> Directive:
    return Directive(**{"attempt": 2, "cause": "spike", "reason": "a test", "time": 1.0, **fields})


RAMP = LearningRateRamp(from_step=100, hold_steps=50, ramp_steps=10, to=1.0)


class TestScale:
    @given(st.floats(1e-6, 1.0), st.integers(0, 10**9))
    def test_without_a_ramp_it_is_held_for_good(self, scale: float, step: int) -> None:
        assert scale_at(directive(lr_scale=scale), step) == scale

    @pytest.mark.parametrize(
        ("step", "scale"),
        [(1, 0.5), (100, 0.5), (150, 0.5), (151, 0.55), (155, 0.75), (159, 0.95), (160, 1.0), (10**6, 1.0)],
    )
    def test_it_is_held_then_climbs_then_stays(self, step: int, scale: float) -> None:
        assert scale_at(directive(lr_scale=0.5, lr_ramp=RAMP), step) == pytest.approx(scale, abs=1e-12)

    def test_a_copy_in_a_later_directive_does_not_restart_it(self) -> None:
        first = directive(lr_scale=0.5, lr_ramp=RAMP)
        later = directive(attempt=3, cause="preempted", resume_from="checkpoint-155", lr_scale=0.5, lr_ramp=RAMP)
        assert [scale_at(first, step) for step in range(90, 200)] == [scale_at(later, step) for step in range(90, 200)]

    @given(st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 50), st.integers(0, 50), st.integers(0, 200))
    def test_it_never_leaves_the_two_ends(self, scale: float, to: float, hold: int, ramp: int, step: int) -> None:
        ramped = LearningRateRamp(from_step=20, hold_steps=hold, ramp_steps=ramp, to=to)
        found = scale_at(directive(lr_scale=scale, lr_ramp=ramped), step)
        assert min(scale, to) - 1e-12 <= found <= max(scale, to) + 1e-12


class TestDirective:
    def test_what_is_published_is_read(self, tmp_path: Path) -> None:
        assert read_directive(tmp_path / "directive.json") is None
        sent = directive(lr_ramp=RAMP, pinned=(5,), skip_batches=({"epoch": 0, "first": 3, "count": 2},))
        publish_directive(tmp_path / "directive.json", sent)
        assert read_directive(tmp_path / "directive.json") == sent

    @pytest.mark.parametrize(
        "change", ['"format": 2', '"attempt": 0', '"lr_scale": 0', '"lr_scale": NaN', '"cause": "?"']
    )
    def test_what_cannot_be_followed_is_refused(self, tmp_path: Path, change: str) -> None:
        path = tmp_path / "directive.json"
        path.write_text('{"attempt": 1, "cause": "first", "reason": "", "time": 1.0, %s}' % change)  # noqa: UP031
        with pytest.raises(UnusableFileError):
            read_directive(path)


class TestNames:
    @pytest.mark.parametrize("name", ["a", "qwen-7b_sft.1", "_x", "0", "a" * 100])
    def test_run_names(self, name: str) -> None:
        assert is_run_name(name)

    @pytest.mark.parametrize(
        "name", ["", ".", "..", "../x", "a/b", "-a", ".a", "a b", "a\n", "ä", "a" * 101, "$a", "a'"]
    )
    def test_no_run_names(self, name: str) -> None:
        assert not is_run_name(name)

    @given(st.integers(0, 10**12))
    def test_a_checkpoint_is_named_by_its_step(self, step: int) -> None:
        assert checkpoint_step(checkpoint_name(step)) == step

    @pytest.mark.parametrize(
        "name",
        [
            "checkpoint-",
            "checkpoint-08",
            "checkpoint-8.tmp",
            "checkpoint-8\n",
            "checkpoint--1",
            "checkpoint-\uff18",
            "a3-r0-checkpoint-8",
        ],
    )
    def test_other_names_are_no_checkpoints(self, name: str) -> None:
        assert checkpoint_step(name) is None

    def test_order_is_by_step(self, tmp_path: Path) -> None:
        run = RunDir(tmp_path)
        assert run.checkpoint_steps() == []
        for step in (9000, 10000, 500):
            run.checkpoint(step).mkdir(parents=True)
        (run.checkpoints / ".tmp-checkpoint-7").mkdir()
        assert run.checkpoint_steps() == [500, 9000, 10000]

    def test_restarts_of_an_attempt(self, tmp_path: Path) -> None:
        run = RunDir(tmp_path)
        assert run.restarts(3) == []
        for restart in (10, 0, 2):
            run.restart(3, restart).mkdir(parents=True)
        (run.attempt(3) / "claim.json").touch()
        assert run.restarts(3) == [0, 2, 10]
        assert run.pulse(3, 2, 1).parent == run.restart(3, 2)


class TestOutcomes:
    def test_every_code_means_what_the_table_says(self) -> None:
        codes = {0: "done", 20: "verdict", 21: "left", 22: "fenced", 23: "refused", 24: "out_of_memory"}
        for code in range(256):
            assert outcome_of(code) == codes.get(code, "crashed")
        assert {outcome.value: code for outcome, code in EXIT_CODE_OF_OUTCOME.items()} == {
            v: k for k, v in codes.items()
        }

    def test_a_signal_is_a_crash(self) -> None:
        assert outcome_of(-9) is Outcome.CRASHED
