"""An update whose gradient is not finite: applied on no rank, under any optimizer, and recorded with who saw it."""

import json
import math
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from tests.trainer_room.rig import Rig, same_end, weights
from worker.attach import nonfinite_ranks
from worker.contract.loss_history import Record
from worker.contract.manifest import complete_manifest
from worker.contract.recipe_config import schedule_factor
from worker.guard import why_unguarded, withhold
from worker.interrupts import Ask
from worker.judgement import OK
from worker.resume import optimizer_steps
from worker.tap import StepTap


@pytest.mark.parametrize("kind", [partial(torch.optim.AdamW, fused=False), partial(torch.optim.SGD, momentum=0.9)])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_the_guard_leaves_weights_moments_and_counts_alone(
    kind: Callable[..., torch.optim.Optimizer], norm: float
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    before, steps = weight.clone(), optimizer_steps(optimizer, 1)
    moments = [value.clone() for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    weight.grad = torch.full((3,), math.nan)
    withhold(optimizer, torch.tensor(norm))
    optimizer.step()
    assert torch.equal(weight, before)
    assert optimizer_steps(optimizer, 1) == steps
    after = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
    assert all(torch.equal(one, other) for one, other in zip(moments, after, strict=True))
    weight.grad = torch.ones(3)
    withhold(optimizer, torch.tensor(1.0))
    optimizer.step()
    assert not torch.equal(weight, before)


def test_a_fused_optimizer_is_told_without_taking_its_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    for norm, moves in ((1.0, True), (math.nan, False), (math.inf, False), (2.0, True)):
        before, steps = weight.clone(), optimizer_steps(optimizer, 0)
        weight.grad = torch.full((3,), 1.0 if moves else math.nan)
        withhold(optimizer, torch.tensor(norm))
        assert weight.grad is not None
        optimizer.step()
        assert torch.equal(weight, before) is not moves
        assert optimizer_steps(optimizer, 0) == steps + moves


@pytest.fixture
def one_rank_mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [partial(torch.optim.AdamW, fused=True), torch.optim.SGD])
def test_the_norm_of_shards_is_gathered_before_it_decides(
    kind: Callable[..., torch.optim.Optimizer], one_rank_mesh: DeviceMesh
) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    trainer = told(kind([weight], lr=0.1))
    tap = StepTap(trainer)
    for norm, moves in ((math.inf, False), (1.0, True)):
        before = weight.clone()
        weight.grad = torch.full((3,), 1.0 if moves else math.nan)
        trainer.norm = DTensor.from_local(torch.tensor(norm), one_rank_mesh, [Partial()])
        trainer._get_grad_norm(None)
        tap.before_update()
        trainer.optimizer.step()
        assert torch.equal(weight, before) is not moves


def told(optimizer: torch.optim.Optimizer, scaler: Any = None, norm: float = math.nan) -> Any:
    """What the tap wants of a Trainer whose gradient has that norm."""
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cpu")),
        optimizer=optimizer,
        accelerator=SimpleNamespace(scaler=scaler),
        training_step=None,
        get_batch_samples=None,
        norm=torch.tensor(norm),
    )
    trainer._get_grad_norm = lambda model: trainer.norm
    return trainer


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu")])
def test_under_fp16_the_scaler_decides_alone(scaler: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), math.nan)
    trainer = told(torch.optim.SGD([weight], lr=0.1), scaler)
    tap = StepTap(trainer)
    trainer._get_grad_norm(None)
    tap.before_update()
    assert (weight.grad is None) is (scaler is None)


def test_the_fp16_scale_of_a_step_is_read_with_its_other_numbers() -> None:
    """To ask the scaler for a number would wait for a device in every step."""
    scaler = SimpleNamespace(scale=lambda one: 8.0 * one)
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(device=torch.device("cpu")),
        optimizer=None,
        accelerator=SimpleNamespace(scaler=scaler),
        training_step=None,
        _get_grad_norm=None,
        get_batch_samples=None,
    )
    state: Any = SimpleNamespace(global_step=1, epoch=0.5)
    measured = StepTap(trainer).take(state, Ask.NOTHING, OK)
    assert measured.knows_scale
    assert measured.rows.read()[0][5] == 8.0


def test_where_updates_cannot_be_withheld_it_is_said() -> None:
    plain: Any = SimpleNamespace(is_deepspeed_enabled=False)
    assert why_unguarded(plain) is None
    plain.is_deepspeed_enabled = True
    said = why_unguarded(plain)
    assert said is not None
    assert said.startswith("DeepSpeed applies its updates by itself")


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        ([[1.0, 1.0, 0.0, 1.0]], None),
        ([[1.0, math.nan, 0.0, 0.0]], (0,)),
        ([[1.0, math.nan, 0.0, 1.0], [1.0, math.nan, 0.0, math.inf]], (1,)),
        ([[math.nan, math.nan, 0.0, 0.0], [1.0, math.nan, 0.0, 0.0]], (0,)),
        ([[1.0, math.nan, 0.0, 0.0], [1.0, math.nan, 0.0, 0.0]], None),
    ],
)
def test_the_rank_that_was_not_finite_is_named(rows: list[list[float]], ranks: tuple[int, ...] | None) -> None:
    assert nonfinite_ranks(rows, knows_norm=True) == ranks


# -- one poisoned row, in real runs ------------------------------------------------------------------------------------

MAX_STEPS = 9
MARKER = 7
"""The byte at which the model of these tests multiplies the loss by infinity."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"learning_rate": 1e-2},
    "adam": {"learning_rate": 1e-2},
    "sgd": {"learning_rate": 1e-1},
    "lion": {"learning_rate": 3e-3},
    "lamb": {"learning_rate": 3e-2},
    "sophia": {"learning_rate": 3e-3, "args": {"every": 2}},
    "torch.optim:NAdam": {"learning_rate": 1e-2, "args": {"betas": [0.9, 0.99]}},
}


def write_poisoned(path: Path, num_samples: int, poisoned: int) -> str:
    """A document a sample, of which one holds the marker."""
    texts = [f"sample {number}, {number * number}{chr(MARKER) * (number == poisoned)}" for number in range(num_samples)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def poisoned_rig(make_rig: Callable[..., Rig], folder: Path, name: str = "run", **training: Any) -> Rig:
    """Nine steps in epochs of five; the poisoned sample, number 9, is of the third batch."""
    data = {"train": write_poisoned(folder / "train.jsonl", 20, poisoned=9), "pack": False, "shuffle": False}
    return make_rig(
        name, data=data, training={"max_steps": MAX_STEPS, **training}, checkpoint={"every_steps": 1, "keep": MAX_STEPS}
    )


def whose_update_was_withheld(rig: Rig) -> list[Record]:
    return [record for record in rig.history() if record.verdict == "skipped"]


@pytest.mark.training
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_poisoned_row_changes_no_weight_and_a_kill_no_bit(
    make_rig: Callable[..., Rig], tmp_path: Path, name: str
) -> None:
    optimizer = {"name": name, "weight_decay": 0.01, **OPTIMIZERS[name]}
    rig = poisoned_rig(make_rig, tmp_path, optimizer=optimizer)
    rig.finish(poison=MARKER)
    withheld = whose_update_was_withheld(rig)
    assert [record.step for record in withheld] == [3, 8]
    assert {record.nonfinite_ranks for record in withheld} == {(0,)}
    assert all((record.nonfinite or {}).keys() == {"loss", "grad_norm"} for record in withheld)
    saved = [weights(rig.run.checkpoint(step)) for step in range(1, MAX_STEPS + 1)]
    assert [step for step in range(2, MAX_STEPS + 1) if saved[step - 1] == saved[step - 2]] == [3, 8]
    assert all(complete_manifest(rig.run.checkpoint(step)).weights_finite for step in range(1, MAX_STEPS + 1))
    assert (rig.history()[5].loss or math.inf) < (rig.history()[0].loss or 0.0)  # the same samples, an epoch later
    rates = [schedule_factor(rig.config.training.schedule, step, MAX_STEPS) for step in range(MAX_STEPS)]
    assert [record.lr for record in rig.history()] == [optimizer["learning_rate"] * rate for rate in rates]

    cut = poisoned_rig(make_rig, tmp_path, "cut", optimizer=optimizer)
    cut.start(poison=MARKER, die_at=[6, "update", signal.SIGKILL, 0])
    cut.ends(-signal.SIGKILL)
    cut.finish(restart=1, poison=MARKER)
    same_end(rig, cut)


@pytest.mark.training
@pytest.mark.parametrize(("name", "counted"), [("adamw", MAX_STEPS - 2), ("sophia", MAX_STEPS)])
def test_one_rank_alone_sees_it_and_none_applies_it(
    make_rig: Callable[..., Rig], tmp_path: Path, name: str, counted: int
) -> None:
    """Two ranks, two micro-steps: sample 9 is in the second micro-step of the third batch, on rank 1.

    Sophia counts its calls, not its updates.
    """
    optimizer = {"name": name, **OPTIMIZERS[name]}
    rig = poisoned_rig(make_rig, tmp_path, batch_size=1, gradient_accumulation=2, optimizer=optimizer)
    rig.finish(world=2, poison=MARKER)
    withheld = whose_update_was_withheld(rig)
    assert [(record.step, record.nonfinite_ranks) for record in withheld] == [(3, (1,)), (8, (1,))]
    assert weights(rig.run.checkpoint(3)) == weights(rig.run.checkpoint(2))
    manifest = complete_manifest(rig.run.checkpoint(MAX_STEPS))
    assert (manifest.weights_finite, manifest.optimizer_steps) == (True, counted)


@pytest.mark.training
def test_steps_that_the_fp16_scaler_skips_are_no_reason_to_go_back(
    make_rig: Callable[..., Rig], tmp_path: Path
) -> None:
    """Its first scale is far too large: AdamW is fused, of which accelerate says that it had applied every step."""
    rig = poisoned_rig(make_rig, tmp_path, precision="fp16")
    rig.finish(fp16_on_cpu=2.0**20)
    skipped = whose_update_was_withheld(rig)
    assert len(skipped) == 3
    assert {record.warnings for record in skipped} == {("the fp16 scaler skipped this step",)}
    scales = [record.loss_scale for record in rig.history()]
    assert scales[: len(skipped)] == [2.0**19, 2.0**18, 2.0**17]
    assert [record.verdict for record in rig.history()][len(skipped) :] == ["ok"] * (MAX_STEPS - len(skipped))


@pytest.mark.training
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_kill_changes_no_bit_under_fp16(make_rig: Callable[..., Rig], tmp_path: Path, name: str) -> None:
    """Once among the steps that the scaler skips at its first, too large scale, and once after them."""
    optimizer = {"name": name, **OPTIMIZERS[name]}
    rig, cut = (
        poisoned_rig(make_rig, tmp_path, each, precision="fp16", optimizer=optimizer) for each in ("whole", "cut")
    )
    rig.finish(fp16_on_cpu=2.0**20)
    assert len(whose_update_was_withheld(rig)) == 3
    rates = [schedule_factor(rig.config.training.schedule, step, MAX_STEPS) for step in range(MAX_STEPS)]
    assert [record.lr for record in rig.history()] == [optimizer["learning_rate"] * rate for rate in rates]
    for restart, step in enumerate((3, 6)):
        cut.start(restart=restart, fp16_on_cpu=2.0**20, die_at=[step, "end", signal.SIGKILL, 0])
        cut.ends(-signal.SIGKILL)
    cut.finish(restart=2, fp16_on_cpu=2.0**20)
    assert [one.start.checkpoint for one in cut.history() if one.start] == [None, "checkpoint-2", "checkpoint-5"]
    same_end(rig, cut)


@pytest.mark.training
def test_a_loss_that_is_nan_beside_a_finite_gradient_is_a_warning(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    rig = poisoned_rig(make_rig, tmp_path, max_steps=4)
    rig.finish(nan_loss=MARKER)
    third = rig.history()[2]
    assert (third.verdict, third.loss, third.nonfinite) == ("ok", None, {"loss": "nan"})
    assert third.warnings == ("the loss is nan and the gradient is finite",)
    assert weights(rig.run.checkpoint(3)) != weights(rig.run.checkpoint(2))
    assert [record.warnings for record in rig.history() if record.step != 3] == [None] * 3
