"""Files that were spoilt under a supervisor: it waits, writes again what is its own, or says what is wrong."""

from pathlib import Path

import pytest

from slurm.commands import SchedulerError
from slurm.local_record import path as record_path
from slurm.local_record import read
from supervisor.journal import StopRequested, read_journal
from supervisor.lease import LeaseFile
from supervisor.report.texts import Listing, event_lines
from supervisor.requests import Request
from tests.supervisor_room.stage import Stage
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import UnusableFileError, publish_message, read_message

SPOILT = [b"", b"\0" * 40, b'{"x', b"\xff\xfe", b"[]"]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    return stage


@pytest.mark.parametrize("content", SPOILT)
def test_a_journal_without_its_beginning_is_refused_and_nothing_is_touched(stage: Stage, content: bytes) -> None:
    stage.run_dir.journal.write_bytes(content)
    with pytest.raises(UnusableFileError, match="RunCreated"):
        read_journal(stage.run_dir.journal)
    assert stage.directive.stop is None


def test_half_a_line_of_somebody_else_does_not_spoil_the_journal_for_what_comes(stage: Stage) -> None:
    with stage.run_dir.journal.open("a") as file:
        file.write('{"event": "Foo')
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.settle()
    assert "RolledBack" in [event.event for event in read_journal(stage.run_dir.journal)]


def test_a_journal_that_is_gone_under_a_supervisor_is_waited_for(stage: Stage) -> None:
    away = stage.run_dir.path / "away"
    stage.run_dir.journal.rename(away)
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.look()
    assert stage.ears.troubles
    assert not stage.run_dir.journal.exists()
    assert stage.directive.attempt == 1
    away.rename(stage.run_dir.journal)
    stage.settle()
    assert stage.directive.attempt == 2


@pytest.mark.parametrize("content", SPOILT)
def test_a_spoilt_directive_is_written_again(stage: Stage, content: bytes) -> None:
    stage.run_dir.directive.write_bytes(content)
    publish_message(stage.run_dir.request, Request(verb="stop", by="bob"))
    stage.settle()
    assert (stage.directive.attempt, stage.directive.stop) == (1, "save")


@pytest.mark.parametrize("content", SPOILT)
def test_a_spoilt_directive_does_not_keep_the_next_attempt_from_beginning(stage: Stage, content: bytes) -> None:
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.run_dir.directive.write_bytes(content)
    stage.settle()
    assert stage.directive.attempt == 2


@pytest.mark.parametrize("content", SPOILT)
def test_a_spoilt_claim_claims_nothing(stage: Stage, content: bytes) -> None:
    stage.run_dir.claim(1).write_bytes(content)
    stage.settle()
    assert stage.state == "training"
    assert stage.submissions == 1


@pytest.mark.parametrize("content", SPOILT)
def test_a_spoilt_exit_report_reports_nothing(stage: Stage, content: bytes) -> None:
    stage.leave(Outcome.CRASHED, error=ErrorDetail(type="E", message="m"))
    stage.run_dir.exit_report(1, 0, 0).write_bytes(content)
    stage.settle()
    assert stage.state == "training"


@pytest.mark.parametrize("content", SPOILT)
def test_a_spoilt_lease_is_written_again_by_its_holder(stage: Stage, content: bytes) -> None:
    stage.run_dir.lease.write_bytes(content)
    stage.watched.run.lease.check()
    found = read_message(stage.run_dir.lease, LeaseFile)
    assert found is not None
    assert found.holder == stage.watched.run.lease.file.holder


@pytest.mark.parametrize("content", [b'{"verb": "rollback", "to": 5}', *SPOILT])
def test_a_request_that_nobody_understands_is_removed_and_told(stage: Stage, content: bytes) -> None:
    stage.run_dir.request.write_bytes(content)
    stage.look()
    assert not stage.run_dir.request.exists()
    assert "request.json" in stage.ears.troubles[-1]
    assert stage.state == "training"


def crash(stage: Stage) -> str:
    """The worker crashes and its job is over; why the next attempt begins where it does."""
    stage.leave(Outcome.CRASHED, error=ErrorDetail(type="E", message="m"))
    stage.settle()
    return stage.directive.reason


def test_a_torn_manifest_is_passed_over_and_the_reason_says_so(stage: Stage) -> None:
    (stage.run_dir.checkpoint(20) / "MANIFEST.json").write_bytes(b'{"form')
    reason = crash(stage)
    assert stage.directive.resume_from == "checkpoint-10"
    assert "; checkpoint-20 is passed over: its manifest is unusable (" in reason
    assert "checkpoint-10 " not in reason


def test_a_run_that_begins_again_because_every_checkpoint_is_damaged_says_which_and_why(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.train(55)
    stage.settle()
    for step in (10, 20, 30, 40):
        (stage.run_dir.checkpoint(step) / "MANIFEST.json").unlink()
    other = (stage.run_dir.checkpoint(50) / "MANIFEST.json").read_bytes().replace(b'"step": 50', b'"step": 60')
    (stage.run_dir.checkpoint(50) / "MANIFEST.json").write_bytes(other)
    reason = crash(stage)
    assert stage.directive.resume_from is None
    assert "; checkpoint-50 is passed over: its manifest is that of step 60" in reason
    assert reason.endswith("; checkpoint-30 is passed over: it has no manifest; and 2 more")


def test_a_damaged_checkpoint_after_the_onset_is_not_spoken_of(stage: Stage) -> None:
    for step in (10, 20):
        (stage.run_dir.checkpoint(step) / "MANIFEST.json").unlink()
    stage.train(28, "spike", onset=15, loss=9.0)
    stage.settle()
    assert stage.directive.resume_from is None
    assert "checkpoint-10 is passed over" in stage.directive.reason
    assert "checkpoint-20" not in stage.directive.reason


def test_a_history_that_this_version_cannot_read_is_waited_for(stage: Stage) -> None:
    before = stage.run_dir.history.read_bytes()
    stage.run_dir.history.write_bytes(before.replace(b'"verdict": "ok"', b'"verdict": "odd"'))
    stage.start_supervisor()
    stage.look()
    assert "loss_history.json" in stage.ears.troubles[-1]
    stage.run_dir.history.write_bytes(before)
    stage.settle()
    assert stage.state == "training"


@pytest.mark.parametrize("content", SPOILT)
def test_a_spoilt_record_of_the_stand_in_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    record_path(tmp_path, "7").write_bytes(content)
    with pytest.raises(SchedulerError, match=r"7_local\.json"):
        read(tmp_path, "7")


def test_what_comes_from_a_file_does_not_paint_the_terminal() -> None:
    forged = StopRequested(by="x", reason="\x1b[2J\x1b[31mroot\nFAKE LINE 2026 FINISHED")
    [line] = event_lines(forged, Listing())
    assert "\x1b" not in line
    assert "\n" not in line
