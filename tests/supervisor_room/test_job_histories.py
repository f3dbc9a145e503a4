"""Histories of the job: preempted, over, forgotten, cancelled, refused, stopped; silent schedulers, a full disk."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from slurm.job import JobState
from supervisor.decision import Wait
from supervisor.job_looks import JobLooks
from supervisor.journal import Continued, Stopped, Submitted, SupervisorStarted, WorkerLeft
from supervisor.lease import read_holder
from supervisor.report.page_data import chart_data
from supervisor.report.texts import text_of
from supervisor.requests import Request
from tests.supervisor_room.stage import CRASHED, PREEMPTED, TIME_LIMIT, Stage
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import publish_message
from worker.contract.loss_history import read_history


def test_a_preempted_job_goes_on_by_itself_and_its_start_is_moved(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.leave(Outcome.LEFT, error=PREEMPTED)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="BeginTime", restarts=1)
    stage.settle()
    assert ("start_now", stage.job_id) in stage.scheduler.calls
    assert stage.names.count("Preempted") == stage.names.count("StartMoved") == 1
    stage.start_job(restarts=1)
    stage.train(30, restart=1)
    stage.settle()
    assert stage.state == "training"
    assert stage.directive.attempt == 1
    assert stage.submissions == 1


def test_with_a_factor_on_preemption_the_requeued_worker_gets_a_new_attempt(tmp_path: Path) -> None:
    stage = Stage(tmp_path, recovery={"preemption": {"lr_factor": 0.5}})
    stage.settle()
    assert stage.directive.on_requeue == "wait"
    stage.start_job()
    stage.train(25)
    stage.leave(Outcome.LEFT, error=PREEMPTED)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="BeginTime", restarts=1)
    stage.settle()
    assert (stage.directive.attempt, stage.directive.lr_scale, stage.directive.resume_from) == (2, 0.5, "checkpoint-20")
    stage.start_job(restarts=1)
    stage.settle()
    assert stage.directive.attempt == 2
    assert stage.submissions == 1


@pytest.mark.parametrize(
    ("state", "error", "cause"),
    [
        (JobState.COMPLETED, TIME_LIMIT, "time_limit"),
        (JobState.TIMEOUT, None, "time_limit"),
        (JobState.COMPLETED, PREEMPTED, "preempted"),
        (JobState.FAILED, None, "vanished"),
        (JobState.OUT_OF_MEMORY, None, "out_of_memory"),
        (JobState.BOOT_FAIL, None, "vanished"),
    ],
)
def test_a_job_that_is_over_is_followed_by_another_from_the_newest_checkpoint(
    stage: Stage, state: JobState, error: ErrorDetail | None, cause: str
) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    if error is not None:
        stage.leave(Outcome.LEFT, error=error)
    stage.scheduler.set_state(stage.job_id, state)
    stage.settle()
    last = [event for event in stage.events if isinstance(event, Continued)][-1]
    assert (last.cause, last.resume_from, last.where, last.lr_scale) == (cause, "checkpoint-20", "new_job", 1.0)
    assert last.cost.steps_repeated == 5
    assert stage.submissions == 2


@pytest.mark.parametrize(("exit_code", "cause"), [(140, "time_limit"), (143, "vanished"), (None, "vanished")])
def test_a_job_that_was_ended_by_the_warning_of_its_limit_met_its_limit(
    stage: Stage, exit_code: int | None, cause: str
) -> None:
    stage.settle()
    stage.start_job()
    stage.scheduler.set_state(stage.job_id, JobState.FAILED, exit_code=exit_code)
    stage.settle()
    assert [event.cause for event in stage.events if isinstance(event, Continued)] == ["first", cause]


@pytest.mark.parametrize("state", [JobState.NODE_FAIL, JobState.PREEMPTED])
def test_a_job_that_may_come_back_is_given_time(stage: Stage, state: JobState) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.scheduler.set_state(stage.job_id, state)
    stage.settle()
    assert stage.submissions == 1
    stage.now += stage.config.recovery.absent_grace_s
    stage.settle()
    assert stage.submissions == 2


def test_a_job_that_the_scheduler_forgot_is_over_after_a_while_for_whoever_looks(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.scheduler.forget(stage.job_id)
    stage.settle()
    assert stage.submissions == 1
    stage.now += stage.config.recovery.absent_grace_s
    stage.start_supervisor()
    stage.settle()
    assert stage.submissions == 2
    assert stage.names.count("JobSeen") == 4  # pending, running, unknown, and the next one


def test_a_foreign_scancel_stops_the_run_for_good(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.scheduler.cancellers[stage.job_id] = "alice"
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    assert stage.state == "stopped"
    assert isinstance(stage.events[-1], Stopped)
    assert (stage.events[-1].by, stage.events[-1].saved_step) == ("alice", 20)
    assert stage.submissions == 1


def test_a_foreign_scancel_wins_over_an_unanswered_verdict(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    assert stage.state == "stopped"


def test_the_term_grows_with_each_supervisor(stage: Stage) -> None:
    stage.watched.run.lease.give_up()
    assert read_holder(stage.run_dir) is None
    stage.start_supervisor()
    terms = [event.term for event in stage.events if isinstance(event, SupervisorStarted)]
    assert terms == [1, 2]


def test_an_attempt_that_nobody_takes_up_is_given_a_fresh_job_under_its_own_number(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.leave(Outcome.CRASHED, error=CRASHED)
    stage.settle()
    stage.now += 61
    stage.settle()
    assert stage.directive.attempt == 2
    assert stage.submissions == 2
    assert stage.names.count("Cancelled") == 1
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING)  # the new job has all the time it needs
    stage.now += 300
    stage.settle()
    assert stage.names.count("Cancelled") == 1
    stage.claim()
    stage.train(30)
    stage.settle()
    assert stage.state == "training"


def test_silence_of_the_scheduler_is_no_ending(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.scheduler.fail("look", 50)
    for _ in range(20):
        stage.now += 60
        assert isinstance(stage.look(), Wait)
    assert stage.names.count("LookFailed") == 1
    assert stage.submissions == 1
    stage.scheduler._failures.clear()
    stage.settle()
    assert stage.names.count("LookRecovered") == 1
    assert stage.state == "training"


def test_a_verdict_is_answered_while_the_scheduler_is_silent(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.scheduler.fail("look", 50)
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.look()
    assert stage.directive.attempt == 2


def test_a_submission_whose_answer_got_lost_is_found_by_its_name(stage: Stage) -> None:
    stage.scheduler.fail("submit", after=True)
    stage.settle()
    assert "SubmitFailed" in stage.names
    stage.now += 10
    stage.settle()
    [submitted] = [event for event in stage.events if isinstance(event, Submitted)]
    assert submitted.adopted
    assert stage.submissions == 1


def test_a_job_without_an_answer_is_looked_for_every_ten_seconds(stage: Stage) -> None:
    stage.scheduler.message_timeout = 100.0
    stage.scheduler.fail("submit")
    stage.settle()
    stage.scheduler.fail("find", 3)
    begin, looks = stage.now, [method for method, _ in stage.scheduler.calls].count("find")
    while stage.now < begin + 100:
        stage.look()
    assert [method for method, _ in stage.scheduler.calls].count("find") - looks in (9, 10)
    assert stage.submissions == 1


def test_no_second_submission_before_two_looks_and_twice_the_message_timeout(stage: Stage) -> None:
    """The first may be queued behind everything that a loaded controller has to do."""
    stage.scheduler.message_timeout = 100.0
    stage.scheduler.fail("submit")
    stage.settle()
    assert stage.names[-1] == "SubmitFailed"
    stage.now += 100
    for _ in range(20):
        stage.look()
    assert (stage.submissions, stage.names[-1], stage.names.count("SubmitIntended")) == (1, "SubmitIntended", 2)
    stage.now += 100
    looks = [method for method, _ in stage.scheduler.calls].count("find")
    stage.look()
    assert stage.submissions == 2
    assert looks >= 2


def test_a_job_that_shows_up_late_is_adopted_and_none_is_submitted_beside_it(stage: Stage) -> None:
    stage.scheduler.message_timeout = 100.0
    stage.scheduler.fail("submit", after=True)
    stage.settle()
    [late] = stage.scheduler.jobs.values()
    stage.scheduler.forget(late.job_id)
    for _ in range(2):
        stage.now += 10
        stage.look()
    stage.scheduler.jobs[late.job_id] = late
    stage.now += 10
    stage.settle()
    [submitted] = [event for event in stage.events if isinstance(event, Submitted)]
    assert (submitted.job_id, submitted.adopted, stage.submissions) == (late.job_id, True, 1)


def test_a_successor_does_not_submit_at_once_what_its_predecessor_died_over(stage: Stage) -> None:
    stage.scheduler.message_timeout = 10.0
    stage.settle()
    stage.start_job()
    stage.scheduler.set_state(stage.job_id, JobState.FAILED)
    stage.scheduler.fail("find", 1000)
    stage.settle()
    stage.start_supervisor()
    stage.scheduler._failures.clear()
    for _ in range(10):
        stage.look()
    assert (stage.submissions, stage.names.count("SubmitIntended")) == (1, 2)
    stage.now += 10
    stage.settle()
    assert (stage.submissions, stage.names.count("SubmitIntended")) == (2, 2)


def test_a_scheduler_that_does_not_answer_is_asked_less_and_less_often(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 0.0
    monkeypatch.setattr("supervisor.job_looks.time.monotonic", lambda: clock)
    looks = JobLooks(stage.scheduler, quiet_s=30.0, busy_s=2.0)
    stage.settle()
    stage.scheduler.fail("look", 1000)
    times = []
    for second in range(600):
        clock, before = float(second), len(stage.scheduler.calls)
        looks.look_if_due([stage.watched.run])
        times += [second] if len(stage.scheduler.calls) > before else []
    apart = [later - sooner for sooner, later in pairwise(times)]
    assert apart == sorted(apart)
    assert (apart[0], apart[-1]) == (2, 60)
    stage.scheduler._failures.clear()
    clock += 60
    looks.look_if_due([stage.watched.run])
    assert looks.error is None


def test_submissions_that_are_refused_again_and_again_end_the_run(stage: Stage) -> None:
    stage.scheduler.says = "Invalid account"
    stage.scheduler.fail("submit", 50)
    for _ in range(200):
        stage.now += 60
        stage.look()
    assert stage.state == "gave_up"
    assert stage.submissions == 5


def test_a_scheduler_that_does_not_answer_submissions_is_waited_for(stage: Stage) -> None:
    stage.scheduler.fail("submit", 12)
    for _ in range(20):
        stage.now += 60
        stage.look()
    assert stage.names.count("SubmitFailed") == 12
    assert stage.names.count("Submitted") == 1


def test_an_id_that_was_given_out_again_is_not_our_job(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.scheduler.jobs[stage.job_id] = replace(
        stage.scheduler.jobs[stage.job_id], name="somebody-else", state=JobState.CANCELLED
    )
    stage.settle()
    assert stage.state == "training"
    stage.now += 1
    assert stage.submissions == 1


def test_only_so_many_jobs_an_hour(tmp_path: Path) -> None:
    stage = Stage(tmp_path, recovery={"max_submissions_per_hour": 2})
    for _ in range(4):
        stage.settle()
        if stage.watched.run.state.has_live_job:
            stage.start_job()
            stage.scheduler.set_state(stage.job_id, JobState.FAILED)
    assert stage.submissions == 2
    stage.now += 3600
    stage.settle()
    assert stage.submissions == 3


def test_stop_saves_and_stays_stopped(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    publish_message(stage.run_dir.request, Request(verb="stop", by="bob"))
    stage.settle()
    assert stage.directive.stop == "save"
    assert not stage.run_dir.request.exists()
    assert stage.state == "stopping"
    stage.save(25)
    stage.leave(Outcome.LEFT, error=ErrorDetail(type="Left", message="", what="stop"))
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
    stage.settle()
    assert stage.state == "stopped"
    assert isinstance(stage.events[-1], Stopped)
    assert (stage.events[-1].by, stage.events[-1].saved_step) == ("bob", 25)
    assert stage.events[-1].reason == "stopped by bob"


def test_a_stop_after_the_last_step_says_that_only_the_weights_are_missing(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(100)
    stage.settle()
    publish_message(stage.run_dir.request, Request(verb="stop", by="bob"))
    stage.settle()
    stage.leave(Outcome.LEFT, error=ErrorDetail(type="Left", message="", what="stop"))
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
    stage.settle()
    assert stage.events[-1].reason == "stopped by bob; all steps are done, a resume only writes final/"


def test_stop_ends_the_waiting_of_a_worker_that_just_saw_a_spike(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.leave(Outcome.VERDICT)
    publish_message(stage.run_dir.request, Request(verb="stop", by="bob"))
    stage.settle()
    assert stage.directive.stop == "save"
    assert stage.directive.attempt == 1


def test_stop_cancels_a_job_that_waits(stage: Stage) -> None:
    stage.settle()
    publish_message(stage.run_dir.request, Request(verb="stop", by="bob"))
    stage.settle()
    assert stage.state == "stopped"
    assert ("cancel", stage.job_id) in stage.scheduler.calls


def test_a_full_disk_under_the_journal_means_no_effect(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("supervisor.journal.append_line", full)
    stage.look()
    assert stage.submissions == 0
    assert "No space left" in stage.ears.troubles[-1]
    monkeypatch.undo()
    stage.settle()
    assert stage.submissions == 1


def test_the_step_of_a_crash_that_nobody_could_report_is_the_last_of_the_curve(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.leave(Outcome.CRASHED, error=CRASHED, step=None)
    stage.settle()
    [left] = [event for event in stage.events if isinstance(event, WorkerLeft)]
    [begun] = [event for event in stage.events if isinstance(event, Continued) and event.cause == "crash"]
    assert left.step == 25
    assert text_of(begun) == "attempt 2 from step 25 back to checkpoint-20 (crash, in the same allocation)"
    records = read_history(stage.run_dir.history)
    [mark] = chart_data(stage.events, records, [])["marks"]
    assert (mark["kind"], mark["step"]) == ("trouble", 25)
