"""The shipped configurations are ones that today's TrainingArguments takes."""

import os
from pathlib import Path

import pytest
from transformers import TrainingArguments

from supervisor.config import load_config, shipped_configs
from worker.contract.run_dir import RunDir
from worker.setup import training_fields

NAMES = sorted(path.stem for path in shipped_configs().glob("*.yaml") if path.stem not in {"base", "deepspeed-offload"})


@pytest.mark.parametrize("name", NAMES)
def test_training_arguments_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable in [one for one in os.environ if one.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # FSDP's settings go through the environment
    given = [] if name == "demo" else ["data.train=stdlib", "model.path=org/model"]
    config = load_config(shipped_configs() / f"{name}.yaml", given)
    args = TrainingArguments(**training_fields(RunDir(tmp_path), config, 10))
    assert args.learning_rate == config.training.optimizer.learning_rate
    assert bool(args.fsdp) == ("fsdp" in config.training.extra)
