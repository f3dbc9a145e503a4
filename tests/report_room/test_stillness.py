"""What is said of a run whose steps stopped coming, and of time that nobody supervised."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.job import JobState
from supervisor.journal import JobSeen, SupervisorStarted
from supervisor.lease import take_lease
from supervisor.pace import step_s, whole_rounds
from supervisor.report.frame import frame
from supervisor.report.log_text import closing_summary, log_lines
from supervisor.report.screen import Screen
from supervisor.report.standing_text import detail_lines, list_lines, stands_still
from supervisor.report.texts import details_of
from supervisor.runs import standing
from supervisor.supervise import reopen, take_up
from supervisor.views import show_log, write_report
from tests.report_room.stories import Slow, refused
from tests.supervisor_room.stage import BEGIN, Stage
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.loss_history import read_history, record

KILLED = ErrorDetail(type="Signal", message="killed by signal 9 (Killed)")


def under_way(folder: Path) -> Slow:
    stage = Slow(folder)
    stage.start_after(5)
    stage.train(49)
    stage.settle()
    return stage


def test_of_a_run_that_stands_still_no_end_is_estimated_and_none_lies_in_the_past(tmp_path: Path) -> None:
    stage = under_way(tmp_path)
    last = stage.story.records[-1].time
    going = standing(stage.run_dir, in_detail=False, now=last + 2)
    assert going["eta"] > last + 2
    assert (going["still_since"], going["worker_left"]) == (None, None)
    late = standing(stage.run_dir, in_detail=True, now=last + 600)
    assert (late["eta"], late["still_since"]) == (None, last)
    picture = frame(late, stage.events, stage.story.records, [], 100, 24, last + 600)
    for text in ("\n".join(lines) for lines in (list_lines([late], last + 600), detail_lines(late, last), picture)):
        assert "no step since" in text
        assert "done about" not in text


def test_a_death_that_no_supervisor_has_read_is_told_at_once_with_what_to_do(tmp_path: Path) -> None:
    stage = under_way(tmp_path)
    stage.leave(Outcome.CRASHED, error=KILLED)
    stage.run_dir.lease.unlink()
    row = standing(stage.run_dir, in_detail=True, now=stage.now)
    assert row["eta"] is None
    told = stands_still(row, stage.now)
    assert "no step since" in told
    assert "killed by signal 9" in told
    assert f"higgsfield resume {stage.run_dir.path}" in told
    assert "killed by signal 9" in "\n".join(detail_lines(row, stage.now))
    summary = closing_summary(stage.events, stage.story.accounting(), still=told)
    assert any("killed by signal 9" in line for line in summary)
    assert "Nothing interrupted it." not in summary


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize("is_read", [False, True])
def test_a_worker_that_was_preempted_has_left_and_waits_to_be_killed(tmp_path: Path, is_read: bool) -> None:
    stage = under_way(tmp_path)
    stage.leave(Outcome.LEFT, error=ErrorDetail(type="Left", message="asked", what="preempted"))
    if is_read:
        stage.settle()
    row = standing(stage.run_dir, in_detail=True, now=stage.now + 300)
    text = "\n".join(detail_lines(row, stage.now + 300))
    assert "no step since" in text
    assert "the worker left in order and" in text
    assert ("its job waits to be killed, until" in text) == is_read
    stage.scheduler.set_state(stage.job_id, JobState.REQUEUED)
    stage.settle()
    assert standing(stage.run_dir, in_detail=False, now=stage.now)["worker_left"] is None


def test_the_log_says_for_how_long_nobody_supervised_a_job_that_had_ended(tmp_path: Path) -> None:
    stage = under_way(tmp_path)
    end = stage.now + 3
    begun = SupervisorStarted(host="h", pid=1, attempt=1, time=end + 81)
    over = JobSeen(job_id="1", state="COMPLETED", attempt=1, ends_at=end, time=end + 82)
    told = [line for line in log_lines([*stage.events, begun, over], stage.story.accounting()) if "had ended" in line]
    assert [line.partition(", ")[2] for line in told] == ["1 min 21 s before"]
    seen_at_once = over.model_copy(update={"ends_at": end + 81.5})
    assert "had ended" not in "".join(log_lines([*stage.events, begun, seen_at_once], stage.story.accounting()))


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("gap_s", "told"),
    [(4, []), (42, [("", "no sign of a supervisor from 23:12:38 to 23:13:20, 42 s")])],
)
def test_the_log_says_for_how_long_nobody_supervised_a_worker_that_lived(
    gap_s: float, told: list[tuple[str, str]]
) -> None:
    begun = SupervisorStarted(host="h", pid=1, time=BEGIN, free_since=BEGIN - gap_s)
    assert details_of(begun) == told


@pytest.mark.parametrize(("play", "is_submitted"), [(under_way, False), (under_way, True), (refused, False)])
def test_the_next_supervisor_of_a_run_that_is_not_over_knows_the_last_sign_of_the_one_before(
    tmp_path: Path, play: Callable[[Path], Slow], is_submitted: bool
) -> None:
    stage = play(tmp_path)
    stage.watched.run.lease.give_up()
    os.utime(stage.run_dir.lease, (BEGIN, BEGIN))
    if is_submitted:
        reopen(stage.run_dir, stage.config)
    lease = take_lease(stage.run_dir)
    watched = take_up(stage.run_dir, stage.config, stage.scheduler, lease, Screen(io.StringIO(), "r", None))
    begun = watched.run.introduction
    assert begun is not None
    assert begun.free_since == (BEGIN if play is under_way else None)


def test_an_evaluation_is_told_moves_the_end_and_is_no_standstill(tmp_path: Path) -> None:
    stage = under_way(tmp_path)
    last = stage.story.records[-1].time
    before = standing(stage.run_dir, in_detail=False, now=last + 1)
    assert before["doing"] is None
    stage.now = last + 80
    stage.pulse("evaluating")
    row = standing(stage.run_dir, in_detail=True, now=last + 90)
    assert (row["doing"], row["still_since"]) == ("evaluating", None)
    assert row["eta"] == pytest.approx(before["eta"] + 90, abs=5)
    picture = frame(row, stage.events, stage.story.records, [], 100, 24, last + 90)
    for text in ("\n".join(lines) for lines in (list_lines([row], last + 90), detail_lines(row, last + 90), picture)):
        assert "evaluating" in text
    silent = standing(stage.run_dir, in_detail=False, now=last + 600)
    assert (silent["doing"], silent["still_since"]) == (None, last)


def test_the_pace_has_as_many_evaluations_in_it_as_belong_there() -> None:
    rows = [
        record(segment=1, attempt=1, restart=0, step=n, epoch=0.0, time=n + 100.0 * ((n - 1) // 20), loss=1.0, lr=1.0)
        for n in range(1, 51)
    ]
    assert step_s(whole_rounds(rows, 20)) == 6.0
    assert whole_rounds(rows, None) == whole_rounds(rows, 50) == rows


def test_the_newest_and_the_best_evaluation_are_told_wherever_a_run_is(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.train(20, eval_loss=1.5)
    stage.train(40, eval_loss=1.8, ema_eval_loss=1.6)
    stage.train(49)
    stage.settle()
    told = "1.8 at step 40, of the average 1.6; the best at step 20: 1.5"
    row = standing(stage.run_dir, in_detail=True, now=stage.now)
    picture = frame(row, stage.events, read_history(stage.run_dir.history), [], 100, 24, stage.now)
    out = io.StringIO()
    show_log(stage.run_dir, 0.0, out)
    for text in ("\n".join(detail_lines(row, stage.now)), "\n".join(picture), out.getvalue()):
        assert told in text
    page = write_report(stage.run_dir).read_text()
    assert told in page
    assert '"evaluations":[[20,1.5],[40,1.8]]' in page.replace(" ", "")
