"""How long training stands still for a save: the plain Trainer, higgsfield, and higgsfield with its saves beside it.

``python -m benchmarks.saves`` trains the same model as each of the three, in turns, with a save every few steps, and
prints the median of what a save costs training. *Stands still* is the time in the call, and what the next update waits
for copies that are still made. *In all* is what the steps from one save to the next took beyond as many steps of the
plain Trainer without a save: a save beside the training also slows the steps that it goes on beside. The plain Trainer
makes nothing durable; higgsfield does, and keeps an average of the weights. The first saves of each training warm up,
the last is a plain one; they are not counted.
"""

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback

from benchmarks.checkpoint import PLAIN, begin_attempt, ours, plain_trainer
from benchmarks.heading import heading, met
from benchmarks.overhead import attached_to
from worker.contract.config import Config
from worker.contract.loss_history import read_history
from worker.contract.run_dir import RunDir
from worker.wrap import wrap

BESIDE = "in background"
KINDS = {PLAIN: False, "higgsfield": False, BESIDE: True}
WANTED_SHARE = 0.2
WARM_UP = 2
"""Saves that are not counted: the first is a plain one in any case."""


@dataclass
class Times:
    """Seconds: of each save that counts, of the steps without one, and from one save to the next."""

    still_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    cycle_s: list[float] = field(default_factory=list)
    write_s: list[float] = field(default_factory=list)


class Clock(TrainerCallback):
    """When each step was done; the save after it comes later."""

    def __init__(self, trainer: Trainer) -> None:
        self.at: list[float] = []
        self.still_s: list[float] = []
        trainer.add_callback(self)
        wrap(trainer, "_save_checkpoint", self._save)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at.append(time.monotonic())

    def _save(self, original: Callable[..., None], *args: Any) -> None:
        began = time.monotonic()
        original(*args)
        self.still_s.append(time.monotonic() - began)

    def wait(self, original: Callable[[], None]) -> None:
        """The next update waits for what of the last save is still being copied."""
        began = time.monotonic()
        original()
        if self.still_s:
            self.still_s[-1] += time.monotonic() - began


def configured(text: Path, told: argparse.Namespace, is_beside: bool) -> Config:
    model = {"model_type": "llama", "vocab_size": 256, "hidden_size": told.hidden, "num_hidden_layers": told.layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 3 * told.hidden}
    training = {"max_steps": told.every * (told.saves + WARM_UP) + 1, "batch_size": 1, "precision": "fp32"}
    fields: dict[str, Any] = {
        "run": {"name": "benchmark"},
        "model": {"config": {**model, **heads}},
        "data": {"train": str(text), "tokenizer": "bytes", "max_tokens": told.tokens},
        "training": {**training, "optimizer": {"learning_rate": 1e-5}},
        "checkpoint": {"every_steps": told.every, "keep": 1, "keep_healthy": 1, "background": is_beside},
    }
    return Config.model_validate(fields)


def train(name: str, run: RunDir, config: Config, told: argparse.Namespace, times: Times) -> None:
    """One training; what its saves took goes into ``times``."""
    run.path.mkdir()
    if name == PLAIN:
        trainer = plain_trainer(run, config)
        trainer.args.save_total_limit = 1
    else:
        begin_attempt(run, 1, None)
        trainer, begin = ours(run, config, 1, None)
        begin()
    clock, every = Clock(trainer), told.every
    background = None if name == PLAIN else attached_to(trainer).background
    if background is not None:
        wrap(background.memory, "wait_until_copied", clock.wait)
    os.sync()
    trainer.train()
    times.still_s += clock.still_s[WARM_UP : WARM_UP + told.saves]
    steps_s = [later - before for before, later in zip(clock.at, clock.at[1:], strict=False)]
    times.step_s += [one for number, one in enumerate(steps_s, start=1) if number % every]
    saved = range(every * (WARM_UP + 1), every * (WARM_UP + told.saves), every)
    times.cycle_s += [clock.at[step + every - 1] - clock.at[step - 1] for step in saved]
    times.write_s += [one.write_s for one in read_history(run.history) if one.write_s is not None]


def measured(told: argparse.Namespace) -> dict[str, Times]:
    found = {name: Times() for name in KINDS}
    with tempfile.TemporaryDirectory(dir=told.folder, prefix="benchmark-") as folder:
        text = Path(folder, "text.txt")
        text.write_bytes(b"a line of the benchmark's text.\n" * 20_000)
        for turn in range(told.turns):
            for number, (name, is_beside) in enumerate(KINDS.items()):
                run = RunDir(Path(folder, f"{turn}-{number}"))
                train(name, run, configured(text, told, is_beside), told, found[name])
                shutil.rmtree(run.path)
    return found


def shown(found: dict[str, Times], told: argparse.Namespace, parameters: int) -> str:
    """The table, with everything that is needed to read it."""
    plain = found[PLAIN]
    step_s, still_s = statistics.median(plain.step_s), statistics.median(plain.still_s)
    lines = [
        *heading("saves"),
        f"threads    {torch.get_num_threads()}",
        f"model      {parameters:,} parameters in float32, AdamW; a step takes {step_s:.3f} s",
        f"figures    median of {len(plain.still_s)} saves, in seconds",
        "",
        f"{'':16}{'stands still':>14}{'x plain':>10}{'in all':>10}{'written after':>15}   wanted",
    ]
    for name, times in found.items():
        still = statistics.median(times.still_s)
        in_all = statistics.median(times.cycle_s) - told.every * step_s
        written = f"{statistics.median(times.write_s):>15.2f}" if times.write_s else f"{'':>15}"
        wanted = f"   {WANTED_SHARE} x plain: {met(still <= WANTED_SHARE * still_s)}" if name == BESIDE else ""
        row = f"{name:16}{still:>14.3f}{still / still_s:>10.2f}{in_all:>10.2f}{written}{wanted}"
        lines.append(row.rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="saves that count in each training")
    parser.add_argument("--every", type=int, default=20, help="steps from one save to the next")
    parser.add_argument("--tokens", type=int, default=32, help="tokens a step")
    parser.add_argument("--hidden", type=int, default=800)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--folder", help="where the checkpoints are written; the disk that is measured")
    told = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = measured(told)
    per_layer = 4 * told.hidden**2 + 3 * told.hidden * 3 * told.hidden + 2 * told.hidden
    print(shown(found, told, 2 * 256 * told.hidden + told.layers * per_layer + told.hidden))


if __name__ == "__main__":
    main()
