"""The file STOP is a person's stop: with a job in the queue, with a worker at work, with nobody who supervises."""

import os
from pathlib import Path

import pytest

from slurm.job import JobState
from supervisor.journal import SaveAnswered, Stopped
from supervisor.requests import Request
from supervisor.runs import standing
from supervisor.supervise import reopen
from tests.supervisor_room.stage import Stage
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import publish_message

LEFT_BY_STOP = ErrorDetail(type="Left", message="", what="stop")


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def training(folder: Path) -> Stage:
    stage = Stage(folder)
    stage.settle()
    stage.start_job()
    stage.train(20)
    stage.settle()
    return stage


def test_a_save_that_was_asked_for_is_told_once(tmp_path: Path) -> None:
    stage = training(tmp_path)
    stage.train(24)
    stage.save(24, asked=True, time=stage.now)
    stage.settle()
    stage.start_supervisor()
    stage.train(50)
    stage.settle()
    [told] = [event for event in stage.events if isinstance(event, SaveAnswered)]
    assert (told.step, told.reason) == (24, "a SAVE file asked for it: checkpoint-24 is whole")
    assert "SAVE" not in standing(stage.run_dir, in_detail=False)["reason"]


def worker_leaves(stage: Stage) -> None:
    stage.leave(Outcome.LEFT, error=LEFT_BY_STOP)
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)


def assert_is_stopped(stage: Stage) -> None:
    last = stage.events[-1]
    assert isinstance(last, Stopped), stage.names
    assert (last.by, stage.names.count("StopRequested")) == ("a STOP file", 1)
    assert stage.run_dir.stop_file.exists()


def test_a_job_in_the_queue_is_cancelled(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.run_dir.stop_file.touch()
    stage.settle()
    assert_is_stopped(stage)
    assert stage.scheduler.jobs["1"].state is JobState.CANCELLED


def test_a_run_without_a_job_yet_never_gets_one(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.run_dir.stop_file.touch()
    stage.settle()
    assert_is_stopped(stage)
    assert stage.submissions == 0


def test_a_worker_at_work_is_waited_for_and_status_says_so(tmp_path: Path) -> None:
    stage = training(tmp_path)
    stage.run_dir.stop_file.touch()
    assert standing(stage.run_dir, in_detail=False)["reason"].startswith("a STOP file is there")
    stage.settle()
    told = standing(stage.run_dir, in_detail=False)
    assert (told["state"], told["reason"]) == ("stopping", "a STOP file asked for a stop")
    assert stage.directive.stop == "save"
    worker_leaves(stage)
    stage.settle()
    assert_is_stopped(stage)
    assert standing(stage.run_dir, in_detail=False)["state"] == "stopped"


def test_one_that_was_obeyed_while_nobody_supervised_is_told_by_the_next_supervisor(tmp_path: Path) -> None:
    stage = training(tmp_path)
    stage.run_dir.stop_file.touch()
    worker_leaves(stage)
    stage.start_supervisor()
    stage.settle()
    assert_is_stopped(stage)
    assert stage.submissions == 1


def test_whoever_stops_by_the_verb_keeps_the_name(tmp_path: Path) -> None:
    stage = training(tmp_path)
    publish_message(stage.run_dir.request, Request(verb="stop", by="alice"))
    stage.run_dir.stop_file.touch()
    worker_leaves(stage)
    stage.settle()
    assert isinstance(stage.events[-1], Stopped)
    assert (stage.events[-1].by, stage.names.count("StopRequested")) == ("alice", 1)


def stopped(folder: Path) -> Stage:
    stage = training(folder)
    stage.run_dir.stop_file.touch()
    worker_leaves(stage)
    stage.settle()
    assert stage.state == "stopped"
    return stage


def test_a_person_who_lets_it_go_on_need_not_remove_it(tmp_path: Path) -> None:
    stage = stopped(tmp_path)
    stage.watched.run.lease.give_up()
    reopen(stage.run_dir, stage.config)
    assert not stage.run_dir.stop_file.exists()
    stage.start_supervisor()
    stage.settle()
    assert (stage.state, stage.directive.cause, stage.submissions) == ("queued", "resumed", 2)


def test_a_folder_of_that_name_stops_nothing_and_stays(tmp_path: Path) -> None:
    stage = training(tmp_path)
    stage.run_dir.stop_file.mkdir()
    stage.settle()
    assert (stage.state, standing(stage.run_dir, in_detail=False)["state"]) == ("training", "training")
    publish_message(stage.run_dir.request, Request(verb="stop", by="alice"))
    worker_leaves(stage)
    stage.settle()
    stage.watched.run.lease.give_up()
    reopen(stage.run_dir, stage.config)
    assert stage.run_dir.stop_file.is_dir()


def test_neither_need_a_person_who_rolls_back(tmp_path: Path) -> None:
    stage = stopped(tmp_path)
    publish_message(stage.run_dir.request, Request(verb="rollback", by="alice", to=10, asked_at=1.0))
    stage.settle()
    stage.settle()
    assert not stage.run_dir.stop_file.exists()
    assert (stage.state, stage.directive.resume_from) == ("queued", "checkpoint-10")
