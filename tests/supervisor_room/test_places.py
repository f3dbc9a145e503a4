"""A supervisor's own job ends: another one goes on, whatever the site allows."""

import os
import signal
from pathlib import Path

import pytest

from slurm.job import JobRequest, JobState, Node
from slurm.scheduler import SchedulerError
from supervisor import place
from supervisor.job_request import supervisor_request
from supervisor.lease import LostError, OwnJob
from supervisor.place import JobSignals, queue_next
from tests.fakes import FakeScheduler
from tests.supervisor_room.stage import Stage, config
from worker.contract.run_dir import RunDir

NOT_ALLOWED = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"


@pytest.fixture
def scheduler(tmp_path: Path) -> FakeScheduler:
    """One in whose job 1 the supervisor lives."""
    found = FakeScheduler()
    found.submit(request(tmp_path))
    found.calls.clear()
    return found


def request(folder: Path, **supervisor: str) -> JobRequest:
    return supervisor_request(config(folder, supervisor=supervisor), RunDir(folder), "hs-1")


def calls(scheduler: FakeScheduler, *methods: str) -> list[tuple[str, str]]:
    return [call for call in scheduler.calls if call[0] in methods]


def test_a_fresh_job_waits_for_the_end_of_this_one(scheduler: FakeScheduler, tmp_path: Path) -> None:
    assert queue_next(scheduler, request(tmp_path), OwnJob("1")) == "job 2 goes on"
    assert scheduler.jobs["2"].why == "Dependency"
    assert calls(scheduler, "requeue") == []


def test_it_is_asked_for_once(scheduler: FakeScheduler, tmp_path: Path) -> None:
    queue_next(scheduler, request(tmp_path), OwnJob("1"))
    assert queue_next(scheduler, request(tmp_path), OwnJob("1")) == "job 2 goes on"
    assert calls(scheduler, "submit") == [("submit", "hs-1")]


def test_where_no_second_job_is_allowed_this_one_is_put_back(scheduler: FakeScheduler, tmp_path: Path) -> None:
    scheduler.says = NOT_ALLOWED
    scheduler.fail("submit")
    assert queue_next(scheduler, request(tmp_path), OwnJob("1")).startswith("job 1 is put back into the queue")
    assert (scheduler.jobs["1"].restarts, list(scheduler.jobs)) == (1, ["1"])


def test_without_an_answer_nothing_is_put_back(scheduler: FakeScheduler, tmp_path: Path) -> None:
    scheduler.fail("submit", after=True)
    with pytest.raises(SchedulerError):
        queue_next(scheduler, request(tmp_path), OwnJob("1"))
    assert queue_next(scheduler, request(tmp_path), OwnJob("1")) == "job 2 goes on"  # it was queued all the same
    assert calls(scheduler, "requeue") == []


@pytest.mark.parametrize(("limit", "asked"), [(None, "B:USR2@120"), ("00:03:00", "B:USR2@60")])
def test_the_batch_step_itself_is_told_ahead_of_the_limit(limit: str | None, asked: str, tmp_path: Path) -> None:
    given = {} if limit is None else {"time_limit": limit}
    assert request(tmp_path, **given).signal == asked


def test_signals_are_flags() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR2)]
    try:
        told = JobSignals()
        assert (told.is_ending, told.limit_is_near) == (False, False)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (told.is_ending, told.limit_is_near) == (False, True)
        os.kill(os.getpid(), signal.SIGTERM)
        assert told.is_ending
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR2), before, strict=True):
            signal.signal(number, handler)


def test_a_job_that_is_preempted_stays_until_it_is_killed_and_a_cancelled_one_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stayed: list[float] = []
    monkeypatch.setattr(place.time, "sleep", stayed.append)
    for answer in (1, 0):
        monkeypatch.setattr(place.requeue, "main", lambda argv, answer=answer: answer)
        place._make_room(OwnJob("1"))
    assert stayed == [600.0]


def test_an_embedded_supervisor_leaves_a_job_that_slurm_has_put_back(tmp_path: Path) -> None:
    """On a node that is lost it lives on, and must not end what begins elsewhere."""
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.own = OwnJob(stage.job_id, 0, tmp_path / "tasks-over")
    stage.start_supervisor()
    stage.scheduler.node_states = {"n1": Node("n1", "down", "Not responding")}
    stage.settle()
    before = stage.names
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="BeginTime", restarts=1)
    with pytest.raises(LostError):
        stage.settle()
    assert stage.names == before
    assert stage.submissions == 1
    assert ("cancel", "1.0") not in stage.scheduler.calls
