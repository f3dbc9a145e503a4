"""What the local stand-in does beyond the suite: identity, signals, limits, and what survives whom."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm import local_record, processes
from slurm.job import JobRequest, JobState, RequestError, Resources
from slurm.scheduler import LocalScheduler, SchedulerError
from tests.waiting import eventually

HERE = Path(__file__).parent
HOSTILE = ["sp ace", "it's", 'dou"ble', "$HOME", "`tick`", "ünïç", "semi;colon", "a,b", "{b}*?"]


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[LocalScheduler]:
    scheduler = LocalScheduler(tmp_path / "jobs", kill_wait_s=0.5)
    yield scheduler
    for record in local_record.read_all(tmp_path / "jobs"):
        scheduler.cancel(record.job_id)
        eventually(lambda job_id=record.job_id: scheduler.look([job_id])[job_id].state.is_over)


def request(folder: Path, entry: str = "obey", **changes: object) -> JobRequest:
    here = Resources(environment={"PYTHONPATH": str(HERE)}, **changes)  # type: ignore[arg-type]
    return JobRequest("hf-00112233", f"job_entries:{entry}", (str(folder),), folder / "jobs", here)


def noted(folder: Path, what: str, job_id: str, rank: int = 0) -> dict[str, object]:
    path = folder / f"{what}-{job_id}-0-{rank}"
    eventually(path.exists)
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def ended(scheduler: LocalScheduler, job_id: str) -> JobState:
    return eventually(lambda: (state := scheduler.look([job_id])[job_id].state).is_over and state)


def test_start_of_each_task(scheduler: LocalScheduler, tmp_path: Path) -> None:
    job_id = scheduler.submit(request(tmp_path, tasks_per_node=2))
    for rank in (0, 1):
        start = noted(tmp_path, "started", job_id, rank)
        expected = {"job_id": job_id, "name": "hf-00112233", "restart": 0, "rank": rank, "world": 2, "local_rank": rank}
        assert {key: start[key] for key in expected} == expected
        assert start["requeue"] is None


def test_the_jobs_folder_is_private(scheduler: LocalScheduler, tmp_path: Path) -> None:
    scheduler.submit(request(tmp_path))
    assert (tmp_path / "jobs").stat().st_mode & 0o777 == 0o700


def test_environment_setup_and_safe_path(
    scheduler: LocalScheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slurm.py").write_text("raise SystemExit('a module of the person, in the working directory')")
    monkeypatch.chdir(tmp_path)
    hostile = 'it\'s "$HOME" `x`\nü;'
    here = {"PYTHONPATH": str(HERE), "HOSTILE": hostile}
    job = request(tmp_path, setup=("export FROM_SETUP=$((20 + 1))  # a comment",))
    job_id = scheduler.submit(replace(job, resources=replace(job.resources, environment=here)))
    start = noted(tmp_path, "started", job_id)
    environment = start["environment"]
    assert isinstance(environment, dict)
    assert (environment["HOSTILE"], environment["FROM_SETUP"]) == (hostile, "21")
    assert environment["PYTHONSAFEPATH"] == "1"
    assert str(tmp_path) not in start["path"]  # type: ignore[operator]


@pytest.mark.parametrize("name", HOSTILE)
def test_folders_of_any_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    scheduler = LocalScheduler(folder / "jobs")
    (folder).mkdir()
    (folder / "go-hf-00112233").write_text("0")
    job_id = scheduler.submit(request(folder))
    assert ended(scheduler, job_id) is JobState.COMPLETED


def test_a_returned_code_is_the_exit_code(scheduler: LocalScheduler, tmp_path: Path) -> None:
    (tmp_path / "code").write_text("4")
    job_id = scheduler.submit(request(tmp_path, "give_back"))
    assert ended(scheduler, job_id) is JobState.FAILED
    assert scheduler.look([job_id])[job_id].exit_code == 4


def test_an_entry_that_raises_is_a_failed_job(scheduler: LocalScheduler, tmp_path: Path) -> None:
    job_id = scheduler.submit(request(tmp_path, "give_back"))
    assert ended(scheduler, job_id) is JobState.FAILED
    assert "FileNotFoundError" in (tmp_path / "jobs" / f"{job_id}_0_log.err").read_text()


def test_the_entry_owns_the_signals_and_cancel_waits_before_it_kills(scheduler: LocalScheduler, tmp_path: Path) -> None:
    job_id = scheduler.submit(request(tmp_path, "note_signals"))
    start = noted(tmp_path, "started", job_id)
    assert set(start["dispositions"].values()) == {"0"}  # type: ignore[attr-defined]  # 0 is SIG_DFL
    scheduler.cancel(job_id)
    assert noted(tmp_path, "signals", job_id) == ["SIGTERM"]
    assert ended(scheduler, job_id) is JobState.CANCELLED
    assert scheduler.cancelled_by(job_id)


def test_a_requeue_ends_it_as_a_preemption_does(scheduler: LocalScheduler, tmp_path: Path) -> None:
    job_id = scheduler.submit(request(tmp_path, "note_signals"))
    noted(tmp_path, "started", job_id)
    scheduler.requeue(job_id)
    assert noted(tmp_path, "signals", job_id) == ["SIGTERM"]
    assert ended(scheduler, job_id) is JobState.PREEMPTED
    assert scheduler.cancelled_by(job_id) is None
    scheduler.requeue(job_id)
    assert scheduler.look([job_id])[job_id].state is JobState.PREEMPTED


def test_the_time_limit_warns_and_then_ends(scheduler: LocalScheduler, tmp_path: Path) -> None:
    job = request(tmp_path, "note_signals", time_limit="00:00:03")
    job_id = scheduler.submit(replace(job, signal="USR2@2"))
    assert ended(scheduler, job_id) is JobState.TIMEOUT
    assert noted(tmp_path, "signals", job_id) == ["SIGUSR2", "SIGTERM"]


def test_a_job_lives_as_long_as_one_of_its_tasks(scheduler: LocalScheduler, tmp_path: Path) -> None:
    job_id = scheduler.submit(request(tmp_path))
    noted(tmp_path, "started", job_id)
    os.kill(int(job_id), signal.SIGKILL)
    eventually(lambda: not processes.is_alive(record_of(tmp_path, job_id).process))
    assert scheduler.look([job_id])[job_id].state is JobState.RUNNING
    scheduler.cancel(job_id)
    assert ended(scheduler, job_id) is JobState.CANCELLED


def test_a_job_whose_every_process_was_killed_has_failed(scheduler: LocalScheduler, tmp_path: Path) -> None:
    job_id = scheduler.submit(request(tmp_path))
    noted(tmp_path, "started", job_id)
    for pid in processes.session_members(record_of(tmp_path, job_id).process):
        os.kill(pid, signal.SIGKILL)
    assert ended(scheduler, job_id) is JobState.FAILED


def record_of(folder: Path, job_id: str) -> local_record.Record:
    record = local_record.read(folder / "jobs", job_id)
    assert record is not None
    return record


def a_record(process: processes.Process) -> local_record.Record:
    return local_record.Record(
        job_id=str(process.pid),
        name="hf-1",
        comment=None,
        process=process,
        order=1,
        submitted=1.0,
        limit_s=None,
        warn_signal="USR2",
        warn_before_s=60,
        kill_wait_s=1,
        state=JobState.RUNNING,
    )


@pytest.mark.parametrize("change", [{"started_ticks": 1}, {"boot_id": "another boot"}])
def test_another_process_with_the_same_number_is_not_the_job(tmp_path: Path, change: dict[str, object]) -> None:
    mine = replace(processes.identify(os.getpid()), **change)  # type: ignore[arg-type]
    local_record.publish(tmp_path, a_record(mine))
    scheduler = LocalScheduler(tmp_path)
    assert scheduler.look([str(os.getpid())])[str(os.getpid())].state is JobState.FAILED
    scheduler.cancel(str(os.getpid()))  # We live.
    assert scheduler.find("hf-1") == []


def test_only_a_job_behind_another_of_its_name_waits_for_one(tmp_path: Path) -> None:
    mine = a_record(processes.identify(os.getpid()))
    local_record.publish(tmp_path, replace(mine, state=JobState.PENDING))
    scheduler = LocalScheduler(tmp_path)
    assert scheduler.look([mine.job_id])[mine.job_id].why == ""
    local_record.publish(tmp_path, replace(mine, job_id="1", order=0))
    assert scheduler.look([mine.job_id])[mine.job_id].why == "Dependency"


def test_from_another_machine_nothing_can_be_said(tmp_path: Path) -> None:
    elsewhere = replace(processes.identify(os.getpid()), boot_id="another", host="another-host")
    local_record.publish(tmp_path, a_record(elsewhere))
    with pytest.raises(SchedulerError, match="another-host"):
        LocalScheduler(tmp_path).look([str(os.getpid())])


def test_a_job_outlives_its_supervisor_and_the_terminal(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.slurm_room.test_local_scheduler import *\n"
        "folder = Path(sys.argv[1]); print(LocalScheduler().submit(request(folder)), flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path)]
    # Its own group, as in a terminal: Ctrl-C and a hang-up go to every process of it.
    with subprocess.Popen(argv, stdout=subprocess.PIPE, process_group=0, text=True) as supervisor:
        assert supervisor.stdout is not None
        job_id = supervisor.stdout.readline().strip()
        noted(tmp_path, "started", job_id)
        os.killpg(supervisor.pid, signal.SIGINT)
        os.killpg(supervisor.pid, signal.SIGHUP)
    successor = LocalScheduler(tmp_path / "jobs", kill_wait_s=0.5)
    assert [job.job_id for job in successor.find("hf-00112233")] == [job_id]
    assert successor.look([job_id])[job_id].state is JobState.RUNNING
    (tmp_path / "go-hf-00112233").write_text("0")
    assert ended(successor, job_id) is JobState.COMPLETED


def test_a_controller_without_a_record_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm import local_controller

    monkeypatch.setattr(local_controller, "RECORD_WAIT_S", 0.0)
    monkeypatch.setattr(sys, "argv", ["controller", str(tmp_path)])
    local_controller.main()
    assert list(tmp_path.iterdir()) == []


def test_two_nodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="one node"):
        LocalScheduler().submit(request(tmp_path, nodes=2))
    assert not (tmp_path / "jobs").exists()
