"""A supervisor that is killed between any two of its effects: its successor goes on with one worker, and says all once.

A forked supervisor process settles one turn of a history on real files, and is killed with SIGKILL before its n-th
effect: n = 0, 1, 2 and so on until it gets through.  An effect is what changes a file of the run or the scheduler.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from slurm.entry import tasks_over
from slurm.job import JobState, Node, Reservation
from slurm.scheduler import Scheduler
from supervisor import actions, watch
from supervisor.decision import ChangeJob, Decision, Wait
from supervisor.fold import replay
from supervisor.journal import ResumeRequested, RollbackRequested, StopRequested, SubmitIntended
from supervisor.lease import NO_JOB, OwnJob
from supervisor.requests import Request
from tests.supervisor_room.stage import CRASHED, Stage
from tests.whole_room.kept_scheduler import CHANGING, KeptScheduler
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import publish_message
from worker.contract.pulse import Hang

_MANY = 400
_PREEMPTED = ErrorDetail(type="Left", message="", what="preempted")
_TIME_LIMIT = ErrorDetail(type="Left", message="", what="time_limit")
_STOPPED = ErrorDetail(type="Left", message="", what="stop")
_ONCE = {"Continued", "RolledBack", "VerdictSeen", "WorkerLeft", "Submitted", "Preempted", "Cancelled"}
_ONCE |= {"HangSeen", "NodeStruck", "NodeExcluded", "JobChanged", "StartMoved", "WouldHaveDone", "GaveUp"}
_ONCE |= {
    "RequestRefused",
    "RollbackRequested",
    "Pinned",
    "StopRequested",
    "Stopped",
    "Finished",
    "ResumeRequested",
    "SegmentStarted",
}


class Mortal(Stage):
    """A stage whose supervisor may be a process of its own, and die."""

    scheduler: KeptScheduler

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        checkpoint = {"every_steps": 10, "healthy_after": 15, "keep_quarantined": 5}
        super().__init__(folder / "runs", checkpoint=checkpoint, **sections)
        self.scheduler = KeptScheduler(folder / "scheduler.pickle")
        self.start_supervisor()

    def look(self) -> Decision:
        """One pass, unless this supervisor has left its job to the next one."""
        has_left = self.own is not NO_JOB and self.watched.run.has_next_job
        return Wait("the next job goes on") if has_left else super().look()

    def settle_until_killed(self, effect: int) -> str | None:
        """Let a supervisor settle that is killed before this effect; which one it was, None where it got through."""
        said = self.run_dir.path.parent / "killed-before"
        pid = os.fork()
        if pid == 0:
            self._be_killed(effect, said)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL), said.read_text()
        self.scheduler.load()
        return said.read_text() if status else None

    def _be_killed(self, effect: int, said: Path) -> None:
        """The child: never returns."""
        effects = 0

        def count(what: str) -> None:
            nonlocal effects
            if effects == effect:
                os.write(descriptor, what.encode())
                os.kill(os.getpid(), signal.SIGKILL)
            effects += 1

        try:
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self.scheduler.boundary = count
            _count_files(self.run_dir.path, count)
            self.start_supervisor()
            self.settle()
        except BaseException:  # noqa: BLE001 (a forked test process must not go on as pytest)
            os.write(descriptor, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)

    def succeed(self) -> None:
        """The next supervisor does the rest; a run that is over is left alone, as `higgsfield run` does.

        It waits as long as the job of a submission without an answer may still show up.
        """
        if self.has_nothing_to_do:
            return
        if not self.is_put_back:
            self.start_supervisor()
            self.settle()
        if isinstance(self.watched.run.state.open_intent, SubmitIntended) and not self.is_put_back:
            self.now += 2 * self.scheduler.message_timeout_s()
            self.settle()
        if self.is_put_back:
            self.live_in("1", restart=1)
            self.start_supervisor()
            self.settle()

    def live_in(self, job_id: str, restart: int) -> None:
        """The supervisors to come live in this start of the worker's job."""
        self.scheduler.set_state(job_id, JobState.RUNNING, nodes=("n1",), restarts=restart)
        self.own = OwnJob(job_id, restart, tasks_over(self.run_dir.jobs, job_id, restart))

    @property
    def is_put_back(self) -> bool:
        """Whether the job that the supervisor lived in is in the queue again, and no supervisor lives until it runs."""
        return self.own is not NO_JOB and self.scheduler.jobs[self.own.job_id].restarts > self.own.restart

    @property
    def has_nothing_to_do(self) -> bool:
        return replay(self.events).is_over and not self.run_dir.request.exists()


def _count_files(folder: Path, count: Callable[[str], None]) -> None:
    """Call `count` before this process changes a file below `folder`; for as long as it lives."""
    changing = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link"}

    def hook(event: str, args: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in changing) and str(folder) in str(args[0]):
            count(f"{event} {args[0]}")

    sys.addaudithook(hook)


# -- histories: what has happened before the supervisor's turn ---------------------------------------------------------


def _submission(stage: Mortal) -> None:
    pass


def _train(stage: Mortal, *spike: object) -> None:
    stage.settle()
    stage.start_job()
    stage.train(20)
    stage.settle()


def _spike(stage: Mortal) -> None:
    _train(stage)
    stage.train(41, "spike", onset=39, loss=9.0)
    stage.leave(Outcome.VERDICT)


def _preemption(stage: Mortal) -> None:
    _train(stage)
    stage.leave(Outcome.LEFT, error=_PREEMPTED)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="BeginTime", restarts=1)


def _node_failure(stage: Mortal) -> None:
    """The job is gone for good: a new attempt in a new job."""
    _train(stage)
    stage.scheduler.set_state(stage.job_id, JobState.FAILED)


def _stop(stage: Mortal) -> None:
    _train(stage)
    publish_message(stage.run_dir.request, Request(verb="stop", by="alice"))


def _stop_carried_out(stage: Mortal) -> None:
    _stop(stage)
    stage.settle()
    stage.leave(Outcome.LEFT, error=_STOPPED)
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)


def _stop_in_the_queue(stage: Mortal) -> None:
    stage.settle()
    publish_message(stage.run_dir.request, Request(verb="stop", by="alice"))


def _resume(stage: Mortal) -> None:
    _stop_carried_out(stage)
    stage.settle()
    stage.watched.run.record(ResumeRequested(by="alice"))


def _end(stage: Mortal) -> None:
    _train(stage)
    stage.train(100)
    stage.leave(Outcome.DONE)
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)


def _rollback_asked(stage: Mortal) -> None:
    _train(stage)
    stage.train(38)
    publish_message(stage.run_dir.request, Request(verb="rollback", by="alice", to=10, lr_scale=0.5, asked_at=1.0))


def _rollback_of_a_stopped_run(stage: Mortal) -> None:
    _stop_carried_out(stage)
    stage.settle()
    publish_message(stage.run_dir.request, Request(verb="rollback", by="alice", to=10, skip=True, asked_at=1.0))


def _rollback_to_what_is_gone(stage: Mortal) -> None:
    _train(stage)
    publish_message(stage.run_dir.request, Request(verb="rollback", by="alice", to=5, asked_at=1.0))


def _rollback_to_what_went_meanwhile(stage: Mortal) -> None:
    _train(stage)
    stage.watched.run.record(RollbackRequested(by="alice", to=5, asked_at=1.0))


def _pin(stage: Mortal) -> None:
    _train(stage)
    publish_message(stage.run_dir.request, Request(verb="pin", by="alice", to=10))


def _hang(stage: Mortal) -> None:
    _train(stage)
    hang = Hang(phase="training", step=20, quiet_s=60.0, limit_s=30.0)
    stage.leave(Outcome.ENDED, error=ErrorDetail(type="Ended", message="", what="hang"), hang=hang)


def _crash_twice(stage: Mortal) -> None:
    """The same one before any step: it gives up, and ends its job."""
    for _ in range(2):
        stage.settle()
        if not stage.scheduler.jobs[stage.job_id].nodes:
            stage.start_job()
        else:
            stage.claim()
        stage.leave(Outcome.CRASHED, error=CRASHED)


def _bad_node(stage: Mortal) -> None:
    """The request would not fit without it."""
    _train(stage)
    stage.leave(Outcome.CRASHED, error=ErrorDetail(type="Signal", message="killed by signal 9"), signal=9)


def _lost_node(stage: Mortal) -> None:
    """Slurm has put the job back into the queue."""
    stage.scheduler.node_names = ("n1", "n2")
    _train(stage)
    stage.scheduler.node_states = {"n1": Node("n1", "down", "Not responding")}
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="BeginTime", restarts=1)


def _failed_launch(stage: Mortal) -> None:
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.HELD, why=_FAILED_LAUNCH)


def _failed_launch_again(stage: Mortal) -> None:
    _failed_launch(stage)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.HELD, why=_FAILED_LAUNCH)


def _maintenance(stage: Mortal) -> None:
    stage.settle()
    stage.scheduler.jobs[stage.job_id] = replace(stage.scheduler.jobs[stage.job_id], limit_s=36_000.0)
    stage.scheduler.known_reservations = [Reservation("m", stage.now + 7200, stage.now + 9000, (), ("MAINT",))]
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="ReqNodeNotAvail, Reserved for maintenance")


def _long_wait(stage: Mortal) -> None:
    stage.settle()
    stage.now += 100


def _long_wait_twice(stage: Mortal) -> None:
    _long_wait(stage)
    stage.settle()
    stage.now += 100


def _observed(stage: Mortal) -> None:
    _train(stage)
    stage.train(41, "spike", onset=39, loss=9.0, observed=True)


def _embedded(stage: Mortal) -> None:
    """Its job nears its time limit, and the site allows no second one beside it."""
    stage.scheduler.allows_one_job = True
    _train(stage)
    stage.live_in("1", restart=0)
    stage.leave(Outcome.LEFT, error=_TIME_LIMIT)
    tasks_over(stage.run_dir.jobs, "1", 0).touch()


def _embedded_in_vain(stage: Mortal) -> None:
    """Another job is needed: the tasks of this one are ended, and the supervisor that lives in it is not."""
    _train(stage)
    stage.live_in("1", restart=0)
    stage.scheduler.node_names = ("n1", "n2")
    stage.leave(Outcome.CRASHED, error=ErrorDetail(type="Signal", message="killed by signal 9"), signal=9)


_FAILED_LAUNCH = "launch failed requeued held"
SECTIONS: dict[Callable[[Mortal], None], dict[str, dict[str, Any]]] = {
    _bad_node: {"recovery": {"node_strikes": 1}},
    _maintenance: {"cluster": {"time_limit": "10:00:00", "min_time": "01:00:00"}},
    _long_wait: {"cluster": {"fallback": [{"partition": "other", "after_s": 60}]}},
    _long_wait_twice: {"cluster": {"fallback": [{"partition": "other", "after_s": 60}, {"qos": "low", "after_s": 60}]}},
    _observed: {"recovery": {"mode": "observe"}},
    _embedded_in_vain: {"recovery": {"relaunches_in_allocation": 0}},
}
"""What a history's configuration says."""
HISTORIES = [_submission, _spike, _preemption, _node_failure, _stop, _stop_carried_out, _stop_in_the_queue]
HISTORIES += [_resume, _end, _rollback_asked, _rollback_of_a_stopped_run, _pin]
HISTORIES += [_rollback_to_what_is_gone, _rollback_to_what_went_meanwhile]
HISTORIES += [_hang, _crash_twice, _bad_node, _lost_node, _failed_launch, _failed_launch_again, _maintenance]
HISTORIES += [_long_wait, _long_wait_twice, _observed, _embedded, _embedded_in_vain]


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process, other than a machine without power, loses nothing that it wrote."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _facts(stage: Mortal) -> dict[str, object]:
    """Everything that must not depend on when a supervisor was killed; one job lives, and the files agree."""
    events = stage.events
    run = replay(events)
    assert run.plan is not None
    told = stage.directive
    assert (told.attempt, told.resume_from, told.lr_scale) == (run.attempt, run.plan.resume_from, run.plan.lr_scale)
    live = [job.job_id for job in stage.scheduler.jobs.values() if not job.state.is_over]
    assert live == [run.job_id] or (live == [] and run.is_over)
    return {
        "events": Counter(name for name in stage.names if name in _ONCE),
        "state": run.state,
        "attempt": max(event.attempt for event in events),
        "directive": told.model_dump(exclude={"time"}),
        "jobs": {job_id: (job.state, job.why) for job_id, job in stage.scheduler.jobs.items()},
        "submissions": stage.submissions,
        "checkpoints": stage.run_dir.checkpoint_steps(),
        "quarantine": sorted(path.name for path in stage.run_dir.quarantine.iterdir()),
        "request": stage.run_dir.request.exists(),
        "table": stage.run_dir.history_csv.exists(),
    }


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__.strip("_"))
def test_a_supervisor_may_die_between_any_two_effects(history: Callable[[Mortal], None], tmp_path: Path) -> None:
    before = _prepared(tmp_path / "stage", history)
    shutil.copytree(tmp_path / "stage", tmp_path / "before")
    undisturbed = _put_back(before, tmp_path)
    undisturbed.succeed()
    expected = _facts(undisturbed)
    killed_before: list[str] = []
    for effect in range(_MANY):
        stage = _put_back(before, tmp_path)
        what = stage.settle_until_killed(effect)
        stage.succeed()
        assert _facts(stage) == expected, what
        assert stage.ears.troubles == [], what
        if what is None:
            break
        killed_before.append(what)
    assert len(killed_before) < _MANY
    assert any("rollback_log" in what for what in killed_before)


@pytest.mark.parametrize("history", HISTORIES[:-2], ids=lambda history: history.__name__.strip("_"))
def test_a_new_supervisor_for_each_pass_is_as_good_as_one(history: Callable[[Mortal], None], tmp_path: Path) -> None:
    """What `run --once` in a crontab does."""
    one, many = _prepared(tmp_path / "one", history), _prepared(tmp_path / "many", history)
    one.succeed()
    before: list[str] = []
    while (told := [name for name in many.names if name != "SupervisorStarted"]) != before:
        before = told
        if not many.has_nothing_to_do:
            many.start_supervisor()
            many.look()
    assert _facts(many) == _facts(one)


def _prepared(folder: Path, history: Callable[[Mortal], None]) -> Mortal:
    folder.mkdir()
    stage = Mortal(folder, **SECTIONS.get(history, {}))
    history(stage)
    stage.scheduler.save()
    return stage


def _put_back(before: Mortal, folder: Path) -> Mortal:
    """The stage as it was before the supervisor's turn, its files too."""
    shutil.rmtree(folder / "stage")
    shutil.copytree(folder / "before", folder / "stage")
    stage = copy.copy(before)
    stage.scheduler = copy.deepcopy(before.scheduler)
    return stage


def test_the_histories_are_what_they_are_called(tmp_path: Path) -> None:
    """Each reaches its effects in an undisturbed supervisor's hands."""

    def names(history: Callable[[Mortal], None]) -> list[str]:
        stage = _prepared(tmp_path / history.__name__, history)
        stage.succeed()
        return stage.names

    assert "Submitted" in names(_submission)
    assert "RolledBack" in names(_spike)
    assert {"Preempted", "StartMoved"} <= set(names(_preemption))
    assert names(_node_failure).count("Submitted") == 2
    assert StopRequested.__name__ in names(_stop)
    assert names(_stop_carried_out)[-1] == "Stopped"
    assert {"Cancelled", "Stopped"} <= set(names(_stop_in_the_queue))
    assert names(_resume).count("Submitted") == 2
    assert names(_end)[-1] == "Finished"
    assert {"RollbackRequested", "RolledBack"} <= set(names(_rollback_asked))
    assert names(_rollback_of_a_stopped_run).count("Submitted") == 2
    assert names(_pin)[-1] == "Pinned"
    assert "RequestRefused" in names(_rollback_to_what_is_gone)
    assert "RequestRefused" in names(_rollback_to_what_went_meanwhile)
    assert "HangSeen" in names(_hang)
    assert names(_crash_twice)[-1] == "GaveUp"
    assert "NodeExcluded" in names(_bad_node)
    assert {"NodeStruck", "JobChanged", "StartMoved"} <= set(names(_lost_node))
    assert "JobChanged" in names(_failed_launch)
    assert names(_failed_launch_again).count("Submitted") == 2
    assert "JobChanged" in names(_maintenance)
    assert names(_long_wait_twice).count("JobChanged") == 2
    assert "WouldHaveDone" in names(_observed)
    assert names(_embedded).count("Submitted") == 2
    assert "Cancelled" in names(_embedded_in_vain)


def test_every_effect_that_there_is_happens_in_a_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision or a call that is new, and reached by none of them, is a boundary that nobody was killed at."""
    reached: list[Decision] = []

    def carry_out(run: Any, decision: Decision) -> None:
        reached.append(decision)
        actions.carry_out(run, decision)

    monkeypatch.setattr(watch, "carry_out", carry_out)
    called = set()
    for history in HISTORIES:
        stage = _prepared(tmp_path / history.__name__, history)
        stage.succeed()
        called |= {method for method, _ in stage.scheduler.calls}
    assert {type(each) for each in reached} == set(get_args(Decision))
    changes = {each.what for each in reached if isinstance(each, ChangeJob)}
    assert changes == set(get_args(get_type_hints(ChangeJob)["what"]))
    asking = {"find", "look", "message_timeout_s", "nodes", "reservations", "test_only", "cancelled_by", "hardware"}
    assert asking | set(CHANGING) == {name for name in vars(Scheduler) if not name.startswith("_")}
    assert set(CHANGING) <= called
