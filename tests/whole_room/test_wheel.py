"""The wheel, installed outside of the tree, is the whole program; its light verbs load nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.journal import Finished
from tests.whole_room.house import EXPLODING, House, environment, furnish, steps

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "transformers", "accelerate", "datasets", "submitit", "pandas"}

_TELLING_MODULES = """
import sys
from supervisor.cli import main
code = main(sys.argv[1:])
print(sorted(sys.modules))
sys.exit(code)
"""


def _run(*argv: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in environment().items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(word) for word in argv], cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin/ of an environment that has the wheel, and of this one only what the wheel depends on."""
    folder = tmp_path_factory.mktemp("wheel")
    built = _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    assert built.returncode == 0, built.stdout + built.stderr
    [wheel] = folder.glob("higgsfield_supervisor-*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install"]
    done = _run(*pip, "--no-deps", "--no-index", wheel, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    [site] = (folder / "venv").glob("lib/python*/site-packages")
    # A plain path in a .pth: the .pth files over there, that of the editable install among them, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return folder / "venv" / "bin"


def test_the_wheel_works_outside_of_the_tree(installed: Path, tmp_path: Path) -> None:
    found = _run(installed / "python", "-c", "import supervisor; print(supervisor.__file__)", cwd=tmp_path)
    assert found.stdout.startswith(str(installed.parent)), found.stderr
    checked = _run(installed / "higgsfield", "check", "demo.yaml", "--json", cwd=tmp_path)
    assert (checked.returncode, checked.stderr) == (0, "")
    told = json.loads(checked.stdout)
    assert told["errors"] == []
    assert "#SBATCH --dependency=singleton" in told["sbatch"]
    assert not list(tmp_path.iterdir())


@pytest.mark.training
def test_a_supervisor_of_the_wheel_goes_on_by_itself_and_trains(installed: Path, tmp_path: Path) -> None:
    training = EXPLODING["training"] | {"max_steps": 2, "schedule": {"warmup": 0}}
    with furnish(tmp_path, environment(), training=training) as house:
        done = _run(installed / "higgsfield", "submit", "tiny.yaml", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        house.waits_for(Finished)
        assert steps(house.records) == [1, 2]
        assert (house.run.final / "model.safetensors").is_file()
        assert "FINISHED" in house.run.supervisor_log.read_text(encoding="utf-8")
        house.until(lambda: not house.processes())


@pytest.fixture(scope="module")
def run_of_nothing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """A run that was made and never submitted."""
    with furnish(tmp_path_factory.mktemp("light"), environment()) as house:
        made = house.higgsfield("run", "tiny.yaml", "--once")
        assert made.returncode == 0, made.stderr
        yield house


@pytest.mark.parametrize("verb", [["status"], ["status", "tiny", "--json"], ["log", "tiny"], ["stop", "tiny"]])
def test_light_verbs_load_nothing_heavy(run_of_nothing: House, verb: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TELLING_MODULES, *verb],
        cwd=run_of_nothing.folder,
        env=run_of_nothing.environment,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    loaded = {name.partition(".")[0].strip("' ") for name in done.stdout.splitlines()[-1].strip("[]").split(",")}
    assert "pydantic" in loaded
    assert not loaded & HEAVY
