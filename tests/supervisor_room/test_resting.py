"""A run in which nothing happens costs a few stamps; whatever happens in it is seen by the next pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulated import CountingScheduler, SimulatedWorker, runs_under_way
from slurm.job import JobState
from supervisor import fleet
from supervisor.disk import REMOTE_PASS_S, seconds_between_passes, stat_anew, stat_for
from supervisor.fleet import Fleet
from supervisor.job_looks import BUSY_LOOK_S, QUIET_LOOK_S, JobLooks
from supervisor.journal import AttemptDecided, read_journal
from supervisor.requests import Request
from supervisor.watch import LONG_REST_S, REST_S, is_due, one_pass, watch
from tests.supervisor_room.stage import Stage
from worker.contract import files, loss_history
from worker.contract.exit_report import Outcome
from worker.contract.files import publish_message
from worker.contract.run_dir import RunDir


class Clock:
    """The process's monotonic clock, moved by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Opens:
    """Counts the files that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[Path] = []
        real = files.open_data

        def counted(path: Path) -> Any:
            self.paths.append(path)
            return real(path)

        for module in (files, loss_history):
            monkeypatch.setattr(module, "open_data", counted)


@pytest.fixture
def resting(stage: Stage, clock: Clock) -> Stage:
    """A run that trains, whose supervisor has seen everything."""
    stage.settle()
    stage.start_job()
    stage.train(until=3)
    stage.pulse()
    stage.settle()
    assert stage.state == "training"
    stage.look()
    assert stage.watched.rest is not None
    stage.looks._quiet_s = stage.looks._busy_s = 1e9
    assert not due(stage)
    assert not due(stage)
    return stage


def due(stage: Stage) -> bool:
    return is_due(stage.watched, stage.looks)


def test_nothing_is_read_where_nothing_happens(resting: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = Opens(monkeypatch)
    assert not any(due(resting) for _ in range(10))
    assert opens.paths == []
    resting.look()
    assert opens.paths, "a whole pass reads, so the count would show it"


def test_steps_that_go_well_cost_their_own_bytes(resting: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = Opens(monkeypatch)
    resting.train(until=9)
    opens.paths.clear()
    assert not due(resting)
    assert opens.paths == [resting.run_dir.history]
    assert resting.watched.rest is not None
    assert resting.watched.rest.seen.last is not None
    assert resting.watched.rest.seen.last.step == 9, "whoever shows the run is told"
    resting.pulse()
    opens.paths.clear()
    assert not due(resting)
    assert opens.paths == [], "a sign of life is looked at with the next pass"


WHATS: dict[str, Callable[[Stage], object]] = {
    "a verdict": lambda stage: stage.train(until=9, verdict="spike", onset=7, loss=9.0),
    "a step above the band": lambda stage: stage.train(until=9, verdict="pending"),
    "an exit report": lambda stage: stage.leave(Outcome.CRASHED),
    "another rank's": lambda stage: stage.leave(Outcome.CRASHED, rank=3),
    "a new start": lambda stage: stage.run_dir.restart(1, 1).mkdir(),
    "a request": lambda stage: publish_message(stage.run_dir.request, Request(verb="stop", by="me")),
    "a STOP file": lambda stage: stage.run_dir.stop_file.touch(),
    "a lost history": lambda stage: stage.run_dir.history.unlink(),
    "a spoilt history": lambda stage: stage.run_dir.history.write_text("[\n"),
    "another answer": lambda stage: (
        stage.scheduler.set_state(stage.job_id, JobState.SUSPENDED),
        stage.looks.look([stage.watched.run]),
    ),
    "silence": lambda stage: (stage.scheduler.fail("look"), stage.looks.look([stage.watched.run])),
}


@pytest.mark.parametrize("what", WHATS)
def test_whatever_else_happens_calls_for_a_pass(resting: Stage, what: str) -> None:
    WHATS[what](resting)
    assert due(resting)


def test_a_report_within_the_tick_of_a_pulse_is_found(resting: Stage) -> None:
    """The disk's clock stands still between the two, so that the folder's stamp does not tell them apart."""
    resting.pulse()
    folder = resting.run_dir.restart(1, 0)
    stamp = folder.stat()
    assert not due(resting)
    resting.leave(Outcome.CRASHED)
    os.utime(folder, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert due(resting)


def test_a_rest_ends_by_the_clock_with_the_next_beat(resting: Stage, clock: Clock) -> None:
    beat = resting.watched.run.lease.file.beat
    clock.now += LONG_REST_S
    assert due(resting)
    resting.look()
    assert resting.watched.run.lease.file.beat == beat + 1
    resting.leave(Outcome.LEFT, rank=1)  # the others' reports are awaited
    resting.settle()
    resting.look()
    assert not due(resting)
    clock.now += REST_S
    assert due(resting)


def test_what_could_not_be_written_down_is_tried_at_once(resting: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    resting.train(until=9, verdict="spike", onset=7, loss=9.0)

    def full(*rest: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(resting.watched.run.journal, "record", full)
        one_pass(resting.watched, resting.looks, [resting.watched])
    assert due(resting)
    resting.settle()
    assert "AttemptDecided" in resting.names[-4:]


def test_a_segment_that_could_not_be_written_down_is_not_forgotten(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.settle()
    stage.start_job()
    stage.settle()
    stage.train(until=3)
    with monkeypatch.context() as patched:
        patched.setattr(stage.watched.run.journal, "record", lambda *rest: (_ for _ in ()).throw(OSError(28, "full")))
        stage.look()
    stage.settle()
    assert stage.names.count("SegmentStarted") == 1
    assert stage.state == "training"


def test_a_single_quiet_run_asks_twice_a_minute(resting: Stage, clock: Clock) -> None:
    looks = JobLooks(resting.scheduler, QUIET_LOOK_S, BUSY_LOOK_S)
    looks.look_if_due([resting.watched.run])
    before = len(resting.scheduler.calls)
    for _ in range(2000):  # ten minutes
        clock.now += 0.3
        looks.look_if_due([resting.watched.run])
    assert len(resting.scheduler.calls) - before <= 20


def test_what_follows_a_decision_does_not_wait_for_the_next_pass(tmp_path: Path) -> None:
    stage = Stage(tmp_path)

    class Rested(Exception):
        """The loop came to its pause."""

    def sleep(seconds: float) -> None:
        raise Rested

    with pytest.raises(Rested):
        watch([stage.watched], sleep, stage.looks, 0.3)
    assert (stage.watched.run.state.attempt, stage.submissions) == (1, 1)


@pytest.mark.parametrize(("step_s", "is_asked"), [(1.0, True), (60.0, False)])
def test_a_worker_that_falls_silent_is_a_reason_to_ask(resting: Stage, step_s: float, is_asked: bool) -> None:
    """A node that died says nothing, and its job is RUNNING for minutes; a step of a minute is as silent."""
    looks = JobLooks(resting.scheduler, QUIET_LOOK_S, BUSY_LOOK_S)
    resting.train(until=9, step_s=step_s)
    resting.pulse()
    for _ in range(3):
        resting.look()
    assert looks._due_s(resting.watched.run) == QUIET_LOOK_S
    resting.now += 16.0
    resting.look()
    assert (looks._due_s(resting.watched.run) == BUSY_LOOK_S) is is_asked
    resting.pulse()
    resting.look()
    assert looks._due_s(resting.watched.run) == QUIET_LOOK_S
    resting.pulse(phase="saving")
    resting.now += 100.0
    resting.look()
    resting.look()
    assert looks._due_s(resting.watched.run) == QUIET_LOOK_S, "a save may take as long as it likes, within its limit"


def test_on_a_shared_disk_attributes_are_those_of_an_opened_file(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    line = "36 35 98:0 / {} rw,noatime - {} server:/home rw\n"
    mounts.write_text(line.format("/", "ext4") + line.format(tmp_path, "nfs4"))
    assert stat_for(tmp_path, mounts) is stat_anew
    assert seconds_between_passes(tmp_path, mounts) == REMOTE_PASS_S
    mounts.write_text(line.format("/", "nfs4") + line.format(tmp_path, "xfs"))
    assert stat_for(tmp_path, mounts) is Path.stat
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    for name in ("file", "pipe", "."):  # none of them is waited for
        assert stat_anew(tmp_path / name).st_ino == (tmp_path / name).stat().st_ino
    with pytest.raises(FileNotFoundError):
        stat_anew(tmp_path / "none")


# -- a fleet


@pytest.fixture
def under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Thirty runs that train, in the hands of one process."""
    scheduler = CountingScheduler()
    monkeypatch.setattr(fleet, "choose", lambda *rest: scheduler)
    runs = runs_under_way(tmp_path, 30)
    with open(os.devnull, "w") as out:
        made = Fleet(tmp_path, out)
        made.take_up()
        for _ in range(3):
            made.tend()
        yield made, runs, scheduler
        made.leave()


def test_a_fleet_reads_nothing_of_runs_in_which_nothing_happens(
    under_way: Any, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    made, _, scheduler = under_way
    opens, calls = Opens(monkeypatch), scheduler.calls
    made.tend()
    assert opens.paths == []
    for _ in range(300):
        clock.now += 2.0
        made.tend()
    assert scheduler.calls - calls <= 20, "in ten minutes"


def test_one_verdict_among_many_is_answered_by_the_next_pass(under_way: Any) -> None:
    made, runs, _ = under_way
    told = runs[17]
    SimulatedWorker(told, 0.0).spike()
    made.tend()
    assert [run for run in runs if has_decided(run)] == [told]


def test_verdicts_have_their_turn_first(under_way: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    made, runs, _ = under_way
    told = runs[17]
    SimulatedWorker(told, 0.0).spike()
    clock.now += LONG_REST_S  # all of them are due
    order: list[str] = []

    def noted(watched: Any, *rest: Any) -> Any:
        order.append(watched.run.run_dir.path.name)
        return one_pass(watched, *rest)

    monkeypatch.setattr(fleet, "one_pass", noted)
    made.tend()
    assert len(order) == 30
    assert order[0] == told.path.name, "its history was looked at before any pass"


def has_decided(run: RunDir) -> bool:
    events = (event for event in read_journal(run.journal) if isinstance(event, AttemptDecided))
    return any(event.cause == "spike" for event in events)
