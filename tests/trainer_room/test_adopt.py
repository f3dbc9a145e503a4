"""A folder that a Trainer wrote by itself becomes a run, and training goes on from there as it would have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from supervisor.adopt import Adopted, adopt
from tests.trainer_room.rig import Launcher, Rig, tiny_config, weights
from worker.contract.run_dir import RunDir
from worker.fits import refuse_other_model
from worker.leaving import RefusedError

pytestmark = pytest.mark.training
PLAIN = {"schedule": {"name": "constant", "warmup": 0, "floor": 1.0}}


def snapshot(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode) for path in files}


def test_it_goes_on_as_the_trainer_would_have(
    make_rig: Callable[..., Rig], launcher: Launcher, text: Path, tmp_path: Path
) -> None:
    training = tiny_config(text).training.model_dump(exclude={"schedule"}) | PLAIN
    sections = {"data": {"shuffle": False}, "training": training}
    whole, part = make_rig("whole", **sections), make_rig("part", **sections)
    whole.finish(elsewhere_until=12)
    part.finish(elsewhere_until=8)
    theirs = part.run.checkpoints
    (theirs / "checkpoint-10").mkdir()
    shutil.copy(theirs / "checkpoint-8" / "optimizer.pt", theirs / "checkpoint-10")
    before = snapshot(theirs)

    kept = {"every_steps": 4, "keep": 1, "keep_healthy": 1, "healthy_after": 1}
    where = {"name": "ours", "dir": str(tmp_path), "seed": 7}
    adopted = adopt(theirs, tiny_config(text, **sections, run=where, checkpoint=kept))
    assert adopted.steps == (4, 8)
    assert adopted.notes == ("checkpoint-10 is passed over: trainer_state.json is missing",)
    assert adopted.run_dir.checkpoint(8).joinpath("optimizer.pt").stat().st_nlink == 2

    ours = Rig(RunDir(tmp_path / "ours"), adopted.config, launcher)
    ours.direct(resume_from="checkpoint-8", cause="adopted")
    ours.finish()
    start = next(one.start for one in ours.history() if one.start is not None)
    assert (start.checkpoint, start.optimizer_steps, start.probe.expected) == ("checkpoint-8", 8, None)
    assert weights(ours.run.final) == weights(whole.run.checkpoint(12))
    assert [(one.step, one.adopted) for one in ours.history()] == [
        *((step, True) for step in (3, 6)),
        *((step, False) for step in range(9, 13)),
    ]
    (warned,) = [one.warnings for one in ours.history() if one.warnings]
    assert "random states of each rank" in warned[0]
    assert not ours.run.checkpoint(4).exists(), "our retention goes on"
    assert snapshot(theirs) == before


def test_a_checkpoint_that_was_written_into_afterwards_is_passed_over(
    make_rig: Callable[..., Rig], launcher: Launcher, text: Path, tmp_path: Path
) -> None:
    part = make_rig("part", training={"max_steps": 12} | tiny_config(text).training.model_dump(exclude={"max_steps"}))
    part.finish(elsewhere_until=8)
    adopted: Adopted = adopt(part.run.checkpoints, tiny_config(text, run={"name": "ours", "dir": str(tmp_path)}))
    with open(part.run.checkpoint(8) / "optimizer.pt", "r+b") as file:
        file.write(b"another")
    ours = Rig(adopted.run_dir, adopted.config, launcher)
    ours.direct(resume_from="checkpoint-8", cause="adopted")
    ours.finish()
    start = next(one.start for one in ours.history() if one.start is not None)
    assert start.checkpoint == "checkpoint-4"
    assert [one.checkpoint for one in start.passed_over] == ["checkpoint-8"]
    assert json.loads(ours.run.checkpoint(4).joinpath("MANIFEST.json").read_text())["adopted"] is True


def test_weights_that_torch_saved_are_looked_at_name_by_name_too(
    make_rig: Callable[..., Rig], launcher: Launcher, text: Path, tmp_path: Path
) -> None:
    part = make_rig("part", training={"max_steps": 12} | tiny_config(text).training.model_dump(exclude={"max_steps"}))
    part.finish(elsewhere_until=8)

    def goes_on(name: str, expected: int = 0) -> Rig:
        where = {"name": name, "dir": str(tmp_path), "seed": 7}
        adopted = adopt(part.run.checkpoints, tiny_config(text, run=where))
        ours = Rig(adopted.run_dir, adopted.config, launcher)
        ours.direct(resume_from="checkpoint-8", cause="adopted")
        ours.finish(expected)
        return ours

    same = goes_on("safetensors")
    folder = part.run.checkpoint(8)
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(stored, folder / "pytorch_model.bin")
    assert weights(goes_on("bin").run.final) == weights(same.run.final)
    del stored["model.layers.1.mlp.up_proj.weight"]
    (folder / "pytorch_model.bin").unlink()
    torch.save(stored, folder / "pytorch_model.bin")
    error = goes_on("another", 23).error().error
    assert error is not None
    assert error.what == "model"
    assert error.message.endswith(
        "pytorch_model.bin: lacks model.layers.1.mlp.up_proj.weight: it is a checkpoint of another model"
    )


def linears(*, is_tied: bool) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    if is_tied:
        model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize("is_zip", [True, False])
def test_weights_that_torch_saved_are_tied_as_the_model_is(tmp_path: Path, is_zip: bool) -> None:
    tied, apart = linears(is_tied=True), linears(is_tied=False)
    path = tmp_path / "pytorch_model.bin"
    for own, other, why in ((tied, apart, "lacks 1.weight"), (apart, tied, "holds weights apart that this model ties")):
        torch.save(own.state_dict(), path, _use_new_zipfile_serialization=is_zip)
        refuse_other_model(tmp_path, own)
        with pytest.raises(RefusedError, match=f"pytorch_model.bin: {why}"):
            refuse_other_model(tmp_path, other)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"model": {"0.weight": torch.zeros(4, 4)}}, "holds no weights by their names"),
        ([torch.zeros(4, 4)], "holds no weights by their names"),
        ({"0.weight": torch.zeros(4, 4), "model": torch.nn.Linear}, "torch does not load it as weights alone"),
        ({**linears(is_tied=False).state_dict(), "0.bias": torch.zeros(5)}, r"0.bias is \(5,\), and this model's is"),
        ({**linears(is_tied=False).state_dict(), "2.bias": torch.zeros(5)}, "holds 2.bias, which this model does not"),
    ],
)
def test_what_is_not_weights_by_name_is_refused(tmp_path: Path, value: object, why: str) -> None:
    torch.save(value, tmp_path / "pytorch_model.bin")
    with pytest.raises(RefusedError, match=f"pytorch_model.bin: {why}"):
        refuse_other_model(tmp_path, linears(is_tied=False))
