"""One supervisor a run: its holder is named, a dead one is followed at once where that can be known, a loser leaves."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supervisor.lease import HeldError, LeaseFile, LostError, OwnJob, SupersededError, describe, read_holder, take_lease
from tests.supervisor_room.stage import Stage
from worker.contract.claim import start_ticks
from worker.contract.files import publish_message
from worker.contract.run_dir import RunDir

ELSEWHERE = "another-node"


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    return RunDir(tmp_path)


def held(run_dir: RunDir, host: str = "", pid: int = 0, job: OwnJob | None = None) -> LeaseFile:
    """The run is in the hands of a process that lives, as far as this host can tell."""
    pid = pid or os.getpid()
    file = LeaseFile(
        holder=f"{host}:{pid}",
        host=host or socket.gethostname(),
        pid=pid,
        started_ticks=start_ticks(pid),
        job_id=job.job_id if job else None,
        restart=job.restart if job else 0,
        term=3,
        beat=0,
    )
    publish_message(run_dir.lease, file)
    return file


def test_one_that_lives_on_this_host_is_named(run_dir: RunDir) -> None:
    held(run_dir, job=OwnJob("17"))
    who = rf"a supervisor on .* \(process {os.getpid()}, job 17\) holds"
    with pytest.raises(HeldError, match=rf"{who} the runs of this folder"):  # of `run --all`
        take_lease(run_dir)
    run_dir.journal.touch()
    with pytest.raises(HeldError, match=rf"{who} this run"):
        take_lease(run_dir)


def test_of_one_that_is_suspended_it_is_said_how_it_goes_on(run_dir: RunDir) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert "suspended" not in describe(held(run_dir, pid=process.pid))
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        file = held(run_dir, pid=process.pid)
        with pytest.raises(HeldError, match=f"is suspended; to let it go on: kill -CONT {process.pid}$"):
            take_lease(run_dir)
        assert "suspended" not in describe(held(run_dir, ELSEWHERE, process.pid)), "nobody here knows"
        process.send_signal(signal.SIGCONT)
        os.waitpid(process.pid, os.WCONTINUED)
        assert "suspended" not in describe(file)
        process.communicate()


def test_one_that_died_on_this_host_is_followed_at_once(run_dir: RunDir) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held(run_dir, pid=process.pid)
    process.communicate()
    assert take_lease(run_dir, patience_s=1e9).term == 4


def test_one_on_another_host_is_held_while_it_beats(run_dir: RunDir) -> None:
    file = held(run_dir, ELSEWHERE)
    beats = iter(range(1, 100))

    def sleep(seconds: float) -> None:
        publish_message(run_dir.lease, file.model_copy(update={"beat": next(beats)}))

    with pytest.raises(HeldError, match=ELSEWHERE):
        take_lease(run_dir, sleep=sleep)


def test_one_on_another_host_is_followed_when_it_beats_no_more(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    held(run_dir, ELSEWHERE)
    now, slept = time.monotonic(), []
    monkeypatch.setattr(time, "monotonic", lambda: now + sum(slept))
    assert take_lease(run_dir, sleep=slept.append).term == 4
    assert 60 <= sum(slept) < 65


def test_one_whose_job_is_over_is_followed_at_once_wherever_it_was(run_dir: RunDir) -> None:
    held(run_dir, ELSEWHERE, job=OwnJob("17"))
    asked: list[str] = []

    def is_over(job_id: str) -> bool:
        asked.append(job_id)
        return True

    assert take_lease(run_dir, job_is_over=is_over, patience_s=1e9).term == 4
    assert asked == ["17"]


def test_an_earlier_start_of_the_same_job_is_followed_at_once_and_leaves(run_dir: RunDir) -> None:
    """Its node "failed": Slurm started the job again elsewhere, and the old process lives on."""
    old = take_lease(run_dir, own=OwnJob("17", restart=0))
    new = take_lease(run_dir, own=OwnJob("17", restart=1), patience_s=1e9)
    assert (new.term, new.file.restart) == (2, 1)
    with pytest.raises(LostError):
        old.check()
    new.check()
    with pytest.raises(HeldError):
        take_lease(run_dir, own=OwnJob("18", restart=5))
    with pytest.raises(SupersededError):
        take_lease(run_dir, own=OwnJob("17", restart=0))
    new.give_up()
    with pytest.raises(SupersededError):  # nobody holds it, and the old start is no more all the same
        take_lease(run_dir, own=OwnJob("17", restart=0))
    assert take_lease(run_dir, own=OwnJob("18")).term == 3


def test_the_loser_of_a_take_over_writes_nothing_more(tmp_path: Path, run_dir: RunDir) -> None:
    loser = Stage(tmp_path / "runs")
    loser.settle()
    winner = loser.watched
    loser.start_supervisor()
    loser.watched, winner = winner, loser.watched
    loser.start_job()
    before = loser.names
    with pytest.raises(LostError):
        loser.look()
    assert loser.names == before
    loser.watched = winner
    loser.settle()
    assert loser.names[-1] == "JobSeen"


def test_whoever_gives_it_up_is_followed_at_once(run_dir: RunDir) -> None:
    take_lease(run_dir).give_up()
    assert read_holder(run_dir) is None
    assert take_lease(run_dir).term == 2


def test_a_folder_that_is_gone_is_told_as_that(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "r")
    run_dir.path.mkdir()
    lease = take_lease(run_dir)
    run_dir.path.rename(tmp_path / "elsewhere")
    with pytest.raises(LostError, match=rf"{run_dir.path}: the folder is gone"):
        lease.check()
    lease.give_up()
    assert not run_dir.path.exists()
