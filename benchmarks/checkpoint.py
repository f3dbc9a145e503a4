"""What a save and a resume cost, beside those of the plain Trainer, early in a run and late.

``python -m benchmarks.checkpoint`` prints one table: the median of ``--repeats`` saves and resumes at every step of
``--steps``. Both run the same model, data and settings in this process. A late step is not trained for: the Trainer is
told that it has come so far, and the history and the Trainer's own log are filled with as many records as there would
be. The plain Trainer makes nothing durable, so its save is shown without and with a fsync of every file. The first save
and the first resume of each kind warm up and are not counted.
"""

import argparse
import logging
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback

from worker.attach import attach
from worker.attached import Context, versions
from worker.checkpoints import make_durable
from worker.contract.claim import Claim, take_claim
from worker.contract.config import Config
from worker.contract.directive import Directive, publish_directive
from worker.contract.loss_history import HistoryWriter, record
from worker.contract.run_dir import RunDir, checkpoint_name
from worker.resume import choose
from worker.setup import build_trainer
from worker.start import Start
from worker.wrap import wrap

JOB = "1"
LOG_EVERY = 50


@dataclass
class Times:
    """Seconds of every repetition, the first one not counted."""

    save_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)


class ReachedError(Exception):
    """The first step would begin now."""


class StartAt(TrainerCallback):
    """Tells a fresh Trainer that ``step - 1`` steps are behind it, and has it save after each of the next steps."""

    def __init__(self, trainer: Trainer, step: int, log: list[dict[str, Any]]) -> None:
        self._trainer, self._step, self._log = trainer, step, log

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.global_step = self._step - 1
        state.log_history = list(self._log)
        schedule: Any = self._trainer.lr_scheduler
        schedule.last_epoch = self._step - 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = True
        return control


class StopAtFirstStep(TrainerCallback):
    """Ends a resumed training where its first step would begin."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ReachedError


def configured(text: Path, told: argparse.Namespace) -> Config:
    model = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": told.hidden,
        "num_hidden_layers": told.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 3 * told.hidden,
    }
    optimizer = {"learning_rate": 1e-5}
    training = {"max_steps": max(told.steps) + told.repeats + 1, "batch_size": 1, "precision": "fp32"}
    fields: dict[str, Any] = {
        "run": {"name": "benchmark"},
        "model": {"config": model},
        "data": {"train": str(text), "tokenizer": "bytes", "max_tokens": 32},
        "training": {**training, "optimizer": optimizer, "log_every": LOG_EVERY},
        "checkpoint": {"every_steps": 10**9, "keep": told.repeats + 2},
    }
    return Config.model_validate(fields)


def fill_history(run: RunDir, steps: int) -> None:
    """A history of so many steps."""
    with HistoryWriter(run.history, lambda: None) as writer:
        for step in range(1, steps + 1):
            numbers = {"loss": 3.1234567, "grad_norm": 0.9876543, "lr": 1e-5, "tokens_per_s": 12345.678}
            timing = {"step_s": 0.123456, "data_wait_s": 0.000123, "data": {"epoch": 0, "batch": step - 1}}
            writer.append(
                record(
                    segment=1, attempt=1, restart=0, step=step, epoch=step / 1e5, time=time.time(), **numbers, **timing
                )
            )


def logged(steps: int) -> list[dict[str, Any]]:
    """What the Trainer's own log holds after so many steps."""
    lines = range(LOG_EVERY, steps, LOG_EVERY)
    return [
        {"epoch": step / 1e5, "grad_norm": 0.98765, "learning_rate": 1e-5, "loss": 3.1234, "step": step}
        for step in lines
    ]


def timed(into: list[float], original: Callable[..., Any], *args: Any) -> None:
    os.sync()  # nobody's earlier writes are waited for within
    began = time.monotonic()
    original(*args)
    into.append(time.monotonic() - began)


def train_until_first_step(trainer: Trainer, checkpoint: Path) -> None:
    trainer.add_callback(StopAtFirstStep())
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except ReachedError:
        return


def measure_plain(run: RunDir, config: Config, step: int, repeats: int) -> Times:
    """The plain Trainer's saves and resumes."""
    times = Times()

    def save(original: Callable[..., Any], *args: Any) -> None:
        timed(times.save_s, original, *args)
        newest = run.checkpoint(trainer.state.global_step)
        began = time.monotonic()
        make_durable(newest)
        times.durable_s.append(times.save_s[-1] + time.monotonic() - began)

    trainer = plain_trainer(run, config, step + repeats)
    trainer.add_callback(StartAt(trainer, step, logged(step)))
    wrap(trainer, "_save_checkpoint", save)
    trainer.train()
    for _ in range(repeats + 1):
        trainer = plain_trainer(run, config, step + repeats)
        timed(times.resume_s, train_until_first_step, trainer, run.checkpoint(step))
    return times


def plain_trainer(run: RunDir, config: Config, max_steps: int) -> Trainer:
    training = config.training.model_copy(update={"max_steps": max_steps})
    trainer, _ = build_trainer(run, config.model_copy(update={"training": training}), Path.cwd())
    return trainer


def measure_ours(run: RunDir, config: Config, step: int, repeats: int) -> Times:
    """Our saves and resumes: choice, digests and proof are part of a resume."""
    times = Times()
    begin_attempt(run, 1, None)
    fill_history(run, step - 1)
    trainer, resume = ours(run, config, 1, None, step + repeats)
    resume()
    trainer.add_callback(StartAt(trainer, step, logged(step)))
    wrap(trainer, "_save_checkpoint", lambda original, *args: timed(times.save_s, original, *args))
    trainer.train()
    for attempt in range(2, 3 + repeats):
        begin_attempt(run, attempt, step)
        trainer, resume = ours(run, config, attempt, step, step + repeats)

        def whole(trainer: Trainer = trainer, resume: Callable[[], None] = resume) -> None:
            resume()
            train_until_first_step(trainer, run.checkpoint(step))

        timed(times.resume_s, whole)
    return times


def begin_attempt(run: RunDir, attempt: int, step: int | None) -> None:
    named = None if step is None else checkpoint_name(step)
    told: dict[str, Any] = {"cause": "first", "reason": "a benchmark", "time": time.time(), "resume_from": named}
    publish_directive(run.directive, Directive(attempt=attempt, **told))
    host = platform.node()
    claim = Claim(job_id=JOB, name="hf-b", restart=0, host=host, pid=1, started_ticks=1, time=time.time())
    take_claim(run.claim(attempt), claim)


def ours(
    run: RunDir, config: Config, attempt: int, step: int | None, max_steps: int
) -> tuple[Trainer, Callable[[], None]]:
    """A Trainer, and what chooses the checkpoint and attaches everything to it."""
    training = config.training.model_copy(update={"max_steps": max_steps})
    config = config.model_copy(update={"training": training})
    trainer, data = build_trainer(run, config, Path.cwd())
    start = Start(attempt=attempt, restart=0, job_id=JOB, name="hf-b", rank=0, world=1, local_rank=0)
    run.restart(attempt, 0).mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"cause": "first", "reason": "a benchmark", "time": 1.0}
    named = None if step is None else checkpoint_name(step)
    directive = Directive(attempt=attempt, resume_from=named, **told)

    def resume() -> None:
        chosen = choose(run, attempt, named, sizes_only=False)
        attach(trainer, Context(run, start, directive, config, data.digest, chosen))

    return trainer, resume


def measured(told: argparse.Namespace) -> list[tuple[str, int, Times]]:
    rows = []
    with tempfile.TemporaryDirectory(dir=told.folder, prefix="benchmark-") as folder:
        text = Path(folder, "text.txt")
        text.write_bytes(b"a line of the benchmark's text.\n" * (max(told.steps) + 10_000))
        config = configured(text, told)
        for step in told.steps:
            for name, measure in (("plain Trainer", measure_plain), ("higgsfield", measure_ours)):
                run = RunDir(Path(folder, f"{name.split()[0]}-{step}"))
                run.path.mkdir()
                rows.append((name, step, measure(run, config, step, told.repeats)))
    return rows


def shown(rows: list[tuple[str, int, Times]], told: argparse.Namespace, parameters: int) -> str:
    """The table, with everything that is needed to read it."""
    having = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"command    python -m benchmarks.checkpoint {shlex.join(sys.argv[1:])}".rstrip(),
        f"date       {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"versions   Python {platform.python_version()}, {having}",
        f"machine    {platform.machine()}, threads {torch.get_num_threads()}, in {told.folder or 'a temporary folder'}",
        f"model      {parameters:,} parameters in float32, AdamW; higgsfield also keeps an average of the weights",
        f"figures    median of {told.repeats}, in seconds",
        "",
        f"{'':16}{'step':>8}{'save':>10}{'durable':>10}{'resume':>10}",
    ]
    for name, step, times in rows:
        durable = times.durable_s or times.save_s
        figures = "".join(f"{statistics.median(each[1:]):>10.3f}" for each in (times.save_s, durable, times.resume_s))
        lines.append(f"{name:16}{step:>8}{figures}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 20_000])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", help="where the checkpoints are written; the disk that is measured")
    told = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = measured(told)
    per_layer = 4 * told.hidden**2 + 3 * told.hidden * 3 * told.hidden + 2 * told.hidden
    print(shown(rows, told, 2 * 256 * told.hidden + told.layers * per_layer + told.hidden))


if __name__ == "__main__":
    main()
