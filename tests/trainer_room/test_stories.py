"""Nights that went wrong elsewhere: late NaN weights, abandoned branches, zombies, a killed rank, odd checkpoints."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer_room.rig import Rig, same_end, sign_again, weights
from worker.contract.loss_history import last_record, read_history, surviving
from worker.contract.manifest import Health, complete_checkpoints, complete_manifest, rollback_target

pytestmark = pytest.mark.training


@pytest.mark.parametrize("keep", [1, 2])
def test_late_nan_weights_push_no_healthy_checkpoint_out(make_rig: Callable[..., Rig], keep: int) -> None:
    rules = {"every_steps": 1, "keep": keep, "keep_healthy": 1, "healthy_after": 2}
    rig = make_rig(checkpoint=rules, training={"max_steps": 10})
    rig.finish(20, nan_weights=7)
    last = last_record(rig.run.history)
    assert last is not None
    assert (last.verdict, last.onset_step) == ("nonfinite", 7)
    manifests = {one.step: one for one in complete_checkpoints(rig.run)}
    assert manifests[7].weights_finite is False
    target = rollback_target(list(manifests.values()), rig.history(), 7, 2)
    assert (target.step, target.health) == (4, Health.HEALTHY)
    assert manifests[4].weights_finite

    for step in [step for step in manifests if step > 4]:
        rig.run.quarantine.mkdir(exist_ok=True)
        rig.run.checkpoint(step).rename(rig.run.quarantine / f"a1-checkpoint-{step}")
    rig.direct(attempt=2, resume_from="checkpoint-4")
    rig.finish(attempt=2)
    undisturbed = make_rig("undisturbed", checkpoint=rules, training={"max_steps": 10})
    undisturbed.finish()
    same_end(undisturbed, rig)


@pytest.mark.parametrize("is_quarantined", [True, False])
def test_an_abandoned_branch_is_never_gone_back_to(make_rig: Callable[..., Rig], is_quarantined: bool) -> None:
    """Back from 12 to 4, on to 8 again, killed while 8 is saved: on from 4, whatever lies about of the old branch."""
    rig = make_rig(training={"max_steps": 14})
    rig.start(die_at=[13, "end", signal.SIGKILL, 0])
    rig.ends(-signal.SIGKILL)
    assert rig.run.checkpoint_steps() == [4, 8, 12]
    abandoned = weights(rig.run.checkpoint(8))
    if is_quarantined:
        rig.run.quarantine.mkdir()
        for step in (8, 12):
            rig.run.checkpoint(step).rename(rig.run.quarantine / f"a1-checkpoint-{step}")
    rig.direct(attempt=2, resume_from="checkpoint-4", lr_scale=0.5)
    rig.finish(-signal.SIGKILL, attempt=2, kill_before="publish_folder")
    rig.finish(attempt=2, restart=1)

    begun = [one.start.checkpoint for one in read_history(rig.run.history) if one.start]
    assert begun == [None, "checkpoint-4", "checkpoint-4"]
    assert [one.attempt for one in rig.history()] == [1] * 4 + [2] * 10
    assert [complete_manifest(rig.run.checkpoint(step)).attempt for step in (8, 12, 14)] == [2, 2, 2]
    assert weights(rig.run.checkpoint(8)) != abandoned
    place = "a1-checkpoint-8" if is_quarantined else "a2-bad-checkpoint-8"
    assert weights(rig.run.quarantine / place) == abandoned


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_is_killed(make_rig: Callable[..., Rig], rank: int) -> None:
    undisturbed, rig = make_rig("undisturbed"), make_rig()
    undisturbed.finish(world=2)
    rig.start(world=2, die_at=[6, "update", signal.SIGKILL, rank])
    assert rig.processes[rank].wait() == -signal.SIGKILL, rig.processes[rank].said()
    assert rig.processes[1 - rank].wait() == 1, "the other rank notices and leaves by itself"
    error = rig.error(rank=1 - rank).error
    assert error is not None
    assert rig.run.checkpoint_steps() == [4]
    rig.finish(restart=1, world=2)
    same_end(undisturbed, rig)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_is_killed_where_both_would_save(make_rig: Callable[..., Rig], rank: int) -> None:
    undisturbed, rig = make_rig("undisturbed"), make_rig()
    undisturbed.finish(world=2)
    rig.start(world=2, die_at=[8, "save", signal.SIGKILL, rank])
    assert rig.processes[rank].wait() == -signal.SIGKILL, rig.processes[rank].said()
    assert rig.processes[1 - rank].wait() == 1, rig.processes[1 - rank].said()
    assert [one.step for one in complete_checkpoints(rig.run)] == [4]
    rig.finish(restart=1, world=2)
    assert list(rig.run.staging.iterdir()) == []
    same_end(undisturbed, rig)


def test_a_zombie_that_wakes_up_beside_its_successor_writes_nothing(make_rig: Callable[..., Rig]) -> None:
    undisturbed, rig = make_rig("undisturbed"), make_rig()
    undisturbed.finish()
    zombie = rig.start(pause_at=[7])
    rig.pauses(7)
    rig.start(restart=1, pause_at=[10])
    successor = rig.processes[-1]
    rig.pauses(10)
    before = rig.run.history.read_bytes()
    rig.goes_on(7)
    assert zombie.wait() == 22, zombie.said()
    assert rig.run.history.read_bytes() == before
    assert not [path for path in rig.run.staging.iterdir() if path.name.startswith("a1-r0")]
    rig.goes_on(10)
    assert successor.wait() == 0, successor.said()
    assert [complete_manifest(rig.run.checkpoint(step)).segment for step in (4, 8, 12)] == [1, 2, 2]
    same_end(undisturbed, rig)


def test_a_zombie_in_the_middle_of_a_save_publishes_nothing(make_rig: Callable[..., Rig]) -> None:
    """It wakes up where the next thing to do is its save at step 8, which its successor has done long ago."""
    rig = make_rig()
    zombie = rig.start(pause_at=[8])
    rig.pauses(8)
    rig.start(restart=1)
    successor = rig.processes[-1]
    assert successor.wait() == 0, successor.said()
    rig.goes_on(8)
    assert zombie.wait() == 22, zombie.said()
    assert complete_manifest(rig.run.checkpoint(8)).segment == 2
    undisturbed = make_rig("undisturbed")
    undisturbed.finish()
    same_end(undisturbed, rig)


def test_a_zombie_whose_files_are_cleared_while_it_saves_is_fenced(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.finish(22, superseded_in_save=True)
    assert rig.run.checkpoint_steps() == []
    rig.finish(restart=2)
    undisturbed = make_rig("undisturbed")
    undisturbed.finish()
    same_end(undisturbed, rig)


@pytest.mark.parametrize("is_beside", [False, True])
def test_a_zombie_that_has_no_folder_for_its_weights_any_more_is_fenced(
    make_rig: Callable[..., Rig], is_beside: bool
) -> None:
    rig = make_rig(checkpoint={"background": is_beside})
    rig.finish(22, superseded_at_weights=2, holds_writes=True)
    assert rig.run.checkpoint_steps() == [4]


@pytest.fixture
def stopped(make_rig: Callable[..., Rig]) -> Rig:
    """A run that was killed after step 9, with the checkpoints 4 and 8."""
    rig = make_rig()
    rig.start(die_at=[9, "end", signal.SIGKILL, 0])
    rig.ends(-signal.SIGKILL)
    return rig


def test_a_best_checkpoint_that_is_gone_is_not_fatal(stopped: Rig) -> None:
    path = stopped.run.checkpoint(8) / "trainer_state.json"
    state = json.loads(path.read_text())
    state |= {"best_model_checkpoint": "/gone/checkpoint-4", "best_metric": 1.0, "best_global_step": 4}
    path.write_text(json.dumps(state))
    sign_again(path.parent)
    stopped.finish(restart=1)
    assert stopped.history()[-1].step == 12


def test_steps_order_checkpoints_and_times_do_not(stopped: Rig) -> None:
    os.utime(stopped.run.checkpoint(4))
    os.utime(stopped.run.checkpoint(8), (1, 1))
    stopped.finish(restart=1)
    begun = [one.start.checkpoint for one in stopped.history() if one.start]
    assert begun == [None, "checkpoint-8"]


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt", "trainer_state.json", "model.safetensors"])
def test_a_missing_file_is_named_and_the_next_older_checkpoint_taken(stopped: Rig, missing: str) -> None:
    folder = stopped.run.checkpoint(8)
    (folder / missing).unlink()
    sign_again(folder)
    stopped.finish(restart=1)
    (start,) = [one.start for one in stopped.history() if one.start and one.segment == 2]
    assert start.checkpoint == "checkpoint-4"
    assert [(one.checkpoint, one.reason) for one in start.passed_over] == [
        ("checkpoint-8", f"{missing} is missing: the Trainer would begin with a fresh one")
    ]


def refusal(rig: Rig, restart: int = 1) -> tuple[str | None, str]:
    """Start again; what was refused, and the message."""
    before = rig.run.history.read_bytes()
    rig.finish(23, restart=restart)
    error = rig.error(restart=restart).error
    assert error is not None
    assert rig.run.history.read_bytes() == before
    assert rig.run.checkpoint_steps() == [4, 8]
    return error.what, error.message


def changed_optimizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    change(state)
    torch.save(state, folder / "optimizer.pt")
    sign_again(folder)


def other_shapes(state: dict[str, Any]) -> None:
    state["state"][0]["exp_avg"] = torch.zeros(3)


def other_types(state: dict[str, Any]) -> None:
    state["state"][1]["exp_avg_sq"] = state["state"][1]["exp_avg_sq"].bfloat16()


def other_groups(state: dict[str, Any]) -> None:
    state["param_groups"][1]["params"].pop()


def nothing(state: dict[str, Any]) -> None:
    state["state"].clear()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_shapes, "exp_avg of parameter 0 is (3,) torch.float32, and the parameter is (256, 32)"),
        (other_types, "exp_avg_sq of parameter 1 is (32, 32) torch.bfloat16"),
        (other_groups, "is for groups of [16, 4] parameters, and this optimizer has [16, 5]"),
        (nothing, "holds a state for 0 parameters instead of 21"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    stopped: Rig, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    changed_optimizer(stopped.run.checkpoint(8), change)
    what, message = refusal(stopped)
    assert what == "optimizer"
    assert f"optimizer.pt: {said}" in message


def test_another_kind_of_optimizer_is_refused(stopped: Rig, make_rig: Callable[..., Rig]) -> None:
    other = make_rig("other", training={"optimizer": {"name": "sgd", "learning_rate": 1e-2}})
    shutil.copytree(stopped.run.checkpoints, other.run.checkpoints)
    other.direct(resume_from="checkpoint-8")
    other.run.history.write_bytes(stopped.run.history.read_bytes())
    what, message = refusal(other, restart=0)
    assert what == "optimizer"
    assert "is the state of AdamW, and this run trains with SGD" in message


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": 3}, "lacks model.layers.2."),
        ({"num_hidden_layers": 1}, "holds model.layers.1."),
        ({"intermediate_size": 32}, "is (32, 64), and this model's is (32, 32)"),
        ({"tie_word_embeddings": True}, "holds weights apart that this model ties"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    stopped: Rig, make_rig: Callable[..., Rig], change: dict[str, Any], said: str
) -> None:
    config = {**stopped.config.model.config, **change}  # type: ignore[dict-item]
    other = make_rig("other", model={"config": config})
    shutil.copytree(stopped.run.checkpoints, other.run.checkpoints)
    other.direct(resume_from="checkpoint-8")
    other.run.history.write_bytes(stopped.run.history.read_bytes())
    what, message = refusal(other, restart=0)
    assert what == "model"
    assert said in message
    assert "it is a checkpoint of another model" in message


def test_the_average_is_evaluated_beside_the_weights_and_trained_on_never(
    make_rig: Callable[..., Rig], text: Path
) -> None:
    evaluates = {"data": {"eval": str(text)}, "training": {"eval_every": 4}}
    rig = make_rig(**evaluates)
    rig.finish()
    found = {one.step: (one.eval_loss, one.ema_eval_loss) for one in rig.history() if one.eval_loss is not None}
    assert sorted(found) == [4, 8, 12]
    assert all(average is not None and average != raw for raw, average in found.values())
    best = json.loads((rig.run.best / "best.json").read_text())
    assert best["step"] == 12
    assert best["eval_loss"] == min(raw for raw, _ in found.values() if raw is not None)
    without = make_rig("without", ema=None, **evaluates)
    without.finish()
    assert without.losses() == rig.losses()
    assert weights(without.run.final) == weights(rig.run.final)
    assert not (without.run.final / "ema").exists()
    assert all(one.ema_eval_loss is None for one in without.history())


def test_an_average_in_main_memory_is_the_same_to_the_bit(make_rig: Callable[..., Rig]) -> None:
    same, aside = make_rig("same"), make_rig("aside", ema={"device": "cpu"})
    same.finish()
    aside.start(die_at=[7, "update", signal.SIGKILL, 0])
    aside.ends(-signal.SIGKILL)
    aside.finish(restart=1)
    same_end(same, aside)


def test_the_finished_model_may_use_its_cache_again(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(training={"max_steps": 2})
    rig.finish()
    for folder in (rig.run.final, rig.run.final / "ema"):
        assert AutoModelForCausalLM.from_pretrained(folder).config.use_cache is True
    assert json.loads((rig.run.checkpoint(2) / "config.json").read_text())["use_cache"] is False


def test_a_missing_average_is_no_fresh_one(stopped: Rig) -> None:
    folder = stopped.run.checkpoint(8)
    (folder / "ema.safetensors").unlink()
    sign_again(folder)
    what, message = refusal(stopped)
    assert what == "ema"
    assert "the average would begin from nothing" in message


def test_surviving_records_of_the_three_segments(stopped: Rig) -> None:
    stopped.finish(restart=1)
    records = read_history(stopped.run.history)
    assert [one.step for one in records] == [*range(1, 10), *range(9, 13)]
    assert [one.segment for one in surviving(records)] == [1] * 8 + [2] * 4


@pytest.mark.parametrize("kept", [0, 3])
def test_a_history_that_was_cut_is_put_back_from_the_checkpoint(make_rig: Callable[..., Rig], kept: int) -> None:
    """Emptied, or cut in the middle: the curve has no hole afterwards, and the first record says what was done."""
    rig = make_rig(training={"max_steps": 8})
    rig.start(die_at=[6, "end", signal.SIGKILL, 0])
    rig.ends(-signal.SIGKILL)
    lines = rig.run.history.read_bytes().splitlines(keepends=True)
    rig.run.history.write_bytes(b"".join(lines[: kept + 1]) if kept else b"")
    rig.finish()
    assert [record.step for record in surviving(read_history(rig.run.history))] == list(range(1, 9))
    [warned] = [record for record in read_history(rig.run.history) if record.warnings]
    assert (warned.step, warned.segment) == (5, 2)
    assert warned.warnings == (f"the history ended at step {kept}: put back from checkpoint-4",)
