"""A run of ours on a Slurm cluster, as benchmarks.recovery disturbs it, and where the time of each recovery went."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from benchmarks.slurm_faults import agents_of, logged, note_start, occupy, starts, step_daemons, until
from slurm.local_cluster.cluster import Cluster
from supervisor.config import load_config
from supervisor.fold import replay
from supervisor.journal import (
    AttemptDecided,
    Event,
    ProgressMade,
    StartMoved,
    VerdictSeen,
    WorkerLeft,
    read_journal,
)
from supervisor.runs import open_or_create
from worker.contract.claim import read_claim
from worker.contract.files import read_message
from worker.contract.loss_history import HistoryReader, Record
from worker.contract.pulse import Pulse
from worker.contract.rehearsal import Fault

MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
EVERY = 5
"""Steps from save to save."""
SPIKES = tuple(range(30, 2000, 60))
"""The steps after which noise is put on the weights, as `rehearse` does it; a run is held before the next one comes."""
Value = TypeVar("Value")
AnyEvent = TypeVar("AnyEvent", bound=Event)


def recipe(text: Path) -> dict[str, Any]:
    """What is trained here, by everybody: 0.86 million parameters on bytes, a checkpoint every five steps."""
    return {
        "model": {"config": MODEL},
        "data": {"train": str(text), "tokenizer": "bytes", "max_tokens": 128},
        "training": {
            "max_steps": 1_000_000,
            "batch_size": 4,
            "precision": "fp32",
            "optimizer": {"learning_rate": 1e-4},
            "schedule": {"name": "constant", "warmup": 0},
        },
        "checkpoint": {"every_steps": EVERY, "healthy_after": EVERY, "keep": 3},
    }


@dataclass(frozen=True)
class Recovery:
    """From what happened to the first step after it, in seconds: waiting in the queue, and where the rest went."""

    total_s: float
    waited_s: float
    parts: tuple[tuple[str, float], ...] = ()


@dataclass
class Supervised:
    """One run, and the process that supervises it in the foreground. Between its turns its trainers are stopped."""

    name: str
    folder: Path
    cluster: Cluster
    partition: str
    ranks: int = 1
    zygote: bool = True
    is_rehearsal: bool = False
    """Whether SPIKES come."""
    records: list[Record] = field(default_factory=list)

    def start(self) -> None:
        """Make the run, and begin to supervise it."""
        self.folder.mkdir(parents=True)
        text = self.folder / "text.txt"
        text.write_text("".join(f"line {number}: {number * number}\n" for number in range(20_000)))
        told = recipe(text)
        told["training"]["zygote"] = self.zygote
        told |= {
            "extends": "base.yaml",
            "run": {"name": self.name, "dir": str(self.folder)},
            "spike": {"window": 20, "warmup": 8},
            "recovery": {"max_submissions_per_hour": 100, "node_strikes": 100},
            "cluster": {
                "kind": "slurm",
                "time_limit": "01:00:00",
                "partition": self.partition,
                "tasks_per_node": self.ranks,
                "setup": [note_start(self.folder)],
                "sbatch": {"exclusive": True},
            },
        }
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump(told))
        faults = tuple(Fault(kind="spike", step=step) for step in SPIKES) if self.is_rehearsal else None
        self.run = open_or_create(load_config(path), rehearse=faults)
        self.reader = HistoryReader(self.run.history)
        with open(self.folder / "supervisor.log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "supervisor.cli", "run", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    # -- looking

    def new_records(self) -> list[Record]:
        self.records += self.reader.new_records()
        return self.records

    def events(self, kind: type[AnyEvent], since: float) -> list[AnyEvent]:
        return [one for one in read_journal(self.run.journal) if isinstance(one, kind) and one.time >= since]

    def until(self, look: Callable[[], Value | None], what: str) -> Value:
        """As `until`; what this run's supervisor and trainer said last where it does not come."""
        try:
            return until(look, f"{self.name}: {what}")
        except TimeoutError as error:
            said = (self.folder / "supervisor.log").read_text()[-1500:]
            log = self.run.train_log
            raise TimeoutError(f"{error}\n{said}\n{log.read_text()[-1500:] if log.exists() else ''}") from None

    def first_after(self, segment: int) -> Record:
        """The first record of a later segment, once it is there."""
        return self.until(
            lambda: next((one for one in self.new_records() if one.segment > segment), None), "a step of the next start"
        )

    def is_healthy(self) -> bool:
        """Whether it has made a healthy checkpoint."""
        return len(self.new_records()) > EVERY and bool(self.events(ProgressMade, 0.0))

    # -- holding

    def trainers(self) -> list[int]:
        """Pids of the newest start's trainers, by rank."""
        last = self.new_records()[-1]
        pulses = [read_message(self.run.pulse(last.attempt, last.restart, rank), Pulse) for rank in range(self.ranks)]
        return [pulse.pid for pulse in pulses if pulse is not None]

    def hold(self) -> None:
        """Stop its trainers, so that the machine is another's; those of the next start where a spike ended these."""
        self.until(self._is_held, "trainers to hold")

    def _is_held(self) -> bool:
        pids = self.trainers()
        _send(pids, signal.SIGSTOP)
        time.sleep(0.05)
        if all(map(_is_stopped, pids)):
            return True
        _send(pids, signal.SIGCONT)
        return False

    def go(self) -> None:
        """Let them go on, for a few steps."""
        _send(self.trainers(), signal.SIGCONT)
        self._more_steps()

    def rests(self) -> None:
        """Hold the last start after a few steps."""
        self._more_steps()
        self.hold()

    def _more_steps(self) -> None:
        behind = len(self.new_records())
        self.until(lambda: len(self.new_records()) >= behind + 3 or None, "three more steps")

    # -- disturbing

    def spike(self) -> Recovery:
        """Let it go on up to the next spike; from the acted record on."""
        segment = self.new_records()[-1].segment
        self.go()
        acted = self.until(
            lambda: next((one for one in self.new_records() if one.segment >= segment and one.is_acted), None),
            "an acted verdict",
        )
        return self._in_place(acted.time, self.first_after(acted.segment))

    def kill(self) -> Recovery:
        """SIGKILL to the last rank's trainer."""
        self.go()
        segment, began = self.new_records()[-1].segment, time.time()
        os.kill(self.trainers()[-1], signal.SIGKILL)
        return self._in_place(began, self.first_after(segment))

    def _in_place(self, began: float, first: Record) -> Recovery:
        seen = [*self.events(VerdictSeen, began), *self.events(WorkerLeft, began)]
        claim = read_claim(self.run.claim(first.attempt))
        assert claim is not None
        marks = [
            ("seen by the supervisor", min(one.time for one in seen)),
            ("decided", self.events(AttemptDecided, began)[0].time),
            ("claimed by the agent", claim.time),
        ]
        return _recovery(began, 0.0, marks, first)

    def node(self) -> str:
        """The node that its job runs on."""
        shown = self.cluster.ask("squeue", "-h", "-p", self.partition, "-t", "RUNNING", "-o", "%N %j")
        return next(line.split()[0] for line in shown.splitlines() if line.split()[1].startswith("hf-"))

    def preempt(self) -> Recovery:
        """A job above it takes its node for three seconds; the other one is idle."""
        self.go()
        segment, asked = self.new_records()[-1].segment, time.time()
        occupy(self.cluster, self.partition, self.node())
        began = logged(self.cluster, "[Pp]reempted JobId", asked)
        return self.elsewhere(began, self.first_after(segment))

    def lose_node(self) -> "LostNode":
        """End the node's daemon and everything of the job at once."""
        self.go()
        segment, asked, node = self.new_records()[-1].segment, time.time(), self.node()
        trainers, job_id = self.trainers(), replay(read_journal(self.run.journal)).job_id
        doomed = [*step_daemons(self.cluster, f"[{job_id}."), *trainers, *agents_of(trainers)]
        self.cluster.kill_slurmd(node)
        for pid in doomed:  # the daemons of its steps first: nobody is to tell Slurm of the others' ends
            os.kill(pid, signal.SIGKILL)

        return LostNode(self, node, asked, segment)

    def elsewhere(self, began: float, first: Record) -> Recovery:
        """From then to the first record of a start that waited in the queue."""
        started = starts(self.folder)[-1]
        claim = read_claim(self.run.claim(first.attempt))
        assert claim is not None
        left, moved = self.events(WorkerLeft, began - 1.0), self.events(StartMoved, began)
        marks = [
            *([("saved and reported", left[0].time)] if left else []),
            *([("its start moved to now", moved[0].time)] if moved else []),
            ("runs again", started),
            ("claimed by the agent", claim.time),
        ]
        return _recovery(began, started - began, marks, first)

    def end(self) -> None:
        """End its supervisor; the cluster's end is that of its jobs."""
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class LostNode:
    """What comes of a run whose node was lost."""

    run: Supervised
    node: str
    lost_at: float
    segment: int

    def given_up_at(self) -> float:
        """When Slurm gave the node up; waits for it."""
        return logged(self.run.cluster, rf"(JobId|job).*due to failure of node {self.node}\b", self.lost_at)

    def recovery(self) -> Recovery:
        """Wait for the first step after that."""
        return self.run.elsewhere(self.given_up_at(), self.run.first_after(self.segment))


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _recovery(began: float, waited_s: float, marks: list[tuple[str, float]], first: Record) -> Recovery:
    """The time between `began` and the first record, by marks that follow each other."""
    parts, at = [], began
    for name, then in marks:
        parts.append((name, then - at))
        at = then
    assert first.start is not None
    assert first.start.began is not None
    parts.append(("trainer begun", first.start.began - at))
    parts += [(f"trainer: {name}", took_s) for name, took_s in first.start.took_s.items()]
    ready = first.start.began + sum(first.start.took_s.values())
    parts.append(("the first step", first.time - ready))
    return Recovery(first.time - began, waited_s, tuple(parts))
