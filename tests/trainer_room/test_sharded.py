"""A model that is sharded over two ranks by FSDP2: real trainers, real shards, on gloo."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

from tests.trainer_room.rig import TINY, Rig, same_end, weights
from worker.contract.files import publish_message
from worker.contract.manifest import MANIFEST, complete_manifest

pytestmark = pytest.mark.training

UNEVEN = {**TINY, "intermediate_size": 65}
"""Two ranks have shards of different sizes."""


def extra(kind: str = "SHARDED_STATE_DICT", **more: Any) -> dict[str, Any]:
    told = {"state_dict_type": kind, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], **more}
    return {"batch_size": 2, "eval_every": 3, "extra": {"fsdp": True, "fsdp_config": told}}


@pytest.fixture
def sharded(make_rig: Callable[..., Rig], text: Path) -> Callable[..., Rig]:
    def make(name: str, training: dict[str, Any] | None = None, **sections: Any) -> Rig:
        told = {"model": {"config": UNEVEN}, "data": {"eval": str(text)}, **sections}
        return make_rig(name, training=extra() if training is None else training, **told)

    return make


def error_of(rig: Rig, **where: Any) -> tuple[str | None, str]:
    error = rig.error(**where).error
    assert error is not None
    return error.what, error.message


def test_a_sharded_run_that_was_killed_ends_bitwise_the_same_and_as_the_plain_one(sharded: Callable[..., Rig]) -> None:
    undisturbed, disturbed = sharded("undisturbed"), sharded("disturbed")
    undisturbed.finish(world=2, fsdp_on_cpu=True)
    folder = undisturbed.run.checkpoint(8)
    shards = {
        f"{part}/{name}" for part in ("pytorch_model_fsdp_0", "optimizer_0") for name in (".metadata", "__1_0.distcp")
    }
    assert complete_manifest(folder).files.keys() >= {*shards, "ema.safetensors", "scheduler.pt", "rng_state_1.pth"}
    assert not {"model.safetensors", "optimizer.pt"} & complete_manifest(folder).files.keys()

    in_its_save = r"os\.rename \.staging/.*/checkpoint-8/optimizer_0/__1_0\.distcp$"
    disturbed.start(world=2, fsdp_on_cpu=True, dies_before=[in_its_save, 1])
    assert disturbed.processes[1].wait() == -signal.SIGKILL, disturbed.processes[1].said()
    disturbed.is_killed()
    assert list(disturbed.run.staging.rglob("__1_0.distcp"))
    disturbed.finish(restart=1, world=2, fsdp_on_cpu=True)
    start = disturbed.history()[4].start
    assert start is not None
    assert start.checkpoint == "checkpoint-4"
    same_end(undisturbed, disturbed)

    plain = sharded("plain", training={**extra(), "extra": {}})
    plain.finish(world=2)
    for name in ("loss", "grad_norm", "eval_loss", "ema_eval_loss"):
        told = ([getattr(one, name) for one in rig.history()] for rig in (undisturbed, plain))
        ours, theirs = ([one for one in each if one is not None] for each in told)
        assert len(ours) in (4, 12)
        assert ours == pytest.approx(theirs, rel=1e-4), name
    for place in ("", "ema"):
        AutoModelForCausalLM.from_pretrained(undisturbed.run.final / place)
        ours, theirs = (load_file(rig.run.final / place / "model.safetensors") for rig in (undisturbed, plain))
        assert ours.keys() == theirs.keys()
        assert all(numpy.allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-5) for name in theirs)
    assert weights(undisturbed.run.final) != weights(undisturbed.run.final / "ema")


def test_a_gradient_that_is_not_finite_on_one_rank_is_applied_to_no_shard(sharded: Callable[..., Rig]) -> None:
    rig = sharded("run")
    rig.finish(world=2, fsdp_on_cpu=True, nan_rank=[3, 1])
    records = rig.history()
    assert [record.verdict for record in records] == ["ok", "ok", "skipped"] + ["ok"] * 9
    assert records[2].grad_norm is None
    assert complete_manifest(rig.run.checkpoint(12)).weights_finite
    assert complete_manifest(rig.run.checkpoint(12)).optimizer_steps == 11


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_sharded_checkpoint_without_its_optimizer_is_refused(sharded: Callable[..., Rig], kind: str) -> None:
    is_full = kind == "FULL_STATE_DICT"
    rig = sharded("run", training=extra(kind, activation_checkpointing=is_full))
    rig.start(world=2, fsdp_on_cpu=True, die_at=[5, "end", signal.SIGKILL, 0])
    rig.processes[0].wait()
    rig.is_killed()
    folder = rig.run.checkpoint(4)
    assert "model.layers.0.mlp.up_proj.weight" in load_file(folder / "ema.safetensors")
    whole = sharded("whole", training=extra(kind))  # checkpointing of activations changes no name
    shutil.copytree(folder, whole.run.checkpoint(4))
    whole.direct(resume_from="checkpoint-4")
    whole.start(world=2, fsdp_on_cpu=True, die_at=[6, "begin", signal.SIGKILL, 0])
    whole.processes[0].wait()
    assert [(record.step, record.segment) for record in whole.history()][3:] == [(4, 1), (5, 2)]
    whole.is_killed()

    manifest = complete_manifest(folder)
    lost = "optimizer.bin" if is_full else "optimizer_0/__1_0.distcp"
    (folder / lost).unlink()
    rig.direct(attempt=2, resume_from="checkpoint-4")
    rig.finish(23, attempt=2, world=2, fsdp_on_cpu=True)
    assert f"checkpoint-4: {lost} is missing" in error_of(rig, attempt=2)[1]

    part = lost.split("/")[0]
    kept = {name: entry for name, entry in manifest.files.items() if name.split("/")[0] != part}
    publish_message(folder / MANIFEST, manifest.model_copy(update={"files": kept}))
    rig.finish(23, attempt=2, restart=1, world=2, fsdp_on_cpu=True)
    assert f"{part} is missing: the Trainer would begin with a fresh one" in error_of(rig, attempt=2, restart=1)[1]
    assert len(rig.history()) == 5


def test_a_sharded_checkpoint_of_another_model_optimizer_or_backend_is_refused(sharded: Callable[..., Rig]) -> None:
    rig = sharded("run")
    rig.start(world=2, fsdp_on_cpu=True, die_at=[5, "end", signal.SIGKILL, 0])
    rig.processes[0].wait()
    rig.is_killed()
    larger = {**UNEVEN, "intermediate_size": 96}
    for name, what, said, changes in (
        ("model", "model", "is (65, 32), and this model's is (96, 32)", {"model": {"config": larger}}),
        ("sgd", "optimizer", "", {"training": {**extra(), "optimizer": {"name": "sgd", "learning_rate": 1e-2}}}),
        ("plain", "backend", "is of FSDP with shards", {"training": {**extra(), "extra": {}}}),
    ):
        other = sharded(name, **changes)
        shutil.copytree(rig.run.checkpoint(4), other.run.checkpoint(4))
        other.direct(resume_from="checkpoint-4")
        other.finish(23, world=2, fsdp_on_cpu=True)
        found, message = error_of(other)
        assert found == what, message
        assert said in message


@pytest.mark.parametrize(
    ("faults", "fsdp", "said"),
    [
        ({}, {}, "was asked for and is not in force"),
        ({"fsdp_on_cpu": True}, {"version": 1}, "only FSDP 2 is supported"),
        ({"fsdp_on_cpu": True}, {}, "checkpoint.background: not with FSDP"),
    ],
)
def test_sharding_that_would_not_be_what_was_asked_for_is_refused(
    sharded: Callable[..., Rig], faults: dict[str, Any], fsdp: dict[str, Any], said: str
) -> None:
    rig = sharded("run", training=extra(**fsdp), checkpoint={"background": "background" in said})
    rig.finish(23, world=2, **faults)
    assert said in error_of(rig)[1]
    assert not rig.run.history.exists()
