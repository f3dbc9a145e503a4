"""Many runs in one process: one query for all, and what happens to one of them ends at that one."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState
from supervisor import fleet, sparing
from supervisor.fleet import Fleet, pause_s
from supervisor.journal import ResumeRequested, read_journal
from supervisor.lease import Lease, LeaseFile, read_holder, take_lease
from supervisor.runs import open_or_create
from supervisor.supervise import read_state, reopen
from supervisor.watch import one_pass
from tests.fakes import FakeScheduler
from tests.supervisor_room.stage import config
from worker.contract import config as contract_config
from worker.contract.exit_report import ExitReport, Outcome
from worker.contract.files import publish_message
from worker.contract.loss_history import HistoryWriter, Probe, Start, record
from worker.contract.run_dir import RunDir

START = Start(
    max_steps=100, lr=1.0, lr_expected=1.0, optimizer_steps=0, rng_digests=(), next_samples=(), versions={},
    probe=Probe(expected=None, found=1.0),
)  # fmt: skip


class Stage:
    """A folder of runs, a scheduler in memory, a clock that the test moves, and the fleet's process."""

    def __init__(self, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.now, self.out = runs, 0.0, io.StringIO()
        self.scheduler = FakeScheduler()
        monkeypatch.setattr(fleet, "choose", lambda kind, *folders: self.scheduler)
        for module in (fleet, sparing):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.fleet = Fleet(runs, self.out)

    def add(self, name: str, **sections: Any) -> RunDir:
        return open_or_create(config(self.runs, run={"name": name, "dir": str(self.runs)}, **sections))

    def passes(self, count: int = 6, step_s: float = 2.5) -> None:
        for _ in range(count):
            self.now += step_s
            self.fleet.take_up()
            self.fleet.tend()

    def join(self) -> None:
        """What is told when a run ends is told."""
        for thread in self.fleet._leaving:
            thread.join()

    def finish(self, run: RunDir) -> None:
        """The run's worker reports that all steps are done."""
        state = read_state(run)
        self.scheduler.set_state(str(state.job_id), JobState.COMPLETED)
        report = {"attempt": 1, "restart": 0, "rank": 0, "job_id": str(state.job_id), "host": "n1", "step": 100}
        path = run.exit_report(1, 0, 0)
        path.parent.mkdir(parents=True)
        publish_message(path, ExitReport(outcome=Outcome.DONE, started=0.0, ended=1.0, **report))

    def names(self, run: RunDir) -> list[str]:
        return [event.event for event in read_journal(run.journal)]

    def looks(self) -> int:
        return sum(name == "look" for name, _ in self.scheduler.calls)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    made = Stage(tmp_path, monkeypatch)
    yield made
    made.fleet.leave()


def holder_elsewhere(run: RunDir, beat: int = 1) -> None:
    publish_message(run.lease, LeaseFile(holder="far:1:x", host="far", pid=1, term=1, beat=beat))


def is_free(run: RunDir) -> bool:
    return read_holder(run) is None


def test_every_run_gets_its_job_and_all_of_them_one_query(stage: Stage) -> None:
    runs = [stage.add(name) for name in ("a", "b", "c")]
    stage.passes()
    assert all(stage.names(run)[-1] == "JobSeen" for run in runs)
    for run in runs:
        stage.scheduler.set_state(str(read_state(run).job_id), JobState.RUNNING, nodes=("n1",))
    stage.passes()
    before, calls = stage.looks(), len(stage.scheduler.calls)
    stage.now += 400.0  # all of them wait for their first step: this is asked about seldom, after a while
    stage.passes(1)
    assert stage.looks() == before + 1
    assert len(stage.scheduler.calls) == calls + 2  # squeue, and sinfo for their nodes


def test_a_rehearsal_is_left_to_whoever_rehearses(stage: Stage) -> None:
    run = open_or_create(config(stage.runs, run={"name": "a", "dir": str(stage.runs)}), rehearse=())
    stage.passes()
    assert stage.names(run) == ["RunCreated"]
    assert is_free(run)


def test_a_quiet_fleet_asks_twice_a_minute(stage: Stage) -> None:
    runs = [stage.add(name) for name in ("a", "b", "c")]
    stage.passes()
    for run in runs:
        stage.scheduler.set_state(str(read_state(run).job_id), JobState.RUNNING, nodes=("n1",))
        with HistoryWriter(run.history, lambda: None) as writer:
            writer.append(record(segment=1, attempt=1, restart=0, step=1, epoch=0.0, time=1.0, loss=2.0, start=START))
    stage.passes()
    assert {read_state(run).state for run in runs} == {"training"}
    before = len(stage.scheduler.calls)
    stage.passes(240)
    assert len(stage.scheduler.calls) - before <= 20  # in 10 minutes
    assert {name for name, _ in stage.scheduler.calls[before:]} == {"look", "nodes"}


@pytest.mark.parametrize(
    ("pass_s", "cpu_s", "wanted"),
    [(0.001, 0.001, 0.3), (0.06, 0.05, 0.5), (0.2, 0.17, 1.0), (0.8, 0.3, 0.4), (3, 1, 0.3)],
)
def test_a_large_fleet_rests_longer_and_what_happens_is_still_seen_in_time(
    pass_s: float, cpu_s: float, wanted: float
) -> None:
    assert pause_s(pass_s, cpu_s, least_s=0.3) == pytest.approx(wanted)


def test_a_job_that_waits_long_is_asked_about_seldom(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stage.add("a")
    stage.passes()
    state = read_state(run)
    assert state.job is not None
    hand = stage.fleet._hands["a"].watched.run
    monkeypatch.setattr(hand, "clock", lambda: state.job.time + 3600.0)
    before = stage.looks()
    stage.passes(24)
    assert 1 <= stage.looks() - before <= 2  # in a minute; 24 passes


@pytest.mark.parametrize("harm", ["journal", "config", "gone", "no_config", "a_folder", "unforeseen"])
def test_a_broken_run_harms_no_other(stage: Stage, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = stage.add("good"), stage.add("bad")
    if harm in ("journal", "config"):
        (bad.journal if harm == "journal" else bad.config).write_text("{torn\n")
    if harm == "a_folder":
        bad.config.unlink()
        bad.config.mkdir()
    stage.passes(2)
    if harm == "gone":
        bad.path.rename(stage.runs / ".elsewhere")
    if harm == "no_config":
        bad.config.unlink()
    if harm == "unforeseen":

        def failing(watched: Any, *rest: Any) -> Any:
            if watched.run.run_dir.path.name == "bad":
                raise KeyError("what nobody thought of")
            return one_pass(watched, *rest)

        monkeypatch.setattr(fleet, "one_pass", failing)
    stage.passes()
    assert stage.names(good)[-1] == "JobSeen"
    stage.finish(good)
    stage.passes(4)
    assert stage.names(good)[-1] == "Finished"
    if harm == "unforeseen":
        assert is_free(bad)
        assert "what nobody thought of" in bad.supervisor_log.read_text()
        assert "bad  put aside: an unforeseen error" in stage.out.getvalue()
        monkeypatch.setattr(fleet, "one_pass", one_pass)
        stage.passes(30)
        assert not is_free(bad), "it is tried again after a minute"


def test_a_config_that_is_mended_is_taken_up_at_once(stage: Stage) -> None:
    run = stage.add("a")
    text = run.config.read_text()
    run.config.write_text("run: [")
    stage.passes(3)
    assert stage.out.getvalue().count("a  put aside") == 1
    assert is_free(run)
    run.config.write_text(text)
    stage.passes(2)
    assert not is_free(run)


def test_runs_come_and_end_while_it_works(stage: Stage) -> None:
    first = stage.add("first")
    stage.passes()
    second = stage.add("second")
    stage.finish(first)
    stage.passes()
    assert stage.names(first)[-1] == "Finished"
    stage.join()
    assert is_free(first)
    assert first.report.exists()
    assert stage.names(second)[-1] == "JobSeen"


def test_a_run_that_is_submitted_again_is_taken_up_again(stage: Stage) -> None:
    run = stage.add("a")
    stage.passes()
    stage.scheduler.set_state(str(read_state(run).job_id), JobState.CANCELLED)
    stage.passes(4)
    assert read_state(run).state == "stopped"
    stage.join()
    assert is_free(run)
    reopen(run, contract_config.read(run.config))
    stage.passes(4)
    assert [event for event in read_journal(run.journal) if isinstance(event, ResumeRequested)]
    assert read_state(run).state == "queued"


def test_somebody_elses_run_is_left_alone_until_that_one_is_dead(stage: Stage) -> None:
    run, other = stage.add("a"), stage.add("b")
    for beat in range(1, 40):
        holder_elsewhere(run, beat // 4)  # it beats every 10 s
        stage.passes(1)
    assert stage.names(run) == ["RunCreated"]
    assert stage.out.getvalue().count("a  left alone: a supervisor on far") == 1
    stage.passes(20)
    assert stage.names(run) == ["RunCreated"]  # 57.5 s without a beat
    stage.passes(4)
    assert "JobSeen" in stage.names(run)
    assert "JobSeen" in stage.names(other)


def test_a_living_holder_on_this_host_is_never_taken_over(stage: Stage) -> None:
    run = stage.add("a")
    lease = take_lease(run)
    stage.passes(60)
    assert stage.names(run) == ["RunCreated"]
    lease.give_up()
    stage.passes(2)
    assert not is_free(run)


def test_a_run_that_is_taken_away_is_not_written_any_more(stage: Stage) -> None:
    run, other = stage.add("a"), stage.add("b")
    stage.passes()
    before = run.journal.read_bytes()
    holder_elsewhere(run)
    stage.scheduler.set_state(str(read_state(run).job_id), JobState.RUNNING, nodes=("n1",))
    stage.passes(4)
    assert run.journal.read_bytes() == before
    assert not is_free(other)


def test_a_run_whose_folder_was_away_is_taken_up_again(stage: Stage) -> None:
    run = stage.add("a")
    stage.passes()
    away = run.path.with_name(".away")
    run.path.rename(away)
    stage.passes(8)
    away.rename(run.path)
    stage.passes(8)
    assert stage.out.getvalue().count("a  taken up") == 2
    assert stage.names(run).count("Submitted") == 1
    run.path.rename(run.path.with_name("b"))
    stage.passes(16)
    assert stage.out.getvalue().count("b  taken up") == 1


def test_it_leaves_every_lease_free(stage: Stage) -> None:
    runs = [stage.add(name) for name in ("a", "b")]
    stage.passes()
    assert not any(map(is_free, runs))
    stage.fleet.leave()
    assert all(map(is_free, runs))


def test_leases_beat_while_one_run_takes_long(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [stage.add(name) for name in "abcdef"]
    stage.passes()
    for run in runs:
        stage.scheduler.set_state(str(read_state(run).job_id), JobState.RUNNING, nodes=("n1",))

    def slow(watched: Any, *rest: Any) -> Any:
        stage.now += 11.0
        return one_pass(watched, *rest)

    monkeypatch.setattr(fleet, "one_pass", slow)
    ages: list[float] = []
    real = Lease.beat

    def beat(self: Lease) -> None:
        real(self)
        ages.append(stage.now - self.beaten_at)

    monkeypatch.setattr(Lease, "beat", beat)
    stage.passes(1)
    assert max(ages) <= 22.0  # of 66 s that the pass took


def test_a_silent_scheduler_is_not_waited_for_once_a_run(stage: Stage) -> None:
    stage.scheduler.fail("find", times=100)
    for number in range(20):
        stage.add(f"r{number}")
    stage.passes(2)
    assert sum(name == "find" for name, _ in stage.scheduler.calls) == 1
    stage.passes(10)
    assert sum(name == "find" for name, _ in stage.scheduler.calls) <= 4  # 25 s later


def test_once_does_what_there_is_to_do_and_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Stage(tmp_path, monkeypatch)
    runs = [made.add(name) for name in ("a", "b")]
    taken = take_lease(made.add("c"))
    fleet.supervise_all_once(tmp_path, made.out)
    assert all("Submitted" in made.names(run) for run in runs)
    assert all(map(is_free, runs))
    assert made.names(RunDir(tmp_path / "c")) == ["RunCreated"]
    taken.give_up()


def test_a_fleet_is_found_by_its_own_lease(tmp_path: Path) -> None:
    assert fleet.fleet_supervisor(tmp_path) is None
    own = take_lease(RunDir(tmp_path))
    assert str(os.getpid()) in str(fleet.fleet_supervisor(tmp_path))
    own.give_up()
    assert fleet.fleet_supervisor(tmp_path) is None
