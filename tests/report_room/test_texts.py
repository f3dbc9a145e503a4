"""What a person reads: the log of every story as it was read and found right, and what no text may ever do."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from supervisor.batches import left_out
from supervisor.diagnosis import diagnose
from supervisor.evidence import Evidence
from supervisor.journal import (
    Continued,
    Diagnosis,
    Event,
    EventBase,
    HangSeen,
    JobSeen,
    ResumeRequested,
    RollbackRequested,
    RolledBack,
    RunCreated,
    WouldHaveDone,
)
from supervisor.report.diagnosis_text import diagnosis_lines
from supervisor.report.figures import duration, local_clock, local_moment, node_hours, rate_text, share, size
from supervisor.report.frame import frame
from supervisor.report.log_text import SinceError, closing_summary, log_lines, milestones, since_time
from supervisor.report.standing_text import detail_lines, list_lines
from supervisor.report.texts import (
    WORD_WIDTH,
    Listing,
    batches_text,
    details_of,
    event_lines,
    is_told,
    lay_out,
    text_of,
    word_of,
)
from supervisor.requests import Request, request_news
from supervisor.run_state import RunState
from supervisor.runs import open_or_create, standing
from supervisor.views import follow_log, write_journal
from tests.report_room.snapshots import assert_told
from tests.report_room.stories import (
    PLAYED,
    RECORDINGS,
    Slow,
    Story,
    healthy,
    long_records,
    one_spike,
    put_into,
    recorded,
    refused,
)
from tests.supervisor_room.stage import BEGIN, config
from worker.contract.data_report import SetReport
from worker.contract.exit_report import Outcome
from worker.contract.loss_history import BatchPosition
from worker.contract.words import count

HIGGSFIELD = str(Path(sys.executable).with_name("higgsfield"))
pytestmark = pytest.mark.usefixtures("berlin")


def told(story: Story) -> str:
    return "\n".join(log_lines(story.events, story.accounting(), folder="/runs/r")) + "\n"


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_log_of_a_run(name: str) -> None:
    assert_told(f"log-{name}", told(recorded(name)))


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_diagnosis_of_a_run(tmp_path: Path, name: str) -> None:
    story = recorded(name)
    training = {"max_steps": 260, "optimizer": {"name": "sgd", "learning_rate": 3.0}}
    findings = diagnose(Evidence(config(tmp_path, training=training), story.records, story.events))
    assert_told(f"diagnosis-{name}", "\n".join(diagnosis_lines("r", findings, 110)) + "\n")


def test_a_rollback_says_what_was_believed_by_its_diagnosis() -> None:
    said = Diagnosis(
        symptom="at the same batch", cause="the data", confidence="likely", evidence=("batch 13", "again"), next="look"
    )
    [rolled] = [event for event in recorded("one_spike").events if isinstance(event, RolledBack)]
    told = details_of(rolled.model_copy(update={"diagnosis": said}))
    assert ("believed", "the data (likely): at the same batch") in told
    assert told[told.index(("believed", "the data (likely): at the same batch")) + 1 :][:2] == [
        ("", "batch 13"),
        ("", "again"),
    ]
    assert told[-1] == ("try", "if it comes again: look")


def test_the_first_attempt_is_not_continued() -> None:
    first = Continued(cause="first", where="new_job", attempt=1, reason="the run begins")
    assert (word_of(first), text_of(first), details_of(first)) == ("begun", "attempt 1 from scratch (in a new job)", [])


def test_every_kind_of_event_has_a_line_even_one_that_nobody_thought_of() -> None:
    class MoonRose(EventBase):
        event: str = "MoonRose"

    assert word_of(MoonRose()) == "moon rose"  # type: ignore[arg-type]
    [line] = event_lines(MoonRose(reason="it is full", time=BEGIN), Listing())  # type: ignore[arg-type]
    assert line == "2023-11-14 23:13:20 CET  moon rose      it is full"
    assert len({word_of(kind.model_construct()) for kind in get_args(Event)}) == len(get_args(Event))


def test_a_hang_and_what_was_only_observed_say_all_there_is() -> None:
    hang = HangSeen(phase="saving", quiet_s=1860.0, limit_s=1800.0, stacks="attempts/0002/r0", reason="no progress")
    assert details_of(hang) == [("look at", "attempts/0002/r0")]
    observed = WouldHaveDone(cause="spike", where="same_allocation", resume_from="checkpoint-80", lr_scale=0.5)
    assert text_of(observed) == "would have begun at checkpoint-80, at 0.5 of the configured rate (spike)"
    assert ("done", "nothing: recovery.mode is observe") in details_of(observed)
    assert milestones([hang, observed]) == {0, 1}
    each: list[Event] = [kind.model_construct(outcome=Outcome.CRASHED) for kind in get_args(Event)]
    assert max(len(word_of(event)) for event in each if is_told(event)) < 15


@pytest.mark.parametrize(
    ("scale", "said"),
    [(0.5, "0.5 of the configured rate"), (1.0, "the configured rate"), (3.0, "3 x the configured rate")],
)
def test_a_rate_is_told_by_the_configured_one(scale: float, said: str) -> None:
    assert rate_text(scale) == said
    asked = Request(verb="rollback", by="ana", to=20, lr_scale=scale)
    (word,) = request_news(RunState(), asked, [20])
    assert word.reason == f"ana asked to go back to step 20 at {said}"


def test_no_file_can_paint_the_terminal_or_forge_a_line() -> None:
    evil = "\x1b[2J\nFINISHED all is well"
    event = JobSeen(job_id="1", state="PENDING", why=evil, nodes=(evil,), time=BEGIN - 60)
    for line in event_lines(event, Listing()):
        assert line.isprintable()
    words = event.model_copy(update={"reason": "job 1 waits: other jobs come first", "starts_at": BEGIN})
    assert "waits: other jobs come first; Slurm expects it to start at 2023-11-14 23:13:20 CET" in " ".join(
        " ".join(event_lines(words, Listing())).split()
    )
    far = words.model_copy(update={"starts_at": BEGIN + 365 * 86400})
    assert "expects" not in " ".join(event_lines(far, Listing())), "a year is Slurm's way to say that it does not know"
    row = standing_row(reason=evil, name=evil)
    assert all(line.isprintable() for line in [*list_lines([row], BEGIN), *detail_lines(row, BEGIN)])


def test_a_log_is_as_wide_as_it_is_asked_to_be(tmp_path: Path) -> None:
    story = one_spike(tmp_path).story
    told = [event for event in story.events if is_told(event)]
    lines = [line for event in told for line in lay_out(event, "17:40  ", None, 80, Listing())]
    assert max(map(len, lines)) <= 80


def test_since_is_a_time_ago_or_a_moment_here() -> None:
    now = 1_700_000_000.0  # 14 November 2023, 23:13:20 in Berlin
    assert since_time("2h", now) == now - 7200
    assert since_time("1.5d", now) == now - 1.5 * 86400
    assert since_time("23:59", now) == since_time("2023-11-13 23:59", now)  # of the day before: it is not so late yet
    assert since_time("22:13:20", now) == since_time("2023-11-14 22:13:20", now) == now - 3600
    assert since_time("9:00", now) == since_time("2023-11-14 09:00", now)
    for nonsense in ("yesterday", "2x", "", "25:61", "0001-01-01"):
        with pytest.raises(SinceError, match=f"^--since '{nonsense}': give 2h, 30min, 1d"):
            since_time(nonsense, now)


def test_since_leaves_earlier_events_out_and_keeps_the_summary(tmp_path: Path) -> None:
    story = one_spike(tmp_path).story
    rolled = next(event for event in story.events if isinstance(event, RolledBack))
    lines = list(log_lines(story.events, story.accounting(), rolled.time + 0.5))
    assert "VERDICT" not in "\n".join(lines)
    assert "is the first of segment 2" in lines[1]
    assert any(line.startswith("Finished at step 100") for line in lines)
    first, *_ = log_lines(story.events, story.accounting(), story.events[-1].time + 60)
    assert first.startswith("nothing happened since 2023-11-14 23:")
    assert "; the last event was FINISHED, at 2023-11-14 23:" in first


def test_a_log_that_is_followed_tells_each_event_once_and_ends_with_the_run(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    stage.start_after(5)
    out, pauses = io.StringIO(), 0

    def sleep(seconds: float) -> None:
        nonlocal pauses
        pauses += 1
        if pauses == 1:
            stage.train(100)
            stage.settle()
        else:
            stage.leave(Outcome.DONE)
            stage.settle()

    follow_log(stage.run_dir, 0.0, out, sleep)
    text = out.getvalue()
    assert text.count("FINISHED") == text.count("is the first of segment 1") == 1
    assert "Finished at step 100" in text
    raw = io.BytesIO()
    write_journal(stage.run_dir, 0.0, True, raw, sleep)
    assert raw.getvalue() == stage.run_dir.journal.read_bytes()
    raw = io.BytesIO()
    last = json.loads(stage.run_dir.journal.read_bytes().splitlines()[-1])
    write_journal(stage.run_dir, last["time"], False, raw)
    told_late = [json.loads(line)["event"] for line in raw.getvalue().splitlines()]
    assert told_late == ["RunCreated", "WorkerLeft", "Finished"]  # the Stage's clock is not the one that made the run


def test_a_log_that_is_followed_says_of_which_event_a_cost_is(tmp_path: Path) -> None:
    stage = one_spike(tmp_path)
    out = io.StringIO()
    follow_log(stage.run_dir, 0.0, out, lambda seconds: None)
    told = out.getvalue()
    rolled = next(event for event in stage.story.events if isinstance(event, RolledBack))
    assert told.count("  cost  ") == 1
    assert f"  cost      of ROLLED BACK at {local_clock(rolled.time)}: 8 steps again, " in told


def test_a_run_that_is_over_is_followed_for_a_while_for_it_may_be_about_to_go_on(tmp_path: Path) -> None:
    stage = refused(tmp_path)
    out, looks = io.StringIO(), 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:  # `higgsfield resume` has loaded its programs
            stage.watched.run.record(ResumeRequested(by="root", reason="root asked for the run to go on"))
            stage.settle()
        elif looks == 4:
            stage.start_after(5)
            stage.train(100)
            stage.leave(Outcome.DONE)
            stage.settle()

    follow_log(stage.run_dir, 0.0, out, sleep)
    assert "FINISHED" in out.getvalue()
    looks = 10
    follow_log(stage.run_dir, 0.0, out, sleep)
    assert looks == 10, "nothing lets a finished run go on"
    given_up, lines = refused(tmp_path / "other"), io.BytesIO()
    write_journal(given_up.run_dir, 0.0, True, lines, sleep)
    assert looks > 20
    assert lines.getvalue() == given_up.run_dir.journal.read_bytes()


def test_the_summary_of_twenty_thousand_steps_is_quick_and_short() -> None:
    records = long_records()
    events: list[Event] = [RunCreated(run_id="r", config_digest="", versions={}, time=records[0].time - 60)]
    summary = closing_summary(events, Story(events, records).accounting(now=records[-1].time))
    assert summary[0] == "Under way for 2 h 48 min so far: 0 attempts, 0 rollbacks, 100 steps repeated."
    assert len(summary) < 6


# -- status ------------------------------------------------------------------------------------------------------------


NOWHERE: dict[str, Any] = {"because": "", "nodes": [], "draining": [], "ends_at": None}
WAITING = NOWHERE | {"id": "9", "state": "PENDING", "why": "Priority", "starts_at": BEGIN + 7200}


def standing_row(**changes: Any) -> dict[str, Any]:
    job = NOWHERE | {"id": "4711", "state": "RUNNING", "why": "", "nodes": ["n1", "n2"], "starts_at": None}
    row: dict[str, Any] = {
        "name": "qwen", "dir": "/runs/qwen", "state": "training", "step": 6720, "max_steps": 20000, "loss": 1.1342,
        "lr_scale": 0.5, "rollbacks": 2, "attempt": 3, "job": job, "since": BEGIN - 12000, "eta": BEGIN + 30000,
        "supervisor": {"host": "login1", "pid": 12, "alive": True}, "reason": "checkpoint-6500 is healthy",
    }  # fmt: skip
    return row | changes


def test_status_tells_each_run_on_one_line() -> None:
    unknown = WAITING | {"why": "QOSMaxJobsPerUserLimit", "starts_at": BEGIN + 400 * 86400}
    over = {"eta": None, "job": None, "supervisor": None}
    rows = [
        standing_row(),
        standing_row(
            name="a-rather-long-name", state="queued", job=WAITING, step=None, loss=None, eta=None, lr_scale=1.0
        ),
        standing_row(name="b", state="recovering", job=unknown, eta=None),
        standing_row(
            name="b2",
            state="queued",
            job=WAITING | {"id": "10", "because": "job 10 waits: other jobs come first (Priority)"},
            eta=None,
        ),
        standing_row(name="c", state="starting", eta=None, supervisor=None),
        standing_row(name="d", state="finished", step=20000, reason="all 20000 steps are done", **over),
        standing_row(name="e", state="gave_up", reason="3 rollbacks brought no new healthy checkpoint", **over),
        standing_row(name="f", state="unreadable", since=None, reason="rollback_log.jsonl: line 3: not JSON", **over),
    ]
    assert "done about Wed 15 Nov" in list_lines(rows[:1], BEGIN, 80)[1], "what a narrow terminal has room for"
    lines = list_lines(rows, BEGIN)
    assert len(lines) == 1 + len(rows)
    assert_told("status-list", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", ["one_spike", "node_failures", "three_rollbacks_and_give_up"])
def test_status_of_one_run(tmp_path: Path, name: str) -> None:
    stage = PLAYED[name](tmp_path)
    row = standing(stage.run_dir, in_detail=True) | {"dir": "/runs/r", "reason": "the last reason"}
    assert_told(f"status-{name}", "\n".join(detail_lines(row, stage.now + 60)) + "\n")


@pytest.mark.parametrize("name", ["chaos_preemption_storm", "chaos_node_failures"])
def test_status_of_a_real_run_while_it_waits_and_when_it_is_over(tmp_path: Path, name: str) -> None:
    run_dir, story = open_or_create(config(tmp_path)), recorded(name)
    waits = max(at for at, event in enumerate(story.events) if isinstance(event, JobSeen) and event.state == "PENDING")
    lines = []
    for end in (waits, len(story.events) - 1):
        now = story.events[end].time
        put_into(Story(story.events[: end + 1], [one for one in story.records if one.time <= now]), run_dir)
        alive = {"dir": "/runs/r", "supervisor": {"host": "login1", "pid": 12, "alive": True}}
        row = standing(run_dir, in_detail=True) | alive
        lines += [*list_lines([row], now + 60), "", *detail_lines(row, now + 60), ""]
    assert_told(f"status-{name}", "\n".join(lines))


def test_status_of_a_run_under_way_and_of_one_that_waits(tmp_path: Path) -> None:
    details = {
        "checkpoints": [{"step": 6500, "health": "healthy", "attempt": 3}],
        "excluded": [{"node": "n7", "until": BEGIN + 86400, "evidence": ["it failed twice", "no answer"]}],
        "budgets": {"rollbacks_left": 1, "attempts_left": 9, "gpu_hours_left": 12.4987, "none": None},
        "events": [],
    }
    lines = detail_lines(standing_row() | details, BEGIN)
    lines += detail_lines(standing_row(state="queued", job=WAITING, eta=None) | details, BEGIN)
    alone = {"host": "h", "pid": 1, "alive": False}
    lines += detail_lines(standing_row(job=None, supervisor=alone, supervisor_job=None) | details, BEGIN)
    assert_told("status-details", "\n".join(lines) + "\n")


def test_a_long_reason_goes_on_below_itself_in_the_status_of_one_run() -> None:
    reason = "config.yaml: " + "training.max_steps: '10' is no number; give one; " * 6
    _, *lines = detail_lines(standing_row(reason=reason) | {"checkpoints": []}, BEGIN, width=80)
    assert max(map(len, lines)) <= 80
    told = [line for line in lines if "training.max_steps" in line]
    assert len(told) > 2
    assert {line[:15] for line in told[1:]} == {" " * 15}
    assert " ".join(" ".join(lines).split()).count(" ".join(reason.split())) == 1


def test_the_estimate_is_the_pace_of_the_last_steps(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    stage.start_after(5)
    stage.train(49)
    stage.wait(7200)  # its supervisor was away: what the journal says about the beginning is late
    stage.settle()
    last = stage.story.records[-1].time
    row = standing(stage.run_dir, in_detail=False, now=last + 1)
    per_step = Slow.step_s + 4 * Slow.save_s / 48
    assert row["eta"] == pytest.approx(last + 51 * per_step)


def test_when_slurm_expects_a_start_is_told_again_when_it_moves_by_much(tmp_path: Path) -> None:
    from slurm.job import JobState

    stage = Slow(tmp_path)
    stage.settle()
    for at in (5000.0, 5600.0, 9000.0, None):
        stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="Priority", starts_at=at)
        stage.settle()
    seen = [event.starts_at for event in stage.events if isinstance(event, JobSeen)]
    assert seen == [None, 5000.0, 9000.0]
    assert standing(stage.run_dir, in_detail=False)["job"]["starts_at"] == 9000.0


def test_the_shell_completes_verbs_the_names_of_runs_and_their_checkpoints(tmp_path: Path) -> None:
    steps = list(map(str, one_spike(tmp_path / "some runs").run_dir.checkpoint_steps()))

    def words(line: str) -> list[str]:
        with open(tmp_path / "words", "w+") as answer:
            env = dict(os.environ) | {"_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line))}
            env |= {"_ARGCOMPLETE_STDOUT_FILENAME": answer.name, "_ARGCOMPLETE_IFS": "\n"}
            subprocess.run([HIGGSFIELD], env=env, cwd=tmp_path, check=True, timeout=60, capture_output=True)
            return answer.read().split()

    assert {"status", "stop", "submit"} <= set(words("higgsfield s"))
    assert words("higgsfield log --dir 'some runs' r") == ["r"]
    assert set(steps) <= set(words("higgsfield pin --dir 'some runs' r "))
    assert words("higgsfield rollback --dir 'some runs' r --to 9") == [step for step in steps if step[0] == "9"] != []
    assert words("higgsfield rollback --dir 'some runs' nobody --to ") == []
    assert words("higgsfield rehearse --fault pre") == ["preempt@"]
    assert words("higgsfield run --all s") == ["some\\", "runs/"]


# -- figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0 s"),
        (0.42, "0.4 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (115.4, "1 min 55 s"),
        (599.4, "9 min 59 s"),
        (629, "10 min"),
        (3599, "1 h"),
        (86399, "1 d"),
        (420, "7 min"),
        (12000, "3 h 20 min"),
        (187200, "2 d 4 h"),
        (7205, "2 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_shares_and_node_hours() -> None:
    assert [size(n) for n in (812, 1400, 112e9, 999.6e6)] == ["812 B", "1.4 kB", "112 GB", "1 GB"]
    assert [share(a, 100) for a in (0, 0.4, 50, 99.9, 100)] == ["0 %", "under 1 %", "50 %", "over 99 %", "100 %"]
    shown = [node_hours(s) for s in (0, 12, 3600, 11520, 3600 * 1234)]
    assert shown == ["0 node-hours", "12 node-seconds", "1 node-hour", "3.2 node-hours", "1,234 node-hours"]


def test_one_of_a_thing_is_no_plural() -> None:
    assert [count(number, "step") for number in (0, 1, 1200)] == ["0 steps", "1 step", "1,200 steps"]
    assert [count(number, "batch", "batches") for number in (1, 2)] == ["1 batch", "2 batches"]
    assert [left_out(number) for number in (1, 2)] == ["1 batch is left out", "2 batches are left out"]
    assert SetReport(documents=1, tokens=40, samples=1, left_out={}).said() == "1 document, 40 tokens, 1 sample"


def test_a_moment_of_another_day_has_its_day() -> None:
    assert local_moment(BEGIN, BEGIN) == "23:13 CET"
    assert local_moment(BEGIN + 86400, BEGIN) == "Wed 15 Nov 23:13 CET"
    summer = time.mktime((2026, 7, 1, 12, 0, 0, 0, 0, -1))
    assert local_moment(summer, summer) == "12:00 CEST"


def test_batches_are_told_as_runs() -> None:
    spots = [(0, 7), (0, 8), (0, 9), (1, 0), (1, 5)]
    assert batches_text(tuple(BatchPosition(epoch=e, batch=b) for e, b in spots)) == (
        "epoch 0, batches 7-9; epoch 1, batch 0; epoch 1, batch 5"
    )


def test_a_healthy_run_says_that_nothing_interrupted_it(tmp_path: Path) -> None:
    story = healthy(tmp_path).story
    assert "Nothing interrupted it." in closing_summary(story.events, story.accounting())


def test_every_word_has_room_before_the_text_that_follows() -> None:
    unset = ("cause", "until", "outcome", "error")
    events = [kind.model_construct(**dict.fromkeys(unset)) for kind in get_args(Event)]
    assert max(len(word_of(event)) for event in events if is_told(event)) < WORD_WIDTH
    picture = frame(standing_row(), [RollbackRequested(by="ana", to=0, reason="ana asked")], [], [], 80, 24, BEGIN)
    assert any("rollback asked ana asked" in line for line in picture)
