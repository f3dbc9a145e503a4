"""What only the real Slurm can show: worlds of several tasks, signals, preemption, and a person's settings."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm import parsing
from slurm.job import JobRequest, JobState, JobStatus, Resources
from slurm.local_cluster.cluster import Cluster
from slurm.scheduler import SchedulerError, SlurmScheduler
from supervisor.exclusion import fits, fitting
from tests.waiting import eventually, keeps_what_it_knows
from worker.agent import JOB_IS_ENDING

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("on_slurm")]
HOSTILE = ["sp ace", "it's", 'dou"ble', "$HOME", "`tick`", "ünïç", "semi;colon", "a,b", "{b}*?"]
Submit = Callable[[JobRequest], str]


@pytest.fixture
def scheduler() -> SlurmScheduler:
    return SlurmScheduler()


@pytest.fixture
def submit(scheduler: SlurmScheduler, on_slurm: Cluster) -> Iterator[Submit]:
    """Submits, and leaves an idle cluster."""
    submitted: list[str] = []

    def submit(job: JobRequest) -> str:
        submitted.append(scheduler.submit(job))
        return submitted[-1]

    yield submit
    for job_id in submitted:
        scheduler.cancel(job_id)
    eventually(lambda: all(status.state.is_over for status in scheduler.look(submitted).values()))
    on_slurm.wait_until_idle()


def request(folder: Path, entry: str = "obey", name: str = "hf-0a0b0c0d", **changes: object) -> JobRequest:
    here = Resources(time_limit="5", environment={"PYTHONPATH": str(Path(__file__).parent)}, **changes)  # type: ignore[arg-type]
    return JobRequest(name, f"job_entries:{entry}", (str(folder),), folder / "jobs", here, comment="a0007")


def noted(folder: Path, what: str, job_id: str, restart: int = 0, rank: int = 0) -> Any:
    path = folder / f"{what}-{job_id}-{restart}-{rank}"
    eventually(path.exists)
    return json.loads(path.read_text())


def status(scheduler: SlurmScheduler, job_id: str) -> JobStatus:
    return scheduler.look([job_id])[job_id]


def test_two_nodes_with_two_tasks_are_one_world(submit: Submit, scheduler: SlurmScheduler, tmp_path: Path) -> None:
    job_id = submit(request(tmp_path, nodes=2, tasks_per_node=2, cpus_per_task=1))
    starts = [noted(tmp_path, "started", job_id, rank=rank) for rank in range(4)]
    assert [(start["rank"], start["local_rank"], start["world"]) for start in starts] == [
        (0, 0, 4),
        (1, 1, 4),
        (2, 0, 4),
        (3, 1, 4),
    ]
    assert starts[0]["requeue"] == [sys.executable, "-m", "slurm.requeue", job_id]
    assert starts[0]["environment"]["PYTHONSAFEPATH"] == "1"
    assert len(status(scheduler, job_id).nodes) == 2


def test_the_attempt_is_in_the_comment(submit: Submit, on_slurm: Cluster, tmp_path: Path) -> None:
    job_id = submit(request(tmp_path))
    assert "Comment=a0007 " in on_slurm.ask("scontrol", "show", "-o", "job", job_id)


@pytest.mark.parametrize("name", HOSTILE)
def test_folders_of_any_name(submit: Submit, scheduler: SlurmScheduler, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "go-hf-0a0b0c0d").write_text("0")
    job_id = submit(request(folder))
    assert eventually(lambda: (now := status(scheduler, job_id).state).is_over and now) is JobState.COMPLETED
    assert (folder / "jobs" / f"{job_id}_0_log.out").exists()


def test_a_persons_settings_change_nothing(
    submit: Submit, scheduler: SlurmScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_slurm: Cluster
) -> None:
    for name, value in {
        "SQUEUE_STATES": "COMPLETED",
        "SQUEUE_PARTITION": "nowhere",
        "SBATCH_PARTITION": "high",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_EXPORT": "NONE",
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "9",
        "SLURM_TIME_FORMAT": "relative",
        "SCANCEL_STATE": "PENDING",
    }.items():
        monkeypatch.setenv(name, value)
    job_id = submit(request(tmp_path))
    assert noted(tmp_path, "started", job_id)["world"] == 1
    assert [job.job_id for job in scheduler.find("hf-0a0b0c0d")] == [job_id]
    assert "Partition=low" in on_slurm.ask("scontrol", "show", "-o", "job", job_id)
    assert "Requeue=1" in on_slurm.ask("scontrol", "show", "-o", "job", job_id)
    scheduler.cancel(job_id)
    eventually(lambda: status(scheduler, job_id).state is JobState.CANCELLED)


def test_a_job_without_srun_is_one_process_and_gets_the_batch_steps_signals(
    submit: Submit, on_slurm: Cluster, tmp_path: Path
) -> None:
    job_id = submit(replace(request(tmp_path, "note_signals", nodes=2), use_srun=False))
    start = noted(tmp_path, "started", job_id)
    assert (start["rank"], start["world"]) == (0, 1)
    on_slurm.ask("scancel", "--batch", "--signal=USR2", job_id)
    assert noted(tmp_path, "signals", job_id) == ["SIGUSR2"]


def test_a_job_without_srun_can_submit(submit: Submit, scheduler: SlurmScheduler, tmp_path: Path) -> None:
    job_id = submit(replace(request(tmp_path, "submit_another", name="hs-0a0b0c0d"), use_srun=False))
    other = noted(tmp_path, "submitted", job_id)
    start = noted(tmp_path, "started", other)
    assert (start["job_id"], start["name"], start["world"]) == (other, "hf-0a0b0c0d", 1)
    scheduler.cancel(other)


def test_a_job_that_was_queued_while_sbatch_failed_runs_all_the_same(
    scheduler: SlurmScheduler, on_slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    said = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    sbatch.write_text(f'#!/bin/sh\n{shutil.which("sbatch")} "$@" >&2\necho "{said}" >&2\nexit 1\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=os.pathsep)
    with pytest.raises(SchedulerError, match="Socket timed out") as caught:
        scheduler.submit(request(tmp_path))
    assert not caught.value.answered
    (job,) = scheduler.find("hf-0a0b0c0d")
    assert noted(tmp_path, "started", job.job_id)["name"] == "hf-0a0b0c0d"
    (tmp_path / "go-hf-0a0b0c0d").write_text("0")
    eventually(lambda: status(scheduler, job.job_id).state is JobState.COMPLETED)
    on_slurm.wait_until_idle()


def test_a_bad_partition_is_refused_by_slurm_in_its_words(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match="Invalid partition name specified") as caught:
        scheduler.submit(request(tmp_path, partition="nowhere"))
    assert caught.value.answered
    assert str(caught.value).count("Invalid partition name specified") == 1
    with pytest.raises(SchedulerError, match="Invalid partition name specified"):
        scheduler.test_only(request(tmp_path, partition="nowhere"))


def test_what_slurm_would_wait_for_for_ever_is_told_before(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    with pytest.raises(SchedulerError, match="not available"):
        scheduler.test_only(request(tmp_path, nodes=9))


def test_slurm_itself_tells_how_many_nodes_can_be_spared(scheduler: SlurmScheduler, tmp_path: Path) -> None:
    nodes = ["n1", "n2", "n3"]
    job, without = fitting(scheduler, lambda left_out: replace(request(tmp_path), exclude_nodes=tuple(left_out)), nodes)
    assert (list(without), job.exclude_nodes) == (["n2", "n3"], ("n2", "n3"))
    assert not fits(scheduler, replace(request(tmp_path, nodes=3), exclude_nodes=("n1",)))


def test_a_held_job_is_held_until_released(submit: Submit, scheduler: SlurmScheduler, tmp_path: Path) -> None:
    job_id = submit(request(tmp_path, sbatch={"hold": True}))
    assert status(scheduler, job_id).state is JobState.HELD
    scheduler.release(job_id)
    noted(tmp_path, "started", job_id)


def test_a_pending_job_is_changed(submit: Submit, scheduler: SlurmScheduler, on_slurm: Cluster, tmp_path: Path) -> None:
    job_id = submit(request(tmp_path, sbatch={"hold": True}))
    scheduler.change(job_id, exclude_nodes=["n1", "n2"], time_limit="3", partition="high")
    shown = on_slurm.ask("scontrol", "show", "-o", "job", job_id)
    assert parsing.nodes(parsing.fields(shown)["ExcNodeList"]) == ("n1", "n2")
    assert "TimeLimit=00:03:00 " in shown
    assert "Partition=high " in shown
    scheduler.change(job_id, exclude_nodes=[])
    assert "ExcNodeList=(null) " in on_slurm.ask("scontrol", "show", "-o", "job", job_id)


def test_nodes_and_what_an_administrator_says_of_them(scheduler: SlurmScheduler, on_slurm: Cluster) -> None:
    on_slurm.ask("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=kernel: new | old")
    try:
        nodes = scheduler.nodes(["n1", "n2"])
    finally:
        on_slurm.ask("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert nodes.keys() == {"n1", "n2"}
    assert (nodes["n2"].is_draining, nodes["n2"].is_down, nodes["n2"].why) == (True, False, "kernel: new | old")
    assert not nodes["n1"].is_draining
    assert scheduler.nodes([]) == {}
    assert scheduler.message_timeout_s() == 10


def test_a_pending_jobs_limit_is_seen_and_changed(
    submit: Submit, scheduler: SlurmScheduler, on_slurm: Cluster, tmp_path: Path
) -> None:
    job_id = submit(request(tmp_path, sbatch={"hold": True}))
    assert status(scheduler, job_id).limit_s == 300
    scheduler.change(job_id, time_limit=parsing.duration_text(180))
    assert status(scheduler, job_id).limit_s == 180
    assert status(scheduler, job_id).preempted_at is None


def test_reservations(scheduler: SlurmScheduler, on_slurm: Cluster) -> None:
    made = ["reservationname=maint", "starttime=now+3600", "duration=60", "nodes=n[1-2]", "user=root", "flags=maint"]
    on_slurm.ask("scontrol", "create", "reservation", *made)
    try:
        (found,) = scheduler.reservations()
    finally:
        on_slurm.ask("scontrol", "delete", "reservationname=maint")
    assert (found.name, found.nodes) == ("maint", ("n1", "n2"))
    assert found.starts_at is not None
    assert found.ends_at == found.starts_at + 3600


def test_who_cancelled_is_known_to_accounting(
    submit: Submit, scheduler: SlurmScheduler, accounting: Cluster, tmp_path: Path
) -> None:
    job_id = submit(request(tmp_path))
    noted(tmp_path, "started", job_id)
    assert scheduler.cancelled_by(job_id) is None
    scheduler.cancel(job_id)
    eventually(lambda: status(scheduler, job_id).state is JobState.CANCELLED)
    assert scheduler.cancelled_by(job_id) == str(os.getuid())


def test_without_an_answer_from_accounting_jobs_go_on(
    submit: Submit, scheduler: SlurmScheduler, accounting: Cluster, tmp_path: Path
) -> None:
    accounting.kill_accounting()
    try:
        job_id = submit(request(tmp_path))
        noted(tmp_path, "started", job_id)
        scheduler.cancel(job_id)
        eventually(lambda: status(scheduler, job_id).state is JobState.CANCELLED)
        assert scheduler.cancelled_by(job_id) is None
    finally:
        accounting.start_accounting()
    assert eventually(lambda: scheduler.cancelled_by(job_id)) == str(os.getuid())  # the controller has kept it


def requeue(start: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Run the command that an agent is given."""
    return subprocess.run(start["requeue"], capture_output=True, text=True, check=False)


def test_the_requeue_command_undoes_no_persons_word(submit: Submit, scheduler: SlurmScheduler, tmp_path: Path) -> None:
    job_id = submit(request(tmp_path, "note_signals"))
    start = noted(tmp_path, "started", job_id)
    refused = requeue(start)
    assert (refused.returncode, "is RUNNING, and is not being preempted" in refused.stdout) == (1, True)
    scheduler.cancel(job_id)
    noted(tmp_path, "signals", job_id)
    refused = requeue(start)
    assert (refused.returncode, "is ending" in refused.stdout) == (JOB_IS_ENDING, True)
    eventually(lambda: status(scheduler, job_id).state is JobState.CANCELLED)


def test_the_requeue_command_brings_a_preempted_job_back(
    submit: Submit, scheduler: SlurmScheduler, tmp_path: Path
) -> None:
    job_id = submit(request(tmp_path, "note_signals", nodes=3, tasks_per_node=2))
    start = noted(tmp_path, "started", job_id)
    rival = submit(request(tmp_path, name="hf-rival", nodes=3, tasks_per_node=2, partition="high"))
    assert "SIGTERM" in noted(tmp_path, "signals", job_id)
    assert requeue(start).returncode == 0
    noted(tmp_path, "started", rival)
    now = status(scheduler, job_id)
    assert (now.state, now.why, now.restarts) == (JobState.PENDING, "BeginTime", 1)
    scheduler.cancel(rival)
    eventually(lambda: scheduler.start_now(job_id) or status(scheduler, job_id).state is JobState.RUNNING)
    assert noted(tmp_path, "started", job_id, restart=1)["restart"] == 1


def test_a_dead_controller_is_an_error_and_no_ending(
    submit: Submit, scheduler: SlurmScheduler, on_slurm: Cluster, tmp_path: Path
) -> None:
    job_id = submit(request(tmp_path))
    noted(tmp_path, "started", job_id)
    keeps_what_it_knows(on_slurm, job_id)
    on_slurm.kill_controller()
    try:
        with pytest.raises(SchedulerError) as caught:
            scheduler.look([job_id])
    finally:
        on_slurm.start_controller()
    assert not caught.value.answered
    eventually(lambda: answers(scheduler))
    assert status(scheduler, job_id).state is JobState.RUNNING


def answers(scheduler: SlurmScheduler) -> bool:
    try:
        scheduler.find("hf-any")
    except SchedulerError:
        return False
    return True
