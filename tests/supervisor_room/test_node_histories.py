"""Histories of nodes: struck with evidence, excluded for a while, kept where nothing else would fit."""

from pathlib import Path

import pytest

from slurm.job import JobState
from supervisor.journal import NodeExcluded, NodeStruck
from supervisor.report.texts import text_of, word_of
from supervisor.runs import standing
from tests.supervisor_room.stage import CRASHED, Stage
from worker.contract.exit_report import ErrorDetail, Outcome

HOUR_S = 3600.0
SEGFAULT = {
    "outcome": Outcome.CRASHED,
    "error": ErrorDetail(type="Signal", message="killed by signal 11"),
    "signal": 11,
}
ECC = ErrorDetail(type="AcceleratorError", message="CUDA error: uncorrectable ECC error encountered")


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A cluster of four nodes; jobs land on n1 as long as they may."""
    stage = Stage(tmp_path, recovery={"max_submissions_per_hour": 3, "max_attempts_without_progress": 4})
    stage.scheduler.node_names = ("n1", "n2", "n3", "n4")
    return stage


def struck(stage: Stage) -> list[tuple[int, str]]:
    return [(event.attempt, event.node) for event in stage.events if isinstance(event, NodeStruck)]


def excluded(stage: Stage) -> list[NodeExcluded]:
    return [event for event in stage.events if isinstance(event, NodeExcluded)]


def dies_at_once(stage: Stage) -> None:
    """The job fails within seconds and leaves no report, on the first node that it may have."""
    free = [
        node for node in stage.scheduler.node_names if node not in stage.scheduler.requests[stage.job_id].exclude_nodes
    ]
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=(free[0],))
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.FAILED, nodes=(free[0],))
    stage.settle()


def test_a_black_hole_of_a_node_does_not_eat_the_budget(stage: Stage) -> None:
    stage.settle()
    for _ in range(4):  # n1 twice, n2 twice: as many attempts as the budget has, more jobs than an hour may have
        dies_at_once(stage)
    assert struck(stage) == [(1, "n1"), (2, "n1"), (3, "n2"), (4, "n2")]
    assert [(event.node, event.until is not None) for event in excluded(stage)] == [("n1", True), ("n2", True)]
    assert word_of(excluded(stage)[0]) == "node excluded"
    assert "(recovery.node_strikes): no job goes there until " in text_of(excluded(stage)[0])
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ("n1", "n2")
    stage.start_job()
    stage.train(30)
    stage.settle()
    assert stage.state == "training"


def test_three_exclusions_without_progress_are_not_the_nodes(stage: Stage) -> None:
    stage.scheduler.node_names = tuple(f"n{number}" for number in range(1, 100))
    stage.settle()
    for _ in range(40):
        stage.now += HOUR_S
        stage.settle()
        if stage.state == "gave_up":
            break
        dies_at_once(stage)
    assert stage.state == "gave_up"
    assert len(excluded(stage)) == 3
    assert stage.submissions == 3 * 2 + 4


def test_a_node_is_kept_when_the_request_would_not_fit_without_it(stage: Stage) -> None:
    stage.scheduler.node_names = ("n1",)
    stage.settle()
    dies_at_once(stage)
    dies_at_once(stage)
    [kept] = excluded(stage)
    assert (kept.node, kept.until) == ("n1", None)
    assert "jobs may still go there: the request would not fit without it" in kept.reason
    assert word_of(kept) == "node allowed"
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ()


def test_an_exclusion_that_does_not_fit_any_more_is_given_up_oldest_first(stage: Stage) -> None:
    stage.settle()
    for _ in range(4):
        dies_at_once(stage)
    stage.scheduler.node_names = ("n1", "n2")  # the others went away meanwhile
    stage.scheduler.set_state(stage.job_id, JobState.TIMEOUT)
    stage.now += HOUR_S
    stage.settle()
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ("n2",)


def test_a_controller_that_knows_of_no_node_yet_gives_up_no_exclusion(stage: Stage) -> None:
    stage.settle()
    for _ in range(4):
        dies_at_once(stage)
    before = stage.scheduler.requests[stage.job_id].exclude_nodes
    stage.scheduler.node_names = ()  # it has just begun
    stage.scheduler.set_state(stage.job_id, JobState.TIMEOUT)
    stage.now += HOUR_S
    stage.settle()
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == before == ("n1", "n2")


def test_an_exclusion_is_over_after_its_time_and_so_is_a_strike(stage: Stage) -> None:
    stage.settle()
    dies_at_once(stage)
    stage.now += 25 * HOUR_S
    dies_at_once(stage)
    assert excluded(stage) == []
    dies_at_once(stage)
    [told] = standing(stage.run_dir, in_detail=True)["excluded"] or [None]
    assert told is None  # by this machine's clock, which is far ahead of the stage's
    assert list(stage.watched.run.state.excluded(stage.now)) == ["n1"]
    stage.now += 25 * HOUR_S
    assert list(stage.watched.run.state.excluded(stage.now)) == []
    stage.scheduler.set_state(stage.job_id, JobState.TIMEOUT)
    stage.settle()
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ()


def test_an_allocation_with_an_excluded_node_is_left(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    for number in range(2):
        stage.settle()
        stage.leave(**SEGFAULT)
        stage.settle()
        if number == 0:
            stage.claim()
            stage.train(28)
    assert struck(stage) == [(1, "n1"), (2, "n1")]
    assert "SIGSEGV" in excluded(stage)[0].evidence
    assert stage.names.count("Cancelled") == 1
    assert stage.submissions == 2
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ("n1",)


def test_what_a_device_says_is_no_crash_of_the_person_s_code(stage: Stage) -> None:
    stage.settle()
    for _ in range(2):
        stage.start_job()
        stage.leave(Outcome.CRASHED, error=ECC)
        stage.settle()
    assert stage.state == "queued"
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ("n1",)


def test_a_traceback_strikes_nobody(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(8)
    stage.leave(Outcome.CRASHED, error=CRASHED)
    stage.settle()
    assert struck(stage) == []


def test_a_successor_strikes_nobody_twice(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(8)
    stage.settle()
    stage.leave(**SEGFAULT)
    stage.scheduler.fail("look", 1)
    stage.look()
    stage.start_supervisor()
    stage.settle()
    assert struck(stage) == [(1, "n1")]
