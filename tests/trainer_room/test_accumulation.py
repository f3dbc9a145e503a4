"""The same global batch, however it is cut into micro-steps and ranks: the same losses, norms and weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.trainer_room.rig import TINY, Rig

pytestmark = pytest.mark.training
STEPS = 5


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "rows of different lengths"])
def test_eight_samples_a_step_are_one_large_batch(
    make_rig: Callable[..., Rig], tmp_path: Path, is_packed: bool
) -> None:
    rows = [{"text": "word " * (1 + 3 * number % 11) + str(number)} for number in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "rows.jsonl"), "pack": is_packed}
    model = {"config": {**TINY, "attention_dropout": 0.0}}

    def trained(name: str, batch_size: int, accumulation: int, world: int) -> Rig:
        training: dict[str, Any] = {"batch_size": batch_size, "gradient_accumulation": accumulation}
        rig = make_rig(name, data=data, model=model, training={**training, "max_steps": STEPS}, ema=None)
        rig.finish(world=world)
        return rig

    large = trained("large", 8, 1, 1)
    expected = load_file(large.run.final / "model.safetensors")
    for name, cut in {"accumulated": (2, 4, 1), "ranks": (4, 1, 2), "both": (2, 2, 2)}.items():
        other = trained(name, *cut)
        for one, two in zip(large.history(), other.history(), strict=True):
            assert two.loss == pytest.approx(one.loss, rel=1e-5), name
            assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4), name
        for key, value in load_file(other.run.final / "model.safetensors").items():
            np.testing.assert_allclose(value, expected[key], atol=2e-4, err_msg=f"{name} {key}")
