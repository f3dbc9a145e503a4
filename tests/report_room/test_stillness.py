"""What is said of a run whose steps stopped coming, and of time that nobody supervised."""

from pathlib import Path

from supervisor.journal import JobSeen, SupervisorStarted
from supervisor.report.frame import frame
from supervisor.report.log_text import closing_summary, log_lines
from supervisor.report.standing_text import detail_lines, list_lines, stands_still
from supervisor.runs import standing
from tests.report_room.stories import Slow
from worker.contract.exit_report import ErrorDetail, Outcome

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


def test_the_log_says_for_how_long_nobody_supervised_a_job_that_had_ended(tmp_path: Path) -> None:
    stage = under_way(tmp_path)
    end = stage.now + 3
    begun = SupervisorStarted(host="h", pid=1, attempt=1, time=end + 81)
    over = JobSeen(job_id="1", state="COMPLETED", attempt=1, ends_at=end, time=end + 82)
    told = [line for line in log_lines([*stage.events, begun, over], stage.story.accounting()) if "nobody" in line]
    assert [line.partition(", ")[2] for line in told] == ["1 min 21 s: its job had ended"]
    seen_at_once = over.model_copy(update={"ends_at": end + 81.5})
    assert "nobody" not in "".join(log_lines([*stage.events, begun, seen_at_once], stage.story.accounting()))
