"""A folder with a small, valid configuration in it, and the current directory there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.config import ConfigError, Finding, load_config

VALID = """\
run: {name: small}
model: {config: {model_type: llama, hidden_size: 8}}
data: {train: words.txt, tokenizer: bytes}
training:
  max_steps: 10
  optimizer: {learning_rate: 1e-3}
cluster: {kind: local}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: small.yaml, which is valid, and its data."""
    (tmp_path / "words.txt").write_text("some words\n")
    (tmp_path / "small.yaml").write_text(VALID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def findings(folder: Path) -> Callable[..., tuple[Finding, ...]]:
    """What load_config finds wrong with small.yaml after overrides."""

    def ask(*overrides: str, name: str = "small.yaml") -> tuple[Finding, ...]:
        with pytest.raises(ConfigError) as caught:
            load_config(Path(name), overrides)
        return caught.value.findings

    return ask
