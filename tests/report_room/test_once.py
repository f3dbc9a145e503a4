"""Each event is told once, and what to try about its kind once a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.journal import NodeStruck
from supervisor.notify import note_of
from supervisor.report.log_text import log_lines
from supervisor.report.page import Facts, render
from tests.report_room.stories import Slow, one_spike
from tests.supervisor_room.stage import config
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.pulse import Hang

pytestmark = pytest.mark.usefixtures("berlin")
KILLED = ErrorDetail(type="Signal", message="killed by signal 9 (Killed)")
ENDED = ErrorDetail(type="Ended", message="no progress for 8 s while training after step 25", what="hang")
STOPPED = Hang(phase="training", step=25, quiet_s=8.0, limit_s=8.0, process="T (stopped) in do_signal_stop")


def told(stage: Slow) -> str:
    lines = log_lines(stage.events, stage.story.accounting())
    return " ".join(" ".join(lines).split())


def test_a_killed_trainer_is_one_line_and_the_advice_comes_once(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    stage.start_after(5)
    for until in (38, 60):
        stage.train(until)
        stage.leave(Outcome.CRASHED, error=KILLED, signal=9)
        stage.settle()
        stage.claim()
    log = told(stage)
    assert log.count("rank 0 on n1 was killed by signal 9 (Killed)") == 2
    assert log.count("signal 9 leaves no traceback") == 1
    assert log.count("try as above") == 1
    assert "SIGKILL" not in log
    struck = next(event for event in stage.events if isinstance(event, NodeStruck))
    assert (struck.reason, struck.evidence) == (
        "a strike against n1",
        "the trainer of rank 0 was killed there by SIGKILL",
    )
    page = render(Facts(config(tmp_path), stage.events, stage.story.records, stage.story.accounting(), (), stage.now))
    assert page.count("signal 9 leaves no traceback") == 1
    because = "<dt>because</dt><dd>the worker ended: rank 0 on n1 was killed"
    assert page.count(because) == 2, "the worker's own line is folded away there"


def test_a_hang_is_one_line(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    stage.start_after(5)
    stage.train(25)
    stage.leave(Outcome.ENDED, error=ENDED, hang=STOPPED)
    stage.settle()
    log = told(stage)
    assert log.count("no progress") == log.count("do_signal_stop") == log.count("attempts/0001/r0") == 1
    assert "a strike against n1" in log


def test_a_verdict_is_told_by_its_own_line_and_a_message_says_all_of_it(tmp_path: Path) -> None:
    stage = one_spike(tmp_path)
    seen = "loss 9 at step 38, 4.5 x the level 2, above the band since step 36"
    log = told(stage)
    assert log.count(seen) == 1
    assert "because back to checkpoint-30 at 0.5 of the configured rate" in log
    rolled = next(event for event in stage.events if event.event == "RolledBack")
    assert f"because: {seen}; back to checkpoint-30" in note_of(rolled, "").text


def test_a_job_that_ends_for_a_verdict_does_not_tell_it_again(tmp_path: Path) -> None:
    stage = Slow(tmp_path, recovery={"relaunches_in_allocation": 0})
    stage.start_after(5)
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    [cancelled] = [event for event in stage.events if event.event == "Cancelled"]
    assert cancelled.reason == "job 1: a fresh job is needed"
