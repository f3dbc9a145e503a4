"""What an interruption may change: nothing, to the bit; and what a resume refuses."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.trainer_room.rig import (
    TINY,
    Launcher,
    Rig,
    evaluations,
    same_end,
    sign_again,
    tiny_config,
    weights,
    write_text,
)
from worker.checkpoints import PROOF, Proof
from worker.contract import config as configuration
from worker.contract.files import publish_message, read_message
from worker.contract.manifest import complete_manifest
from worker.contract.recipe_config import schedule_factor
from worker.contract.run_dir import RunDir
from worker.fits import refuse_other_model
from worker.leaving import RefusedError
from worker.order import EpochOrder
from worker.resume import Settings, refuse_changes

pytestmark = pytest.mark.training


def test_a_run_that_was_interrupted_ends_bitwise_the_same(make_rig: Callable[..., Rig]) -> None:
    undisturbed, disturbed = make_rig("undisturbed"), make_rig("disturbed")
    undisturbed.finish()

    disturbed.start(pause_at=[2])
    disturbed.pauses(2)
    disturbed.processes[0].send(signal.SIGTERM)
    disturbed.goes_on(2)
    disturbed.ends(21)
    error = disturbed.error()
    assert error.error is not None
    assert (error.error.what, error.saved_step) == ("preempted", 3)

    disturbed.start(restart=1, pause_at=[10])
    disturbed.pauses(10)
    disturbed.is_killed()
    disturbed.finish(restart=2)

    records = disturbed.history()
    assert [record.segment for record in records] == [1] * 3 + [2] * 5 + [3] * 4
    begun = [record.start.checkpoint for record in records if record.start]
    assert begun == [None, "checkpoint-3", "checkpoint-8"]
    same_end(undisturbed, disturbed)


def test_the_checkpoint_that_a_save_file_asked_for_says_so(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig("asked")
    rig.start(pause_at=[2])
    rig.pauses(2)
    rig.run.save_file.touch()
    rig.goes_on(2)
    rig.ends(0)
    made = {step: complete_manifest(rig.run.checkpoint(step)).asked for step in rig.run.checkpoint_steps()}
    assert made.pop(3)
    assert made
    assert not any(made.values())
    assert not rig.run.save_file.exists()


def test_two_ranks_resume_bitwise(make_rig: Callable[..., Rig]) -> None:
    undisturbed = make_rig("undisturbed")
    undisturbed.finish(world=2)
    disturbed = make_rig("disturbed")
    disturbed.start(world=2, pause_at=[6])
    disturbed.pauses(6)
    disturbed.processes[1].send(signal.SIGUSR2)
    disturbed.goes_on(6)
    disturbed.ends(21)
    for rank in (0, 1):
        error = disturbed.error(rank=rank)
        assert error.error is not None
        assert (error.error.what, error.saved_step) == ("time_limit", 7)
    disturbed.finish(restart=1, world=2)
    same_end(undisturbed, disturbed)


def test_two_ranks_then_one_then_two_train_on_the_same_samples(make_rig: Callable[..., Rig]) -> None:
    without_dropout = {"config": {**TINY, "attention_dropout": 0.0}}
    undisturbed = make_rig("undisturbed", model=without_dropout)
    undisturbed.finish()
    order = EpochOrder(range(20), global_batch=4, seed=7, shuffle=True, skipped=())
    before, losses = None, []
    for part, (world, pause) in enumerate([(2, 5), (1, 9), (2, None)]):
        rig = make_rig(f"part-{part}", model=without_dropout, training={"batch_size": 4 // world})
        if before is not None:
            before.run.checkpoint(4 * part).rename(_in(rig, 4 * part))
            rig.direct(resume_from=f"checkpoint-{4 * part}")
        rig.start(world=world, pause_at=[pause])
        if pause is None:
            rig.ends(0)
        else:
            rig.pauses(pause)
            rig.is_killed()
        losses += rig.losses()[4 * part : 4 * part + 4 if pause else None]
        begun = [record.start for record in rig.history() if record.start][-1]
        assert begun is not None
        assert list(begun.next_samples) == order.samples_of(4 * part + 1) + order.samples_of(4 * part + 2)
        assert ("the same samples, but not bitwise" in rig.processes[0].said()) == (part > 0)
        before = rig
    assert losses == pytest.approx(undisturbed.losses(), rel=1e-4)


def _in(rig: Rig, step: int = 4) -> Path:
    rig.run.checkpoints.mkdir()
    return rig.run.checkpoint(step)


def test_a_bad_newest_checkpoint_is_passed_over_and_out_of_the_way(make_rig: Callable[..., Rig]) -> None:
    undisturbed = make_rig("undisturbed")
    undisturbed.finish()
    disturbed = make_rig("disturbed")
    disturbed.start(pause_at=[9])
    disturbed.pauses(9)
    disturbed.is_killed()
    torn = disturbed.run.checkpoint(8) / "optimizer.pt"
    os.truncate(torn, 100)
    disturbed.finish(restart=1)

    start = disturbed.history()[4].start
    assert start is not None
    assert start.checkpoint == "checkpoint-4"
    assert [(one.checkpoint, one.reason) for one in start.passed_over] == [
        (
            "checkpoint-8",
            f"optimizer.pt has 100 bytes instead of {_size(undisturbed.run.checkpoint(8) / 'optimizer.pt')}",
        )
    ]
    assert (disturbed.run.quarantine / "a1-bad-checkpoint-8" / "optimizer.pt").stat().st_size == 100
    same_end(undisturbed, disturbed)


def _size(path: Path) -> int:
    return path.stat().st_size


def test_the_checkpoint_that_the_directive_names_outlives_every_save(make_rig: Callable[..., Rig]) -> None:
    rules = {"every_steps": 2, "keep": 1, "keep_healthy": 1, "healthy_after": 0}
    rig = make_rig(training={"max_steps": 6}, checkpoint=rules)
    rig.start(pause_at=[3])
    rig.pauses(3)
    rig.is_killed()
    rig.direct(attempt=2, resume_from="checkpoint-2")
    rig.finish(attempt=2)
    assert rig.run.checkpoint_steps() == [2, 6]


def test_a_named_checkpoint_is_never_replaced_by_a_fresh_start(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.start(pause_at=[5])
    rig.pauses(5)
    rig.is_killed()
    weights_file = rig.run.checkpoint(4) / "model.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    rig.direct(attempt=2, resume_from="checkpoint-4")
    rig.finish(23, attempt=2)
    error = rig.error(attempt=2).error
    assert error is not None
    assert error.type == "RefusedError"
    assert "the content of model.safetensors is not what was written" in error.message
    assert len(rig.history()) == 5


@pytest.fixture(scope="module")
def killed(launcher: Launcher, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was killed after step 9, with the checkpoints 4 and 8: to be copied."""
    rig = Rig(RunDir(tmp_path_factory.mktemp("killed")), tiny_config(text), launcher)
    configuration.write(rig.run.config, rig.config)
    rig.start(die_at=[9, "end", signal.SIGKILL, 0])
    rig.ends(-signal.SIGKILL)
    return rig.run.path


def _refused_by_proof(rig: Rig) -> tuple[str | None, str | None, str | None]:
    """Start again; what was not as the checkpoint says, what was expected of it and what was found."""
    before = rig.run.history.read_bytes()
    rig.finish(23, restart=1)
    error = rig.error(restart=1).error
    assert error is not None
    assert error.type == "ProofError"
    assert rig.run.history.read_bytes() == before
    return error.what, error.expected, error.found


def _told_of(rig: Rig, step: int) -> dict[str, object]:
    """What a resume from this checkpoint has to find, by the name that it is refused by."""
    folder, schedule = rig.run.checkpoint(step), rig.config.training.schedule
    manifest, proof = complete_manifest(folder), read_message(folder / PROOF, Proof)
    assert proof is not None
    return {
        "step": step,
        "learning rate": 1e-2 * schedule_factor(schedule, step, 12),
        "optimizer step count": manifest.optimizer_steps,
        "probe loss": manifest.probe_loss,
        "EMA": proof.ema_digest,
        "random states": proof.rng_digests[0],
    }


@pytest.mark.parametrize(
    ("stale", "what"),
    [
        ("trainer_state.json", "step"),
        ("scheduler.pt", "learning rate"),
        ("optimizer.pt", "optimizer step count"),
        ("model.safetensors", "probe loss"),
        ("ema.safetensors", "EMA"),
        ("rng_state.pth", "random states"),
    ],
)
def test_a_file_of_an_older_checkpoint_is_refused(
    make_rig: Callable[..., Rig], killed: Path, stale: str, what: str
) -> None:
    rig = make_rig()
    shutil.copytree(killed, rig.run.path, dirs_exist_ok=True)
    expected, found = _told_of(rig, 8)[what], _told_of(rig, 4)[what]
    shutil.copy(rig.run.checkpoint(4) / stale, rig.run.checkpoint(8) / stale)
    sign_again(rig.run.checkpoint(8))
    assert expected != found
    assert _refused_by_proof(rig) == (what, str(expected), str(found))


def test_other_next_samples_are_refused(make_rig: Callable[..., Rig], killed: Path) -> None:
    rig = make_rig()
    shutil.copytree(killed, rig.run.path, dirs_exist_ok=True)
    proof = read_message(rig.run.checkpoint(8) / PROOF, Proof)
    assert proof is not None
    others = proof.next_samples[::-1]
    publish_message(rig.run.checkpoint(8) / PROOF, proof.model_copy(update={"next_samples": others}))
    sign_again(rig.run.checkpoint(8))
    assert _refused_by_proof(rig) == ("next samples", str(others), str(proof.next_samples))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"run": {"seed": 8}}, "seed"),
        ({"training": {"max_steps": 13}}, "max_steps"),
        ({"training": {"batch_size": 2}}, "global_batch"),
        ({"data": {"max_tokens": 16}}, "data_digest"),
    ],
)
def test_another_training_is_refused_by_name(make_rig: Callable[..., Rig], change: dict[str, Any], what: str) -> None:
    rig = make_rig("first")
    rig.start(pause_at=[5])
    rig.pauses(5)
    rig.is_killed()
    changed = make_rig("changed", **change)
    rig.run.checkpoint(4).rename(_in(changed))
    changed.direct(resume_from="checkpoint-4")
    changed.finish(23)
    error = changed.error().error
    assert error is not None
    assert (error.type, error.what) == ("RefusedError", what)


def test_what_a_person_changed_is_named_before_the_steps_that_follow_from_it() -> None:
    before, now = Settings(594, 42, 12, "d"), Settings(1186, 42, 8, "e")
    with pytest.raises(RefusedError, match=r"^global_batch is 8 and was 12"):
        refuse_changes(before, now)
    with pytest.raises(RefusedError, match=r"^data_digest is e and was d"):
        refuse_changes(before, replace(now, global_batch=12))
    with pytest.raises(RefusedError, match=r"^max_steps is 1186 and was 594"):
        refuse_changes(before, replace(before, max_steps=1186))


def test_a_signal_to_every_process_of_the_step_ends_no_data_worker(make_rig: Callable[..., Rig], text: Path) -> None:
    """Slurm sends it to all of them: also in an epoch that is longer than what they read ahead."""
    rig = make_rig(data={"workers": 2, "train": str(write_text(text.with_name("long.txt"), 32 * 4 * 60))})
    for restart, step in enumerate((2, 5)):
        rig.start(restart=restart, pause_at=[step])
        rig.pauses(step)
        os.killpg(rig.processes[-1].child.pid, signal.SIGTERM)
        rig.goes_on(step)
        rig.ends(21)
        assert (rig.error(restart=restart).saved_step) == step + 1
    rig.finish(restart=2)


def test_how_often_to_save_and_evaluate_may_change_between_two_starts(make_rig: Callable[..., Rig], text: Path) -> None:
    rig = make_rig(data={"eval": str(text)})
    rig.start(die_at=[5, "end", signal.SIGKILL, 0])
    rig.ends(-signal.SIGKILL)
    config = rig.config
    training = config.training.model_copy(update={"eval_every": 3})
    checkpoint = config.checkpoint.model_copy(update={"every_steps": 2})
    configuration.write(rig.run.config, config.model_copy(update={"training": training, "checkpoint": checkpoint}))
    rig.finish(restart=1)
    assert rig.run.checkpoint_steps() == [4, 6, 8, 10, 12]
    assert list(evaluations(rig, "eval_loss")) == [6, 9, 12]


def test_the_rate_is_absolute_at_the_very_first_step_and_after_every_resume(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.start(pause_at=[5])
    rig.pauses(5)
    rig.is_killed()
    configured = {record.step: record.lr for record in rig.history()}
    rig.direct(attempt=2, resume_from="checkpoint-4", lr_scale=0.5)
    for restart, step in enumerate((5, 7, 9)):
        rig.start(attempt=2, restart=restart, pause_at=[step])
        rig.pauses(step)
        rig.processes[-1].send(signal.SIGTERM)
        rig.goes_on(step)
        rig.ends(21)
    rig.finish(attempt=2, restart=3)
    undisturbed = make_rig("undisturbed")
    undisturbed.finish()
    configured = {record.step: record.lr for record in undisturbed.history()}
    records = rig.history()
    assert [record.start.checkpoint for record in records if record.start and record.attempt == 2] == [
        "checkpoint-4",
        "checkpoint-6",
        "checkpoint-8",
        "checkpoint-10",
    ]
    assert [record.lr for record in records[:4]] == [configured[step] for step in range(1, 5)]
    for record in records[4:]:
        assert record.lr == configured[record.step] * 0.5, record.step
    state = json.loads((rig.run.checkpoint(12) / "trainer_state.json").read_text())
    assert state["log_history"][-1]["learning_rate"] == configured[12] * 0.5


def test_a_ramp_is_counted_from_where_the_rollback_went_through_every_later_start(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.start(pause_at=[5])
    rig.pauses(5)
    rig.is_killed()
    told = {"lr_scale": 0.25, "lr_ramp": {"from_step": 4, "hold_steps": 2, "ramp_steps": 4, "to": 0.75}}
    rig.direct(attempt=2, resume_from="checkpoint-4", **told)
    rig.start(attempt=2, die_at=[7, "begin", signal.SIGTERM, 0])
    rig.ends(21)
    rig.start(attempt=2, restart=1, die_at=[9, "begin", signal.SIGTERM, 0])
    rig.ends(21)
    rig.direct(attempt=3, cause="preempted", resume_from="checkpoint-9", **told)
    rig.finish(attempt=3)
    scales = {5: 0.25, 6: 0.25, 7: 0.375, 8: 0.5, 9: 0.625, 10: 0.75, 11: 0.75, 12: 0.75}
    records = rig.history()[4:]
    assert [record.segment for record in records] == [2, 2, 2, 3, 3, 4, 4, 4]
    schedule = rig.config.training.schedule
    assert {record.step: record.lr for record in records} == {
        step: 1e-2 * (schedule_factor(schedule, step - 1, 12) * scale) for step, scale in scales.items()
    }


def test_a_mixture_of_experts_is_saved_under_the_names_that_a_resume_loads_by(make_rig: Callable[..., Rig]) -> None:
    experts = {**TINY, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    undisturbed, disturbed = (make_rig(name, model={"config": experts}) for name in ("undisturbed", "disturbed"))
    undisturbed.finish()
    disturbed.start(die_at=[6, "end", signal.SIGKILL, 0])
    disturbed.ends(-signal.SIGKILL)
    disturbed.finish(restart=1)
    same_end(undisturbed, disturbed)
    assert "model.layers.0.mlp.experts.gate_up_proj" in weights(undisturbed.run.checkpoint(12))
    assert "model.layers.0.block_sparse_moe.experts.1.w1.weight" in weights(undisturbed.run.final)

    folder = disturbed.run.checkpoint(8)
    model = AutoModelForCausalLM.from_pretrained(undisturbed.run.final)
    refuse_other_model(folder, model)
    model.save_pretrained(folder)  # as a plain Trainer saves it
    with pytest.raises(RefusedError, match=r"under the hub's names, which a resume does not translate"):
        refuse_other_model(folder, model)


def test_moments_are_dropped_and_the_rate_warmed_up_again_where_that_is_asked_for(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.start(pause_at=[5])
    rig.pauses(5)
    rig.is_killed()
    told = {"reset_moments": True, "rewarm_steps": 5, "reset_from": 4}
    rig.direct(attempt=2, resume_from="checkpoint-4", **told)
    rig.start(attempt=2, die_at=[7, "begin", signal.SIGTERM, 0])
    rig.ends(21)
    rig.direct(attempt=3, cause="preempted", resume_from="checkpoint-7", **told)
    rig.finish(attempt=3)
    undisturbed = make_rig("undisturbed")
    undisturbed.finish()
    configured = {record.step: record.lr for record in undisturbed.history()}
    for record in rig.history()[4:]:
        assert record.lr == pytest.approx(configured[record.step] * min(1.0, (record.step - 4) / 5), rel=1e-12)
    assert complete_manifest(rig.run.checkpoint(12)).optimizer_steps == 8


def test_a_run_that_was_killed_after_its_last_step_only_publishes_what_is_missing(make_rig: Callable[..., Rig]) -> None:
    undisturbed, rig = make_rig("undisturbed"), make_rig()
    undisturbed.finish()
    rig.finish(-signal.SIGKILL, kill_before_final=True)
    assert not rig.run.final.exists()
    before = rig.run.history.read_bytes()
    rig.finish(restart=1)
    assert rig.run.history.read_bytes() == before
    same_end(undisturbed, rig)


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_run_that_is_asked_to_leave_after_its_last_step_finishes(number: int, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.finish(signal_before_final=number)
    assert rig.run.final.exists()
