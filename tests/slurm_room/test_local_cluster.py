"""A real cluster comes up, and goes: whatever ends its owner, nothing of it stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm import processes
from slurm.local_cluster import cluster, configuration
from slurm.local_cluster.__main__ import main
from slurm.local_cluster.accounting import database_argv
from tests.waiting import eventually

pytestmark = pytest.mark.slurm
RUN = [sys.executable, "-m", "slurm.local_cluster", "run", "--nodes", "2", "--"]


@pytest.fixture(autouse=True)
def _needs_slurm(slurm_cluster: cluster.Cluster) -> None:
    """Skips where the packages are missing."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: sockets are made below it."""
    with tempfile.TemporaryDirectory(prefix="hf-") as name:
        yield Path(name)


@pytest.fixture
def owner(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`run` with a job and a command that both would last, once both run; its temporary folder is this test's own."""
    job = f"trap '' TERM; touch {folder}/job; sleep 1000"
    script = f'sbatch -o /dev/null --wrap "{job}"; touch {folder}/command; sleep 999'
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen([*RUN, "bash", "-c", script], env=environment, stdout=subprocess.DEVNULL) as owner:
        try:
            eventually(lambda: (folder / "job").exists() and (folder / "command").exists(), timeout_s=30)
            yield owner
        finally:
            owner.kill()


def tree(owner: subprocess.Popen[bytes]) -> list[processes.Process]:
    """Everything below the owner, now."""
    return [processes.identify(pid) for pid in processes.descendants(owner.pid)]


def commands_of(found: list[processes.Process]) -> set[str]:
    return {Path(f"/proc/{process.pid}/comm").read_text().strip() for process in found}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_the_owner(owner: subprocess.Popen[bytes], folder: Path, number: signal.Signals) -> None:
    before = tree(owner)
    assert {"munged", "slurmctld", "slurmd", "slurmstepd", "sleep"} <= commands_of(before)
    owner.send_signal(number)
    owner.wait()
    eventually(lambda: not any(processes.is_alive(process) for process in before))
    eventually(lambda: not list(folder.glob("higgsfield-slurm-*")))
    if number is not signal.SIGKILL:
        assert owner.returncode == 128 + number


def test_run_gives_the_commands_exit_code_and_a_cluster(tmp_path: Path) -> None:
    script = f"sinfo -h -o %N > {tmp_path}/nodes; echo $SLURM_CONF > {tmp_path}/conf; exit 7"
    assert subprocess.run([*RUN, "bash", "-c", script], check=False).returncode == 7
    assert set((tmp_path / "nodes").read_text().split()) == {"n[1-2]"}
    assert not Path((tmp_path / "conf").read_text().strip()).parent.exists()


def test_accounting_needs_no_more_than_its_packages(accounting: cluster.Cluster) -> None:
    told = "until sacct -X -n -o Account,State | grep -q 'lab *COMPLETED'; do sleep 0.1; done"
    script = f"srun -N1 true; {told}; sacctmgr -n show qos format=name"
    run = [*RUN[:-1], "--accounting", "--", "timeout", "60", "bash", "-c", script]
    done = subprocess.run(run, check=False, capture_output=True)
    assert (done.returncode, done.stdout.split()) == (0, [b"normal"]), done.stderr


def test_a_database_has_its_temporary_tables_in_its_own_folder(folder: Path) -> None:
    """Servers that share one remove each other's at their start, and a cluster fails to come up now and then."""
    assert f"--tmpdir={folder}" in database_argv(folder)


def test_up_and_down(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder / "c"
    assert main(["up", "--nodes", "1", "--folder", str(folder)]) == 0
    assert capsys.readouterr().out == f"export SLURM_CONF={folder}/slurm.conf\n"
    assert main(["up", "--folder", str(folder)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main(["down", "--folder", str(folder)]) == 0
    assert not folder.exists()
    assert main(["down", "--folder", str(folder)]) == 1
    assert "no cluster is up" in capsys.readouterr().err


def test_it_says_which_packages_are_missing_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(configuration, "program", lambda name: None if name in {"munged", "slurmd"} else name)
    assert main(["run", "--", "true"]) == 1
    assert capsys.readouterr().err.strip().endswith("not installed: munge slurmd")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["a folder", "x" * 100])
def test_folders_that_slurm_cannot_use_are_refused_in_one_line(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--folder", str(tmp_path / name)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / name).exists()


@pytest.mark.skipif(not configuration.name_is_loopback(), reason="the machine's name is not 127.0.0.1")
def test_its_daemons_listen_on_loopback_alone(slurm_cluster: cluster.Cluster) -> None:
    lines = slurm_cluster.conf.read_text().splitlines()
    ports = {int(word.partition("=")[2]) for line in lines for word in line.split() if "Port=" in word}
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [local for _, local, _, state, *_ in table if state == "0A"]
    ours = {address for address, _, port in (text.partition(":") for text in listening) if int(port, 16) in ports}
    assert ours == {"0100007F"}


def test_faults_of_one_node_and_of_the_controller(slurm_cluster: cluster.Cluster) -> None:
    slurm_cluster.kill_slurmd("n3")
    slurm_cluster.ask("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=test")
    assert slurm_cluster.node_states()["n3"].startswith("down")
    slurm_cluster.start_slurmd("n3")
    eventually(lambda: slurm_cluster.node_states()["n3"] == "idle")
    slurm_cluster.kill_controller()
    slurm_cluster.start_controller()
    slurm_cluster.wait_until_idle()
    slurm_cluster.stop("n2")
    slurm_cluster.cont("n2")
    slurm_cluster.wait_until_idle()


@pytest.mark.skipif(os.getuid() != 0, reason="the whole session runs without root already")
def test_no_root_is_needed(folder: Path) -> None:
    """The same as a user without rights, from a copy of the package that this user may read."""
    as_nobody = ["runuser", "-u", "nobody", "--", "env", "-i", "PATH=/usr/bin:/usr/sbin:/bin:/sbin"]
    python = next(
        (each for each in (sys.executable, "/usr/bin/python3") if _works([*as_nobody, each, "--version"])), None
    )
    if python is None:
        pytest.skip("no interpreter that the user nobody may start")
    shutil.copytree(Path(cluster.__file__).parents[1], folder / "slurm", ignore=shutil.ignore_patterns("__pycache__"))
    folder.chmod(0o755)
    run = [python, "-B", "-m", "slurm.local_cluster", "run", "--nodes", "1", "--", "srun", "-n1", "id", "-un"]
    done = subprocess.run([*as_nobody, *run], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "nobody\n"), done.stderr


def _works(argv: list[str]) -> bool:
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0
