"""Histories of hangs: what agents report, what only the supervisor can notice, and what is none."""

from pathlib import Path

import pytest

from slurm.job import JobState
from supervisor.decision import Wait
from supervisor.journal import Continued, HangSeen, NodeStruck
from tests.supervisor_room.stage import CRASHED, Stage
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.pulse import Hang

ENDED = ErrorDetail(type="Ended", message="no progress", what="hang")
PEER_DIED = ErrorDetail(type="Ended", message="the trainers of ranks [1] ended", what="rank_died")
STOPPED = Hang(phase="training", step=25, quiet_s=1801.0, limit_s=1800.0, process="T (stopped) in do_signal_stop")
IN_KERNEL = STOPPED.model_copy(update={"process": "D (disk sleep) in nfs_wait"})


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A run that trains, with a checkpoint behind it."""
    stage = Stage(tmp_path, recovery={"hang_timeout_s": 30.0})
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.pulse()
    stage.settle()
    return stage


def hangs(stage: Stage) -> list[HangSeen]:
    return [event for event in stage.events if isinstance(event, HangSeen)]


def last_attempt(stage: Stage) -> Continued:
    return [event for event in stage.events if isinstance(event, Continued)][-1]


def struck(stage: Stage) -> list[str]:
    return [event.node for event in stage.events if isinstance(event, NodeStruck)]


def wait_for_agents(stage: Stage, seconds: int) -> None:
    for _ in range(seconds // 10):
        stage.now += 9
        stage.look()


def test_a_hang_that_the_agents_ended_is_continued_where_it_was(stage: Stage) -> None:
    stage.leave(Outcome.ENDED, error=ENDED, hang=STOPPED)
    stage.settle()
    [hang] = hangs(stage)
    assert (hang.phase, hang.quiet_s, hang.limit_s, hang.stacks) == ("training", 1801.0, 1800.0, "attempts/0001/r0")
    assert "its process was stopped by a signal, in the kernel's do_signal_stop; " in hang.reason
    attempt = last_attempt(stage)
    assert (attempt.cause, attempt.resume_from, attempt.where) == ("hang", "checkpoint-20", "same_allocation")
    assert stage.directive.cause == "hang"
    assert struck(stage) == ["n1"]


def test_the_rank_that_hung_is_told_whoever_reports_first(stage: Stage) -> None:
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=("n1", "n2"))
    stage.leave(Outcome.ENDED, error=ENDED, hang=STOPPED, rank=1, host="n2")
    assert isinstance(stage.settle(), Wait)
    assert stage.directive.attempt == 1
    stage.leave(Outcome.CRASHED, error=CRASHED, rank=0)  # its collective broke when the other was ended
    stage.settle()
    assert last_attempt(stage).cause == "hang"
    assert "rank 1 on n2" in hangs(stage)[0].reason
    assert struck(stage) == []  # two nodes, and nothing says which


def test_a_rank_that_the_kernel_holds_points_at_its_node(stage: Stage) -> None:
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=("n1", "n2"))
    stage.leave(Outcome.ENDED, error=ENDED, hang=STOPPED)
    stage.leave(Outcome.ENDED, error=ENDED, hang=IN_KERNEL, rank=1, host="n2")
    stage.settle()
    assert struck(stage) == ["n2"]


def test_agents_that_are_gone_too_are_noticed_by_the_supervisor(stage: Stage) -> None:
    wait_for_agents(stage, 200)
    assert hangs(stage) == []
    wait_for_agents(stage, 40)
    assert len(hangs(stage)) == 1
    assert "none of the agents" in hangs(stage)[0].reason
    attempt = last_attempt(stage)
    assert (attempt.cause, attempt.resume_from, attempt.where) == ("hang", "checkpoint-20", "same_allocation")
    wait_for_agents(stage, 80)  # nobody takes it up
    assert stage.names.count("Cancelled") == 1
    stage.settle()
    assert (stage.submissions, stage.directive.attempt) == (2, 2)


def test_a_new_supervisor_counts_anew(stage: Stage) -> None:
    wait_for_agents(stage, 200)
    stage.start_supervisor()
    wait_for_agents(stage, 200)
    assert hangs(stage) == []
    wait_for_agents(stage, 40)
    assert len(hangs(stage)) == 1


@pytest.mark.parametrize(
    "state", [JobState.SUSPENDED, JobState.CONFIGURING, JobState.PENDING, JobState.COMPLETING, JobState.HELD]
)
def test_a_job_that_does_not_run_does_not_hang(stage: Stage, state: JobState) -> None:
    stage.scheduler.set_state(stage.job_id, state)
    wait_for_agents(stage, 1000)
    assert hangs(stage) == []
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=("n1",))
    wait_for_agents(stage, 200)
    assert hangs(stage) == []


def test_nobody_hangs_while_the_scheduler_is_silent(stage: Stage) -> None:
    stage.scheduler.fail("look", 1000)
    wait_for_agents(stage, 1000)
    assert hangs(stage) == []


def test_signs_of_life_are_life(stage: Stage) -> None:
    for _ in range(20):
        wait_for_agents(stage, 60)
        stage.pulse()
    assert hangs(stage) == []


def test_a_worker_that_waits_for_an_answer_does_not_hang(stage: Stage) -> None:
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    assert stage.directive.attempt == 2
    stage.claim()
    stage.pulse("starting", limit_s=120.0)
    wait_for_agents(stage, 290)
    assert hangs(stage) == []


def test_rank_0_s_agent_may_be_gone_alone(stage: Stage) -> None:
    stage.leave(Outcome.CRASHED, error=CRASHED, rank=1)
    stage.settle()
    assert stage.directive.attempt == 1
    stage.now += 61
    stage.settle()
    assert last_attempt(stage).cause == "crash"


def test_a_rank_that_nobody_met_leads_to_a_fresh_job(stage: Stage) -> None:
    stage.leave(Outcome.CRASHED, error=ErrorDetail(type="NoWorldError", message="2 ranks found no world"))
    stage.settle()
    assert last_attempt(stage).where == "new_job"
    assert stage.submissions == 2


def test_one_rank_alone_with_numbers_that_are_not_finite_points_at_its_node(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cluster={"nodes": 2})
    stage.settle()
    stage.start_job()
    stage.pulse(rank=1, host="n2")
    stage.train(38, "nonfinite", onset=37, ranks=(1,))
    stage.leave(Outcome.VERDICT)
    stage.settle()
    assert struck(stage) == ["n2"]
