"""Histories of a job that waits, and of the nodes under it: held, reserved away, drained, lost, moved elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState, Node, Reservation
from supervisor.journal import Continued, DrainSeen, JobChanged, JobSeen, NodeExcluded, NodeStruck, SubmitIntended
from supervisor.queue_policy import fitting_limit_s
from supervisor.report.standing_text import detail_lines
from supervisor.runs import standing
from tests.supervisor_room.stage import BEGIN, CRASHED, PREEMPTED, Stage
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.pulse import Hang

MINUTE, HOUR = 60.0, 3600.0
FAILED_LAUNCH = "launch failed requeued held"
RESERVED = "ReqNodeNotAvail, Reserved for maintenance"


def those(stage: Stage, kind: type[Any]) -> list[Any]:
    return [event for event in stage.events if isinstance(event, kind)]


def changes(stage: Stage) -> list[tuple[str, str | None]]:
    return [(event.what, event.new) for event in those(stage, JobChanged)]


def in_training(stage: Stage, nodes: tuple[str, ...] = ("n1",)) -> None:
    stage.scheduler.node_names = ("n1", "n2", "n3", "n4")
    stage.scheduler.node_states = {name: Node(name, "allocated") for name in stage.scheduler.node_names}
    stage.settle()
    stage.start_job()
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=nodes)
    stage.train(25)
    stage.settle()


def lose(stage: Stage, node: str) -> None:
    stage.scheduler.node_states[node] = Node(node, "down", "Not responding")


def requeue(stage: Stage, restarts: int = 1, why: str = "BeginTime") -> None:
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why=why, restarts=restarts)


# -- nodes


def test_the_batch_node_is_lost_and_the_requeued_job_starts_elsewhere(stage: Stage) -> None:
    in_training(stage)
    lose(stage, "n1")
    requeue(stage)
    stage.settle()
    assert changes(stage) == [("exclude", "n1")]
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ("n1",)
    assert stage.names.count("StartMoved") == 1
    assert [strike.node for strike in those(stage, NodeStruck)] == ["n1"]
    stage.start_job(restarts=1)
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=("n2",), restarts=1)
    stage.train(30, restart=1)
    stage.settle()
    assert (stage.state, stage.directive.attempt, stage.submissions) == ("training", 1, 1)


def test_a_node_that_only_does_not_answer_counts_once_its_job_is_back_in_the_queue(stage: Stage) -> None:
    in_training(stage)
    stage.scheduler.node_states["n1"] = Node("n1", "completing", is_silent=True)
    stage.settle()
    assert (stage.state, changes(stage)) == ("training", [])
    requeue(stage)
    stage.settle()
    assert changes(stage) == [("exclude", "n1")]


def test_a_drained_node_that_is_silent_while_it_is_put_into_order_was_not_lost(stage: Stage) -> None:
    in_training(stage)
    stage.scheduler.node_states["n1"] = Node("n1", "draining", "kernel")
    stage.settle()
    stage.scheduler.node_states["n1"] = Node("n1", "idle", is_silent=True)
    requeue(stage)
    stage.settle()
    assert (changes(stage), those(stage, NodeStruck)) == ([], [])


def test_nothing_is_left_out_while_the_request_does_not_fit_with_all_nodes_either(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cluster={"nodes": 2})
    in_training(stage, ("n1", "n2"))
    stage.scheduler.node_names = ("n3",)  # the others are away, for now
    lose(stage, "n2")
    requeue(stage)
    stage.settle()
    [change] = those(stage, JobChanged)
    assert (change.what, change.error) == ("exclude", "the request would not fit without it")


def test_what_was_left_out_comes_back_where_the_job_can_never_start_without_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cluster={"nodes": 2}, recovery={"node_strikes": 1})
    in_training(stage, ("n1", "n2"))
    first = stage.job_id
    lose(stage, "n2")
    requeue(stage)
    stage.settle()
    assert (changes(stage), list(stage.watched.run.state.excluded(stage.now))) == ([("exclude", "n2")], ["n2"])
    stage.scheduler.node_names = ("n2", "n3")
    stage.scheduler.node_states["n2"] = Node("n2", "idle")
    stage.scheduler.set_state(first, JobState.PENDING, why="BadConstraints", restarts=1)
    stage.settle()
    assert [(each.node, each.until) for each in those(stage, NodeExcluded)][1:] == [("n2", None)]
    assert (stage.submissions, stage.job_id != first, stage.state) == (2, True, "queued")
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ()


def test_constraints_that_a_person_chose_are_that_persons_to_mend(stage: Stage) -> None:
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="BadConstraints")
    stage.settle()
    assert (stage.submissions, "cluster.constraint" in stage.watched.run.state.reason) == (1, True)


def test_the_only_node_that_fits_is_not_excluded(stage: Stage) -> None:
    in_training(stage)
    stage.scheduler.node_names = ("n1",)
    lose(stage, "n1")
    requeue(stage)
    stage.settle()
    [change] = those(stage, JobChanged)
    assert (change.what, change.error) == ("exclude", "the request would not fit without it")
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ()


def test_a_crash_that_was_reported_after_the_requeue_is_answered_for_the_agents_wait(stage: Stage) -> None:
    """On a node that Slurm gave up an agent lives on, and reports when its trainer dies."""
    in_training(stage)
    requeue(stage, why="Priority")
    stage.settle()
    stage.start_job(restarts=1)
    stage.settle()
    stage.leave(Outcome.CRASHED, restart=0)
    stage.settle()
    assert [(each.cause, each.where) for each in those(stage, Continued)][1:] == [("crash", "same_allocation")]


def test_a_job_that_comes_back_from_a_cancel_is_cancelled_again(tmp_path: Path) -> None:
    """Slurm puts it back where it was requeued, or its node failed, at the same moment."""
    stage = Stage(tmp_path, cluster={"nodes": 2})
    in_training(stage, ("n1", "n2"))
    first = stage.job_id
    stage.scheduler.cancel = lambda job_id: None  # type: ignore[method-assign]
    lose(stage, "n2")
    stage.scheduler.set_state(first, JobState.RUNNING, nodes=("n1",))
    stage.settle()
    assert stage.names.count("Cancelled") == 1
    del stage.scheduler.cancel
    stage.scheduler.set_state(first, JobState.COMPLETING, restarts=1, nodes=("n1",))
    stage.settle()
    stage.scheduler.set_state(first, JobState.PENDING, why="BeginTime", restarts=1)
    stage.settle()
    assert (stage.scheduler.jobs[first].state, stage.names.count("Cancelled")) == (JobState.CANCELLED, 2)
    assert (stage.submissions, stage.job_id != first) == (2, True)


def test_a_crash_is_told_once_though_the_job_was_put_back(stage: Stage) -> None:
    in_training(stage)
    stage.leave(Outcome.CRASHED)
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETING, restarts=1)
    stage.settle()
    requeue(stage, why="Priority")
    stage.settle()
    assert stage.names.count("WorkerLeft") == 1
    assert [each.cause for each in those(stage, Continued)] == ["first", "crash"]


def test_a_job_that_goes_on_without_a_node_is_ended_and_submitted_afresh(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cluster={"nodes": 2})
    in_training(stage, ("n1", "n2"))
    first = stage.job_id
    lose(stage, "n2")
    stage.scheduler.set_state(first, JobState.RUNNING, nodes=("n1",))  # Slurm takes it off the list
    stage.settle()
    assert ("cancel", first) in stage.scheduler.calls
    assert stage.directive.new_job
    last = those(stage, Continued)[-1]
    assert (last.cause, last.resume_from, last.where) == ("node_failed", "checkpoint-20", "new_job")
    assert "n2 is down (Not responding)" in last.reason
    assert (stage.submissions, stage.state) == (2, "queued")


def test_a_node_that_is_back_before_anybody_looked_was_lost_all_the_same(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cluster={"nodes": 2})
    in_training(stage, ("n1", "n2"))
    first = stage.job_id
    stage.scheduler.node_states["n2"] = Node("n2", "idle")
    stage.scheduler.set_state(first, JobState.RUNNING, nodes=("n1",))
    stage.leave(Outcome.CRASHED)  # its collective broke
    stage.settle()
    last = those(stage, Continued)[-1]
    assert (last.cause, last.where, ("cancel", first) in stage.scheduler.calls) == ("node_failed", "new_job", True)
    assert [strike.node for strike in those(stage, NodeStruck)] == ["n2"]
    assert (stage.submissions, stage.state) == (2, "queued")


def test_a_running_job_that_lost_a_node_for_a_moment_is_submitted_afresh(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cluster={"nodes": 2})
    in_training(stage, ("n1", "n2"))
    stage.scheduler.node_states["n2"] = Node("n2", "idle")
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=("n1",))
    stage.settle()
    last = those(stage, Continued)[-1]
    assert (last.cause, last.where) == ("node_failed", "new_job")
    assert "n2 was taken off the job" in last.reason


@pytest.mark.parametrize("outcome", [Outcome.CRASHED, Outcome.ENDED])
def test_a_crash_beside_a_lost_node_is_the_node_s(tmp_path: Path, outcome: Outcome) -> None:
    stage = Stage(tmp_path, cluster={"nodes": 2})
    in_training(stage, ("n1", "n2"))
    lose(stage, "n2")
    stage.leave(outcome, error=CRASHED)  # rank 0's collective broke
    stage.settle()
    last = those(stage, Continued)[-1]
    assert (last.cause, last.where, last.reason) == ("node_failed", "new_job", "n2 is down (Not responding)")


def test_a_hang_beside_a_lost_node_is_the_node_s(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cluster={"nodes": 2})
    in_training(stage, ("n1", "n2"))
    lose(stage, "n2")
    hang = Hang(quiet_s=40.0, limit_s=30.0, phase="training", step=25)
    stage.leave(Outcome.ENDED, error=ErrorDetail(type="Ended", message="", what="hang"), hang=hang)
    stage.settle()
    assert those(stage, Continued)[-1].cause == "node_failed"


def test_a_crash_of_a_lost_node_is_not_the_first_of_two(tmp_path: Path) -> None:
    stage = Stage(tmp_path, cluster={"nodes": 2})
    for is_lost in (True, False, False):
        stage.settle()
        stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=("n1", "n2"))
        stage.claim()
        stage.settle()
        if is_lost:
            lose(stage, "n2")
        stage.leave(Outcome.CRASHED, error=CRASHED)
        stage.settle()
        stage.scheduler.node_states["n2"] = Node("n2", "idle")
    assert [each.cause for each in those(stage, Continued)] == ["first", "node_failed", "crash"]
    assert stage.state == "gave_up"


def test_with_a_factor_the_cause_of_a_requeue_is_known(tmp_path: Path) -> None:
    stage = Stage(tmp_path, recovery={"preemption": {"lr_factor": 0.5}})
    in_training(stage)
    lose(stage, "n1")
    requeue(stage)
    stage.settle()
    assert (stage.directive.cause, stage.directive.lr_scale) == ("node_failed", 0.5)
    assert stage.names.count("StartMoved") == 1


def test_a_drain_is_told_once_and_training_goes_on(stage: Stage) -> None:
    in_training(stage)
    stage.scheduler.node_states["n1"] = Node("n1", "draining", "kernel update")
    stage.settle()
    stage.settle()
    [drain] = those(stage, DrainSeen)
    assert (drain.nodes, drain.job_id) == (("n1",), stage.job_id)
    assert "kernel update" in drain.reason
    assert (stage.state, stage.submissions) == ("training", 1)
    row = standing(stage.run_dir, in_detail=True)
    assert row["job"]["draining"] == ["n1"]
    assert "n1 drains" in "\n".join(detail_lines(row, stage.now))
    stage.scheduler.set_state(stage.job_id, JobState.FAILED)
    stage.settle()
    assert those(stage, Continued)[-1].cause == "drained"


def test_nodes_that_nobody_can_tell_about_are_not_lost(stage: Stage) -> None:
    in_training(stage)
    stage.scheduler.fail("nodes", 3)
    stage.settle()
    assert (stage.state, stage.submissions) == ("training", 1)


def test_a_preemption_without_a_report_is_one(stage: Stage) -> None:
    in_training(stage)
    stage.scheduler.set_state(
        stage.job_id, JobState.PENDING, why="BeginTime", restarts=1, preempted_at=stage.now, nodes=()
    )
    stage.settle()
    assert stage.names.count("Preempted") == 1


# -- held


def test_a_failed_launch_is_released_once_and_then_submitted_afresh(stage: Stage) -> None:
    stage.settle()
    first = stage.job_id
    stage.scheduler.set_state(first, JobState.HELD, why=FAILED_LAUNCH)
    stage.look()
    assert changes(stage) == [("released", None)]
    assert stage.scheduler.jobs[first].state is JobState.PENDING
    stage.scheduler.set_state(first, JobState.HELD, why=FAILED_LAUNCH)
    stage.settle()
    assert changes(stage) == [("released", None)]
    assert ("cancel", first) in stage.scheduler.calls
    assert (stage.submissions, stage.directive.attempt) == (2, 1)


def test_after_a_launch_that_failed_where_its_start_was_moved_no_start_is_moved_any_more(stage: Stage) -> None:
    in_training(stage)
    requeue(stage)
    stage.settle()
    assert stage.names.count("StartMoved") == 1
    stage.scheduler.set_state(stage.job_id, JobState.HELD, why=FAILED_LAUNCH, restarts=1)
    stage.settle()
    stage.start_job(restarts=2)
    stage.settle()
    requeue(stage, restarts=3)
    stage.settle()
    assert stage.names.count("StartMoved") == 1
    assert stage.watched.run.state.memory.may_hurry is False


@pytest.mark.parametrize("why", ["JobHeldUser", "JobHeldAdmin"])
def test_a_hold_that_somebody_asked_for_stays(stage: Stage, why: str) -> None:
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.HELD, why=why)
    stage.settle()
    assert not {"release", "cancel"} & {method for method, _ in stage.scheduler.calls}
    assert "hold" in stage.watched.run.state.reason or "held" in stage.watched.run.state.reason


def test_why_a_job_waits_is_said_in_words_at_the_first_look(stage: Stage) -> None:
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="QOSMaxJobsPerUserLimit")
    stage.look()
    seen = those(stage, JobSeen)[-1]
    assert "the QOS lets one person run no more jobs at once (QOSMaxJobsPerUserLimit)" in seen.reason
    row = standing(stage.run_dir, in_detail=True)
    assert seen.reason in "\n".join(detail_lines(row, stage.now))


# -- maintenance


def maintenance(starts_in: float, lasts: float = HOUR, flags: tuple[str, ...] = ("MAINT",)) -> Reservation:
    return Reservation("maint", BEGIN + starts_in, BEGIN + starts_in + lasts, ("n1",), flags)


@pytest.mark.parametrize(
    ("reservations", "fits_s", "named"),
    [
        ([], 10 * HOUR, False),
        ([maintenance(20 * HOUR)], 10 * HOUR, False),
        ([maintenance(10 * HOUR)], 10 * HOUR, False),
        ([maintenance(5 * HOUR)], 5 * HOUR - MINUTE, True),
        ([maintenance(5 * HOUR + 59)], 5 * HOUR - MINUTE, True),
        ([maintenance(9 * HOUR), maintenance(5 * HOUR)], 5 * HOUR - MINUTE, True),
        ([maintenance(5 * HOUR), maintenance(HOUR, flags=())], 5 * HOUR - MINUTE, True),
        ([maintenance(HOUR, flags=())], HOUR - MINUTE, True),
        ([maintenance(-HOUR, 2 * HOUR)], 0.0, True),
        ([maintenance(-HOUR, 2 * HOUR), maintenance(5 * HOUR)], 5 * HOUR - MINUTE, True),
        ([maintenance(-2 * HOUR, HOUR)], 10 * HOUR, False),
    ],
)
def test_what_fits_before_a_maintenance(reservations: list[Reservation], fits_s: float, named: bool) -> None:
    found_s, reservation = fitting_limit_s(10 * HOUR, BEGIN, reservations)
    assert (found_s, reservation is not None) == (fits_s, named)


def test_the_own_reservation_is_none_that_keeps_us_out() -> None:
    assert fitting_limit_s(10 * HOUR, BEGIN, [maintenance(HOUR, flags=())], "maint") == (10 * HOUR, None)


def reserved(tmp_path: Path, starts_in: float, min_time: str | None) -> Stage:
    stage = Stage(tmp_path, cluster={"time_limit": "10:00:00", "min_time": min_time})
    stage.settle()
    stage.scheduler.known_reservations = [maintenance(starts_in)]
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why=RESERVED, limit_s=10 * HOUR)
    stage.settle()
    return stage


def test_before_a_maintenance_a_job_gets_what_fits_and_the_full_limit_afterwards(tmp_path: Path) -> None:
    stage = reserved(tmp_path, 5 * HOUR + 30, "00:30:00")
    [change] = those(stage, JobChanged)
    assert (change.old, change.new) == ("10:00:00", "04:59:00")
    assert stage.scheduler.requests[stage.job_id].resources.time_limit == "04:59:00"
    stage.start_job()
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=("n1",), limit_s=5 * HOUR - MINUTE)
    stage.train(25)
    stage.settle()
    stage.now = BEGIN + 6 * HOUR  # it is over, the job was preempted at its beginning and waits
    stage.leave(Outcome.LEFT, error=PREEMPTED)
    stage.scheduler.known_reservations = []
    stage.scheduler.set_state(
        stage.job_id, JobState.PENDING, why="BeginTime", restarts=1, limit_s=5 * HOUR - MINUTE, nodes=()
    )
    stage.settle()
    assert changes(stage) == [("time_limit", "04:59:00"), ("time_limit", "10:00:00")]
    assert stage.names.index("StartMoved") > stage.names.index("JobChanged", stage.names.index("JobChanged") + 1)


@pytest.mark.parametrize(
    ("starts_in", "min_time"), [(5 * HOUR, None), (20 * MINUTE, "00:30:00"), (6 * MINUTE, "00:01:00")]
)
def test_too_little_time_before_a_maintenance_is_not_used_and_status_says_when_it_starts(
    tmp_path: Path, starts_in: float, min_time: str | None
) -> None:
    stage = reserved(tmp_path, starts_in, min_time)
    assert changes(stage) == []
    assert "maint begins" in stage.watched.run.state.reason
    assert "after which it can start" in stage.watched.run.state.reason


def test_a_limit_that_no_longer_fits_is_shortened_again_and_given_up_below_the_shortest(tmp_path: Path) -> None:
    stage = reserved(tmp_path, 5 * HOUR, "01:00:00")
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why=RESERVED, limit_s=5 * HOUR - MINUTE)
    stage.now = BEGIN + 2 * HOUR
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why=RESERVED, limit_s=3 * HOUR - 2 * MINUTE)
    stage.now = BEGIN + 4.5 * HOUR
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why=RESERVED, limit_s=10 * HOUR)
    stage.settle()
    news = [new for _, new in changes(stage)]
    assert news == ["04:58:00", "02:58:00", "10:00:00"]


# -- fallback


def waiting(tmp_path: Path, **state: Any) -> Stage:
    ways = [{"partition": "cpu", "after_s": 600.0}, {"partition": "old", "qos": "low", "after_s": 1200.0}]
    stage = Stage(tmp_path, cluster={"fallback": ways})
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, **{"why": "Priority"} | state)
    stage.settle()
    return stage


def at(stage: Stage, seconds: float) -> list[tuple[str, str | None]]:
    stage.now = BEGIN + seconds
    stage.settle()
    return changes(stage)


def test_a_job_that_does_not_start_goes_to_the_next_partition_or_qos(tmp_path: Path) -> None:
    stage = waiting(tmp_path)
    assert at(stage, 590) == []
    assert at(stage, 620) == [("partition", "partition cpu")]
    assert stage.scheduler.requests[stage.job_id].resources.partition == "cpu"
    assert len(at(stage, 1800)) == 1
    assert at(stage, 1840)[1:] == [("partition", "partition old with QOS low")]
    assert stage.scheduler.requests[stage.job_id].resources.qos == "low"
    assert len(at(stage, 100_000)) == 2


def test_a_way_that_is_refused_is_passed_over(tmp_path: Path) -> None:
    stage = waiting(tmp_path)
    stage.scheduler.says = "Invalid partition name specified"
    stage.scheduler.fail("change")
    assert at(stage, 620) == [("partition", "partition cpu")]
    assert those(stage, JobChanged)[0].reason.startswith("not changed (")
    assert len(at(stage, 1900)) == 2
    assert those(stage, JobChanged)[1].error is None


def test_a_job_that_waits_for_the_runs_own_earlier_job_goes_nowhere(tmp_path: Path) -> None:
    assert at(waiting(tmp_path, why="Dependency"), 100_000) == []


def test_another_supervisor_knows_how_long_it_has_waited(tmp_path: Path) -> None:
    stage = waiting(tmp_path)
    at(stage, 620)
    stage.start_supervisor()
    assert len(at(stage, 700)) == 1
    assert len(at(stage, 1900)) == 2


# -- what was learned


@pytest.mark.parametrize(("save_s", "warning_s"), [(None, None), (100.0, 2 * 102 + 60), (4000.0, 3600)])
def test_the_next_job_is_told_as_early_as_the_saves_were_long(
    tmp_path: Path, save_s: float | None, warning_s: int | None
) -> None:
    stage = Stage(tmp_path, cluster={"time_limit": "03:00:00"})
    stage.settle()
    stage.start_job()
    stage.train(25, save_s=save_s, step_s=1.5)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.TIMEOUT)
    stage.settle()
    assert those(stage, SubmitIntended)[-1].warning_s == warning_s
    signal = stage.scheduler.requests[stage.job_id].signal
    assert signal == f"USR2@{120 if warning_s is None else warning_s}"


@pytest.mark.parametrize("kill", [lambda stage: None, Stage.start_supervisor])
def test_a_change_whose_answer_got_lost_is_made_again(stage: Stage, kill: Callable[[Stage], None]) -> None:
    in_training(stage)
    lose(stage, "n1")
    requeue(stage)
    stage.scheduler.fail("change", after=True)
    stage.look()
    kill(stage)
    stage.settle()
    assert changes(stage) == [("exclude", "n1")]
    assert stage.scheduler.requests[stage.job_id].exclude_nodes == ("n1",)
