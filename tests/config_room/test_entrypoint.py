"""training.entrypoint before a run: what a worker would not find is said, and nothing of the script is run."""

from pathlib import Path

import pytest

from slurm.scheduler import LocalScheduler, Scheduler
from supervisor import cli, known_facts
from supervisor.config import load_config
from supervisor.own_script import script_remarks
from supervisor.recipe_facts import Remark
from supervisor.runs import RunError
from tests.fakes import FakeScheduler
from worker.contract.check_report import CheckReport

FILES = {
    "sft.py": "raise SystemExit('run')\ndef main(context): ...\nclass Trial:\n    def method(self): ...\n",
    "given.py": "from sft import main as start\nif True:\n    run = lambda context: None\n",
    "late.py": "def set():\n    global main\n",
    "any.py": "from sft import *\n",
    "escape.py": "main = '\\d'\n",
    "wrong.py": "def main(:\n",
    "test.py": "def main(context): ...\n",
    "pack/__init__.py": "raise SystemExit('run')\n",
    "pack/inner.py": "def main(context): ...\n",
    "plain/more/deep.py": "def main(context): ...\n",
    "elsewhere/far.py": "def main(context): ...\n",
}


@pytest.fixture
def scripts(folder: Path) -> Path:
    """A folder of scripts, most of which cannot be run."""
    for name, text in FILES.items():
        (folder / "scripts" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "scripts" / name).write_text(text)
    return folder / "scripts"


def remarks(entrypoint: str, *overrides: str, scheduler: Scheduler | None = None) -> list[Remark]:
    config = load_config(Path("small.yaml"), [f"training.entrypoint={entrypoint}", *overrides])
    return list(script_remarks(config, scheduler or LocalScheduler()))


@pytest.mark.parametrize(
    "entrypoint",
    ["sft:main", "sft:Trial", "given:start", "given:run", "late:main", "any:main", "escape:main", "pack.inner:main",
     "plain.more.deep:main", "plain/more.deep:main", "json:loads", "time:sleep"],
)  # fmt: skip
def test_what_a_worker_would_find(scripts: Path, entrypoint: str) -> None:
    assert remarks(f"scripts/{entrypoint}") == []


@pytest.mark.parametrize(
    ("entrypoint", "message", "mend"),
    [
        ("nosuch:main", "there is no module nosuch in {}, nor is one installed", "name the file of your script"),
        ("stf:main", "there is no module stf in {}, nor is one installed", "did you mean sft?"),
        ("sft.py:main", "there is no module sft.py in {}, nor is one installed", "did you mean sft?"),
        ("pack.other:main", "there is no module pack.other in {}, nor is one installed", "name the file"),
        ("sft:man", "{}/sft.py has no function man", "did you mean main?"),
        ("sft:method", "{}/sft.py has no function method", "name a function that is written there"),
        ("pack:main", "{}/pack/__init__.py has no function main", "name a function that is written there"),
        ("plain/more.deep:mein", "{}/plain/more/deep.py has no function mein", "did you mean main?"),
        ("plain.more:main", "plain.more is a folder without __init__.py, where no function is", "plain.more.FILE:main"),
        ("wrong:main", "{}/wrong.py is no Python, line 1: invalid syntax", "mend the script"),
        ("test:main", "/test/__init__.py has no function main", "give your file another name"),
    ],
)
def test_what_a_worker_would_not_find_is_an_error(scripts: Path, entrypoint: str, message: str, mend: str) -> None:
    (found,) = remarks(f"scripts/{entrypoint}")
    assert (found.level, found.place) == ("error", ("training", "entrypoint"))
    assert message.format(scripts) in found.message
    assert mend in found.mend


def test_python_path_of_the_worker_counts(scripts: Path) -> None:
    path = f"cluster.environment.PYTHONPATH={scripts}/none:{scripts}/elsewhere"
    assert [one.level for one in remarks("far:main")] == ["error"]
    assert remarks("far:main", path) == []
    assert [one.level for one in remarks("far:man", path)] == ["error"]


@pytest.mark.parametrize(
    "other", ["python=python3", "container=apptainer exec image.sif", "setup=[module load python]"]
)
def test_what_another_python_may_have_is_a_warning(scripts: Path, other: str) -> None:
    for entrypoint in ("scripts/nosuch:main", "scripts/sft:man"):
        (found,) = remarks(entrypoint, f"cluster.{other}")
        assert found.level == "warning"
        assert "is not known" in found.evidence


def test_what_only_the_nodes_may_have_is_a_warning(scripts: Path) -> None:
    assert [one.level for one in remarks("scripts/nosuch:main", scheduler=FakeScheduler())] == ["warning"]
    assert [one.level for one in remarks("scripts/sft:man", scheduler=FakeScheduler())] == ["error"]


def test_check_refuses_it_and_run_warns_of_it(
    scripts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(run_dir: object, out: object) -> None:
        raise RunError("that is enough")

    monkeypatch.setattr(known_facts, "look_closer", lambda config: CheckReport())
    given = ["small.yaml", "--set", "training.entrypoint=scripts/sft:man"]
    assert cli.main(["check", *given]) == cli.WRONG_INPUT
    said = f"--set: training.entrypoint: {scripts}/sft.py has no function man; did you mean main?"
    assert f"error: {said}" in capsys.readouterr().out.splitlines()
    monkeypatch.setattr("supervisor.verbs.going.supervise", begin)
    assert cli.main(["run", *given]) == cli.WRONG_INPUT
    assert f"warning: {said}" in capsys.readouterr().err.splitlines()
