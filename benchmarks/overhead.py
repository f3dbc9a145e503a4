"""What a step costs beyond the plain Trainer's: history, detector, guard and signals; and what the average costs.

``python -m benchmarks.overhead`` trains one model once, in rounds of four steps in random order: two as the plain
Trainer makes them, two under higgsfield.  What is attached is taken off before a plain step and put back after it.  So
neither what slows the machine down for a tenth of a second, nor where in memory a training lies, is taken for a
difference: two plain trainings of their own differ by up to 0.3 ms a step for as long as they live.  The data's order
is ours in all of them.  *More* is the median over the rounds of what ours took beyond the plain ones, and *noise* the
same of one plain and one of ours beyond the two others, where nothing is to be found.  Added to *more* is what comes
only every few seconds, each fsync of the history and each pulse, from its beginning to its end.  The average of the
weights is left out of the steps and timed in place, beside one foreach lerp of tensors of the same shapes, divided by
``every``; which of the two finds the caches cold takes turns.
"""

import argparse
import ctypes
import functools
import gc
import logging
import math
import os
import random
import statistics
import string
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback

import worker.contract.loss_history
import worker.pulse
from benchmarks.checkpoint import ReachedError, begin_attempt, ours
from benchmarks.heading import heading, met
from worker.attach import StepsCallback
from worker.attached import Attached
from worker.contract.config import Config
from worker.contract.run_dir import RunDir
from worker.ema import trained
from worker.wrap import replaced, wrap

EVERY = 10
"""Steps from one update of the average to the next, and those that warm up."""
ROUND = (False, False, True, True)
"""Whether ours is attached to a step: those of a round, before they are shuffled."""
WANTED_MS, WANTED_SHARE, WANTED_LERPS = 0.5, 0.01, 1.2
"""Milliseconds more of the short step, this share of the long one, and lerps an update of the average."""
MALLOPT = {"ARENA_MAX": (-8, 1), "MMAP_THRESHOLD": (-3, 32 << 20), "TRIM_THRESHOLD": (-1, 2**31 - 1)}
"""Options of mallopt(3), with their numbers and values: one heap for all threads, which keeps what it once had."""


@dataclass(frozen=True)
class Size:
    """A model, the tokens of a step, and the rounds that are made by default."""

    name: str
    hidden: int
    layers: int
    tokens: int
    rounds: int


SIZES = (Size("short", 128, 4, 64, 400), Size("long", 384, 6, 112, 200))
TINY = (Size("short", 16, 1, 8, 20), Size("long", 32, 1, 8, 20))


class Ways(TrainerCallback):
    """Makes the steps of one training now plainly, now with ours attached, and keeps the seconds that they took."""

    def __init__(self, attached: Attached, rounds: int) -> None:
        trainer = attached.trainer
        self.plain_s, self.ours_s = list[float](), list[float]()
        self.update_s, self.lerp_s = list[float](), list[float]()
        """Of the average: what each ``EVERY`` steps spent on it, and a lerp after one update and before the next."""
        self._attached, self._trainer, self._num_rounds = attached, trainer, rounds
        self._methods = {name: one for name, one in vars(trainer).items() if isinstance(one, functools.partial)}
        self._own = [one for one in trainer.callback_handler.callbacks if isinstance(one, StepsCallback)]
        self._random, self._round = random.Random(1), list[bool]()
        self._is_attached, self._began = True, 0.0
        self._others, self._num_calls, self._spent_s = list[torch.Tensor](), 0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first steps warm up, with everything attached."""
        took_s = time.perf_counter() - self._began
        if state.global_step > EVERY:
            (self.ours_s if self._is_attached else self.plain_s).append(took_s)
        if state.global_step == EVERY:
            self._others = [one.detach().clone() for _, one in trained(self._attached.model)]
            wrap(self._attached.average, "update", self._update)
        if state.global_step >= EVERY:
            self._go_on()
        self._began = time.perf_counter()

    def _go_on(self) -> None:
        """Attach what the next step is to be made with, and nothing else."""
        if not self._round:
            if len(self.plain_s) == self._num_rounds * ROUND.count(False):
                raise ReachedError
            self._round = self._random.sample(ROUND, k=len(ROUND))
        was_attached, self._is_attached = self._is_attached, self._round.pop()
        if was_attached == self._is_attached:
            return
        handler, members = self._trainer.callback_handler, vars(self._trainer)
        if self._is_attached:
            members.update(self._methods)
            handler.callbacks = [*handler.callbacks[:-1], *self._own, self]
        else:
            for name in self._methods:
                del members[name]
            handler.callbacks = [one for one in handler.callbacks if one not in self._own]
        self._trainer.args.logging_nan_inf_filter = not self._is_attached

    def _update(self, original: Callable[..., None], model: torch.nn.Module, step: int) -> None:
        """The average's, of which every step is one more that has ours attached; on nobody's time."""
        began = time.perf_counter()
        self._num_calls += 1
        is_due, is_after = self._num_calls % EVERY == 0, len(self.update_s) % 2 == 0
        if is_due and not is_after:
            self._lerp()
        update_began = time.perf_counter()
        original(model, self._num_calls)
        self._spent_s += time.perf_counter() - update_began
        if is_due:
            self.update_s.append(self._spent_s)
            self._spent_s = 0.0
            if is_after:
                self._lerp()
        self._began += time.perf_counter() - began

    def _lerp(self) -> None:
        weights = [one.detach() for _, one in trained(self._attached.model)]
        began = time.perf_counter()
        torch._foreach_lerp_(self._others, weights, 0.01)
        self.lerp_s.append(time.perf_counter() - began)


def configured(text: Path, size: Size, max_steps: int) -> Config:
    model = {"model_type": "llama", "vocab_size": 256, "hidden_size": size.hidden, "num_hidden_layers": size.layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 3 * size.hidden}
    fields: dict[str, Any] = {
        "run": {"name": "benchmark"},
        "model": {"config": {**model, **heads}},
        "data": {"train": str(text), "tokenizer": "bytes", "max_tokens": size.tokens},
        "training": {
            **{"max_steps": max_steps, "batch_size": 1, "precision": "fp32"},
            "optimizer": {"learning_rate": 1e-5},
        },
        "ema": {"every": EVERY},
        "checkpoint": {"every_steps": 10**9},
    }
    return Config.model_validate(fields)


@dataclass(frozen=True)
class Found:
    """What one size came to, in seconds: steps in pairs, one a round; the rare things of a step; the average of one."""

    size: Size
    parameters: int
    plain_s: list[tuple[float, float]]
    ours_s: list[tuple[float, float]]
    rare_s: float
    update_s: float
    lerp_s: float

    @property
    def plain_ms(self) -> float:
        """Milliseconds of a plain step."""
        return 1e3 * statistics.median(one for pair in self.plain_s for one in pair)

    @property
    def more_ms(self) -> float:
        """Milliseconds that ours takes beyond it, but for what is rare."""
        rounds = zip(self.plain_s, self.ours_s, strict=True)
        return 1e3 * statistics.median(statistics.mean(ours) - statistics.mean(plain) for plain, ours in rounds)

    @property
    def noise_ms(self) -> float:
        """The same of two steps of both kinds beyond the round's two others."""
        rounds = zip(self.plain_s, self.ours_s, strict=True)
        return 1e3 * statistics.median((plain[0] + ours[0] - plain[1] - ours[1]) / 2 for plain, ours in rounds)


def measured(size: Size, rounds: int, folder: Path) -> Found:
    max_steps = len(ROUND) * rounds + 2 * EVERY
    text = folder / f"{size.name}.txt"
    letters = random.Random(1).choices(string.ascii_letters, k=size.tokens * (max_steps + EVERY))
    text.write_text("".join(letters))  # nothing to learn, and so nothing to be judged a spike
    run = RunDir(folder / size.name)
    run.path.mkdir()
    begin_attempt(run, 1, None)
    trainer, begin = ours(run, configured(text, size, max_steps), 1, None)
    begin()
    attached, rare_s = attached_to(trainer), list[float]()
    ways = Ways(attached, rounds)
    trainer.add_callback(ways)
    gc.collect()
    gc.freeze()
    with suppress(ReachedError), timed(worker.pulse, "publish_message", rare_s), timed(os, "fsync", rare_s):
        trainer.train()
    return Found(
        size,
        sum(one.numel() for one in attached.model.parameters()),
        list(pairwise(ways.plain_s))[::2],
        list(pairwise(ways.ours_s))[::2],
        sum(rare_s) / len(ways.ours_s),
        statistics.median(ways.update_s) / EVERY,
        statistics.median(ways.lerp_s) / EVERY,
    )


@contextmanager
def timed(place: Any, name: str, took_s: list[float]) -> Iterator[None]:
    """Within, the seconds of each call of ``place.name`` are kept, whichever thread makes it."""
    original = getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            took_s.append(time.perf_counter() - began)

    with replaced(place, name, call):
        yield


def attached_to(trainer: Trainer) -> Attached:
    for one in trainer.callback_handler.callbacks:
        found = getattr(one, "_attached", None)
        if isinstance(found, Attached):
            return found
    raise LookupError("nothing of ours is attached")


def shown(all_found: list[Found]) -> str:
    """The tables, with everything that is needed to read them."""
    lines = heading("overhead")
    rounds = " and ".join(f"{len(found.plain_s)}" for found in all_found)
    lines.append(f"figures    milliseconds a step, medians of {rounds} rounds; threads {torch.get_num_threads()}\n")
    columns = f"{'plain':>9}{'more':>8}{'syncs, pulses':>15}{'in all':>8}{'ratio':>8}{'noise':>8}"
    lines.append(f"{'parameters':>12}{columns}   wanted")
    for found in all_found:
        plain, more, rare = found.plain_ms, found.more_ms, 1e3 * found.rare_s
        is_short = found.size.name == "short"
        wanted = f"{WANTED_MS} ms" if is_short else f"{WANTED_SHARE:.0%}"
        is_met = more + rare <= (WANTED_MS if is_short else WANTED_SHARE * plain)
        figures = f"{plain:>9.2f}{more:>8.3f}{rare:>15.3f}{more + rare:>8.3f}{1 + (more + rare) / plain:>8.3f}"
        lines.append(f"{found.parameters:>12,}{figures}{found.noise_ms:>8.3f}   {wanted}: {met(is_met)}")
    lines.append(f"\n{'parameters':>12}{'ema':>9}{f'lerp / {EVERY}':>12}{'ratio':>8}   wanted")
    for found in all_found:
        update, lerp = 1e3 * found.update_s, 1e3 * found.lerp_s
        figures = f"{update:>9.4f}{lerp:>12.4f}{update / lerp:>8.2f}"
        lines.append(f"{found.parameters:>12,}{figures}   {WANTED_LERPS}: {met(update <= WANTED_LERPS * lerp)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=float, default=1.0, help="times as many as by default")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--folder", help="where the histories are written; the disk that is measured")
    parser.add_argument("--tiny", action="store_true", help="very small models, to see that it works")
    told = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for option, value in MALLOPT.values():  # else one training's memory is given back and faulted in anew each step
        ctypes.CDLL(None).mallopt(option, value)
    torch.set_num_threads(told.threads)
    if told.threads == 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the training's thread stays where it is
    # Only half of the time is ours, and what comes every few seconds must not come twice as often in it.
    worker.contract.loss_history._SYNC_EVERY_S *= 2
    worker.pulse._EVERY_S *= 2
    with tempfile.TemporaryDirectory(dir=told.folder, prefix="benchmark-") as folder:
        found = [
            measured(size, math.ceil(told.rounds * size.rounds), Path(folder))
            for size in (TINY if told.tiny else SIZES)
        ]
    print(shown(found))


if __name__ == "__main__":
    main()
