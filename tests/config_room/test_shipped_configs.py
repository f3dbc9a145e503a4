"""The configurations that come with the package say what their comments and the documentation say."""

from pathlib import Path

import pytest

from supervisor.config import ConfigError, load_config, shipped_configs
from supervisor.config_findings import all_places

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
