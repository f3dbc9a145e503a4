"""The shipped configurations are ones that today's TrainingArguments takes, and that check has nothing against."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments

from supervisor.check import check
from supervisor.config import load_config, shipped_configs, writer_of_keys
from supervisor.known_facts import look_closer
from tests.fakes import FakeScheduler
from tests.recipe_room.recipes import chat_tokenizer
from worker.check import look
from worker.contract.run_dir import RunDir
from worker.setup import training_fields

NAMES = sorted(path.stem for path in shipped_configs().glob("*.yaml") if path.stem not in {"base", "deepspeed-offload"})


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP's settings go through the environment."""
    for variable in [one for one in os.environ if one.startswith(("ACCELERATE_", "FSDP_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.mark.parametrize("name", NAMES)
def test_training_arguments_take_them(tmp_path: Path, name: str) -> None:
    given = [] if name == "demo" else ["data.train=stdlib", "model.path=org/model"]
    config = load_config(shipped_configs() / f"{name}.yaml", given)
    args = TrainingArguments(**training_fields(RunDir(tmp_path), config, 10))
    assert args.learning_rate == config.training.optimizer.learning_rate
    assert bool(args.fsdp) == ("fsdp" in config.training.extra)


SIZES = {
    "full-7b-a100": (28, 3584),
    "fsdp-13b-2x8": (40, 5120),
    "lora-13b-24g": (4, 5120),  # fewer, for adapters of shapes alone take half a second a layer
    "deepspeed-offload": (28, 3584),
}


@pytest.mark.parametrize("name", [*NAMES, "base", "deepspeed-offload"])
def test_check_is_strict_with_them_and_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Given data, and a folder with a config of their size and a tokenizer, without weights."""
    layers, width = SIZES.get(name, (24, 896))
    model = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": width, "max_position_embeddings": 4096}
    chat_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    text = "and then some more of what a model may learn from, one row a line"
    rows = ({"text": f"{number} {text}"} for number in range(9_000 if name in SIZES else 900))  # more than a step takes
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"run.dir={tmp_path}", f"data.train={tmp_path}/rows.jsonl", f"model.path={tmp_path}/model"]
    more = {"base": ["run.name=b", "training.max_steps=5000"], "demo": ["run.name=d"]}.get(name, [])
    given = more if name == "demo" else [*given, *more]
    scheduler = FakeScheduler()
    scheduler.node_names = ("n1", "n2")
    monkeypatch.setattr("supervisor.check.choose", lambda kind: scheduler)
    monkeypatch.setattr(
        "supervisor.known_facts.shutil.disk_usage", lambda folder: SimpleNamespace(total=10**12, free=10**12)
    )
    path = shipped_configs() / f"{name}.yaml"
    result = check(load_config(path, given), str(path), writer_of_keys(path, given), lambda one: look(one, tmp_path))
    assert result.errors == ()
    meant = ["training.optimizer.learning_rate"] if name == "demo" else []  # the demo's rate is to spike
    assert [warning.key for warning in result.warnings] == meant
    assert result.memory is not None
    assert result.memory["activations"] > 0
    assert result.data is not None
    assert result.data["train"]["is_whole"]


def test_the_look_is_a_program_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    report = look_closer(load_config(Path("demo.yaml")))
    assert report.found == ()
    assert report.model is not None
    assert report.model.parameters == 857_216
    assert list(tmp_path.iterdir()) == []
