"""Histories of verdicts that come again: what the ladder answers, and that it says why."""

import os
from pathlib import Path
from typing import Any

import pytest

from supervisor.journal import NodeStruck, RolledBack
from tests.supervisor_room.stage import Stage
from worker.contract.directive import SkippedBatches
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import publish_message
from worker.contract.manifest import MANIFEST, complete_checkpoints


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def laid_out(folder: Path, max_steps: int = 5000, ranks: int = 1, **spike: Any) -> Stage:
    """A run that trains, checkpoints every 10 steps and keeps what it goes back from."""
    stage = Stage(
        folder,
        training={"max_steps": max_steps, "optimizer": {"learning_rate": 1.0}},
        checkpoint={"every_steps": 10, "healthy_after": 5, "keep_quarantined": 50},
        recovery={"spike": spike, "relaunches_in_allocation": 9},
        cluster={"nodes": ranks},
    )
    stage.settle()
    stage.start_job()
    return stage


def rollbacks(stage: Stage) -> list[RolledBack]:
    return [event for event in stage.events if isinstance(event, RolledBack)]


def answers(stage: Stage) -> list[tuple[str | None, float]]:
    return [(event.resume_from, event.lr_scale) for event in rollbacks(stage)]


# -- again at the same batches -----------------------------------------------------------------------------------------


def test_a_spike_at_the_same_batches_leaves_them_out_from_ahead_of_the_onset_to_its_end(tmp_path: Path) -> None:
    stage = laid_out(tmp_path, skip_before=4)
    stage.spike(138, onset=136)
    assert stage.directive.skip_batches == ()
    stage.spike(139, onset=137)  # a lower rate shows it one step later
    told = rollbacks(stage)[-1]
    assert [batch.batch for batch in told.batches] == [136, 137, 138]
    assert answers(stage) == [("checkpoint-130", 0.5), ("checkpoint-130", 0.25)]
    assert told.skip_batches == stage.directive.skip_batches == (SkippedBatches(epoch=0, first=132, count=7),)
    assert "again at the same batches, so 7 batches are left out (132 to 138 of epoch 0)" in told.reason


def test_a_skip_never_reaches_back_behind_the_checkpoint(tmp_path: Path) -> None:
    stage = laid_out(tmp_path, skip_before=20)
    for _ in range(2):
        stage.spike(138, onset=136)
    assert stage.directive.skip_batches == (SkippedBatches(epoch=0, first=130, count=8),)


def test_what_was_left_out_stays_left_out_and_is_named_in_its_own_order_later(tmp_path: Path) -> None:
    stage = laid_out(tmp_path, skip_before=0)
    for _ in range(2):
        stage.spike(138, onset=136)
    first = SkippedBatches(epoch=0, first=135, count=3)
    stage.train(240)
    stage.settle()
    stage.leave(Outcome.CRASHED)
    stage.settle()
    assert (stage.directive.cause, stage.directive.skip_batches) == ("crash", (first,))
    stage.claim()
    for _ in range(2):
        stage.spike(258, onset=256)
    assert stage.directive.skip_batches == (first, SkippedBatches(epoch=0, first=258, count=3))


def test_a_spike_that_goes_on_beside_the_skip_leaves_out_as_many_again(tmp_path: Path) -> None:
    """A shard of many bad batches: three are seen at a time."""
    stage = laid_out(tmp_path, skip_before=5)
    for _ in range(2):
        stage.spike(138, onset=136, loss=50.0)
    assert stage.directive.skip_batches == (SkippedBatches(epoch=0, first=130, count=8),)
    stage.spike(133, onset=131, loss=900.0)  # batches 138 to 140
    assert stage.directive.skip_batches == (SkippedBatches(epoch=0, first=130, count=8 + 3 + 8),)
    assert "its batches lie right beside those that are left out already" in rollbacks(stage)[-1].reason


def test_where_there_is_no_room_left_the_lead_makes_it_for_the_rest_of_the_shard(tmp_path: Path) -> None:
    """Four bad batches, 200 to 203, in a run of which four may be left out: two of them are the lead at first."""
    stage = laid_out(tmp_path, max_steps=400, skip_before=20)
    for _ in range(2):
        stage.spike(202, onset=201, verdict="nonfinite")
    assert stage.directive.skip_batches == (SkippedBatches(epoch=0, first=198, count=4),)
    stage.spike(200, onset=199, verdict="nonfinite")
    assert [batch.batch for batch in rollbacks(stage)[-1].batches] == [202, 203]
    assert stage.directive.skip_batches == (SkippedBatches(epoch=0, first=200, count=4),)
    assert "(202 to 203 of epoch 0, instead of 198 to 199 of epoch 0)" in rollbacks(stage)[-1].reason
    stage.spike(203, onset=202, verdict="nonfinite")
    assert stage.directive.skip_batches == (SkippedBatches(epoch=0, first=200, count=4),), "all were blamed: no room"
    assert "; no more are left out, for that would be more than 1 % of the run's batches" in rollbacks(stage)[-1].reason


@pytest.mark.parametrize(("max_steps", "first", "count"), [(1000, 130, 8), (500, 133, 5), (300, 135, 3), (200, 0, 0)])
def test_at_most_one_percent_is_left_out_and_the_spike_itself_first(
    tmp_path: Path, max_steps: int, first: int, count: int
) -> None:
    stage = laid_out(tmp_path, max_steps)
    for _ in range(2):
        stage.spike(138, onset=136)
    expected = (SkippedBatches(epoch=0, first=first, count=count),) if count else ()
    assert stage.directive.skip_batches == expected
    assert ("more than 1 %" in stage.directive.reason) is not bool(count)


def test_skip_always_and_never(tmp_path: Path) -> None:
    always = laid_out(tmp_path / "always", skip="always", skip_before=0)
    always.spike(138, onset=136)
    assert always.directive.skip_batches == (SkippedBatches(epoch=0, first=135, count=3),)
    never = laid_out(tmp_path / "never", skip="never")
    for _ in range(2):
        never.spike(138, onset=136)
    assert (never.directive.skip_batches, never.directive.lr_scale) == ((), 0.25)
    assert "recovery.spike.skip is never" in never.directive.reason


@pytest.mark.parametrize("skip", ["never", "always"])
def test_where_neither_batches_nor_rate_are_left_to_change_it_goes_further_back(tmp_path: Path, skip: str) -> None:
    stage = laid_out(tmp_path, max_steps=150, skip=skip, min_lr_scale=0.5)  # no batch may be left out of so few
    for again in range(3):
        stage.spike(138, onset=136, loss=9.0 * 2**again)
    assert answers(stage) == [("checkpoint-130", 0.5), ("checkpoint-120", 0.5), ("checkpoint-110", 0.5)]
    assert "the rate is as low as it goes: the newest healthy one before the onset" in rollbacks(stage)[-1].reason


# -- again elsewhere ---------------------------------------------------------------------------------------------------


def test_a_spike_soon_again_elsewhere_goes_one_healthy_checkpoint_further_back(tmp_path: Path) -> None:
    stage = laid_out(tmp_path)
    stage.spike(139, onset=137, loss=9.0)
    stage.spike(132, onset=131, loss=90.0)
    stage.spike(127, onset=126, loss=900.0)
    assert answers(stage) == [("checkpoint-130", 0.5), ("checkpoint-120", 0.25), ("checkpoint-110", 0.125)]
    assert stage.run_dir.checkpoint_steps()[-1] == 110


def test_soon_is_before_a_new_healthy_checkpoint(tmp_path: Path) -> None:
    stage = laid_out(tmp_path)
    stage.spike(139, onset=137)
    stage.spike(132, onset=131, loss=90.0)
    assert "again soon, at other batches: the newest healthy one" in rollbacks(stage)[-1].reason
    stage.train(150)
    stage.settle()
    stage.spike(158, onset=157, loss=30.0)
    assert answers(stage)[-1] == ("checkpoint-150", 0.125)


def test_where_none_is_further_back_the_healthy_one_is_taken_again(tmp_path: Path) -> None:
    stage = laid_out(tmp_path)
    stage.spike(18, onset=17)
    stage.spike(12, onset=11, loss=90.0)
    assert answers(stage) == [("checkpoint-10", 0.5), ("checkpoint-10", 0.25)]
    assert "none further back is left" in rollbacks(stage)[-1].reason


def test_an_untested_checkpoint_that_led_nowhere_is_not_taken_twice(tmp_path: Path) -> None:
    stage = laid_out(tmp_path)
    stage.spike(11, onset=11)
    assert answers(stage) == [("checkpoint-10", 0.5)]
    stage.spike(15, onset=15, loss=90.0)
    assert answers(stage)[-1] == (None, 0.25)


def test_within_the_first_steps_it_begins_from_finite_weights_or_from_scratch(tmp_path: Path) -> None:
    stage = laid_out(tmp_path)
    stage.train(10)
    path = stage.run_dir.checkpoint(10) / MANIFEST
    [broken] = [each for each in complete_checkpoints(stage.run_dir) if each.step == 10]
    publish_message(path, broken.model_copy(update={"weights_finite": False}))
    stage.spike(13, onset=12)
    assert answers(stage) == [(None, 0.5)]


# -- a level that stays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", ["repeat", "never"])
def test_a_flat_level_that_comes_again_after_two_rollbacks_is_accepted_at_the_same_rate(
    tmp_path: Path, skip: str
) -> None:
    stage = laid_out(tmp_path, skip=skip)
    for loss in (6.1, 6.0, 6.2):
        stage.spike(138, onset=136, loss=loss)
    assert [event.accept_level for event in rollbacks(stage)] == [None, None, 6.2]
    assert [event.lr_scale for event in rollbacks(stage)] == [0.5, 0.25, 0.25]
    assert stage.directive.accept_level == 6.2
    assert "accepted as its new level" in rollbacks(stage)[-1].reason
    stage.train(160)
    stage.settle()
    stage.leave(Outcome.CRASHED)
    stage.settle()
    assert stage.directive.accept_level == 6.2, "what is accepted stays accepted"


def test_a_level_that_was_accepted_and_does_not_stay_is_no_livelock(tmp_path: Path) -> None:
    stage = laid_out(tmp_path, skip="never")
    for _ in range(9):
        if stage.state != "gave_up":
            stage.spike(138, onset=136, loss=6.0)
    assert stage.state == "gave_up"
    assert [event.accept_level for event in rollbacks(stage)] == [None, None, 6.0, 6.0, 6.0]
    assert len({event.lr_scale for event in rollbacks(stage)}) == 4


@pytest.mark.parametrize("losses", [(6.0, 9.0, 14.0), (6.0, 6.0, 60.0)])
def test_a_loss_that_comes_elsewhere_each_time_is_no_level(tmp_path: Path, losses: tuple[float, ...]) -> None:
    stage = laid_out(tmp_path, skip="never")
    for loss in losses:
        stage.spike(138, onset=136, loss=loss)
    assert [event.accept_level for event in rollbacks(stage)] == [None, None, None]


def test_numbers_that_are_not_finite_are_no_level(tmp_path: Path) -> None:
    stage = laid_out(tmp_path, skip="never")
    for _ in range(3):
        stage.spike(138, onset=136, verdict="nonfinite")
    assert [event.accept_level for event in rollbacks(stage)] == [None, None, None]
    assert [event.cause for event in rollbacks(stage)] == ["nonfinite"] * 3


# -- a bad restore -----------------------------------------------------------------------------------------------------


def resumed_with_another_probe(folder: Path, onset: int, probe: float) -> Stage:
    """A crash at step 155; the resume from checkpoint-150 brings that probe loss, and a spike at ``onset``."""
    stage = laid_out(folder)
    stage.train(155)
    stage.settle()
    stage.leave(Outcome.CRASHED)
    stage.settle()
    stage.claim()
    stage.spike(onset + 2, onset=onset, probe=probe)
    return stage


def test_a_spike_soon_after_a_resume_with_another_probe_is_a_bad_restore(tmp_path: Path) -> None:
    stage = resumed_with_another_probe(tmp_path, onset=152, probe=1.002)
    [told] = rollbacks(stage)
    assert (told.cause, told.resume_from, told.lr_scale) == ("refused", "checkpoint-140", 1.0)
    assert "checkpoint-150 seems to restore badly" in told.reason
    stage.spike(153, onset=151, probe=1.001)
    assert (stage.directive.cause, stage.directive.lr_scale) == ("spike", 0.5), "not twice in a row"


@pytest.mark.parametrize(("onset", "probe"), [(152, 1.0), (202, 1.002)])
def test_a_spike_after_a_faithful_resume_or_much_later_is_a_spike(tmp_path: Path, onset: int, probe: float) -> None:
    stage = resumed_with_another_probe(tmp_path, onset, probe)
    assert (stage.directive.cause, stage.directive.lr_scale) == ("spike", 0.5)


# -- rates -------------------------------------------------------------------------------------------------------------


def test_the_rate_is_held_and_ramps_back_from_an_absolute_step_through_everything_but_a_rollback(
    tmp_path: Path,
) -> None:
    stage = laid_out(tmp_path, hold_steps=20, ramp_steps=40, ramp_to=0.9)
    stage.spike(138, onset=136)
    ramp = stage.directive.lr_ramp
    assert ramp is not None
    assert (ramp.from_step, ramp.hold_steps, ramp.ramp_steps, ramp.to) == (130, 20, 40, 0.9)
    stage.train(170)
    stage.settle()
    stage.leave(Outcome.CRASHED)
    stage.settle()
    assert stage.directive.lr_ramp == ramp
    stage.claim()
    stage.spike(172, onset=171, loss=20.0)
    assert stage.directive.lr_scale == pytest.approx(0.36)  # half of 0.5 + 0.4 * 22 / 40
    assert stage.directive.lr_ramp is not None
    assert stage.directive.lr_ramp.from_step == 160


def test_the_rate_has_a_floor(tmp_path: Path) -> None:
    stage = laid_out(tmp_path, min_lr_scale=0.3)
    for again in range(3):
        stage.spike(138, onset=136, loss=9.0 * 2**again)
    assert [event.lr_scale for event in rollbacks(stage)] == [0.5, 0.3, 0.3]


def test_moments_are_dropped_from_an_absolute_step_and_again_where_it_goes_further_back(tmp_path: Path) -> None:
    stage = laid_out(tmp_path, reset_moments=True, rewarm_steps=40)
    stage.spike(138, onset=136)
    told = rollbacks(stage)[-1]
    assert (told.reset_moments, told.rewarm_steps, told.reset_from) == (True, 40, 130)
    stage.train(150)
    stage.settle()
    stage.leave(Outcome.CRASHED)
    stage.settle()
    directive = stage.directive
    assert (directive.cause, directive.resume_from) == ("crash", "checkpoint-150")
    assert (directive.reset_moments, directive.rewarm_steps, directive.reset_from) == (True, 40, 130)
    stage.claim()
    stage.spike(159, onset=157, probe=1.001)
    assert stage.directive.cause == "refused"  # a bad restore: the same rate, the next older checkpoint
    assert (stage.directive.resume_from, stage.directive.reset_from) == ("checkpoint-140", 130)
    stage.spike(148, onset=146)
    assert (stage.directive.resume_from, stage.directive.reset_from) == ("checkpoint-130", 130)
    stage.leave(Outcome.REFUSED, error=ErrorDetail(type="ProofError", message="probe loss", what="probe loss"))
    stage.settle()
    assert (stage.directive.resume_from, stage.directive.reset_from) == ("checkpoint-120", 120)
    assert stage.directive.reset_moments


def test_moments_stay_where_nothing_asks_to_drop_them_and_from_scratch(tmp_path: Path) -> None:
    kept, scratch = laid_out(tmp_path / "kept"), laid_out(tmp_path / "scratch", reset_moments=True, rewarm_steps=4)
    kept.spike(138, onset=136)
    scratch.spike(8, onset=6)
    for stage in (kept, scratch):
        directive = stage.directive
        assert (directive.reset_moments, directive.rewarm_steps, directive.reset_from) == (False, None, None)


# -- one rank alone ----------------------------------------------------------------------------------------------------


def test_one_rank_alone_is_held_against_its_node_but_not_at_the_same_batches_again(tmp_path: Path) -> None:
    stage = laid_out(tmp_path, ranks=2)
    for again in range(2):
        stage.pulse(rank=1, host="n2")
        stage.spike(138, onset=136, verdict="nonfinite", ranks=(1,))
        assert stage.names.count("NodeStruck") == 1, again
    struck = next(event for event in stage.events if isinstance(event, NodeStruck))
    assert (struck.node, struck.evidence) == ("n2", "rank 1 alone saw numbers that are not finite at step 138")


@pytest.mark.parametrize(("ranks", "of"), [((0, 1), 2), ((0,), 1)])
def test_all_ranks_together_point_at_no_node(tmp_path: Path, ranks: tuple[int, ...], of: int) -> None:
    stage = laid_out(tmp_path, ranks=of)
    stage.pulse()
    stage.spike(138, onset=136, verdict="nonfinite", ranks=ranks)
    assert "NodeStruck" not in stage.names
