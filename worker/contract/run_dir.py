"""Every path of a run, in one place."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def is_run_name(name: str) -> bool:
    """Whether ``name`` may be the name of a run: one plain folder name, also fit for a Slurm job's comment."""
    return _RUN_NAME.fullmatch(name) is not None


def checkpoint_name(step: int) -> str:
    """The folder name of the checkpoint after ``step`` optimizer steps."""
    return f"checkpoint-{step}"


def checkpoint_step(name: str) -> int | None:
    """The step in a checkpoint's folder name, None for any other name."""
    match = _CHECKPOINT.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class RunDir:
    """One run's folder; every method answers with a path, nothing is touched except where it says so.

    Paths are made once: a supervisor of many runs spends a third of its time on making them otherwise.
    """

    path: Path

    @cached_property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @cached_property
    def directive(self) -> Path:
        return self.path / "directive.json"

    @cached_property
    def history(self) -> Path:
        return self.path / "loss_history.json"

    @cached_property
    def history_csv(self) -> Path:
        return self.path / "loss_history.csv"

    @cached_property
    def journal(self) -> Path:
        return self.path / "rollback_log.jsonl"

    @cached_property
    def lease(self) -> Path:
        return self.path / "lease.json"

    @property
    def own_files(self) -> tuple[Path, ...]:
        """What a supervisor reads and writes at each pass."""
        return self.lease, self.directive, self.request, self.history, self.journal

    @cached_property
    def lease_lock(self) -> Path:
        return self.path / "lease.lock"

    @cached_property
    def request(self) -> Path:
        return self.path / "request.json"

    @cached_property
    def stop_file(self) -> Path:
        return self.path / "STOP"

    @cached_property
    def save_file(self) -> Path:
        return self.path / "SAVE"

    @cached_property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @cached_property
    def best(self) -> Path:
        return self.path / "best"

    @cached_property
    def final(self) -> Path:
        return self.path / "final"

    @cached_property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @cached_property
    def staging(self) -> Path:
        return self.path / ".staging"

    @cached_property
    def data_report(self) -> Path:
        return self.path / "data.json"

    @cached_property
    def tokens(self) -> Path:
        return self.path / "tokens"

    @cached_property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @cached_property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @cached_property
    def report(self) -> Path:
        return self.path / "report.html"

    @cached_property
    def rehearsal(self) -> Path:
        return self.path / "rehearsal"

    @cached_property
    def jobs(self) -> Path:
        return self.path / "jobs"

    @cached_property
    def train_log(self) -> Path:
        return self.path / "logs" / "train.log"

    @cached_property
    def supervisor_log(self) -> Path:
        return self.path / "logs" / "supervisor.log"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_name(step)

    def checkpoint_steps(self) -> list[int]:
        """Steps of the checkpoint folders that are there, whole or not, in ascending order."""
        names = (entry.name for entry in _entries(self.checkpoints))
        return sorted(step for step in map(checkpoint_step, names) if step is not None)

    def attempt(self, attempt: int) -> Path:
        return self.attempts / f"{attempt:04d}"

    def claim(self, attempt: int) -> Path:
        return self.attempt(attempt) / "claim.json"

    def restart(self, attempt: int, restart: int) -> Path:
        """The folder of one start of the worker: attempt and Slurm's restart count."""
        return self.attempt(attempt) / f"r{restart}"

    def rendezvous(self, attempt: int, restart: int) -> Path:
        return self.restart(attempt, restart) / "rendezvous.json"

    def pulse(self, attempt: int, restart: int, rank: int) -> Path:
        return self.restart(attempt, restart) / f"rank-{rank}.pulse.json"

    def error(self, attempt: int, restart: int, rank: int) -> Path:
        return self.restart(attempt, restart) / f"rank-{rank}.error.json"

    def exit_report(self, attempt: int, restart: int, rank: int) -> Path:
        return self.restart(attempt, restart) / f"rank-{rank}.exit.json"

    def stacks(self, attempt: int, restart: int, rank: int) -> Path:
        return self.restart(attempt, restart) / f"rank-{rank}.stacks.txt"

    def hang(self, attempt: int, restart: int, rank: int) -> Path:
        return self.restart(attempt, restart) / f"rank-{rank}.hang.json"

    def let_go(self, attempt: int, restart: int) -> Path:
        return self.restart(attempt, restart) / "let-go"

    def restarts(self, attempt: int) -> list[int]:
        """Restart counts of ``attempt`` that left a folder, in ascending order."""
        names = (entry.name for entry in _entries(self.attempt(attempt)))
        return sorted(int(name[1:]) for name in names if re.fullmatch(r"r[0-9]+", name))

    def fault(self, name: str) -> Path:
        return self.rehearsal / f"{name}.json"

    def memory(self, rank: int) -> Path:
        return self.rehearsal / f"memory-rank-{rank}.json"

    def staged(self, attempt: int, restart: int, step: int) -> Path:
        """Where a checkpoint is written before it is published."""
        return self.staging / f"a{attempt}-r{restart}-{checkpoint_name(step)}"

    def staged_tokens(self, attempt: int, restart: int, rank: int) -> Path:
        """Where a rank's tokens are until they are whole."""
        return self.staging / f"a{attempt}-r{restart}-tokens-{rank}"


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except FileNotFoundError:
        return
