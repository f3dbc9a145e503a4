"""What interrupted a run: told once, by its own name, and its time and steps belong to one event alone."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState
from supervisor import actions
from supervisor.how_it_left import how_it_left
from supervisor.journal import Continued, Event, JobSeen, Preempted, ResumeRequested, RolledBack, Stopped, WorkerLeft
from supervisor.notify import note_of
from supervisor.report.frame import frame
from supervisor.report.interruptions import add_up, first_step_began
from supervisor.report.log_text import closing_summary, costs_of, log_lines, milestones
from supervisor.report.page import Facts, render
from supervisor.report.page_data import chart_data
from supervisor.report.standing_text import list_lines
from supervisor.report.texts import details_of, text_of, word_of
from supervisor.runs import standing
from tests.fakes import FakeScheduler
from tests.report_room.stories import PLAYED, RECORDINGS, Slow, Story, preemption_storm, recorded
from tests.report_room.test_texts import standing_row
from tests.supervisor_room.stage import BEGIN, CRASHED, PREEMPTED, config
from worker.contract.exit_report import ErrorDetail, ExitReport, Outcome

pytestmark = pytest.mark.usefixtures("berlin")
STOP = ErrorDetail(type="Left", message="asked to leave at step 38", what="stop")


def told(story: Story) -> str:
    return "\n".join(log_lines(story.events, story.accounting(), width=400))


# -- every second has one owner ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_time_between_two_starts_belongs_to_what_happened_in_it_and_no_second_to_two(name: str) -> None:
    story = recorded(name)
    found = story.accounting()
    owners = [each.event for each in found.interruptions]
    assert None not in owners
    assert len(set(owners)) == len(owners)
    assert set(owners) <= milestones(story.events)
    gaps = [(a.time, first_step_began([b])) for a, b in pairwise(story.records) if a.segment != b.segment]
    shares = sum(each.idle_s + each.paused_s for each in found.interruptions)
    assert shares == pytest.approx(sum(end - begin for begin, end in gaps), abs=0.01)
    again = len(story.records) - len({record.step for record in story.records})
    assert sum(each.steps_undone for each in found.interruptions) == again


@pytest.mark.parametrize("name", RECORDINGS)
def test_what_the_events_cost_adds_up_to_what_the_summary_tells(name: str) -> None:
    lines = " ".join(told(recorded(name)).split())
    rounded = {"second": (1.0, 0.5), "hour": (3600.0, 18.0)}

    def sums(pattern: str) -> tuple[float, float]:
        """In node-seconds, and by how much it may be off."""
        found = re.findall(rf"{pattern} ([\d.]+) node-(second|hour)", lines)
        return sum(float(one) * rounded[unit][0] for one, unit in found), sum(rounded[unit][1] for _, unit in found)

    each, may_be_off = sums(r"without training(?: beside a pause of [^:]*)?:")
    whole, may_be = sums(r"were training and")
    assert each == pytest.approx(whole, abs=may_be_off + may_be)
    assert (each > 0) == (name not in ("healthy", "refused"))


def preempted_before_its_first_step(folder: Path) -> Slow:
    """Stopped and resumed; what was resumed is preempted before it makes a step, and then crashes before one."""
    stage = stopped_and_resumed(folder)
    stage.leave(Outcome.LEFT, error=PREEMPTED)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="BeginTime", restarts=1)
    stage.settle()
    stage.wait(1800)
    stage.start_job(restarts=1)
    stage.settle()
    stage.wait(20)
    stage.leave(Outcome.CRASHED, restart=1, error=CRASHED)
    stage.settle()
    stage.claim(restarts=1)
    stage.train(60, restart=1)
    stage.settle()
    return stage


def stopped_and_resumed(folder: Path) -> Slow:
    """Stopped by a person at step 38, an hour later resumed; its job runs."""
    stage = Slow(folder)
    stage.start_after(5)
    stage.train(38)
    stage.run_dir.stop_file.touch()
    stage.settle()
    stage.save(38)
    stage.leave(Outcome.LEFT, error=STOP, saved_step=38)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
    stage.settle()
    stage.wait(3600)
    stage.run_dir.stop_file.unlink()
    resume(stage)
    stage.start_after(60)
    return stage


def resume(stage: Slow) -> None:
    stage.watched.run.record(ResumeRequested(by="ada", reason="ada asked for the run to go on"))
    stage.settle()


def test_a_resume_a_preemption_and_a_crash_before_the_next_step_share_the_time(tmp_path: Path) -> None:
    story = preempted_before_its_first_step(tmp_path).story
    costs = costs_of(story.accounting())
    shared = {word_of(story.events[place]): cost for place, cost in costs.items()}
    assert list(shared) == ["resumed", "preempted", "continued"]
    assert shared["resumed"].paused_s == pytest.approx(3600, abs=10)
    assert shared["resumed"].idle_s < 200
    assert 1800 < shared["preempted"].idle_s < 1900
    assert shared["continued"].idle_s < 60
    assert [cost.kept_node_s > 0 for cost in shared.values()] == [False, False, True]
    whole = add_up(list(costs.values()))
    assert whole == add_up(story.accounting().costs_of_segment(2))
    assert len({text for line in told(story).splitlines() if "cost  " in line for text in [line.strip()]}) == 3


def test_steps_are_undone_by_the_attempt_that_went_back_behind_them(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    stage.start_after(5)
    stage.train(38)
    stage.leave(Outcome.CRASHED, error=CRASHED)
    stage.settle()
    stage.claim()
    stage.leave(Outcome.CRASHED, error=CRASHED.model_copy(update={"traceback": '  File "b.py", line 1, in b'}))
    stage.settle()
    stage.claim()
    stage.train(50)
    story = stage.story
    assert [cost.steps_undone for cost in story.accounting().interruptions] == [8, 0]


def test_the_report_shows_every_interruption_that_its_summary_names(tmp_path: Path) -> None:
    story = preemption_storm(tmp_path).story
    shown = [story.events[place] for place in milestones(story.events)]
    assert sum(isinstance(event, Preempted) for event in shown) == 4
    assert "What happened: preempted 4 times." in closing_summary(story.events, story.accounting())
    silent = Story([event for event in story.events if not isinstance(event, Preempted)], story.records)
    shown = [silent.events[place] for place in sorted(milestones(silent.events))]
    assert [event.restarts for event in shown if isinstance(event, JobSeen)] == [1, 2, 3, 4]
    told = closing_summary(silent.events, silent.accounting())
    assert "What happened: Slurm put its job back into the queue 4 times." in told
    assert len(costs_of(silent.accounting())) == 4


# -- a person's word is no trouble -------------------------------------------------------------------------------------


def test_a_stop_and_a_resume_have_a_mark_and_a_word_of_their_own(tmp_path: Path) -> None:
    stage = stopped_and_resumed(tmp_path)
    stage.train(60)
    story = stage.story
    marks = chart_data(story.events, story.records, [])["marks"]
    assert [(mark["kind"], mark["step"]) for mark in marks] == [("stopped", 38), ("resumed", 38)]
    page = render(Facts(config(tmp_path), story.events, story.records, story.accounting(), (), stage.now))
    assert "stopped by a person" in page
    lines = frame(standing_row(), story.events, story.records, [], 80, 24, stage.now)
    assert lines[-1] == "q quits  S stopped"
    assert "What happened: a person stopped it (step 38); a person resumed it." in told(story)
    [resumed] = [event for event in story.events if isinstance(event, Continued) and event.cause == "resumed"]
    assert (word_of(resumed), text_of(resumed)) == ("resumed", "attempt 2 from checkpoint-38 (in a new job)")
    assert "beside a pause of 1 h" in told(story)
    assert "Error" not in told(story)


def test_only_trouble_is_marked_as_trouble() -> None:
    marks: Counter[tuple[str, str]] = Counter()
    for name in RECORDINGS:
        story = recorded(name)
        kinds = [mark["kind"] for mark in chart_data(story.events, story.records, [])["marks"]]
        causes = [e.cause for e in story.events if isinstance(e, Continued)]
        bad = {"crash", "hang", "node_failed", "vanished", "out_of_memory", "refused"}
        troubles = sum(cause in bad for cause in causes) + sum(event.event == "GaveUp" for event in story.events)
        assert kinds.count("trouble") == troubles, name
        marks.update((name, kind) for kind in kinds)
    assert marks["slurm_cancelled", "stopped"] == marks["slurm_cancelled", "resumed"] == 2


def test_where_there_is_no_slurm_a_job_ends_by_a_signal_and_no_scancel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "LocalScheduler", FakeScheduler)
    stage = Slow(tmp_path)
    stage.start_after(5)
    stage.train(38)
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    assert stage.events[-1].reason == "job 1 was CANCELLED by a signal from outside, not by this supervisor"
    assert "Stopped by a signal from outside after" in told(stage.story)


@pytest.mark.parametrize("user", ["ada", None])
def test_a_scancel_is_what_slurm_says_and_no_preemption(tmp_path: Path, user: str | None) -> None:
    stage = Slow(tmp_path)
    stage.start_after(5)
    stage.scheduler.cancellers = {stage.job_id: user} if user else {}
    stage.train(38)
    stage.leave(Outcome.LEFT, error=PREEMPTED, saved_step=38)
    stage.save(38)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    ended = stage.events[-1]
    assert isinstance(ended, Stopped)
    assert ended.reason == f"job 1 was CANCELLED by {user or 'a person'}, not by this supervisor"
    log = told(stage.story)
    assert "left (preempted)" not in log
    assert "left in order and saved step 38: SIGTERM asked it to (a preemption, a requeue or a scancel)" in log
    assert f"Stopped by {user or 'the scancel of a person'} after" in log
    assert "Nothing interrupted it." not in log
    [_, line] = list_lines([standing(stage.run_dir, in_detail=False)], stage.now)
    assert "job 1 was CANCELLED by" in line
    assert "job 1 was CANCELLED by" in note_of(ended, "").text
    page = render(Facts(config(tmp_path), stage.events, stage.story.records, stage.story.accounting(), (), stage.now))
    assert "left: preempted" not in page
    assert "CANCELLED by" in page


# -- how a worker left -------------------------------------------------------------------------------------------------


def left(outcome: Outcome, error: ErrorDetail | None = None, **fields: Any) -> str:
    report = ExitReport(
        attempt=1, restart=0, rank=1, job_id="7", host="n2", outcome=outcome, step=38, started=0.0, ended=1.0,
        error=error, **fields,
    )  # fmt: skip
    return how_it_left(report)


def test_how_a_worker_left_is_one_sentence_without_our_own_names() -> None:
    killed = ErrorDetail(type="Signal", message="killed by signal 9 (Killed)")
    ended = ErrorDetail(type="Ended", message="no progress for 8 s while training", what="hang")
    limit = ErrorDetail(type="Left", message="", what="time_limit")
    assert [
        left(Outcome.DONE),
        left(Outcome.VERDICT, ErrorDetail(type="VerdictError", message="spike at step 38", what="spike")),
        left(Outcome.LEFT, STOP, saved_step=38),
        left(Outcome.LEFT, limit, saved_step=30),
        left(Outcome.LEFT, limit),
        left(Outcome.CRASHED, killed),
        left(Outcome.CRASHED, ErrorDetail(type="KeyError", message="'x'\nand more")),
        left(Outcome.ENDED, ended),
    ] == [
        "the worker has made the last step",
        "the worker stopped at its verdict",
        "the worker left in order and saved step 38: it was asked to stop",
        "the worker left in order and had saved step 30: its time limit was near",
        "the worker left in order and saved nothing: its time limit was near",
        "the worker ended: rank 1 on n2 was killed by signal 9 (Killed)",
        "the worker crashed: rank 1 on n2: KeyError: 'x' and more",
        "the worker was ended by its agent: rank 1 on n2: no progress for 8 s while training",
    ]
    assert len(left(Outcome.CRASHED, ErrorDetail(type="RuntimeError", message="gloo " * 500))) < 300


@pytest.mark.parametrize("name", [*RECORDINGS, *PLAYED])
def test_an_end_in_order_names_no_error(tmp_path: Path, name: str) -> None:
    events: list[Event] = recorded(name).events if name in RECORDINGS else PLAYED[name](tmp_path).events
    for event in events:
        if isinstance(event, WorkerLeft) and event.outcome in (Outcome.DONE, Outcome.LEFT, Outcome.VERDICT):
            assert details_of(event) == []
        if isinstance(event, RolledBack):
            assert "VerdictError" not in str(details_of(event))


# -- one line a run ----------------------------------------------------------------------------------------------------


def test_a_job_that_is_about_to_begin_where_there_is_no_slurm_is_named_once_and_slurm_is_not() -> None:
    job = {"id": "6429", "state": "PENDING", "why": "", "because": "", "nodes": ["vm"], "starts_at": None}
    [_, line] = list_lines([standing_row(state="queued", eta=None, job=job)], BEGIN)
    assert line.count("job 6429") == 1
    assert "Slurm" not in line


def test_a_row_is_one_short_line_and_names_the_job(tmp_path: Path) -> None:
    over = {"eta": None, "job": None, "supervisor": None}
    nodes = standing_row()["job"] | {"nodes": [f"n{number}" for number in range(64)]}
    rows = [
        standing_row(),
        standing_row(state="gave_up", reason="the same crash twice: " + "why\n" * 100, **over),
        standing_row(state="unreadable", since=None, reason="line 3: " + "x" * 400, **over),
        standing_row(job=nodes),
        standing_row(
            supervisor=None, supervisor_job=None, supervisor_died={"id": "12", "began": False, "said": "no " * 200}
        ),
    ]
    _, *lines = list_lines(rows, BEGIN)
    assert len(lines) == len(rows)
    assert max(map(len, lines)) < 240
    assert "job 4711 on n1 n2" in lines[0]
    assert "why why..." in lines[1]
    assert "job 4711 on n0 and 63 more" in lines[3]
    for width in (60, 80, 100):
        assert max(map(len, list_lines(rows, BEGIN, width))) <= width
