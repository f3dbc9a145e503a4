"""Whole runs through the `higgsfield` command: a configuration that really explodes, and the processes of its run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml

from supervisor.journal import Event, read_journal
from tests.waiting import eventually
from worker.contract.loss_history import HistoryReader, Record
from worker.contract.run_dir import RunDir
from worker.zygote import TRAINER_NAME

HIGGSFIELD = str(Path(sys.executable).with_name("higgsfield"))
PATIENCE_S = 300.0
RUN_TIMEOUT_S = 900.0
KILL, STOP, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
AnyEvent = TypeVar("AnyEvent", bound=Event)

EXPLODING: dict[str, Any] = {
    "run": {"name": "tiny", "dir": "runs"},
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        }
    },
    "data": {"train": "text.txt", "tokenizer": "bytes", "max_tokens": 128},
    "training": {
        "max_steps": 48,
        "batch_size": 16,
        "precision": "fp32",
        "max_grad_norm": None,
        "optimizer": {"name": "sgd", "momentum": 0.9, "learning_rate": 1.6},
        "schedule": {"name": "cosine", "warmup": 48},
    },
    "recovery": {"spike": {"lr_factor": 0.25}},
    "spike": {"window": 20, "warmup": 8, "ratio": 3.0},
    "ema": None,
    "checkpoint": {"every_steps": 5, "healthy_after": 5, "keep": 12, "keep_quarantined": 12},
    "cluster": {"kind": "local", "time_limit": "00:10:00"},
}
"""The demo's recipe, smaller: at this rate the loss leaves the rails near step 32, at a quarter of it the run ends."""


@dataclass
class House:
    """A folder with a configuration and a text, in which the command is given; ends what it started."""

    folder: Path
    environment: dict[str, str]
    name: str = "tiny"
    command: tuple[str, ...] = (HIGGSFIELD,)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "runs" / self.name)

    def higgsfield(self, *argv: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """The command, to its end."""
        return subprocess.run(
            [*self.command, *argv],
            cwd=self.folder,
            env=self.environment | changes,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """The command, going on in a process group of its own; what it prints goes into a file beside the runs."""
        with open(self.folder / f"printed-{len(self.started)}", "w", encoding="utf-8") as out:
            process = subprocess.Popen(
                [*self.command, *argv],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
            )
        self.started.append(process)
        return process

    def printed(self, process: subprocess.Popen[str]) -> str:
        return (self.folder / f"printed-{self.started.index(process)}").read_text(encoding="utf-8")

    def json(self, *argv: str) -> Any:
        """What a verb prints with --json."""
        done = self.higgsfield(*argv, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    @property
    def events(self) -> list[Event]:
        return read_journal(self.run.journal)

    def those(self, kind: type[AnyEvent]) -> list[AnyEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def waits_for(self, kind: type[AnyEvent], count: int = 1) -> AnyEvent:
        """The `count`-th event of a kind, once it is in the journal."""
        found: list[AnyEvent] = self.until(lambda: self.those(kind)[count - 1 : count])
        return found[0]

    def until(self, look: Callable[[], Any]) -> Any:
        """Wait for a condition; a failure shows what the supervisors printed."""
        try:
            return eventually(look, PATIENCE_S)
        except AssertionError as error:
            said = [self.printed(process) for process in self.started]
            log = self.run.train_log.read_text(errors="replace") if self.run.train_log.exists() else ""
            raise AssertionError("\n".join([str(error), *said, log[-3000:]])) from None

    @property
    def records(self) -> list[Record]:
        return HistoryReader(self.run.history).new_records()

    def waits_for_step(self, step: int) -> None:
        self.until(lambda: self.records and self.records[-1].step >= step)

    def processes(self, word: str = "") -> list[int]:
        """Processes whose command line names this run and `word`, whoever started them."""
        return [pid for pid, line in _command_lines() if str(self.run.path) in line and word in line]

    def trainers(self) -> list[int]:
        """Trainers of this run: forked by a zygote, or started cold."""
        cold = [*self.processes("-m worker.train"), *self.processes("-m tests.whole_room.light_trainer")]
        return [*cold, *(pid for pid in self.processes() if _name(pid) == TRAINER_NAME)]

    def leaves_nothing(self) -> None:
        """Of a run that is over: no process, no unfinished or temporary file, and nobody who holds it, before long."""
        self.until(lambda: not self.processes())
        left = [path for path in self.run.path.rglob("*") if path.name.startswith(".tmp-")]
        left += self.run.staging.iterdir() if self.run.staging.exists() else ()
        assert not left, left
        assert json.loads(self.run.lease.read_text(encoding="utf-8"))["holder"] == ""
        assert not self.run.request.exists()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill what still runs."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        for pid in self.processes():
            send(pid, KILL)


def send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def parent_of(pid: int) -> int:
    """The process that started this one: of a trainer, its agent."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _command_lines() -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(entry.name), " ".join(word.decode(errors="replace") for word in words)


def environment(**more: str) -> dict[str, str]:
    """A person's environment: nothing of a Slurm job, no hub, one thread."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "SQUEUE"))}
    return own | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | more


def furnish(folder: Path, env: Mapping[str, str], **sections: Mapping[str, Any] | None) -> House:
    """`tiny.yaml` and its text in a folder; a section given here is laid over the exploding one."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"line {number}: {number * number} and {number % 7}\n" for number in range(4000)]
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")
    write_config(folder / "tiny.yaml", **sections)
    return House(folder, dict(env))


def write_config(path: Path, **sections: Mapping[str, Any] | None) -> None:
    fields: dict[str, Any] = {"extends": "base.yaml", **EXPLODING}
    for name, section in sections.items():
        fields[name] = None if section is None else {**(fields.get(name) or {}), **section}
    path.write_text(yaml.safe_dump(fields, allow_unicode=True), encoding="utf-8")


def steps(records: Sequence[Record]) -> list[int]:
    return [record.step for record in records]
