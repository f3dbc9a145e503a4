"""Every second of a run belongs to one kind, and they add up to the wall time."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.journal import Event, Finished, JobSeen, ProgressMade, StopRequested, Submitted, WorkerLeft
from supervisor.report.accounting import Accounting, account
from supervisor.report.spans import KINDS
from tests.report_room.stories import PLAYED, REAL, Slow, Story, healthy, node_failures, one_spike, preemption_storm
from tests.report_room.stories import recorded as real
from worker.contract.exit_report import Outcome
from worker.contract.loss_history import record


def assert_adds_up(found: Accounting, story: Story) -> None:
    assert found.spans[0].begin == story.events[0].time
    assert all(a.end == b.begin for a, b in pairwise(found.spans))
    assert sum(found.seconds(kind) for kind in KINDS) == pytest.approx(found.wall_s)
    by_attempt = {span.attempt for span in found.spans}
    assert sum(found.seconds(k, a) for k in KINDS for a in by_attempt) == pytest.approx(found.wall_s)


@pytest.mark.parametrize("name", PLAYED)
def test_the_seconds_of_a_story_add_up_to_its_wall_time(tmp_path: Path, name: str) -> None:
    story = PLAYED[name](tmp_path).story
    found = story.accounting()
    assert_adds_up(found, story)
    assert found.wall_s == story.events[-1].time - story.events[0].time


@pytest.mark.parametrize("name", REAL)
def test_the_seconds_of_a_real_run_add_up_to_its_wall_time(name: str) -> None:
    story = real(name)
    found = story.accounting()
    assert_adds_up(found, story)
    assert found.wall_s == story.events[-1].time - story.events[0].time
    assert 0 < (found.goodput or 0) < 1


def test_a_healthy_run_waits_starts_trains_and_saves(tmp_path: Path) -> None:
    found = healthy(tmp_path).story.accounting()
    assert found.seconds("training") == 100 * Slow.step_s
    assert found.seconds("saving") == pytest.approx(9 * Slow.save_s)
    assert found.seconds("finishing") == pytest.approx(1, abs=2)  # after the last step: until it left
    assert found.seconds("queued") == pytest.approx(600, abs=10)
    assert found.seconds("starting") == pytest.approx(Slow.load_s, abs=10)
    assert found.seconds("repeated") == 0
    assert found.interruptions == ()


def test_steps_that_are_made_again_are_repeated_and_cost_what_they_took(tmp_path: Path) -> None:
    found = one_spike(tmp_path).story.accounting()
    assert found.seconds("repeated") == 8 * Slow.step_s
    assert found.seconds("training") == 100 * Slow.step_s
    [cost] = found.interruptions
    assert (cost.segment, cost.steps_undone) == (2, 8)
    assert cost.idle_s == pytest.approx(Slow.load_s, abs=10)
    assert cost.lost_node_s == pytest.approx(cost.idle_s + 8 * Slow.step_s)
    assert cost.kept_node_s == 30 * Slow.step_s


def test_a_requeued_job_waits_in_the_queue_and_holds_no_node_there(tmp_path: Path) -> None:
    found = preemption_storm(tmp_path).story.accounting()
    assert found.seconds("queued") == pytest.approx(4 * 1800, abs=60)
    assert [cost.segment for cost in found.interruptions] == [2, 3, 4, 5]
    assert all(cost.idle_s > 1800 and cost.lost_node_s < 120 for cost in found.interruptions)


def test_node_hours_multiply_by_the_allocation(tmp_path: Path) -> None:
    found = node_failures(tmp_path).story.accounting()
    first = [span for span in found.spans if span.attempt == 1 and span.kind in ("training", "repeated")]
    assert {span.nodes for span in first} == {2}
    assert found.node_s("queued") == 0


def test_of_a_run_that_waits_the_time_goes_on(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    stage.settle()
    found = stage.story.accounting(now=stage.now + 5000)
    assert found.seconds("queued") == pytest.approx(5000, abs=10)


def test_time_that_is_suspended_within_a_segment_is_lost(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    stage.start_after(5)
    stage.train(5)
    story, at = stage.story, stage.now
    job = JobSeen(job_id="1", state="SUSPENDED", nodes=("n1",), attempt=1)
    seen = [job.model_copy(update={"time": at + 10}), job.model_copy(update={"state": "RUNNING", "time": at + 70})]
    late = record(segment=1, attempt=1, restart=0, step=6, epoch=0.0, time=at + 80, loss=2.0, lr=1.0)
    found = Story([*story.events, *seen], [*story.records, late]).accounting()
    assert found.seconds("lost") - story.accounting(now=at).seconds("lost") == 60
    assert found.seconds("training") == 5 * Slow.step_s + 20


def test_a_run_whose_worker_started_while_nobody_looked_adds_up(tmp_path: Path) -> None:
    """The supervisor was dead: the history has steps from before the journal says that the job runs."""
    story = one_spike(tmp_path).story
    events = [e.model_copy(update={"time": e.time + (900 if isinstance(e, JobSeen) else 0)}) for e in story.events]
    found = Story(events, story.records).accounting()
    assert found.seconds("training") == 100 * Slow.step_s
    assert sum(found.seconds(kind) for kind in KINDS) == pytest.approx(found.wall_s)


@given(st.lists(st.floats(0, 1e4), min_size=3, max_size=12), st.floats(-500, 500))
def test_clocks_that_disagree_lose_no_second(times: list[float], skew: float) -> None:
    made = [Submitted(name="n", job_id="1", time=times[0]), JobSeen(job_id="1", state="RUNNING", time=times[1])]
    end = Finished(final_step=9, time=max(times) + 1)
    rows = [
        record(segment=n // 3, attempt=1, restart=0, step=n, epoch=0.0, time=t + skew, loss=1.0, lr=1.0, step_s=1.0)
        for n, t in enumerate(times[2:])
    ]
    found = account([*made, end], rows, 0.0, 1)
    assert sum(span.seconds for span in found.spans) == pytest.approx(found.wall_s)
    assert all(span.seconds > 0 for span in found.spans)


def test_after_the_end_of_a_job_that_nobody_supervised_time_is_lost_and_holds_no_node(tmp_path: Path) -> None:
    story = healthy(tmp_path).story
    end = story.records[-1].time + 3
    left = [e.model_copy(update={"time": e.time + 84}) for e in story.events if e.time >= end - 3]
    seen = JobSeen(job_id="1", state="COMPLETED", attempt=1, ends_at=end, time=end + 81)
    late = [*(e for e in story.events if e.time < end - 3), seen, *left]
    found = Story(late, story.records).accounting()
    assert_adds_up(found, Story(late, story.records))
    lost = [span for span in found.spans if span.kind == "lost" and span.begin >= end]
    assert sum(span.seconds for span in lost) > 75
    assert {span.nodes for span in lost} == {0}
    assert found.spans[-1].kind == "lost"


def test_a_save_before_a_leave_that_nobody_saw_lasts_until_the_job_ended_and_no_longer(tmp_path: Path) -> None:
    """Slurm tells a job's end in whole seconds, so that it may seem to be ahead of the last step."""
    story = healthy(tmp_path).story
    last = story.records[-1]
    before = [event for event in story.events if event.time < last.time]
    for ended in (last.time + 3, last.time - 0.4):
        late: list[Event] = [
            StopRequested(by="a STOP file", time=last.time + 44),
            JobSeen(job_id="1", state="COMPLETED", attempt=1, ends_at=ended, time=last.time + 44),
            WorkerLeft(
                outcome=Outcome.LEFT, step=last.step, saved_step=last.step, attempt=1, restart=0, time=last.time + 44
            ),
        ]
        found = Story([*before, *late], story.records).accounting(now=last.time + 44)
        saved = sum(span.seconds for span in found.spans if span.kind == "saving" and span.begin >= last.time)
        assert saved == pytest.approx(max(0.0, ended - last.time))
        lost = sum(span.seconds for span in found.spans if span.kind == "lost" and span.begin >= last.time)
        assert lost == pytest.approx(44 - saved)
        assert {span.nodes for span in found.spans if span.kind == "lost" and span.begin >= last.time} == {0}


def test_a_worker_that_has_saved_and_waits_to_be_killed_saves_no_more(tmp_path: Path) -> None:
    story = healthy(tmp_path).story
    last = story.records[-1]
    before = [event for event in story.events if event.time < last.time]
    left = WorkerLeft(outcome=Outcome.LEFT, step=last.step, saved_step=last.step, attempt=1, time=last.time + 4)
    back = JobSeen(job_id="1", state="PENDING", restarts=1, attempt=1, time=last.time + 300)
    found = Story([*before, left, back], story.records).accounting(now=last.time + 310)
    after = [(span.kind, span.seconds, span.nodes) for span in found.spans if span.begin >= last.time]
    assert after == [
        ("saving", pytest.approx(4), 1),
        ("lost", pytest.approx(296), 1),
        ("queued", pytest.approx(10), 0),
    ]


def test_an_evaluation_between_two_steps_is_a_kind_of_its_own(tmp_path: Path) -> None:
    story = healthy(tmp_path).story
    plain = story.accounting()
    at = next(n for n, one in enumerate(story.records) if one.step == 41)
    late = [one.model_copy(update={"time": one.time + 30}) for one in story.records[at:]]
    before = [*story.records[: at - 1], story.records[at - 1].model_copy(update={"eval_loss": 2.0})]
    events = [e.model_copy(update={"time": e.time + 30 * (e.time > before[-1].time)}) for e in story.events]
    found = Story(events, [*before, *late]).accounting()
    assert found.seconds("evaluating") == pytest.approx(30)
    assert found.seconds("training") == pytest.approx(plain.seconds("training"))
    assert found.seconds("saving") == pytest.approx(plain.seconds("saving"))


def test_time_within_an_evaluation_is_not_lost_because_a_checkpoint_proved_healthy(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    stage.start_after(5)
    stage.train(20)
    events = [*stage.story.events, ProgressMade(healthy_step=10, attempt=1, time=stage.now + 2)]
    found = Story(events, stage.story.records).accounting(now=stage.now + 40)
    assert found.spans[-1].kind == "training"
    ended = [*events, JobSeen(job_id="1", state="FAILED", attempt=1, time=stage.now + 30)]
    last = Story(ended, stage.story.records).accounting(now=stage.now + 40).spans[-1]
    assert (last.kind, last.end) == ("lost", stage.now + 40)
