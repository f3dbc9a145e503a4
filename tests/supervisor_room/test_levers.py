"""A person's rollback and pin: carried out once, whoever supervises, and whatever else goes on."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurm.job import JobState
from supervisor import cli, levers
from supervisor.arguments import parser_of
from supervisor.journal import Pinned, RequestRefused, RollbackRequested, RolledBack
from supervisor.lease import read_holder
from supervisor.requests import Request
from supervisor.verbs.levers import _check_rollback
from tests.supervisor_room.stage import CRASHED, Stage
from worker.contract.config import write
from worker.contract.directive import SkippedBatches
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import publish_message


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def training(folder: Path, **sections: Any) -> Stage:
    stage = Stage(folder, **sections)
    stage.settle()
    stage.start_job()
    stage.train(38)
    stage.settle()
    return stage


def ask(stage: Stage, verb: str, **fields: Any) -> None:
    publish_message(stage.run_dir.request, Request(verb=verb, by="alice", **fields))  # type: ignore[arg-type]
    stage.settle()


def rotate(stage: Stage, step: int) -> None:
    shutil.rmtree(stage.run_dir.checkpoint(step))


def test_a_rollback_stops_the_worker_by_a_newer_attempt_in_the_same_allocation(tmp_path: Path) -> None:
    stage = training(tmp_path)
    ask(stage, "rollback", to=20, asked_at=1.0)
    told = stage.events[-1]
    assert isinstance(told, RolledBack)
    assert (told.cause, told.kind, told.from_step, told.to_step) == ("rollback", "requested", 38, 20)
    assert (told.lr_scale, told.where, told.cost.steps_repeated) == (1.0, "same_allocation", 18)
    assert (stage.directive.attempt, stage.directive.resume_from) == (2, "checkpoint-20")
    assert stage.run_dir.checkpoint_steps() == [10, 20]
    assert "alice asked to go back to step 20" in stage.directive.reason
    assert not stage.run_dir.request.exists()


def test_its_rate_is_absolute_and_its_skip_leaves_out_all_since(tmp_path: Path) -> None:
    stage = training(tmp_path, recovery={"spike": {"hold_steps": 5, "ramp_steps": 5}})
    ask(stage, "rollback", to=30, lr_scale=0.25, skip=True, asked_at=1.0)
    assert stage.directive.lr_scale == 0.25
    assert stage.directive.skip_batches == (SkippedBatches(epoch=0, first=30, count=8),)
    assert stage.directive.lr_ramp is not None
    assert stage.directive.lr_ramp.from_step == 30
    assert "8 batches are left out" in stage.directive.reason
    stage.claim()
    stage.train(34)
    ask(stage, "rollback", to=10, asked_at=2.0)
    assert (stage.directive.resume_from, stage.directive.lr_scale) == ("checkpoint-10", 0.25)
    assert stage.directive.lr_ramp.from_step == 30, "without a rate it stays what it is"
    assert stage.directive.skip_batches == (SkippedBatches(epoch=0, first=30, count=8),)


def test_the_same_rollback_may_be_asked_for_again(tmp_path: Path) -> None:
    stage = training(tmp_path)
    for again in range(4):
        ask(stage, "rollback", to=20, asked_at=float(again + 1))
        stage.claim()
        stage.train(28)
        stage.settle()
    assert stage.names.count("RollbackRequested") == stage.names.count("RolledBack") == 4
    assert stage.directive.attempt == 5
    assert stage.submissions == 1, "a person's word is not held against the allocation"
    assert stage.watched.run.state.rollbacks_since_progress == 0


def test_progress_begins_anew_where_a_person_goes_back_to(tmp_path: Path) -> None:
    stage = training(tmp_path)
    ask(stage, "rollback", to=10, asked_at=1.0)
    assert stage.watched.run.state.healthy_step == 10
    stage.claim()
    stage.train(26)
    stage.settle()
    assert stage.watched.run.state.healthy_step == 20


def test_it_tells_what_a_person_changed_in_the_file_that_the_next_attempt_trains_by(tmp_path: Path) -> None:
    stage = training(tmp_path)
    optimizer = stage.config.training.optimizer.model_copy(update={"learning_rate": 0.25})
    changed = stage.config.training.model_copy(update={"optimizer": optimizer})
    write(stage.run_dir.config, stage.config.model_copy(update={"training": changed}))
    ask(stage, "rollback", to=20, asked_at=1.0)
    [asked] = [event for event in stage.events if isinstance(event, RollbackRequested)]
    rate = stage.config.training.optimizer.learning_rate
    assert asked.changed == {"training.optimizer.learning_rate": (rate, 0.25)}
    assert asked.reason.startswith("alice asked to go back to step 20, with training.optimizer.learning_rate: ")


@pytest.mark.parametrize("end", ["stopped", "gave_up"])
def test_a_rollback_opens_a_run_that_was_stopped_or_gave_up(tmp_path: Path, end: str) -> None:
    stage = training(tmp_path)
    if end == "stopped":
        ask(stage, "stop")
        stage.leave(Outcome.LEFT, error=ErrorDetail(type="Left", message="", what="stop"))
        stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
    else:
        stage.leave(Outcome.REFUSED, error=ErrorDetail(type="DataError", message="gone"))
    stage.settle()
    assert stage.state == end
    stage.start_supervisor()
    ask(stage, "rollback", to=20, lr_scale=0.5, asked_at=1.0)
    assert stage.state == "queued"
    assert (stage.directive.resume_from, stage.directive.lr_scale, stage.directive.stop) == ("checkpoint-20", 0.5, None)
    assert stage.submissions == 2


def test_it_answers_a_verdict_that_nobody_has_answered(tmp_path: Path) -> None:
    stage = training(tmp_path)
    publish_message(stage.run_dir.request, Request(verb="rollback", by="alice", to=10, lr_scale=0.9))
    stage.spike(40, onset=39)
    assert (stage.directive.cause, stage.directive.resume_from) == ("rollback", "checkpoint-10")
    assert stage.names.count("RolledBack") == 1


@pytest.mark.parametrize("gone", [10, 30])
def test_a_checkpoint_that_is_gone_by_then_is_refused_and_nothing_is_touched(tmp_path: Path, gone: int) -> None:
    stage = training(tmp_path)
    rotate(stage, gone)
    there, before, reason = stage.run_dir.checkpoint_steps(), stage.directive, stage.watched.run.state.reason
    ask(stage, "rollback", to=gone, asked_at=1.0)
    told = stage.events[-1]
    assert isinstance(told, RequestRefused)
    assert (told.verb, told.by, told.to, told.asked_at) == ("rollback", "alice", gone, 1.0)
    assert told.reason == (
        f"alice asked to go back to step {gone}; refused, no checkpoint is there by now; "
        f"there are: {', '.join(map(str, there))}"
    )
    assert (stage.run_dir.checkpoint_steps(), stage.directive, stage.state) == (there, before, "training")
    assert stage.watched.run.state.reason == reason
    assert not stage.run_dir.quarantine.exists() or not list(stage.run_dir.quarantine.iterdir())
    assert not stage.run_dir.request.exists()
    ask(stage, "rollback", to=0, asked_at=2.0)
    assert (stage.directive.attempt, stage.directive.resume_from) == (2, None), "from scratch where that was said"


def test_a_run_that_is_over_stays_over_where_its_rollback_is_refused(tmp_path: Path) -> None:
    stage = training(tmp_path)
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    rotate(stage, 10)
    ask(stage, "rollback", to=10, asked_at=1.0)
    stage.start_supervisor()
    stage.settle()
    assert (stage.state, stage.names.count("RequestRefused"), stage.submissions) == ("stopped", 1, 1)


@pytest.mark.parametrize("is_there", [True, False])
def test_its_checkpoint_is_kept_while_the_old_job_saves_and_ends(tmp_path: Path, is_there: bool) -> None:
    stage = training(tmp_path, recovery={"relaunches_in_allocation": 0})
    publish_message(stage.run_dir.request, Request(verb="rollback", by="alice", to=10, asked_at=1.0))
    stage.look()
    assert stage.names[-1] == "Cancelled"
    assert (stage.directive.attempt, stage.directive.pinned) == (1, (10,))
    if not is_there:
        rotate(stage, 10)
    stage.settle()
    assert stage.directive.resume_from == ("checkpoint-10" if is_there else "checkpoint-30")
    assert stage.directive.pinned == ()
    assert stage.names.count("RequestRefused") == (not is_there)
    assert stage.watched.run.state.rollback_asked is None


def test_a_stop_that_is_under_way_goes_before_a_rollback(tmp_path: Path) -> None:
    stage = training(tmp_path)
    ask(stage, "stop")
    ask(stage, "rollback", to=20, asked_at=1.0)
    stage.leave(Outcome.LEFT, error=ErrorDetail(type="Left", message="", what="stop"))
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
    stage.settle()
    assert stage.state == "stopped"
    assert stage.watched.run.state.rollback_asked is None


# -- pins --------------------------------------------------------------------------------------------------------------


def test_a_pin_reaches_the_worker_that_runs_and_every_attempt_to_come(tmp_path: Path) -> None:
    stage = training(tmp_path)
    ask(stage, "pin", to=10)
    ask(stage, "pin", to=30)
    ask(stage, "pin", to=10)
    assert (stage.directive.attempt, stage.directive.pinned) == (1, (10, 30))
    assert [event.to for event in stage.events if isinstance(event, Pinned)] == [10, 30]
    stage.leave(Outcome.CRASHED, error=CRASHED)
    stage.settle()
    assert (stage.directive.attempt, stage.directive.pinned) == (2, (10, 30))


def test_quarantine_keeps_what_is_pinned(tmp_path: Path) -> None:
    stage = training(tmp_path, checkpoint={"every_steps": 10, "healthy_after": 5, "keep_quarantined": 0})
    ask(stage, "pin", to=20)
    ask(stage, "rollback", to=10, asked_at=1.0)
    assert [path.name for path in stage.run_dir.quarantine.iterdir()] == ["a1-checkpoint-20"]


def test_a_run_that_is_over_is_pinned_and_stays_over(tmp_path: Path) -> None:
    stage = training(tmp_path)
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    assert stage.state == "stopped"
    ask(stage, "pin", to=20)
    ask(stage, "stop")
    assert (stage.state, stage.directive.pinned, stage.directive.stop) == ("stopped", (20,), "now")
    assert not stage.run_dir.request.exists()


def test_a_pin_of_what_is_gone_by_then_is_refused(tmp_path: Path) -> None:
    stage = training(tmp_path)
    rotate(stage, 10)
    ask(stage, "pin", to=10, asked_at=1.0)
    assert (stage.names[-1], stage.directive.pinned, stage.watched.run.state.pinned) == ("RequestRefused", (), ())
    assert stage.events[-1].reason == (
        "alice asked for checkpoint-10 to be kept; refused, no checkpoint is there by now; there are: 20, 30"
    )


def over(folder: Path) -> Stage:
    """A run that was stopped and that nobody supervises."""
    stage = training(folder, cluster={"kind": "local"})
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    stage._forget_lease()
    return stage


@pytest.mark.parametrize("argv", [["pin", "10"], ["rollback", "--to", "10"]])
def test_who_waits_is_told_that_the_checkpoint_is_gone_by_now(
    tmp_path: Path, argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = over(tmp_path)

    def publish(path: Path, request: Request) -> None:
        rotate(stage, 10)
        publish_message(path, request)

    monkeypatch.setattr(levers, "publish_message", publish)
    verb, *rest = argv
    assert cli.main([verb, str(stage.run_dir.path), *rest]) == cli.WRONG_INPUT
    said = capsys.readouterr()
    assert "kept for good" not in said.out
    assert said.err.count("\n") == 1
    assert "refused, no checkpoint is there by now; there are: 20, 30" in said.err


def test_a_pin_that_the_worker_is_about_to_undo_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = over(tmp_path)
    carry_out = levers.carry_out_request

    def and_rotate(*arguments: Any) -> None:
        carry_out(*arguments)
        rotate(stage, 10)

    monkeypatch.setattr(levers, "carry_out_request", and_rotate)
    assert cli.main(["pin", str(stage.run_dir.path), "10"]) == cli.WRONG_INPUT
    assert "no checkpoint is at step 10; there are: 20, 30" in capsys.readouterr().err


def test_a_pin_whose_place_another_request_took_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = over(tmp_path)
    other = Request(verb="pin", by="bob", to=20)
    monkeypatch.setattr(levers, "publish_message", lambda path, request: publish_message(path, other))
    assert cli.main(["pin", str(stage.run_dir.path), "10"]) == cli.WRONG_INPUT
    assert "another request took the place of this pin; ask again" in capsys.readouterr().err
    assert stage.directive.pinned == (20,)


def test_a_stop_waits_until_a_pin_has_been_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = training(tmp_path)
    publish_message(stage.run_dir.request, Request(verb="pin", by="alice", to=10))

    def pass_by(seconds: float) -> None:
        if stage.state == "stopping":
            stage.leave(Outcome.LEFT, error=ErrorDetail(type="Left", message="", what="stop"))
            stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
        stage.look()

    monkeypatch.setattr(levers, "time", SimpleNamespace(sleep=pass_by, monotonic=time.monotonic))
    assert cli.main(["stop", str(stage.run_dir.path)]) == cli.OK
    assert "r is stopped" in capsys.readouterr().out
    assert [name for name in stage.names if name in ("Pinned", "StopRequested")] == ["Pinned", "StopRequested"]
    assert stage.directive.pinned == (10,)


@pytest.mark.parametrize(("argv", "code"), [(["stop"], cli.OK), (["rollback", "--to", "10"], cli.WRONG_INPUT)])
def test_a_run_that_finishes_meanwhile_is_said_to_be_finished(
    tmp_path: Path, argv: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = training(tmp_path)

    def finish(seconds: float) -> None:
        if stage.state == "training":
            stage.leave(Outcome.DONE)
        stage.look()

    monkeypatch.setattr(levers, "time", SimpleNamespace(sleep=finish, monotonic=time.monotonic))
    verb, *rest = argv
    assert cli.main([verb, str(stage.run_dir.path), *rest]) == code
    said = capsys.readouterr()
    assert "finished" in (said.err if code else said.out)
    assert "is stopped" not in said.out


def test_the_verb_itself_does_it_where_nobody_supervises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = training(tmp_path, cluster={"kind": "local"})
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    stage._forget_lease()
    assert cli.main(["pin", str(stage.run_dir.path), "20"]) == cli.OK
    assert "checkpoint-20 is kept for good" in capsys.readouterr().out
    assert (stage.names[-1], stage.directive.pinned) == ("Pinned", (20,))
    assert read_holder(stage.run_dir) is None


def test_a_supervisor_that_shows_no_sign_of_life_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = training(tmp_path, cluster={"kind": "local"})
    monkeypatch.setattr(levers, "DEAD_AFTER_S", 0.5)
    assert cli.main(["pin", str(stage.run_dir.path), "20"]) == cli.HELD  # it lives on this very host, frozen
    assert f"process {os.getpid()}" in capsys.readouterr().err
    assert stage.run_dir.request.exists(), "it is carried out when the supervisor goes on"
    stage.settle()
    assert stage.directive.pinned == (20,)


# -- what the verbs say ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["rollback", "--to", "25"], "no checkpoint is at step 25; there are: 10, 20, 30; 0 begins from scratch"),
        (["pin", "7"], "no checkpoint is at step 7; there are: 10, 20, 30"),
        (["rollback", "--to", "20", "--lr-scale", "0"], "give a number above 0"),
        (["rollback", "--to", "20", "--lr-scale", "nan"], "give a number above 0"),
    ],
)
def test_a_wrong_step_or_rate_is_one_line(
    tmp_path: Path, argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = training(tmp_path)
    verb, *rest = argv
    assert cli.main([verb, str(stage.run_dir.path), *rest]) == cli.WRONG_INPUT
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert not stage.run_dir.request.exists()


def test_a_step_in_quarantine_is_said_to_lie_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = training(tmp_path)
    for name in ("a1-checkpoint-40", "a2-bad-checkpoint-50"):
        (stage.run_dir.quarantine / name).mkdir(parents=True)
    said = {
        ("pin", "40"): "checkpoint-40 is of what a rollback left behind after attempt 1, and lies in quarantine/a1-ch",
        ("rollback", "--to", "40"): "quarantine/a1-checkpoint-40; its weights are whole",
        ("pin", "50"): "checkpoint-50 was found broken in attempt 2 and set aside as quarantine/a2-bad-checkpoint-50",
    }
    for (verb, *rest), words in said.items():
        assert cli.main([verb, str(stage.run_dir.path), *rest]) == cli.WRONG_INPUT
        printed = capsys.readouterr().err
        assert words in printed
        assert "there are: 10, 20, 30" in printed


def test_a_rate_above_the_configured_one_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = training(tmp_path)
    args = parser_of(cli.VERBS).parse_args(["rollback", str(stage.run_dir.path), "--to", "20", "--lr-scale", "2"])
    _check_rollback(args, stage.run_dir)
    assert "warning: --lr-scale 2: 2 x the configured rate; the run goes on at it" in capsys.readouterr().err
    args.lr_scale = 1.0
    _check_rollback(args, stage.run_dir)
    assert capsys.readouterr().err == ""


def test_a_finished_run_does_not_go_back_and_one_that_is_being_stopped_has_its_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = training(tmp_path)
    ask(stage, "stop")
    assert cli.main(["rollback", str(stage.run_dir.path), "--to", "20"]) == cli.WRONG_INPUT
    assert "is being stopped" in capsys.readouterr().err
    stage.leave(Outcome.DONE)
    stage.settle()
    assert cli.main(["rollback", str(stage.run_dir.path), "--to", "20"]) == cli.WRONG_INPUT
    assert "is finished" in capsys.readouterr().err
    ask(stage, "rollback", to=20, asked_at=1.0)
    assert stage.state == "finished"
    assert not [event for event in stage.events if isinstance(event, RollbackRequested)]
