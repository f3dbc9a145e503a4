"""What reaches Slurm: the environment, the batch text, and errors that say what was run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import commands
from slurm.commands import SchedulerError, clean_environment
from slurm.job import JobRequest, RequestError, Resources
from slurm.scheduler import LocalScheduler, SlurmScheduler, choose, sbatch_text, slurm_is_configured


@pytest.mark.parametrize(
    "name",
    [
        *("SQUEUE_STATES", "SACCT_FORMAT", "SINFO_FORMAT", "SCANCEL_NAME", "SLURM_JOB_ID", "SLURM_TIME_FORMAT"),
        *(
            "SLURM_CLUSTERS",
            "SBATCH_PARTITION",
            "SBATCH_NO_REQUEUE",
            "SBATCH_EXPORT",
            "SRUN_DEBUG",
            "SUBMITIT_EXECUTOR",
        ),
    ],
)
def test_a_persons_settings_do_not_reach_slurm(name: str) -> None:
    assert clean_environment({name: "x", "HOME": "/h"}) == {"HOME": "/h"}


def test_where_the_controller_is_stays() -> None:
    environment = {"SLURM_CONF": "/c", "SLURM_JWT": "j", "PATH": "/bin"}
    assert clean_environment(environment) == environment


def test_the_account_of_the_shell_counts_where_the_config_has_none() -> None:
    shell = {"SBATCH_ACCOUNT": "theirs"}
    assert clean_environment(shell) == shell
    assert clean_environment(shell, {"account"}) == {}


def test_os_environ_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    before = dict(os.environ)
    scheduler = LocalScheduler(tmp_path)
    job_id = scheduler.submit(JobRequest("hf-1", "os:getpid", (), tmp_path))
    assert dict(os.environ) == before
    scheduler.cancel(job_id)


def test_an_error_carries_what_was_run_and_what_it_said() -> None:
    with pytest.raises(SchedulerError, match="bash: first second") as caught:
        commands.call(["bash", "-c", "echo first >&2; echo second >&2; exit 3"], os.environ)
    assert caught.value.argv == ("bash", "-c", "echo first >&2; echo second >&2; exit 3")
    assert caught.value.stderr == "first\nsecond\n"
    assert caught.value.answered


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Connection reset by peer",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
    ],
)
def test_no_answer_is_told_from_a_no(said: str) -> None:
    assert not SchedulerError("squeue: it failed", ["squeue"], said).answered
    assert SchedulerError("x", ["sbatch"], "Batch job submission failed: Invalid partition name specified").answered


def test_a_program_that_hangs_is_ended() -> None:
    with pytest.raises(SchedulerError, match="timed out after") as caught:
        commands.call(["sleep", "60"], os.environ, timeout_s=0.1)
    assert not caught.value.answered


def test_a_program_that_is_missing() -> None:
    with pytest.raises(SchedulerError, match="no-such-program is not installed here"):
        commands.call(["no-such-program"], os.environ)


def fake_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Put shell scripts by these names on the PATH, alone."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)


NO_SOURCE = "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"


def test_auto_is_local_without_sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not slurm_is_configured()
    assert isinstance(choose("auto"), LocalScheduler)
    with pytest.raises(SchedulerError, match="no sbatch"):
        choose("slurm")


def test_auto_is_local_where_sbatch_has_no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm(tmp_path, monkeypatch, sbatch="exit 1", scontrol=NO_SOURCE)
    assert isinstance(choose("auto"), LocalScheduler)


def test_auto_is_slurm_where_there_is_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    fake_slurm(tmp_path, monkeypatch, sbatch=down, squeue=down, scontrol="echo localhost")
    scheduler = choose("auto")
    assert isinstance(scheduler, SlurmScheduler)
    with pytest.raises(SchedulerError) as caught:
        scheduler.find("hf-1")
    assert not caught.value.answered


def test_a_configuration_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_slurm(tmp_path, monkeypatch, sbatch="exit 0")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "gone.conf"))
    with pytest.raises(SchedulerError, match=r"gone\.conf"):
        choose("auto")


def test_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match="cloud"):
        choose("cloud")


def test_local_ignores_slurm() -> None:
    assert isinstance(choose("local"), LocalScheduler)


def test_accounting_that_fails_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    fake_slurm(tmp_path, monkeypatch, squeue="", scontrol=gone, sacct="echo 'accounting is disabled' >&2; exit 1")
    assert SlurmScheduler().look(["12"]) == {}
    assert SlurmScheduler().cancelled_by("12") is None


def test_accounting_knows_a_job_that_the_controller_has_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    fake_slurm(tmp_path, monkeypatch, squeue="", scontrol=gone, sacct="echo '12|TIMEOUT|1|2|0:0|n1|hf-1'")
    status = SlurmScheduler().look(["12"])["12"]
    assert (status.state.name, status.source) == ("TIMEOUT", "sacct")


def test_the_cluster_that_sbatch_names_is_asked_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm(
        tmp_path,
        monkeypatch,
        sbatch="echo Submitted batch job 12 on cluster nautilus",
        squeue=f'echo "$@" > {tmp_path}/asked',
    )
    scheduler = SlurmScheduler()
    assert scheduler.submit(JobRequest("hf-1", "a:b", (), tmp_path / "jobs")) == "12"
    assert scheduler.find("hf-1") == []
    assert "--clusters=nautilus" in (tmp_path / "asked").read_text()


def a_job(folder: Path = Path("/runs/x/jobs"), **changes: object) -> JobRequest:
    return JobRequest("hf-1", "a.b:c", (), folder, Resources(**changes))  # type: ignore[arg-type]


def test_the_batch_text() -> None:
    job = JobRequest(
        "hf-00112233",
        "worker.agent:main",
        ("/runs/x",),
        Path("/runs/it's x/jobs"),
        Resources(
            nodes=2,
            tasks_per_node=4,
            cpus_per_task=8,
            gpus_per_node=4,
            time_limit="1-00:00:00",
            partition="gpu",
            exclude="n7",
            setup=("module load cuda",),
            environment={"A": "b $c"},
            srun=("--mpi=none",),
            container="apptainer exec --nv x.sif",
            python="/opt/py thon",
            sbatch={"mail-user": "a@b", "exclusive": True, "nice": None},
        ),
        exclude_nodes=("n8", "n9"),
        comment="a0003",
    )
    lines = sbatch_text(job).splitlines()
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert options == {
        "comment=a0003",
        "cpus-per-task=8",
        "dependency=singleton",
        "exclude=n7,n8,n9",
        "exclusive",
        "gpus-per-node=4",
        "job-name=hf-00112233",
        "mail-user=a@b",
        "no-kill",
        "nodes=2",
        "ntasks-per-node=4",
        "open-mode=append",
        "partition=gpu",
        "requeue",
        "signal=USR2@120",
        "time=1-00:00:00",
        """output='/runs/it'"'"'s x/jobs/%j_0_log.out'""",
        """error='/runs/it'"'"'s x/jobs/%j_0_log.err'""",
    }
    its_own = """. '/runs/it'"'"'s x/jobs/hf-00112233.env'"""
    order = [lines.index(line) for line in (its_own, "module load cuda", "export PYTHONSAFEPATH=1")]
    assert order == sorted(order)
    its = """'/runs/it'"'"'s x/jobs/'"${SLURM_JOB_ID}_submitted.pkl\""""
    assert f"""[ -e {its} ] || cp '/runs/it'"'"'s x/jobs/hf-00112233.pkl' {its}""" in lines
    (srun,) = [line for line in lines if line.startswith("srun ")]
    assert "--kill-on-bad-exit=0 --wait=0 --no-kill --cpus-per-task=8 --mpi=none" in srun
    assert "apptainer exec --nv x.sif '/opt/py thon' -u -m submitit.core._submit" in srun


def test_without_srun_the_program_takes_the_place_of_the_batch_shell() -> None:
    job = JobRequest("hs-1", "a:b", (), Path("/runs/x/jobs"), use_srun=False, requeue=False)
    text = sbatch_text(job)
    assert "srun" not in text
    assert f"\nexec {sys.executable} " in text
    assert "#SBATCH --no-requeue" in text
    assert "--time" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partition": "gpu\nrm -rf /"}, "newline"),
        ({"sbatch": {"mail-user": "a\nb"}}, "newline"),
        ({"sbatch": {"job name": "x"}}, "long name"),
        ({"sbatch": {"job-name": "x"}}, "set by the supervisor"),
        ({"sbatch": {"dependency": "x"}}, "set by the supervisor"),
        ({"environment": {"A B": "x"}}, "name of a variable"),
        ({"environment": {"A=$(x)": "x"}}, "name of a variable"),
        ({"srun": ("a\nb",)}, "newline"),
        ({"container": "a\nb"}, "newline"),
    ],
)
def test_what_a_batch_script_cannot_carry_is_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        a_job(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("folder", ["/runs/a\nb/jobs", "/runs/%j/jobs", "/runs/a\\b/jobs", "relative/jobs"])
def test_folders_that_slurm_would_misread_are_refused_in_one_line(folder: str) -> None:
    with pytest.raises(RequestError) as caught:
        a_job(Path(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a b", "a,b", "", "ü", "a/b", "a\n"])
def test_names_that_squeue_cannot_find_are_refused(name: str) -> None:
    with pytest.raises(RequestError):
        JobRequest(name, "a:b", (), Path("/x"))


def test_the_room_is_light() -> None:
    code = (
        "import sys, slurm.scheduler; print(sorted({'submitit', 'cloudpickle', 'numpy', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
