"""Each event is told once, and what to try about its kind once a log."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.journal import GaveUp, NodeStruck, RolledBack, SegmentStarted
from supervisor.notify import note_of
from supervisor.report.log_text import log_lines
from supervisor.report.page import Facts, render
from supervisor.report.texts import Listing, details_of, details_once
from tests.report_room.stories import Slow, a_start, one_spike
from tests.supervisor_room.stage import config
from worker.contract.directive import SkippedBatches
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.loss_history import LeftOutBatch, SourceRows
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


def test_what_was_tried_and_which_batches_are_left_out_is_not_told_again(tmp_path: Path) -> None:
    answer = RolledBack(
        cause="spike", where="new_job", kind="spike", verdict_step=8, onset_step=6, from_step=8, to_step=0,
        reason="the loss rose; back to scratch at 0.5 of the rate: there is none before the onset",
        skip_batches=(SkippedBatches(epoch=0, first=5, count=3),),
    )  # fmt: skip
    over = GaveUp(tried=(answer.reason,), reason="1 rollback brought nothing")
    rows = SourceRows(file="a.txt", unit="line", first=1, last=2)
    start = a_start(100).model_copy(update={"left_out": (LeftOutBatch(epoch=0, batch=5, rows=(rows,)),)})
    begun = SegmentStarted(segment=2, restart=0, step=1, start=start)
    listing = Listing()
    assert ("left out", "batch 5 of epoch 0: line 1-2 of a.txt") in details_once(begun, None, listing)
    assert ("left out", "as above") in details_once(begun, None, listing)
    assert "; 3 batches are left out in all" in dict(details_once(answer, None, listing))["done"]
    assert "tried" not in dict(details_once(over, None, listing))
    assert dict(details_once(over, None, Listing()))["tried"] == answer.reason


def test_after_an_error_of_the_disk_nobody_is_sent_to_the_program() -> None:
    reason = (
        "10 attempts without a new healthy checkpoint; the last: the worker crashed: [Errno 122] Disk quota exceeded"
    )
    over = GaveUp(reason=reason, saved_step=10)
    tried = [text for label, text in details_of(over, folder="/runs/r") if label == "try"]
    assert tried[0].startswith("an error of the disk")
    assert tried[1:] == ["do that, then higgsfield resume /runs/r"]


def test_an_error_in_a_persons_own_script_names_the_place_to_mend_and_is_shown_from_a_frame_on() -> None:
    ours = "".join(f'  File "/x/worker/train.py", line {n}, in f{n}\n    f()\n    ^^^\n' for n in range(5))
    call = '  File "/x/worker/own_script.py", line 86, in run\n    script(self)\n'
    theirs = '  File "/w/boom.py", line 2, in main\n    torch.cat()\n'
    library = '  File "/v/lib/python3.11/site-packages/torch/a.py", line 9, in cat\n    raise ValueError\n'
    error = f"Traceback (most recent call last):\n{ours}{call}{theirs}{library}ValueError: bad"
    over = GaveUp(reason="the same crash twice before any step: ValueError", error=error)
    details = details_of(over, folder="/runs/r")
    tried = [text for label, text in details if label == "try"]
    assert tried == ["mend /w/boom.py, line 2", "do that, then higgsfield resume /runs/r"]
    shown = [text for label, text in details if not label]
    assert (shown[0], shown[1].split(",")[0], shown[-1]) == ("...", '  File "/x/worker/train.py"', "ValueError: bad")
    assert not any("^" in line for line in shown)
    without = GaveUp(reason="the same crash twice before any step", error=error.replace(call, ""))
    assert "edit /runs/r/config.yaml" in dict(details_of(without, folder="/runs/r"))["try"]
