"""One run on this machine, in a folder with an unkind name, whose supervisor is killed again and again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from supervisor.journal import (
    Continued,
    Finished,
    RolledBack,
    SegmentStarted,
    Submitted,
    SupervisorStarted,
    VerdictSeen,
)
from supervisor.report import tfevents
from supervisor.report.spans import KINDS
from supervisor.views import accounting_of
from tests.whole_room.house import KILL, House, environment, furnish, send, steps
from worker.contract.loss_history import surviving

pytestmark = pytest.mark.training
HEAVY = ("libtorch", "libpython_torch", "/numpy/", "/torch/", "/transformers/", "/submitit/")


@dataclass
class Eventful:
    """What a run went through, and what was seen on the way."""

    house: House
    held: subprocess.CompletedProcess[str] | None = None
    interrupted: subprocess.Popen[str] | None = None
    last: subprocess.CompletedProcess[str] | None = None
    status_under_way: dict[str, Any] = field(default_factory=dict)
    holder: int = 0
    maps: str = ""
    most_trainers: int = 0


class Counting(threading.Thread):
    """Counts trainers of the run all the time: there is never more than one."""

    def __init__(self, house: House) -> None:
        super().__init__(daemon=True)
        self.house, self.most, self.is_over = house, 0, threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(0.1):
            self.most = max(self.most, len(self.house.trainers()))


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eventful]:
    """Killed before the worker's first step, while it trains, before the verdict is answered; then interrupted."""
    folder = tmp_path_factory.mktemp("local") / 'it\'s a "$HOME" `ünïç`; {x}*?'
    with furnish(folder, environment()) as house:
        seen = Eventful(house)
        counting = Counting(house)
        counting.start()
        first = house.start("run", "tiny.yaml")
        house.waits_for(Submitted)
        _kill(first)
        for name in ("directive.json", "lease.json", "loss_history.csv", "report.html"):
            (house.run.path / f".tmp-{name}-0a").touch()  # what it may have been about to publish

        second = house.start("run", "tiny.yaml")
        house.waits_for(SupervisorStarted, 2)
        seen.held = house.higgsfield("run", "tiny.yaml")
        seen.holder = second.pid
        house.waits_for_step(3)
        seen.maps = Path(f"/proc/{second.pid}/maps").read_text(encoding="utf-8")
        _kill(second)

        house.until(lambda: house.records[-1].is_acted)
        seen.status_under_way = house.json("status", "tiny")
        seen.interrupted = house.start("run", "tiny.yaml")
        house.waits_for(RolledBack)
        os.killpg(seen.interrupted.pid, signal.SIGINT)  # as a terminal does
        seen.interrupted.wait()

        seen.last = house.higgsfield("run", "tiny.yaml")
        counting.is_over.set()
        counting.join()
        seen.most_trainers = counting.most
        yield seen


def _kill(process: subprocess.Popen[str]) -> None:
    send(process.pid, KILL)
    process.wait()


def test_it_finishes_all_the_same(eventful: Eventful) -> None:
    house = eventful.house
    assert eventful.last is not None
    assert (eventful.last.returncode, eventful.last.stderr) == (0, "")
    assert steps(surviving(house.records)) == list(range(1, 49))
    assert (house.run.final / "model.safetensors").is_file()
    house.leaves_nothing()


def test_there_was_one_worker_and_no_event_is_lost_or_doubled(eventful: Eventful) -> None:
    house = eventful.house
    assert eventful.most_trainers == 1
    acted = [record.step for record in house.records if record.is_acted]
    assert [event.step for event in house.those(VerdictSeen)] == acted
    assert [event.verdict_step for event in house.those(RolledBack)] == acted
    assert [event.segment for event in house.those(SegmentStarted)] == list(range(1, len(acted) + 2))
    assert len(house.those(Submitted)) == len(house.those(Continued)) == len(house.those(Finished)) == 1
    assert [event.term for event in house.those(SupervisorStarted)] == [1, 2, 3, 4]
    assert {event.where for event in house.those(RolledBack)} == {"same_allocation"}
    assert house.those(RolledBack)[0].lr_scale == 0.25


def test_the_page_and_the_curves_are_there_and_the_time_adds_up(eventful: Eventful) -> None:
    """Each supervisor took up the curves where the one before it was killed."""
    house = eventful.house
    page = house.run.report.read_text(encoding="utf-8")
    assert page.count("ROLLED BACK") == len(house.those(RolledBack))
    written = [path.name for path in house.run.tensorboard.iterdir()]
    assert sum(name.startswith("segment-") for name in written) == len(house.those(SegmentStarted))
    assert sum(name.startswith("rollback-") for name in written) == len(house.those(RolledBack))
    [events] = (house.run.tensorboard / "survived").iterdir()
    told = [tfevents.kind_of(event) for _, event in tfevents.whole_events(events.read_bytes())]
    assert told.count("summary") == len(house.records)
    found = accounting_of(house.run, house.events)
    assert sum(map(found.seconds, KINDS)) == pytest.approx(house.events[-1].time - house.events[0].time)


def test_a_second_supervisor_is_told_who_holds_the_run(eventful: Eventful) -> None:
    assert eventful.held is not None
    assert eventful.held.returncode == 5
    assert eventful.held.stderr.count("\n") == 1
    assert f"process {eventful.holder}" in eventful.held.stderr


def test_a_supervisor_never_loads_what_is_heavy(eventful: Eventful) -> None:
    assert "pydantic" in eventful.maps
    assert not [name for name in HEAVY if name in eventful.maps]


def test_an_interrupt_ends_the_supervisor_only(eventful: Eventful) -> None:
    assert eventful.interrupted is not None
    assert eventful.interrupted.returncode == 130
    assert "the worker goes on" in eventful.house.printed(eventful.interrupted)
    assert "Traceback" not in eventful.house.printed(eventful.interrupted)


def test_a_finished_run_is_left_alone(eventful: Eventful) -> None:
    house = eventful.house
    before = {path: path.stat().st_mtime_ns for path in house.run.path.rglob("*")}
    done = house.higgsfield("run", "tiny.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in house.run.path.rglob("*")} == before


def test_another_configuration_of_the_same_name_is_refused(eventful: Eventful) -> None:
    house = eventful.house
    before = house.run.config.read_bytes(), house.run.journal.read_bytes()
    done = house.higgsfield("run", "tiny.yaml", "--set", "spike.ratio=4")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "spike.ratio" in done.stderr
    assert (house.run.config.read_bytes(), house.run.journal.read_bytes()) == before


ROW = {"name", "dir", "state", "step", "max_steps", "loss", "lr_scale", "rollbacks", "attempt", "job", "supervisor"}
ROW |= {"supervisor_place", "since", "eta", "doing", "still_since", "worker_left", "reason"}
DETAILS = {"checkpoints", "excluded", "budgets", "events", "try", "evaluations"}


def test_status_of_all_runs_and_of_one(eventful: Eventful) -> None:
    house = eventful.house
    [row] = house.json("status")["runs"]
    assert set(row) == ROW
    told = row["name"], row["dir"], row["state"], row["step"], row["max_steps"], row["rollbacks"]
    assert told == ("tiny", str(house.run.path), "finished", 48, 48, len(house.those(RolledBack)))
    [detailed] = house.json("status", "tiny")["runs"]
    assert set(detailed) == ROW | DETAILS
    assert detailed["events"][-1]["event"] == "Finished"
    assert {"step", "health", "attempt"} == set(detailed["checkpoints"][0])
    [same] = house.json("status", str(house.run.path))["runs"]
    assert same == detailed
    text = house.higgsfield("status", "tiny").stdout
    assert text.startswith("tiny: finished for ")


def test_status_of_a_run_that_nobody_supervises(eventful: Eventful) -> None:
    [row] = eventful.status_under_way["runs"]
    assert row["supervisor"] == {"host": row["supervisor"]["host"], "pid": eventful.holder, "alive": False}
    assert set(row["job"]) == {"id", "state", "why", "because", "nodes", "draining", "starts_at", "ends_at"}
    assert row["job"]["state"] == "RUNNING"
    assert row["step"] == eventful.house.those(VerdictSeen)[0].step


def test_the_log_for_people_and_for_programs(eventful: Eventful) -> None:
    house = eventful.house
    done = house.higgsfield("log", "tiny", "--json")
    assert done.returncode == 0
    assert done.stdout.encode() == house.run.journal.read_bytes()
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all({"event", "time", "attempt", "term", "reason"} <= set(line) for line in lines)
    text = house.higgsfield("log", "tiny").stdout
    assert "ROLLED BACK" in text
    assert any(line.startswith("Finished at step 48 after ") for line in text.splitlines())
