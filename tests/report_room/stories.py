"""Histories for texts and pages: played on the Stage with a clock that passes, or recorded from real runs.

A recorded one is `recorded/NAME.json.gz`: journal and history of a run as its files were. Texts are compared on
recorded ones only, so that a policy which says something else does not change what a text is compared with.
`python -m tests.report_room.stories FOLDER` plays all stories in a folder and records them anew.
"""

from __future__ import annotations

import functools
import gzip
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState
from supervisor.journal import Event, parse_event, read_journal
from supervisor.report.accounting import Accounting, account
from tests.supervisor_room.stage import BEGIN, CRASHED, PREEMPTED, TIME_LIMIT, Stage
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.loss_history import HistoryWriter, Probe, Record, Start, read_history, record
from worker.contract.run_dir import RunDir

RECORDED = Path(__file__).with_name("recorded")


@dataclass(frozen=True)
class Story:
    """A run's events and records."""

    events: list[Event]
    records: list[Record]

    def accounting(self, now: float = 0.0) -> Accounting:
        return account(self.events, self.records, now, nodes=1)


class Slow(Stage):
    """The Stage with a worker whose steps, saves and starts take time, and a job that waits."""

    step_s, save_s, load_s = 2.0, 4.0, 30.0

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def train(
        self, until: int, verdict: str = "ok", onset: int | None = None, loss: float = 2.0, restart: int = 0
    ) -> None:
        self.wait(self.load_s)
        super().train(until, verdict, onset, loss, restart)
        self._spread(until)

    def _spread(self, until: int) -> None:
        """Give each new record its own time: the Stage wrote them all at one moment."""
        lines = self.run_dir.history.read_bytes().decode().splitlines()
        rows = [json.loads(line.removesuffix(",")) for line in lines[1:-1]]
        new = [row for row in rows if "step_s" not in row]
        for number, row in enumerate(new):
            saved = number > 0 and new[number - 1]["step"] % self.config.checkpoint.every_steps == 0
            self.wait(self.step_s + (self.save_s if saved else 0.0))
            row |= {"time": self.now, "step_s": self.step_s, "tokens_per_s": 1024.0}
            row |= {"save_s": self.save_s} if saved else {}
            if row["verdict"] == "ok":
                row["loss"] = round(4.0 * math.exp(-row["step"] / 60) + 1.5 + 0.05 * math.sin(row["step"]), 4)
            row["grad_norm"] = round(1.0 + 0.1 * math.cos(row["step"]), 4)
        text = ",\n".join(json.dumps(row) for row in rows)
        self.run_dir.history.write_text(f"[\n{text}\n]\n")

    def start_after(self, seconds: float, restarts: int = 0) -> None:
        """The job waits in the queue, then starts."""
        self.settle()
        self.wait(seconds)
        self.start_job(restarts)
        self.settle()

    @property
    def story(self) -> Story:
        """Told as if the run had been made when the Stage's clock begins."""
        created, *events = read_journal(self.run_dir.journal)
        return Story([created.model_copy(update={"time": BEGIN}), *events], read_history(self.run_dir.history))


def healthy(folder: Path) -> Slow:
    """Waits ten minutes, trains, finishes."""
    stage = Slow(folder)
    stage.start_after(600)
    stage.train(100)
    stage.leave(Outcome.DONE)
    stage.settle()
    return stage


def one_spike(folder: Path) -> Slow:
    """A spike, a rollback in the same allocation, the end."""
    stage = Slow(folder)
    stage.start_after(60)
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    stage.claim()
    stage.train(100)
    stage.leave(Outcome.DONE)
    stage.settle()
    return stage


def three_rollbacks_and_give_up(folder: Path) -> Slow:
    """The loss spikes again after each of three rollbacks; the budget is spent."""
    stage = Slow(folder, recovery={"spike": {"max_rollbacks": 3}})
    stage.start_after(5)
    for _ in range(4):
        stage.train(8, "spike", onset=6, loss=9.0)
        stage.leave(Outcome.VERDICT)
        stage.settle()
        if not stage.watched.run.state.is_over:
            if stage.watched.run.state.job is None:
                stage.start_after(20)
            else:
                stage.claim()
    return stage


def preemption_storm(folder: Path) -> Slow:
    """Preempted four times within the same attempt, by a cluster whose queue is long."""
    stage = Slow(folder)
    stage.start_after(5)
    for restart in range(5):
        stage.train(20 * (restart + 1), restart=restart)
        if restart == 4:
            break
        stage.leave(Outcome.LEFT, restart=restart, error=PREEMPTED)
        stage.settle()
        stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="BeginTime", restarts=restart + 1)
        stage.settle()
        stage.wait(1800)
        stage.start_job(restarts=restart + 1)
        stage.settle()
    stage.leave(Outcome.DONE, restart=4)
    stage.settle()
    return stage


def node_failures(folder: Path) -> Slow:
    """Two nodes; one goes away without a word, then the time limit comes, then it crashes once."""
    stage = Slow(folder, cluster={"nodes": 2})
    stage.start_after(5)
    stage.scheduler.set_state(stage.job_id, JobState.RUNNING, nodes=("n1", "n2"))
    stage.train(35)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.NODE_FAIL, nodes=("n1", "n2"))
    stage.settle()
    stage.wait(130)
    stage.start_after(300)
    stage.train(55)
    stage.leave(Outcome.LEFT, error=TIME_LIMIT)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
    stage.start_after(900)
    stage.train(70)
    stage.leave(Outcome.CRASHED, error=CRASHED)
    stage.settle()
    stage.claim()
    stage.train(100)
    stage.leave(Outcome.DONE)
    stage.settle()
    return stage


def refused(folder: Path) -> Slow:
    """The worker will not train: nothing was made."""
    stage = Slow(folder)
    stage.start_after(5)
    stage.leave(Outcome.REFUSED, error=ErrorDetail(type="DataError", message="data/train.jsonl: line 83 is no JSON"))
    stage.settle()
    return stage


PLAYED: dict[str, Callable[[Path], Slow]] = {
    each.__name__: each
    for each in (healthy, one_spike, three_rollbacks_and_give_up, preemption_storm, node_failures, refused)
}
RECORDINGS = sorted(path.name.removesuffix(".json.gz") for path in RECORDED.glob("*.json.gz"))
REAL = [name for name in RECORDINGS if name not in PLAYED]


def recorded(name: str) -> Story:
    """A recorded run's story."""
    files: dict[str, Any] = json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))
    events = [parse_event(json.loads(line)) for line in files["journal"].splitlines()]
    return Story(events, [Record.model_validate(row) for row in json.loads(files["history"])])


def keep(run_dir: RunDir, name: str) -> None:
    """Record a run: what `recorded` gives back."""
    files = {
        "journal": run_dir.journal.read_text(),
        "history": run_dir.history.read_text() if run_dir.history.exists() else "[]",
    }
    (RECORDED / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(files).encode(), mtime=0))


def put_into(story: Story, run_dir: RunDir) -> None:
    """Make a run's folder hold this journal and this history."""
    lines = [json.dumps({"event": event.event} | event.model_dump(mode="json")) for event in story.events]
    run_dir.journal.write_text("\n".join(lines) + "\n")
    run_dir.history.unlink(missing_ok=True)
    with HistoryWriter(run_dir.history, lambda: None) as writer:
        for one in story.records:
            writer.append(one)


@functools.cache
def long_records(steps: int = 20_000, begin: float = 1_700_000_000.0) -> list[Record]:
    """A long curve with one abandoned branch: a spike at three quarters, gone back a hundred steps."""
    turn = steps * 3 // 4
    made = [*((1, step) for step in range(1, turn + 1)), *((2, step) for step in range(turn - 99, steps + 1))]
    found = []
    for number, (segment, step) in enumerate(made):
        is_first = number == 0 or made[number - 1][0] != segment
        is_verdict = segment == 1 and step == turn
        bump = 6.0 if segment == 1 and step > turn - 3 else 0.0
        found.append(
            record(
                segment=segment, attempt=segment, restart=0, step=step, epoch=step / 5000, time=begin + number * 0.5,
                loss=2.0 + 8.0 * math.exp(-step / 3000) + 0.1 * math.sin(step * 12.9898) + bump,
                grad_norm=1.0 + 0.3 * math.sin(step * 78.233), lr=1e-4 * min(1.0, step / 1000) / segment,
                tokens_per_s=20_000.0, step_s=0.5, verdict="spike" if is_verdict else "ok",
                onset_step=turn - 2 if is_verdict else None, start=a_start(steps) if is_first else None,
            )
        )  # fmt: skip
    return found


def a_start(max_steps: int) -> Start:
    return Start(
        max_steps=max_steps, lr=1.0, lr_expected=1.0, optimizer_steps=0, rng_digests=("r",), next_samples=(1,),
        probe=Probe(expected=None, found=1.0), versions={},
    )  # fmt: skip


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reader is in Berlin."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


if __name__ == "__main__":
    for name, play in PLAYED.items():
        stage = play(Path(sys.argv[1]) / name)
        created, *rest = stage.run_dir.journal.read_text().splitlines(keepends=True)
        stage.run_dir.journal.write_text("".join([json.dumps(json.loads(created) | {"time": BEGIN}) + "\n", *rest]))
        keep(stage.run_dir, name)
