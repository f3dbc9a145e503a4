"""What a person reads of a run that is over, was only watched, or was asked for something: true, once, and short."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from supervisor.journal import Continued, GaveUp, JobSeen, RolledBack, SegmentStarted, WouldHaveDone
from supervisor.report.accounting import account
from supervisor.report.figures import node_hours
from supervisor.report.log_text import closing_summary, entry_lines, milestones
from supervisor.report.standing_text import detail_lines, list_lines
from supervisor.report.texts import WIDTH, Listing, details_of, step_of
from supervisor.requests import Request
from supervisor.runs import standing
from supervisor.views import show_standing
from tests.report_room.stories import Slow, a_start, healthy, refused
from tests.supervisor_room.stage import BEGIN, Stage
from worker.contract.directive import SkippedBatches
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import publish_message
from worker.contract.loss_history import LeftOutBatch, SourceRows, read_history

pytestmark = pytest.mark.usefixtures("berlin")
KILLED = ErrorDetail(type="Signal", message="killed by signal 9 (Killed)")


@pytest.mark.parametrize(("play", "word"), [(healthy, "Finished at step 100"), (refused, "Gave up after")])
def test_a_pin_changes_nothing_of_what_is_told_of_a_run_that_is_over(tmp_path: Path, play: Any, word: str) -> None:
    stage = play(tmp_path)
    before = closing_summary(stage.story.events, stage.story.accounting())
    reason = standing(stage.run_dir, in_detail=False)["reason"]
    stage.wait(120)
    publish_message(stage.run_dir.request, Request(verb="pin", by="root", to=80))
    stage.settle()
    story = stage.story
    assert "checkpoint-80 to be kept" in story.events[-1].reason, "or refused, where it is not there"
    assert closing_summary(story.events, story.accounting(now=stage.now + 600)) == before
    assert before[0].startswith(word)
    assert story.accounting(now=stage.now + 600).seconds("paused") == 0
    assert standing(stage.run_dir, in_detail=False)["reason"] == reason


def test_many_batches_that_are_left_out_are_counted_after_the_first_few() -> None:
    lines = tuple(SourceRows(file="a.jsonl", unit="line", first=n, last=n) for n in range(1, 60, 2))
    left_out = tuple(LeftOutBatch(epoch=1, batch=number, rows=lines) for number in range(85))
    start = a_start(100).model_copy(update={"left_out": left_out})
    told = details_of(SegmentStarted(segment=2, restart=0, step=6, start=start))
    assert len(told) == 7
    assert told[0][1].endswith("27, 29, 31 and 14 more of a.jsonl")
    assert told[-1] == ("", "and 79 more: higgsfield log --json")


def test_a_start_says_what_its_time_went_into() -> None:
    took_s = {"imports": 0.2, "meet": 0.04, "choose": 0.0, "build": 0.61, "load": 2.0, "prove": 0.3}

    def told(waited_s: float) -> dict[str, str]:
        start = a_start(100).model_copy(update={"took_s": took_s, "waited_s": waited_s})
        return dict(details_of(SegmentStarted(segment=2, restart=0, step=6, start=start)))

    assert told(61.3) == {"start took": "1 min 5 s: imports 1 min 2 s, build 1 s, load 2 s"}
    assert told(0.0) == {"start took": "3.1 s: imports 0.2 s, build 0.6 s, load 2 s, prove 0.3 s"}
    assert told(600.0) == {"start took": "10 min: imports 10 min"}


def test_who_asked_for_a_rollback_is_not_told_when_batches_are_left_out_by_themselves() -> None:
    skips = (SkippedBatches(epoch=0, first=1, count=2),)
    fields: dict[str, Any] = {"kind": "requested", "verdict_step": 9, "onset_step": 6, "from_step": 9, "to_step": 5}
    asked = RolledBack(cause="rollback", where="same_allocation", skip_batches=skips, **fields)
    assert "try" not in dict(details_of(asked))
    assert "recovery.spike.skip" in dict(details_of(asked.model_copy(update={"cause": "spike"})))["try"]


def test_why_a_job_waits_is_said_once() -> None:
    event = JobSeen(job_id="9", state="PENDING", why="Priority", reason="job 9 waits: other jobs come first (Priority)")
    assert "\n".join(entry_lines(event, None, WIDTH, Listing())).count("other jobs come first") == 1


def test_nobody_is_sent_to_a_traceback_that_a_kill_cannot_leave(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    stage.start_after(5)
    stage.train(38)
    stage.leave(Outcome.CRASHED, error=KILLED)
    stage.settle()
    again = [event for event in stage.events if isinstance(event, Continued)][-1]
    assert again.reason == "the worker ended: rank 0 on n1 was killed by signal 9 (Killed)"

    assert "What happened: its trainer was killed." in closing_summary(stage.events, stage.story.accounting())

    def tried(reason: str) -> str:
        return dict(details_of(again.model_copy(update={"reason": reason})))["try"]

    assert "most often memory ran out" in tried(again.reason)
    assert "native code" in tried("the worker ended: rank 0 on n1 was killed by signal 11 (Segmentation fault)")
    assert "somebody outside" in tried("the worker ended: rank 0 on n1 was killed by signal 15 (Terminated)")
    assert "another rank ended first" in tried("the worker was ended by its agent: rank 1 on n1: the trainers of [0]")
    assert tried("the worker crashed: rank 0 on n1: KeyError: 'x'").startswith("the traceback is in")
    given_up = GaveUp(reason=f"10 attempts without a new healthy checkpoint; the last: {again.reason}", saved_step=30)
    assert [text[:8] for label, text in details_of(given_up) if label == "try"] == ["signal 9", "do that,"]


def test_a_run_that_was_only_watched_says_what_would_have_been_made(tmp_path: Path) -> None:
    stage = Stage(tmp_path, recovery={"mode": "observe"})
    stage.settle()
    stage.start_job()
    stage.train(38, "spike", onset=36, loss=9.0, observed=True)
    stage.settle()
    events, records = stage.events, read_history(stage.run_dir.history)
    [noted] = [event for event in events if isinstance(event, WouldHaveDone)]
    assert step_of(noted) == 38
    told = closing_summary(events, account(events, records, stage.now, 1))
    assert "1 rollback (step 38) would have been made; nothing was, for recovery.mode is observe." in told
    assert "Nothing interrupted it." not in told
    without = [event for event in events if event is not noted]
    assert "Nothing interrupted it." in closing_summary(without, account(without, records, stage.now, 1))


def test_a_sentence_has_one_unit() -> None:
    assert [node_hours(s, whole_s=40) for s in (40, 27, 0)] == ["40 node-seconds", "27 node-seconds", "0 node-seconds"]
    assert [node_hours(s, whole_s=7200) for s in (7200, 27)] == ["2 node-hours", "under 0.01 node-hours"]


def test_the_reason_for_giving_up_goes_on_the_sentence_and_ends_it_once(tmp_path: Path) -> None:
    story = refused(tmp_path).story
    *before, last = story.events
    assert isinstance(last, GaveUp)
    ended = last.model_copy(update={"reason": "the worker will not train: exit code (2)."})
    [head, *_] = closing_summary([*before, ended], story.accounting())
    assert head.endswith("0 steps repeated; why: the worker will not train: exit code (2).")


def test_where_no_checkpoint_would_be_lost_the_advice_is_to_mend_or_to_begin_anew(tmp_path: Path) -> None:
    nothing = refused(tmp_path / "nothing").events[-1]
    assert "edit config.yaml in the run's folder" in dict(details_of(nothing))["try"]
    lowered = nothing.model_copy(update={"tried": ("back to scratch at 0.5 of the rate",)})
    folder = "/runs/r"
    anew = f"higgsfield rollback {folder} --to 0 --lr-scale 1, which begins at the configured rate"
    said = f"edit {folder}/config.yaml, then {anew}, then higgsfield resume {folder}, or remove {folder}"
    assert dict(details_of(lowered, folder=folder))["try"].endswith(said)
    row = standing(refused(tmp_path / "status").run_dir, in_detail=True)
    assert said.replace(folder, row["dir"]) in " ".join(" ".join(detail_lines(row | {"lr_scale": 0.5}, BEGIN)).split())
    stage = Slow(tmp_path / "saved")
    stage.start_after(5)
    stage.train(38)
    stage.leave(Outcome.REFUSED, error=ErrorDetail(type="DataError", message="the data are gone"))
    stage.settle()
    last = stage.events[-1]
    assert isinstance(last, GaveUp)
    assert last.saved_step == 30
    assert dict(details_of(last))["try"] == "mend what made it give up, then higgsfield resume"


def test_a_run_that_gave_up_names_the_keys_to_change_where_they_are_known(tmp_path: Path) -> None:
    stage = Slow(tmp_path, recovery={"spike": {"max_rollbacks": 0}})
    stage.start_after(5)
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    last = stage.events[-1]
    assert isinstance(last, GaveUp)
    assert last.diagnosis is not None
    tried = [text for label, text in details_of(last) if label == "try"]
    assert tried == [last.diagnosis.next, "set that in the run's config.yaml, then higgsfield resume"]
    assert "recovery.spike.skip" in tried[0]
    out = io.StringIO()
    show_standing([standing(stage.run_dir, in_detail=True)], True, stage.run_dir.path.parent, out)
    told = " ".join(out.getvalue().split())
    assert f"try {tried[0]} go on set that" in told
    assert told.count(tried[0]) == 1
    assert f"then higgsfield resume {stage.run_dir.path}; as it is it may give up again" in told
    rate = last.diagnosis.model_copy(update={"next": "training.optimizer.learning_rate: 0.1"})
    assert details_of(last.model_copy(update={"diagnosis": rate}), folder="/runs/r")[-1][1].endswith(
        "then higgsfield resume /runs/r, at a lowered rate; "
        "higgsfield rollback /runs/r --to STEP --lr-scale 1 begins at the configured one"
    )
    nothing = last.model_copy(update={"diagnosis": None})
    assert dict(details_of(nothing))["try"] == "mend what made it give up, then higgsfield resume"
    memory = nothing.model_copy(update={"reason": "out of memory again, without a new healthy checkpoint: ..."})
    assert "training.batch_size" in details_of(memory)[0][1]


def test_each_verdict_and_each_giving_up_is_counted_once_and_a_persons_words_are_told(tmp_path: Path) -> None:
    stage = Slow(tmp_path, recovery={"spike": {"max_rollbacks": 1}})
    stage.start_after(5)
    for _ in range(2):
        stage.train(38, "spike", onset=36, loss=9.0)
        stage.leave(Outcome.VERDICT)
        stage.settle()
    assert stage.state == "gave_up"
    spiked = "What happened: the loss spiked 2 times (steps 38, 38)"
    assert f"{spiked}." in closing_summary(stage.events, stage.story.accounting())
    publish_message(stage.run_dir.request, Request(verb="rollback", by="ada", to=0, lr_scale=1.0, asked_at=1.0))
    stage.settle()
    told = closing_summary(stage.events, stage.story.accounting())
    assert f"{spiked}; it gave up; a person asked for a rollback (step 38)." in told
    shown = [stage.events[number].event for number in sorted(milestones(stage.events))]
    assert shown[-3:] == ["GaveUp", "RollbackRequested", "RolledBack"]


def test_a_long_reason_is_cut_at_the_terminals_width(tmp_path: Path) -> None:
    row = standing(refused(tmp_path).run_dir, in_detail=False)
    [head, line] = list_lines([row | {"reason": "why " * 80}], BEGIN + 60, width=80)
    assert len(line) <= 80
    assert line.endswith("...")
    assert len(head) <= 80
