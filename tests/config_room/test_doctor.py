"""doctor tells the truth about this machine, also about one that is unfit."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm.local_cluster.cluster import Cluster
from supervisor import doctor
from supervisor.doctor import CheckedItem, examine, file_system_of


def looked_at(folder: Path) -> dict[str, CheckedItem]:
    return {item.name: item for item in examine(folder)}


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_this_machine_is_fit_and_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    items = looked_at(tmp_path / "runs" / "of" / "mine")
    assert all(item.ok and item.mend is None for item in items.values()), items
    assert "torch 2." in items["packages"].message
    assert items["slurm"].message == "not installed: runs use this machine"
    assert items["file locks"].message == "they work"
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_or_too_old_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["no-such-package>=1.0", "pydantic>=999", "pyyaml>=6.0", 'pytest>=999; extra == "dev"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda _: wanted)
    item = looked_at(tmp_path)["packages"]
    assert not item.ok
    assert "no-such-package 1.0 or newer (missing)" in item.message
    assert "pydantic 999 or newer (2" in item.message
    assert "pyyaml" not in item.message
    assert "pytest" not in item.message
    assert item.mend


def test_the_other_supervisor_is_named(tmp_path: Path) -> None:
    """A real second process with the metadata of the other package on its path."""
    info = tmp_path / "supervisor-4.2.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: supervisor\nVersion: 4.2.5\n")
    code = "from pathlib import Path; from supervisor.doctor import _names; print(_names().message)"
    root = Path(doctor.__file__).parent.parent
    said = subprocess.check_output(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": f"{root}:{tmp_path}"}, text=True, cwd=tmp_path
    )
    assert said.strip() == "the PyPI package supervisor has the same import name"


def test_a_person_s_own_worker_module_is_named(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("")
    code = "from supervisor.doctor import _names; item = _names(); print(item.ok, item.message)"
    root = Path(doctor.__file__).parent.parent
    said = subprocess.check_output(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
        env={**os.environ, "PYTHONPATH": str(root)},
        text=True,
        cwd=tmp_path,
    )
    assert said.startswith("False ")
    assert "worker from" in said


@pytest.mark.skipif(not Path("/proc/sys").is_dir(), reason="needs a folder where even root cannot write")
def test_a_folder_that_cannot_be_written() -> None:
    item = looked_at(Path("/proc/sys/runs"))["run folder"]
    assert not item.ok
    assert item.mend == "choose another run.dir"


def test_the_file_system_is_the_one_around_the_folder(tmp_path: Path) -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    assert file_system_of(tmp_path) not in (None, "proc")


def test_a_file_system_without_room_or_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(doctor.fcntl, "flock", no_locks)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    items = looked_at(tmp_path)
    assert "No locks available" in items["file locks"].message
    assert not items["free space"].ok


def test_a_part_of_slurm_is_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sbatch", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    item = looked_at(tmp_path)["slurm"]
    assert not item.ok
    assert item.message == "squeue, scontrol, scancel not found"


def test_a_controller_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "scontrol", "scancel"):
        program(tmp_path, name, "exit 0")
    program(tmp_path, "squeue", 'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1')
    (tmp_path / "slurm.conf").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    items = looked_at(tmp_path)
    assert not items["slurm"].ok
    assert "Unable to contact slurm controller" in items["slurm"].message
    assert items["accounting"].message == "no sacct: not needed"


@pytest.mark.slurm
def test_a_real_controller_answers(tmp_path: Path, on_slurm: Cluster) -> None:
    items = looked_at(tmp_path)
    assert items["slurm"].message == "the controller answers"
    assert items["supervisor's job"].ok, items["supervisor's job"]
    assert items["submitting from nodes"].message == "every partition takes jobs from the nodes (AllocNodes)"


def test_configuration_check_and_doctor_stay_light(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import supervisor.config, supervisor.check, supervisor.doctor\n"
        f"supervisor.doctor.examine(Path({str(tmp_path)!r}))\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'accelerate', 'datasets', 'submitit'} & sys.modules.keys()))"
    )
    root = Path(doctor.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "PATH": str(tmp_path)}
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True, cwd=tmp_path)
    assert said.strip() == "[]"
