"""Real runs of the trainer: a run folder made by hand, one real process a rank, real signals."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from worker.contract import config as configuration
from worker.contract.claim import Claim, take_claim
from worker.contract.config import Config
from worker.contract.directive import Directive, publish_directive
from worker.contract.exit_report import TrainerError
from worker.contract.files import publish, read_message
from worker.contract.loss_history import HistoryReader, Record, read_history, surviving
from worker.contract.run_dir import RunDir
from worker.start import Start

JOB = "17"
_PATIENCE_S = 240.0
TINY: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "attention_dropout": 0.1,
}


def tiny_config(data: Path, **sections: dict[str, Any]) -> Config:
    """Twelve steps of a tiny Llama; a section given here is laid over that."""
    fields: dict[str, dict[str, Any]] = {
        "run": {"name": "tiny", "seed": 7},
        "model": {"config": TINY},
        "data": {"train": str(data), "tokenizer": "bytes", "max_tokens": 32},
        "training": {
            "max_steps": 12,
            "batch_size": 4,
            "optimizer": {"learning_rate": 1e-2},
            "precision": "fp32",
            "log_every": 1,
        },
        "ema": {"every": 2},
        "checkpoint": {"every_steps": 4, "keep": 9},
    }
    for name, section in sections.items():
        fields[name] = {**fields.get(name, {}), **section}
    return Config.model_validate(fields)


@dataclass
class Process:
    """One rank's trainer."""

    popen: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> int:
        try:
            return self.popen.wait(_PATIENCE_S)
        finally:
            self.popen.kill()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.popen.pid, number)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass
class Rig:
    """A run folder, and the ranks that are started in it."""

    run: RunDir
    config: Config
    processes: list[Process] = field(default_factory=list)

    @staticmethod
    def make(folder: Path, config: Config) -> "Rig":
        folder.mkdir(parents=True)
        run = RunDir(folder)
        configuration.write(run.config, config)
        return Rig(run, config)

    def direct(self, attempt: int = 1, **fields: Any) -> None:
        told = {"cause": "first", "reason": "a test", "time": time.time(), **fields}
        publish_directive(self.run.directive, Directive(attempt=attempt, **told))

    def claim(self, attempt: int, job_id: str = JOB, restart: int = 0) -> None:
        claim = Claim(
            job_id=job_id, name="hf-test", restart=restart, host="here", pid=1, started_ticks=1, time=time.time()
        )
        take_claim(self.run.claim(attempt), claim)

    def start(
        self,
        attempt: int = 1,
        restart: int = 0,
        world: int = 1,
        launcher: Sequence[str] = ("-m", "worker.train"),
        environment: dict[str, str] | None = None,
    ) -> list[Process]:
        """Start every rank; without a directive of this attempt one from scratch is published."""
        if not self.run.directive.exists():
            self.direct(attempt)
        self.claim(attempt, restart=restart)
        begun = [self._start_rank(attempt, restart, rank, world, launcher, environment or {}) for rank in range(world)]
        self.processes += begun
        return begun

    def _start_rank(
        self,
        attempt: int,
        restart: int,
        rank: int,
        world: int,
        launcher: Sequence[str],
        environment: dict[str, str],
    ) -> Process:
        start = Start(
            attempt=attempt, restart=restart, job_id=JOB, name="hf-test", rank=rank, world=world, local_rank=rank
        )
        log = self.run.path / f"a{attempt}-r{restart}-{rank}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        with open(log, "wb") as output:
            popen = subprocess.Popen(
                [sys.executable, *launcher, str(self.run.path), start.model_dump_json()],
                env={**clean, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        return Process(popen, log)

    def finish(self, expected: int = 0, **how: Any) -> None:
        """Start, wait, and insist on an exit code on every rank."""
        for process in self.start(**how):
            code = process.wait()
            assert code == expected, f"exit {code} instead of {expected}:\n{process.said()}"

    def history(self) -> list[Record]:
        return surviving(read_history(self.run.history))

    def losses(self) -> list[float | None]:
        return [record.loss for record in self.history()]

    def error(self, attempt: int = 1, restart: int = 0, rank: int = 0) -> TrainerError:
        error = read_message(self.run.error(attempt, restart, rank), TrainerError)
        assert error is not None
        return error

    def wait_for_step(self, step: int) -> None:
        reader = HistoryReader(self.run.history)
        self.wait_until(lambda: any(record.step >= step for record in reader.new_records()), f"step {step}")

    def wait_until(self, is_true: Callable[[], bool], what: str) -> None:
        """Wait for a condition; a trainer that ends before it comes true fails the test with its log."""
        deadline = time.monotonic() + _PATIENCE_S
        while not is_true():
            for process in self.processes:
                code = process.popen.poll()
                assert code is None or process.popen.returncode == 0 or is_true(), (
                    f"{what}: exit {code}\n" + process.said()
                )
            assert time.monotonic() < deadline, f"{what}: not within {_PATIENCE_S} s"
            time.sleep(0.01)

    def stop_all(self) -> None:
        for process in self.processes:
            process.popen.kill()
            process.popen.wait()


def weights(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes."""
    return {name: tensor.tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


def write_text(path: Path, kilobytes: int = 6) -> Path:
    """Text that is the same everywhere."""
    lines = [f"line {number}: {number * number} and {number % 7}\n" for number in range(kilobytes * 64)]
    publish(path, "".join(lines)[: kilobytes * 1024])
    return path
