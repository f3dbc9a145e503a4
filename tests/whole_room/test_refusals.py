"""What a person can do wrong: one line that says the mend, exit code 2, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.whole_room.house import House, environment, furnish, write_config

Spoil = Callable[[House], object]


def _write(text: str) -> Spoil:
    return lambda house: _config(house).write_text(text, encoding="utf-8")


def _config(house: House) -> Path:
    return house.folder / "tiny.yaml"


def _set(**sections: dict[str, object]) -> Spoil:
    return lambda house: write_config(_config(house), **sections)


def _no_slurm(house: House) -> None:
    _set(cluster={"kind": "slurm"})(house)
    (house.folder / "bin").mkdir()
    house.environment["PATH"] = str(house.folder / "bin")


def _lost_slurm(house: House) -> None:
    _set(cluster={"kind": "auto"})(house)
    (house.folder / "bin").mkdir()
    (house.folder / "bin" / "sbatch").symlink_to("/bin/true")
    house.environment |= {"PATH": str(house.folder / "bin"), "SLURM_CONF": "/nowhere/slurm.conf"}


WRONG: dict[str, tuple[Spoil, str]] = {
    "a tab": (_write("run:\n\tname: x\n"), "tiny.yaml"),
    "half a file": (_write("run: {name: x"), "tiny.yaml"),
    "an empty file": (_write(""), "it is empty"),
    "a list": (_write("- run\n"), "instead of keys"),
    "no such file": (lambda house: _config(house).unlink(), "tiny.yaml"),
    "an unknown key": (_set(spike={"windw": 10}), "spike.windw"),
    "a number as text": (_set(checkpoint={"every_steps": "5"}), "checkpoint.every_steps"),
    "missing data": (_set(data={"train": "nowhere/*.txt", "tokenizer": "bytes"}), "data.train"),
    "a name that is a path": (_set(run={"name": "../x"}), "run.name"),
    "a file in the way": (_set(run={"name": "tiny", "dir": "text.txt"}), "run.dir"),
    "a folder nobody may write": (_set(run={"name": "tiny", "dir": "/proc/runs"}), "run.dir"),
    "several nodes here": (_set(cluster={"kind": "local", "nodes": 2}), "cluster.nodes"),
    "no Slurm where it was asked for": (_no_slurm, "no sbatch"),
    "a Slurm that is not where it should be": (_lost_slurm, "/nowhere/slurm.conf"),
}


def assert_refused(house: House, *argv: str, says: str) -> None:
    before = _tree(house.folder)
    done = house.higgsfield(*argv)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert _tree(house.folder) == before


def _tree(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("verb", ["run", "submit"])
def test_a_wrong_configuration_leaves_nothing_behind(verb: str, name: str, tmp_path: Path) -> None:
    spoil, says = WRONG[name]
    house = furnish(tmp_path, environment())
    spoil(house)
    assert_refused(house, verb, "tiny.yaml", says=says)


def test_a_wrong_override_is_named(tmp_path: Path) -> None:
    house = furnish(tmp_path, environment())
    assert_refused(house, "run", "tiny.yaml", "--set", "spike.ratio=fast", says="--set")
    assert_refused(house, "run", "tiny.yaml", "--set", "ratio", says="--set")


@pytest.mark.parametrize("verb", ["status", "log", "stop", "resume"])
def test_a_run_that_is_not_there(verb: str, tmp_path: Path) -> None:
    house = furnish(tmp_path, environment())
    assert_refused(house, verb, "nobody", says="nobody")


@pytest.mark.parametrize("verb", ["run", "submit"])
def test_a_folder_that_no_batch_script_can_name(verb: str, tmp_path: Path) -> None:
    house = furnish(tmp_path / "two\nlines", environment())
    assert_refused(house, verb, "tiny.yaml", says="run.dir")


def test_a_folder_of_that_name_that_is_no_run(tmp_path: Path) -> None:
    house = furnish(tmp_path, environment())
    (house.run.path / "mine").mkdir(parents=True)
    assert_refused(house, "run", "tiny.yaml", says="run.name")


def test_no_runs_yet(tmp_path: Path) -> None:
    house = furnish(tmp_path, environment())
    assert house.json("status") == {"runs": []}
    done = house.higgsfield("status")
    assert (done.returncode, done.stdout) == (0, f"no runs under {tmp_path / 'runs'}; --dir names another folder\n")
