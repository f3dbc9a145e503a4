"""Real runs of the trainer: a run folder made by hand, one real process a rank, real signals and faults."""

import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.waiting import eventually
from worker.checkpoints import DETECTOR, digest_of
from worker.child import Child
from worker.contract.claim import Claim, take_claim
from worker.contract.config import Config
from worker.contract.directive import Directive, publish_directive
from worker.contract.exit_report import TrainerError
from worker.contract.files import publish, publish_message, read_message
from worker.contract.loss_history import Record, read_history, surviving
from worker.contract.manifest import MANIFEST, FileEntry, Manifest
from worker.contract.run_dir import RunDir
from worker.start import Start
from worker.zygote import Zygote

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


def tiny_config(text: Path, /, **sections: dict[str, Any] | None) -> Config:
    """Twelve steps of a tiny Llama; a section given here is laid over that."""
    fields: dict[str, Any] = {
        "run": {"name": "tiny", "seed": 7},
        "model": {"config": TINY},
        "data": {"train": str(text), "tokenizer": "bytes", "max_tokens": 32},
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
        fields[name] = None if section is None else {**fields.get(name, {}), **section}
    return Config.model_validate(fields)


class Launcher:
    """The zygote of the test session, whose agent is this process."""

    def __init__(self, log: Path) -> None:
        root = Path(__file__).parents[2]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self._environment = environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root)}
        self._zygote = Zygote("tests.trainer_room.faults", self._environment, log)

    def start(self, arguments: list[str], environment: dict[str, str], log: Path) -> Child:
        eventually(self._zygote.is_ready, _PATIENCE_S)
        return self._zygote.fork(arguments, self._environment | environment, log)

    def close(self) -> None:
        self._zygote.close()


@dataclass
class Process:
    """One rank's trainer."""

    child: Child
    log: Path
    returncode: int | None = None
    """As of the last ``poll``."""

    def poll(self) -> int | None:
        self.returncode = self.child.poll()
        return self.returncode

    def wait(self) -> int:
        return eventually(lambda: (self.poll(),) if self.poll() is not None else None, _PATIENCE_S)[0]

    def send(self, number: signal.Signals) -> None:
        self.child.send(number)

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


@dataclass
class Rig:
    """A run folder, and the ranks that are started in it."""

    run: RunDir
    config: Config
    launcher: Launcher
    processes: list[Process] = field(default_factory=list)

    def direct(self, attempt: int = 1, **fields: Any) -> None:
        told = {"cause": "first", "reason": "a test", "time": time.time(), **fields}
        publish_directive(self.run.directive, Directive(attempt=attempt, **told))

    def claim(self, attempt: int, job_id: str = JOB, restart: int = 0) -> None:
        claim = Claim(
            job_id=job_id, name="hf-test", restart=restart, host="here", pid=1, started_ticks=1, time=time.time()
        )
        take_claim(self.run.claim(attempt), claim)

    def start(self, attempt: int = 1, restart: int = 0, world: int = 1, **faults: Any) -> Process:
        """Start every rank, rank 0's process is returned; without a directive, one from scratch is published."""
        if not self.run.directive.exists():
            self.direct(attempt)
        self.claim(attempt, restart=restart)
        begun = [self._start_rank(attempt, restart, rank, world, faults) for rank in range(world)]
        self.processes += begun
        return begun[0]

    def _start_rank(self, attempt: int, restart: int, rank: int, world: int, faults: dict[str, Any]) -> Process:
        start = Start(
            attempt=attempt, restart=restart, job_id=JOB, name="hf-test", rank=rank, world=world, local_rank=rank
        )
        log = self.run.path / f"a{attempt}-r{restart}-{rank}.log"
        environment = faults.pop("environment", {})
        arguments = [str(self.run.path), start.model_dump_json(), json.dumps(faults)]
        return Process(self.launcher.start(arguments, environment, log), log)

    def finish(self, expected: int = 0, **how: Any) -> None:
        """Start, and wait for this exit code of every rank."""
        self.start(**how)
        self.ends(expected)

    def ends(self, expected: int) -> None:
        """Every rank that runs ends with this exit code."""
        for process in self.processes:
            if process.returncode is None:
                assert process.wait() == expected, process.said()

    def pauses(self, step: int) -> None:
        """The run comes to the pause after this step, and waits there."""
        here = self._paused(step)
        eventually(lambda: here.exists() or any(process.poll() is not None for process in self.processes[-1:]), 240)
        assert here.exists(), self.processes[-1].said()

    def goes_on(self, step: int) -> None:
        self._paused(step).unlink()

    def is_killed(self) -> None:
        """SIGKILL to every rank that runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send(signal.SIGKILL)
                process.wait()
        for pause in self.run.path.glob("paused-*"):
            pause.unlink()

    def _paused(self, step: int) -> Path:
        return self.run.path / f"paused-{step}"

    def history(self) -> list[Record]:
        return surviving(read_history(self.run.history))

    def losses(self) -> list[float | None]:
        return [record.loss for record in self.history()]

    def error(self, attempt: int = 1, restart: int = 0, rank: int = 0) -> TrainerError:
        error = read_message(self.run.error(attempt, restart, rank), TrainerError)
        assert error is not None
        return error


def same_end(one: Rig, other: Rig) -> None:
    """Weights, average, detector, per-step and evaluation losses are the same to the bit; copies of histories whole."""
    for name in ("loss", "level", "loss_scale"):
        assert per_step(one, name) == per_step(other, name)
    assert detector_state(one) == detector_state(other)
    for name in ("eval_loss", "ema_eval_loss"):
        assert evaluations(one, name) == evaluations(other, name)
    assert weights(one.run.final) == weights(other.run.final)
    assert weights(one.run.final / "ema") == weights(other.run.final / "ema")
    for rig in (one, other):
        copies_begin_the_history(rig)


def copies_begin_the_history(rig: Rig) -> None:
    """Each checkpoint has the history up to its step, byte for byte, and closed."""
    history, closing = rig.run.history.read_bytes(), b"\n]\n"
    for step in rig.run.checkpoint_steps():
        copy = (rig.run.checkpoint(step) / rig.run.history.name).read_bytes()
        assert copy.endswith(closing)
        assert history.startswith(copy.removesuffix(closing))
        assert json.loads(copy)[-1]["step"] == step


def per_step(rig: Rig, name: str) -> list[Any]:
    """A field of each surviving record."""
    return [getattr(record, name) for record in rig.history()]


def detector_state(rig: Rig) -> bytes:
    """The detector's state in the last checkpoint, as its bytes."""
    return (rig.run.checkpoint(max(rig.run.checkpoint_steps())) / DETECTOR).read_bytes()


def evaluations(rig: Rig, name: str) -> dict[int, float]:
    """The losses of a kind of evaluation, by the step whose weights were evaluated."""
    return {one.evaluated_step: loss for one in rig.history() if (loss := getattr(one, name)) is not None}


def weights(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes."""
    return {name: tensor.tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


def sign_again(folder: Path) -> None:
    """Make the manifest agree with files that were changed."""
    fields: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    fields["files"] = {
        name: FileEntry(bytes=(folder / name).stat().st_size, xxh128=digest_of(folder / name))
        for name in fields["files"]
        if (folder / name).exists()
    }
    publish_message(folder / MANIFEST, Manifest.model_validate(fields))


def write_text(path: Path, num_bytes: int) -> Path:
    """Text that is the same everywhere."""
    lines = [f"line {number}: {number * number} and {number % 7}\n" for number in range(num_bytes // 8)]
    publish(path, "".join(lines)[:num_bytes])
    return path
