"""Fixtures of the trainer's tests."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_room.rig import Launcher, Rig, tiny_config, write_text
from worker.contract import config as configuration
from worker.contract.run_dir import RunDir


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 samples of 32 bytes: an epoch of five tiny batches."""
    return write_text(tmp_path_factory.mktemp("data") / "text.txt", num_bytes=20 * 32)


@pytest.fixture
def make_rig(launcher: Launcher, text: Path, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """``make_rig(name, **sections)``: a run folder with a tiny config; what still runs at the end is killed."""
    rigs: list[Rig] = []

    def make(name: str = "run", **sections: dict[str, Any]) -> Rig:
        rig = Rig(RunDir(tmp_path / name), tiny_config(text, **sections), launcher)
        rig.run.path.mkdir()
        configuration.write(rig.run.config, rig.config)
        rigs.append(rig)
        return rig

    yield make
    for rig in rigs:
        rig.is_killed()
