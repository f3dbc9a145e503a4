"""A run's folder may be somebody else's: it is data, never code; jobs/, which is code, is one's own or refused."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm import submission
from slurm.job import JobRequest, RequestError, Resources
from slurm.scheduler import sbatch_text
from slurm.submission import make_private
from supervisor.cli import main
from supervisor.job_request import worker_request
from supervisor.runs import RunError, find_run, open_or_create
from tests.supervisor_room.stage import Stage, config
from worker.contract.manifest import MANIFEST
from worker.contract.run_dir import RunDir
from worker.contract.yaml_file import YamlError, parse_yaml

HANGS_AFTER_S = 60
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12)
)


@pytest.fixture
def _ends() -> Iterator[None]:
    """What hangs is a failure, and does not hang the tests."""

    def hung(number: int, frame: Any) -> None:
        raise AssertionError(f"it hangs: nothing for {HANGS_AFTER_S} s")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(HANGS_AFTER_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that trained and saved."""
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.train(20)
    stage.settle()
    return stage.run_dir


FILES = {
    "history": lambda run: run.history,
    "journal": lambda run: run.journal,
    "config": lambda run: run.config,
    "lease": lambda run: run.lease,
    "manifest": lambda run: run.checkpoint(10) / MANIFEST,
}


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(b"[\n")
        file.truncate(1 << 40)  # a hole: it takes no room on the disk


@pytest.mark.parametrize("moment", ["1e300", "-1e15"])
def test_times_that_no_calendar_has_are_told_all_the_same(run: RunDir, moment: str) -> None:
    run.journal.write_text(re.sub(r'"time":[^,]*', f'"time":{moment}', run.journal.read_text()))
    for verb in (["status", str(run.path)], ["log", str(run.path)], ["report", str(run.path)]):
        assert main(verb) == 0


def test_a_run_that_may_not_be_read_does_not_hide_the_others(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    other = run.path.with_name("loop")
    shutil.copytree(run.path, other)
    RunDir(other).history.unlink(missing_ok=True)
    RunDir(other).history.symlink_to(RunDir(other).history)
    assert main(["status", "--dir", str(run.path.parent)]) == 0
    said = capsys.readouterr().out
    assert "unreadable" in said
    assert run.path.name in said


@pytest.mark.usefixtures("_ends")
@pytest.mark.parametrize("make", [pipe, endless, huge], ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", FILES)
def test_readers_do_not_hang_or_fill_the_memory(
    run: RunDir, name: str, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = FILES[name](run)
    path.unlink(missing_ok=True)
    make(path)
    for verb in (["status", "--dir", str(run.path.parent)], ["status", str(run.path)], ["log", str(run.path)]):
        assert main(verb) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err
    assert main(["report", str(run.path), "--output", str(run.path.parent / "page.html")]) in (0, 2)


@pytest.mark.usefixtures("_ends")
@pytest.mark.parametrize("make", [pipe, Path.mkdir], ids=["pipe", "folder"])
@pytest.mark.parametrize("name", ["history", "lease", "directive", "request"])
def test_who_would_supervise_refuses_them_in_one_line(
    run: RunDir, name: str, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = getattr(run, name)
    path.unlink(missing_ok=True)
    make(path)
    before = run.journal.read_bytes()
    for verb, *options in (["pin", "10"], ["rollback", "--to", "10"], ["resume"], ["stop"]):
        assert main([verb, str(run.path), *options]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{path}: is ")
        assert "move it away" in line
    assert name == "request" or not run.request.exists()
    assert run.journal.read_bytes() == before


@pytest.mark.usefixtures("_ends")
@pytest.mark.parametrize("make", [pipe, endless], ids=lambda make: make.__name__)
def test_detect_reads_regular_files_only(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "log.json")
    assert main(["detect", str(tmp_path / "log.json")]) == 2


@pytest.mark.usefixtures("_ends")
@pytest.mark.parametrize(
    "text",
    [
        '!!python/object/apply:os.system ["touch {mark}"]',
        'run: !!python/object/new:os.system ["touch {mark}"]',
        BOMB,
        "a: &a [*a]",
    ],
    ids=["tag", "tag below a key", "aliases that grow", "an alias of itself"],
)
def test_a_configuration_is_data(run: RunDir, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    mark = run.path.parent / "mark"
    run.config.write_text(text.replace("{mark}", str(mark)))
    for verb in ("status", "log", "report"):
        assert main([verb, str(run.path)]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert not mark.exists()
    with pytest.raises(YamlError):
        parse_yaml(run.config.read_text())


def request(folder: Path, **fields: Any) -> JobRequest:
    return JobRequest(name="hf-1", entry="worker.agent:main", args=("x",), folder=folder, resources=Resources(**fields))


def test_jobs_is_private_whatever_the_umask_and_the_rest_is_the_groups(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    before = os.umask(0o002)
    try:
        run = open_or_create(config(tmp_path))
        make_private(run.jobs)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [run.path, *run.path.iterdir()]}
    assert modes.pop("jobs") & 0o777 == 0o700
    assert {mode & 0o777 for mode in modes.values()} == {0o775, 0o664}
    assert all(mode & stat.S_ISGID for name, mode in modes.items() if (run.path / name).is_dir())


@pytest.mark.parametrize("harm", ["a link", "somebody else's", "a pickle of somebody else's"])
def test_jobs_of_somebody_else_is_refused(tmp_path: Path, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = tmp_path / "jobs"
    if harm == "a link":
        (tmp_path / "elsewhere").mkdir()
        jobs.symlink_to(tmp_path / "elsewhere")
    else:
        jobs.mkdir()
    if harm == "a pickle of somebody else's":
        (jobs / "7_submitted.pkl").touch()
        os.chown(jobs / "7_submitted.pkl", 12345, -1)
    if harm == "somebody else's":
        monkeypatch.setattr(submission.os, "geteuid", lambda: 12345)
    with pytest.raises(RequestError, match="run as code; remove it"):
        submission.submit("slurm", request(jobs))


@pytest.mark.parametrize("mode", [0o700, 0o770, 0o707])
def test_the_job_looks_at_it_once_more_before_it_unpickles(tmp_path: Path, mode: int) -> None:
    jobs = tmp_path / "it's $(touch mark)"
    jobs.mkdir()
    jobs.chmod(mode)
    text = sbatch_text(request(jobs))
    assert text.index("is not yours alone") < text.index("submitit.core._submit")
    script = [line for line in text.splitlines() if not line.startswith("srun")]
    done = subprocess.run(
        ["bash", "-c", "\n".join([*script, "echo unpickled"])], cwd=tmp_path, capture_output=True, text=True
    )
    assert ("unpickled" in done.stdout) == (mode == 0o700)
    assert ("is not yours alone" in done.stderr) == (mode != 0o700)
    assert not (tmp_path / "mark").exists()


NAMES = ["with space", "it's", 'q"q', "$(touch mark)", "`touch mark`", "; touch mark", "-dash", "ü漢", "*", "~"]


def make(folder: Path) -> tuple[RunDir, str]:
    """A run in a folder, and its batch text."""
    run = RunDir(folder / "r")
    text = sbatch_text(worker_request(config(folder), run, "hf-1", 1))
    return open_or_create(config(folder)), text


@pytest.mark.parametrize("name", [*NAMES, "new\nline", "per%cent", "back\\slash", "x" * 300])
def test_folders_with_odd_names_work_or_are_refused_in_one_line(tmp_path: Path, name: str) -> None:
    if name not in NAMES:
        with pytest.raises((RequestError, RunError, OSError)) as refused:  # cli.py tells each in one line
            make(tmp_path / name)
        assert len(str(refused.value).splitlines()) == 1
        return
    run, text = make(tmp_path / name)
    script = "\n".join(line for line in text.splitlines() if not line.startswith("srun"))
    done = subprocess.run(["bash", "-c", script + "\necho through"], cwd=tmp_path, capture_output=True, text=True)
    assert "through" in done.stdout, done.stderr
    assert not (tmp_path / "mark").exists()
    assert find_run("r", tmp_path / name).path == run.path


def test_secrets_are_in_no_log_report_or_batch_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = "hunter2-never-shown"
    stage = Stage(tmp_path, cluster={"environment": {"API_KEY": secret}})
    stage.settle()
    stage.start_job()
    stage.train(20)
    stage.settle()
    folder = str(stage.run_dir.path)
    for verb in (["status", folder, "--json"], ["log", folder], ["log", folder, "--json"], ["report", folder]):
        assert main(verb) == 0
    job = stage.scheduler.requests[stage.job_id]
    assert secret in job.resources.environment.values()
    shown = (
        capsys.readouterr().out
        + sbatch_text(job)
        + stage.run_dir.report.read_text()
        + stage.run_dir.journal.read_text()
    )
    assert secret not in shown


def test_the_job_gets_its_environment_from_a_file_of_ones_own(tmp_path: Path) -> None:
    job = request(tmp_path / "jobs", environment={"API_KEY": "it's `x` $y"})
    make_private(job.folder)
    submission._publish_environment(job)
    (file,) = job.folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    script = "\n".join(line for line in sbatch_text(job).splitlines() if not line.startswith("srun"))
    done = subprocess.run(["bash", "-c", script + "\nprintenv API_KEY"], capture_output=True, text=True, check=False)
    assert done.stdout == "it's `x` $y\n"
