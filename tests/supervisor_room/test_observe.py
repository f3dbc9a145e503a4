"""Histories in `recovery.mode: observe`: everything that would be done is said, and nothing is touched."""

import os
from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState
from supervisor.believed import read_evidence
from supervisor.decision import Wait
from supervisor.diagnosis import diagnose
from supervisor.journal import GaveUp, VerdictSeen, WouldHaveDone
from supervisor.requests import Request
from tests.supervisor_room.stage import CRASHED, PREEMPTED, Stage
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import publish_message
from worker.contract.manifest import Health, complete_checkpoints, health

TOUCHING = {"cancel", "start_now", "change", "release", "requeue"}


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def observed(folder: Path, **recovery: Any) -> Stage:
    stage = Stage(folder, recovery={"mode": "observe", **recovery})
    stage.settle()
    stage.start_job()
    return stage


def notes(stage: Stage) -> list[WouldHaveDone]:
    return [event for event in stage.events if isinstance(event, WouldHaveDone)]


def assert_untouched(stage: Stage) -> None:
    assert (stage.directive.attempt, stage.directive.stop) == (1, None)
    assert stage.submissions == 1
    assert not TOUCHING & {method for method, _ in stage.scheduler.calls}
    assert list(stage.run_dir.quarantine.iterdir()) == []


def test_a_spike_is_noted_with_what_would_have_been_done_and_training_goes_on(tmp_path: Path) -> None:
    stage = observed(tmp_path)
    stage.train(38, "spike", onset=36, loss=9.0, observed=True)
    stage.settle()
    [told] = notes(stage)
    assert (told.cause, told.resume_from, told.lr_scale, told.where) == (
        "spike",
        "checkpoint-30",
        0.5,
        "same_allocation",
    )
    assert told.rollback is not None
    assert (told.rollback.onset_step, told.rollback.to_step) == (36, 30)
    assert told.diagnosis is not None
    assert told.diagnosis.cure == "tenth-rate"
    assert "not done, for recovery.mode is observe: loss 9 at step 38" in told.reason
    stage.train(60)
    stage.settle()
    assert stage.state == "training"
    assert len(notes(stage)) == 1
    assert_untouched(stage)


def test_one_streak_is_told_once_and_the_next_one_again(tmp_path: Path) -> None:
    stage = observed(tmp_path)
    for until in (38, 41, 44):
        stage.train(until, "spike", onset=36, loss=9.0, observed=True)
        stage.settle()
    stage.start_supervisor()
    stage.settle()
    stage.train(70)
    stage.train(75, "nonfinite", onset=74, observed=True)
    stage.settle()
    assert [event.onset_step for event in stage.events if isinstance(event, VerdictSeen)] == [36, 74]
    assert [event.cause for event in notes(stage)] == ["spike", "nonfinite"]
    assert_untouched(stage)


def test_rules_that_speak_of_one_rise_in_turn_tell_it_once(tmp_path: Path) -> None:
    stage = observed(tmp_path)
    for until, kind, onset in ((38, "divergence", 32), (41, "spike", 36), (44, "divergence", 32), (47, "spike", 36)):
        stage.train(until, kind, onset=onset, loss=9.0, observed=True)
        stage.settle()
    assert [event.onset_step for event in stage.events if isinstance(event, VerdictSeen)] == [32]
    [noted] = notes(stage)
    assert noted.diagnosis is not None
    assert [noted.diagnosis] == diagnose(read_evidence(stage.run_dir))


def test_two_streaks_between_two_looks_are_both_told(tmp_path: Path) -> None:
    stage = observed(tmp_path)
    stage.train(38, "spike", onset=36, loss=9.0, observed=True)
    stage.train(50)
    stage.train(58, "spike", onset=56, loss=9.0, observed=True)
    stage.train(65)
    stage.settle()
    assert [event.rollback.onset_step for event in notes(stage) if event.rollback is not None] == [36, 56]


def test_checkpoints_after_a_spike_that_passed_are_healthy_and_those_within_it_are_not(tmp_path: Path) -> None:
    stage = observed(tmp_path)
    stage.train(38, "spike", onset=36, loss=9.0, observed=True)
    stage.train(41, "spike", onset=36, loss=9.0, observed=True)
    stage.train(60)
    stage.settle()
    branch = stage.watched.observer._branch
    found = {one.step: health(one, branch, 5) for one in complete_checkpoints(stage.run_dir)}
    assert (found[30], found[40], found[50]) == (Health.HEALTHY, Health.SUSPECT, Health.HEALTHY)
    assert stage.watched.run.state.healthy_step == 50


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.REFUSED, Outcome.OUT_OF_MEMORY])
def test_a_worker_that_ends_is_noted_left_alone_and_the_run_over_with_its_job(tmp_path: Path, outcome: Outcome) -> None:
    stage = observed(tmp_path)
    stage.train(25)
    stage.settle()
    error = ErrorDetail(type="ProofError", message="probe") if outcome is Outcome.REFUSED else CRASHED
    stage.leave(outcome, error=error)
    assert isinstance(stage.settle(), Wait)
    stage.start_supervisor()
    assert isinstance(stage.settle(), Wait)
    assert len(notes(stage)) == (outcome is not Outcome.REFUSED)
    assert_untouched(stage)
    stage.scheduler.set_state(stage.job_id, JobState.FAILED)
    stage.settle()
    assert isinstance(stage.events[-1], GaveUp)
    assert stage.submissions == 1


def test_a_job_that_is_gone_is_not_replaced_until_a_person_says_resume(tmp_path: Path) -> None:
    stage = observed(tmp_path)
    stage.train(25)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.FAILED)
    stage.settle()
    assert [event.cause for event in notes(stage)] == ["vanished"]
    assert stage.state == "gave_up"
    assert "higgsfield resume" in stage.events[-1].reason
    publish_message(stage.run_dir.request, Request(verb="rollback", by="alice", to=10, asked_at=1.0))
    stage.start_supervisor()
    stage.settle()
    assert (stage.state, stage.directive.resume_from, stage.submissions) == ("queued", "checkpoint-10", 2)


def test_a_requeued_worker_goes_on_by_itself_and_nobody_moves_its_start(tmp_path: Path) -> None:
    stage = observed(tmp_path, preemption={"lr_factor": 0.5})
    assert stage.directive.on_requeue == "continue", "nobody would decide"
    stage.train(25)
    stage.settle()
    stage.leave(Outcome.LEFT, error=PREEMPTED)
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="BeginTime", restarts=1)
    stage.settle()
    assert_untouched(stage)
    stage.start_job(restarts=1)
    stage.train(60, restart=1)
    stage.settle()
    assert stage.state == "training"
    assert notes(stage) == []


def test_a_person_s_stop_is_carried_out(tmp_path: Path) -> None:
    stage = observed(tmp_path)
    stage.train(25)
    publish_message(stage.run_dir.request, Request(verb="stop", by="alice"))
    stage.settle()
    assert stage.directive.stop == "save"
    stage.leave(Outcome.LEFT, error=ErrorDetail(type="Left", message="", what="stop"))
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
    stage.settle()
    assert stage.state == "stopped"


def test_it_finishes(tmp_path: Path) -> None:
    stage = observed(tmp_path)
    stage.train(100)
    stage.leave(Outcome.DONE)
    stage.settle()
    assert stage.state == "finished"
