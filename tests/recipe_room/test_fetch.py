"""What the hub has is fetched where it can be reached, and read where it cannot."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.hub import fetch_from_hub
from supervisor.job_request import worker_request
from supervisor.runs import RunError
from tests.recipe_room.hub import serving
from tests.supervisor_room.stage import config
from worker.contract.config import Config
from worker.contract.run_dir import RunDir

OFFLINE = """
import json
from transformers import AutoConfig
from worker.rows import rows_of_hub
kind = AutoConfig.from_pretrained("lab/tiny", revision="main").model_type
print(json.dumps([kind, [row for _, row in rows_of_hub("lab/rows")]]))
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The hub's folder, served; its libraries keep what they fetch in `home`."""
    files = {
        "models/lab/tiny/config.json": json.dumps({"model_type": "llama"}),
        "models/lab/tiny/model.safetensors": "weights",
        "models/lab/tiny/pytorch_model.bin": "the same once more",
        "datasets/lab/rows/train.jsonl": '{"text": "one"}\n{"text": "two"}\n',
    }
    for name, text in files.items():
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_text(text)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with serving(tmp_path / "hub") as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield tmp_path / "hub"


def naming(path: str, train: str) -> Config:
    named = config(Path("/runs"), model={"path": path, "config": None}, data={"train": train, "tokenizer": None})
    return named.model_copy(update={"cluster": named.cluster.model_copy(update={"offline": True})})


def test_model_and_data_are_fetched_and_then_read_without_a_network(
    hub: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = naming("lab/tiny", "lab/rows")
    fetch_from_hub(given)
    assert capfd.readouterr().out.splitlines() == ["fetched the model lab/tiny", "fetched the data set lab/rows"]
    fetched = {path.name for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert "model.safetensors" in fetched
    assert "pytorch_model.bin" not in fetched  # the same weights once more

    switches = worker_request(given, RunDir(Path("/runs/r")), "hf-0", 1).resources.environment
    assert set(switches) == {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"}
    environment = {**os.environ, **switches, "HF_ENDPOINT": "http://127.0.0.1:9"}
    said = subprocess.check_output([sys.executable, "-c", OFFLINE], env=environment, stderr=subprocess.PIPE)
    assert json.loads(said) == ["llama", [{"text": "one"}, {"text": "two"}]]


def test_what_the_hub_does_not_have_is_one_line(hub: Path) -> None:
    with pytest.raises(RunError, match=r"^cluster.offline: model.path: the hub does not give lab/other ") as error:
        fetch_from_hub(naming("lab/other", "lab/rows"))
    assert "\n" not in str(error.value)


def test_a_job_that_may_ask_has_no_switch() -> None:
    given = naming("lab/tiny", "lab/rows")
    open_to_all = given.model_copy(update={"cluster": given.cluster.model_copy(update={"offline": False})})
    assert worker_request(open_to_all, RunDir(Path("/runs/r")), "hf-0", 1).resources.environment == {}
