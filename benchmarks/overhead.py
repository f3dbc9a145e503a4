"""What a step costs beyond the plain Trainer's: history, detector, guard and signals; and what the average costs.

``python -m benchmarks.overhead`` trains one model in one process: with the plain Trainer, under higgsfield without its
average of the weights, and with it. They alternate step by step on the same weights and the same optimizer, so that
neither what slows the machine down for a tenth of a second nor where in memory a model lies is taken for a difference.
The figures of a turn are means, in which every fsync of the history and every pulse counts; the table has medians over
the turns. The average's own cost is timed in place, beside one foreach lerp of tensors of the same shapes, divided by
``every``; which of the two finds the caches cold takes turns.
"""

import argparse
import ctypes
import gc
import logging
import os
import random
import statistics
import string
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback

import worker.contract.loss_history
import worker.pulse
from benchmarks.checkpoint import PLAIN, ReachedError, begin_attempt, ours, plain_trainer
from benchmarks.heading import heading, met
from worker.attached import Attached
from worker.contract.config import Config
from worker.contract.run_dir import RunDir
from worker.ema import trained
from worker.wrap import wrap

EVERY = 10
"""Steps from one update of the average to the next; what warms up, and a turn, are multiples of it."""
OURS, AVERAGED = "higgsfield", "higgsfield, ema"
ARMS = (PLAIN, OURS, AVERAGED)
WANTED_MS, WANTED_SHARE, WANTED_LERPS = 0.5, 0.01, 1.2
"""Milliseconds more of the short step, this share of the long one, and lerps an update of the average."""
MALLOPT = {"ARENA_MAX": (-8, 1), "MMAP_THRESHOLD": (-3, 32 << 20), "TRIM_THRESHOLD": (-1, 2**31 - 1)}
"""Options of mallopt(3), with their numbers and values: one heap for all threads, which keeps what it once had."""


@dataclass(frozen=True)
class Size:
    """A model, the tokens of a step, and the steps of a turn."""

    name: str
    hidden: int
    layers: int
    tokens: int
    steps: int


SIZES = (Size("short", 128, 4, 64, 300), Size("long", 384, 6, 112, 40))
TINY = (Size("short", 16, 1, 8, 20), Size("long", 32, 1, 8, 20))


class OverError(Exception):
    """Another of the trainings failed."""


class Ring:
    """Trainings that take turns: each waits until the one before it hands over."""

    def __init__(self, count: int) -> None:
        self._count, self._turn, self._is_over = count, 0, False
        self._changed = threading.Condition()

    def wait(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._turn == number)
            if self._is_over:
                raise OverError

    def hand_over(self) -> None:
        with self._changed:
            self._turn = (self._turn + 1) % self._count
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class Arm(TrainerCallback):
    """One training: the seconds that its steps took, by the wall and of its own thread."""

    def __init__(self, trainer: Trainer, ring: Ring, number: int, num_steps: int) -> None:
        self.trainer, self.wall_s, self.cpu_s = trainer, list[float](), list[float]()
        self._ring, self._number, self._num_steps = ring, number, num_steps
        self._began: tuple[float, float] | None = None
        self.between: Callable[[int], None] = lambda step: None
        """Called between two steps, on nobody's time."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The first steps warm up, all in a row."""
        if state.global_step < EVERY:
            return
        if self._began is not None:
            self.wall_s.append(time.perf_counter() - self._began[0])
            self.cpu_s.append(time.thread_time() - self._began[1])
        self.between(state.global_step)
        self._ring.hand_over()
        if len(self.wall_s) == self._num_steps:
            raise ReachedError
        self._ring.wait(self._number)
        self._began = time.perf_counter(), time.thread_time()

    def leave_out(self, what: Callable[[], None]) -> None:
        """Do something within a step that is not of its time."""
        wall, cpu = time.perf_counter(), time.thread_time()
        what()
        if self._began is not None:
            self._began = self._began[0] + time.perf_counter() - wall, self._began[1] + time.thread_time() - cpu

    def train(self) -> None:
        self._ring.wait(self._number)
        try:
            self.trainer.train()
        except ReachedError:
            return
        except BaseException:
            self._ring.end()
            raise


class AverageClock:
    """Seconds that every ``EVERY`` steps spent on the average, and those of a foreach lerp beside each update.

    The lerp comes right after one update and right before the next.
    """

    def __init__(self, arm: Arm, attached: Callable[[], Attached]) -> None:
        self.update_s, self.lerp_s = list[float](), list[float]()
        self._attached, self._spent_s, self._others = attached, 0.0, list[torch.Tensor]()
        self._is_lerp_next, self._arm = False, arm
        arm.between = self._between

    def _between(self, step: int) -> None:
        if step % EVERY:
            return
        attached = self._attached()
        if not self._others:  # the warm-up is over
            self._others = [one.detach().clone() for _, one in trained(attached.model)]
            wrap(attached.average, "update", self._timed)
            return
        if not self._is_lerp_next:
            self._lerp()
        self._is_lerp_next = len(self.update_s) % 2 == 0
        self.update_s.append(self._spent_s)
        self._spent_s = 0.0

    def _lerp(self) -> None:
        weights = [one.detach() for _, one in trained(self._attached().model)]
        began = time.perf_counter()
        torch._foreach_lerp_(self._others, weights, 0.01)
        self.lerp_s.append(time.perf_counter() - began)

    def _timed(self, original: Callable[..., None], model: torch.nn.Module, step: int) -> None:
        if step % EVERY == 0 and self._is_lerp_next:
            self._arm.leave_out(self._lerp)
        began = time.perf_counter()
        original(model, step)
        self._spent_s += time.perf_counter() - began


def configured(text: Path, size: Size, num_steps: int, is_averaged: bool) -> Config:
    model = {"model_type": "llama", "vocab_size": 256, "hidden_size": size.hidden, "num_hidden_layers": size.layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 3 * size.hidden}
    training = {"max_steps": num_steps + 9 * EVERY, "batch_size": 1, "precision": "fp32"}
    fields: dict[str, Any] = {
        "run": {"name": "benchmark"},
        "model": {"config": {**model, **heads}},
        "data": {"train": str(text), "tokenizer": "bytes", "max_tokens": size.tokens},
        "training": {**training, "optimizer": {"learning_rate": 1e-5}},
        "ema": {"every": EVERY} if is_averaged else None,
        "checkpoint": {"every_steps": 10**9},
    }
    return Config.model_validate(fields)


@dataclass(frozen=True)
class Found:
    """What one size came to: seconds a step of each turn, and the average's own."""

    size: Size
    parameters: int
    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    update_s: float
    lerp_s: float

    def more_ms(self, name: str, base: str, times: dict[str, list[float]]) -> float:
        """Milliseconds a step that ``name`` takes beyond ``base``: the median over the turns."""
        return 1e3 * statistics.median(one - other for one, other in zip(times[name], times[base], strict=True))


def measured(size: Size, turns: int, folder: Path) -> Found:
    num_steps = turns * size.steps
    text = folder / f"{size.name}.txt"
    letters = random.Random(1).choices(string.ascii_letters, k=size.tokens * (num_steps + 9 * EVERY))
    text.write_text("".join(letters))  # nothing to learn, and so nothing to be judged a spike
    ring, arms = Ring(len(ARMS)), dict[str, Arm]()
    for number, name in enumerate(ARMS):
        run = RunDir(folder / f"{size.name}-{number}")
        run.path.mkdir()
        config = configured(text, size, num_steps, is_averaged=name == AVERAGED)
        trainer = prepared(name, run, config, arms[PLAIN].trainer if arms else None)
        arms[name] = Arm(trainer, ring, number, num_steps)
        arms[name].trainer.add_callback(arms[name])
    average = AverageClock(arms[AVERAGED], lambda: attached_to(arms[AVERAGED].trainer))
    gc.collect()
    gc.freeze()
    with ThreadPoolExecutor(len(arms)) as threads:
        for one in [threads.submit(arm.train) for arm in arms.values()]:
            one.result()
    return Found(
        size,
        sum(one.numel() for one in arms[PLAIN].trainer.model.parameters()),
        {name: turn_means(arm.wall_s, size.steps) for name, arm in arms.items()},
        {name: turn_means(arm.cpu_s, size.steps) for name, arm in arms.items()},
        statistics.median(average.update_s) / EVERY,
        statistics.median(average.lerp_s) / EVERY,
    )


def prepared(name: str, run: RunDir, config: Config, first: Trainer | None) -> Trainer:
    """A Trainer of the ``first`` one's model and optimizer, with everything attached to it where that is asked for."""
    if first is None:
        trainer = plain_trainer(run, config)
        trainer.create_optimizer()
        return trainer
    begin_attempt(run, 1, None)
    trainer, begin = ours(run, config, 1, None)
    trainer.model = trainer.model_wrapped = first.model
    trainer.optimizer = first.optimizer
    begin()
    return trainer


def attached_to(trainer: Trainer) -> Attached:
    for one in trainer.callback_handler.callbacks:
        found = getattr(one, "_attached", None)
        if isinstance(found, Attached):
            return found
    raise LookupError("nothing of ours is attached")


def turn_means(step_s: Sequence[float], steps: int) -> list[float]:
    """Seconds a step, one number a turn."""
    return [statistics.mean(step_s[begin : begin + steps]) for begin in range(0, len(step_s), steps)]


def shown(all_found: list[Found], turns: int) -> str:
    """The tables, with everything that is needed to read them."""
    lines = heading("overhead")
    lines.append(f"figures    milliseconds a step, medians of {turns} turns; threads {torch.get_num_threads()}\n")
    lines.append(f"{'parameters':>12}{'plain':>9}{OURS:>12}{'more':>8}{'ratio':>8}{'more, in CPU time':>19}   wanted")
    for found in all_found:
        plain, own = (1e3 * statistics.median(found.wall_s[name]) for name in (PLAIN, OURS))
        more, in_cpu = (found.more_ms(OURS, PLAIN, times) for times in (found.wall_s, found.cpu_s))
        is_short = found.size.name == "short"
        wanted = f"{WANTED_MS} ms" if is_short else f"{WANTED_SHARE:.0%}"
        is_met = more <= (WANTED_MS if is_short else WANTED_SHARE * plain)
        figures = f"{plain:>9.2f}{own:>12.2f}{more:>8.3f}{1 + more / plain:>8.3f}{in_cpu:>19.3f}"
        lines.append(f"{found.parameters:>12,}{figures}   {wanted}: {met(is_met)}")
    lines.append(f"\n{'parameters':>12}{'ema':>9}{f'lerp / {EVERY}':>12}{'ratio':>8}{'with less without':>19}   wanted")
    for found in all_found:
        update, lerp = 1e3 * found.update_s, 1e3 * found.lerp_s
        beyond = found.more_ms(AVERAGED, OURS, found.wall_s)
        figures = f"{update:>9.4f}{lerp:>12.4f}{update / lerp:>8.2f}{beyond:>19.3f}"
        lines.append(f"{found.parameters:>12,}{figures}   {WANTED_LERPS}: {met(update <= WANTED_LERPS * lerp)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of torch, for the training that has its turn")
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
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # each training's thread stays where it is, as a rule
    # Only a third of the time is each training's own, and what comes every few seconds must not come thrice as often.
    worker.contract.loss_history._SYNC_EVERY_S *= len(ARMS)
    worker.pulse._EVERY_S *= len(ARMS)
    with tempfile.TemporaryDirectory(dir=told.folder, prefix="benchmark-") as folder:
        found = [measured(size, told.turns, Path(folder)) for size in (TINY if told.tiny else SIZES)]
    print(shown(found, told.turns))


if __name__ == "__main__":
    main()
