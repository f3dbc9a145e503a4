"""A supervisor that is killed between any two of its effects: its successor goes on with one worker, and says all once.

A forked supervisor process settles one turn of a history on real files, and is killed with SIGKILL before its n-th
effect: n = 0, 1, 2 and so on until it gets through.  An effect is what changes a file of the run or the scheduler.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.job import JobState
from supervisor.journal import ResumeRequested, StopRequested, SubmitIntended
from supervisor.requests import Request
from supervisor.run_state import replay
from tests.supervisor_room.stage import Stage
from tests.whole_room.kept_scheduler import KeptScheduler
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import publish_message

_MANY = 400
_PREEMPTED = ErrorDetail(type="Left", message="", what="preempted")
_STOPPED = ErrorDetail(type="Left", message="", what="stop")
_ONCE = {"Continued", "RolledBack", "VerdictSeen", "WorkerLeft", "Submitted", "Preempted", "Cancelled"}
_ONCE |= {"RollbackRequested", "Pinned", "StopRequested", "Stopped", "Finished", "ResumeRequested", "SegmentStarted"}


class Mortal(Stage):
    """A stage whose supervisor may be a process of its own, and die."""

    scheduler: KeptScheduler

    def __init__(self, folder: Path) -> None:
        checkpoint = {"every_steps": 10, "healthy_after": 15, "keep_quarantined": 5}
        super().__init__(folder / "runs", checkpoint=checkpoint)
        self.scheduler = KeptScheduler(folder / "scheduler.pickle")
        self.start_supervisor()

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
        self.start_supervisor()
        self.settle()
        if isinstance(self.watched.run.state.open_intent, SubmitIntended):
            self.now += 2 * self.scheduler.message_timeout_s()
            self.settle()

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


def _pin(stage: Mortal) -> None:
    _train(stage)
    publish_message(stage.run_dir.request, Request(verb="pin", by="alice", to=10))


HISTORIES = [_submission, _spike, _preemption, _node_failure, _stop, _stop_carried_out, _stop_in_the_queue]
HISTORIES += [_resume, _end, _rollback_asked, _rollback_of_a_stopped_run, _pin]


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
    undisturbed = _prepared(tmp_path / "undisturbed", history)
    undisturbed.succeed()
    expected = _facts(undisturbed)
    killed_before: list[str] = []
    for effect in range(_MANY):
        stage = _prepared(tmp_path / str(effect), history)
        what = stage.settle_until_killed(effect)
        stage.succeed()
        assert _facts(stage) == expected, what
        assert stage.names.count("StartMoved") <= 1, what  # it has no intent: done and not told is possible
        assert stage.ears.troubles == [], what
        if what is None:
            break
        killed_before.append(what)
    assert len(killed_before) < _MANY
    assert any("rollback_log" in what for what in killed_before)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.__name__.strip("_"))
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
    stage = Mortal(folder)
    history(stage)
    stage.scheduler.save()
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
