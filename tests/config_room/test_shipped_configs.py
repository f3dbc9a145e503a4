"""The configurations that come with the package say what their comments and the documentation say."""

import json
from pathlib import Path

import pytest

from supervisor.check import check
from supervisor.config import ConfigError, load_config, shipped_configs
from supervisor.config_findings import all_places
from tests.fakes import FakeScheduler

CONFIGS = shipped_configs()


def test_the_demo_is_the_run_that_explodes(folder: Path) -> None:
    config = load_config(CONFIGS / "demo.yaml")
    assert config.model.config == {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 344,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    training, optimizer = config.training, config.training.optimizer
    assert (training.max_steps, training.batch_size, config.data.max_tokens) == (260, 8, 128)
    assert (optimizer.name, optimizer.learning_rate, optimizer.momentum) == ("sgd", 3.0, 0.9)
    assert (training.max_grad_norm, training.precision, training.schedule.warmup) == (None, "fp32", 240)
    assert (config.data.train, config.data.tokenizer, config.cluster.kind) == ("stdlib", "bytes", "local")


def test_the_demo_can_go_back_before_the_explosion(folder: Path) -> None:
    checkpoint = load_config(CONFIGS / "demo.yaml").checkpoint
    assert checkpoint.every_steps + checkpoint.healthy_after < 45


def test_the_dataset_recipe_loads_with_its_three_lines_set(folder: Path) -> None:
    given = ["run.name=mine", "model.path=org/model", "data.train=words.txt"]
    config = load_config(CONFIGS / "dataset.yaml", given)
    training, optimizer, schedule = config.training, config.training.optimizer, config.training.schedule
    assert (optimizer.name, optimizer.learning_rate, optimizer.betas) == ("adamw", 2e-5, (0.9, 0.95))
    assert (optimizer.eps, optimizer.weight_decay) == (1e-8, 0.1)
    assert (schedule.name, schedule.warmup, schedule.floor) == ("cosine", 0.03, 0.1)
    assert (training.epochs, training.max_grad_norm, training.precision) == (3, 1.0, "bf16")
    assert config.ema is not None
    assert (config.ema.decay, config.ema.every, config.checkpoint.every_steps) == (0.999, 10, 500)


def test_the_base_names_no_run_model_data_or_length(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIGS / "base.yaml")
    assert {found.key for found in caught.value.findings} == {"run.name"}
    (tmp_path / "mine.yaml").write_text("extends: base.yaml\nrun: {name: mine}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "mine.yaml")
    missing = {found.key for found in caught.value.findings}
    assert missing == {"model", "data.train", "training"}


def test_the_keys_of_a_configuration() -> None:
    """A key that is added, renamed or removed is seen here first: people's files depend on these names."""
    pinned = (Path(__file__).parent / "keys.txt").read_text().split()
    assert sorted(".".join(place) for place in all_places()) == pinned


SIZES = {"full-7b-a100": (28, 3584), "fsdp-13b-2x8": (40, 5120), "lora-13b-24g": (40, 5120)}


@pytest.fixture
def given(folder: Path) -> list[str]:
    """A data file, and a model folder with a tokenizer and a config, as a person would set them."""
    (folder / "rows.jsonl").write_text('{"text": "one"}\n')
    (folder / "model").mkdir()
    (folder / "model" / "tokenizer.json").write_text("{}")
    return [f"data.train={folder / 'rows.jsonl'}", f"model.path={folder / 'model'}"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_passes_check_with_data_and_a_model(
    folder: Path, given: list[str], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, width = SIZES.get(path.stem, (24, 896))
    model = {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": width}
    (folder / "model" / "config.json").write_text(json.dumps(model))
    scheduler = FakeScheduler()
    scheduler.node_names = ("n1", "n2")
    monkeypatch.setattr("supervisor.check.choose", lambda kind: scheduler)
    more = {"demo": [], "base": ["run.name=b", "training.max_steps=5", "training.optimizer.learning_rate=1e-5"]}
    config = load_config(path, (given if path.stem != "demo" else []) + more.get(path.stem, []))
    result = check(config, str(path))
    assert result.errors == ()
    expected = ["training.optimizer.learning_rate"] if path.stem == "demo" else []  # it is to explode
    assert [one.key for one in result.warnings] == expected
    assert f"#SBATCH --nodes={config.cluster.nodes}\n" in result.sbatch


def test_what_the_articles_say() -> None:
    given = ["data.train=stdlib", "model.path=org/model"]
    optimizer = load_config(CONFIGS / "model-optimizer.yaml", given).training
    assert (optimizer.optimizer.name, optimizer.optimizer.learning_rate) == ("adamw", 5e-5)
    assert (optimizer.optimizer.betas, optimizer.optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    assert (optimizer.gradient_accumulation, optimizer.activation_checkpointing) == (8, True)
    sharded = load_config(CONFIGS / "fsdp-13b-2x8.yaml", given)
    assert sharded.training.extra["fsdp_config"]["cpu_offload"] is True
    assert sharded.cluster.world_size == 16
    assert "112 GB" in (CONFIGS / "full-7b-a100.yaml").read_text()
