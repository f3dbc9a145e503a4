"""The trainer's side of a rehearsal: the faults that it does to itself, at exactly their step.

A process that kills or stops itself is found by its agent, its peers and the supervisor as one that was killed by
anybody else; only the moment is sure. A fault from outside is waited for, so that it too comes at its step.
"""

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from worker import world
from worker.attached import Attached
from worker.contract.rehearsal import FROM_OUTSIDE, Fault, inflicted, note_fault, this_process
from worker.probe import probe_loss
from worker.shards import own_part
from worker.wrap import wrap

_LONGEST_WAIT_S = 10.0
_WAIT_LOOK_S = 0.02
_CLEARLY = 4.0
"""Times the band of the detector that a spoilt loss is above."""
_STRONGEST = 64.0


def rehearse(attached: Attached, faults: tuple[Fault, ...]) -> None:
    """Have the trainer meet those of ``faults`` that did not come yet; every rank calls it together."""
    run = attached.context.run
    due = world.from_rank_zero(lambda: [fault for fault in faults if inflicted(run, fault) is None])
    attached.trainer.add_callback(FaultsCallback(attached, due))


class FaultsCallback(TrainerCallback):
    """Does each fault once: between two steps, or in the middle of a save."""

    def __init__(self, attached: Attached, due: list[Fault]) -> None:
        self._attached, self._due = attached, due
        wrap(attached.trainer, "_save_checkpoint", self._save)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for fault in [each for each in self._due if each.kind != "torn-save" and each.step <= state.global_step]:
            self._due.remove(fault)
            self._meet(fault)

    def _meet(self, fault: Fault) -> None:
        if fault.kind == "spike":
            self._spoil(fault)
        elif fault.kind in FROM_OUTSIDE:
            self._wait_for(fault)
        elif world.rank() == world.world_size() - 1:  # not the first one, which writes: its loss is the harder to see
            self._strike(fault, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def _save(self, original: Callable[..., None], *args: Any) -> None:
        """The Trainer's own save; where it is to be torn, its files are there, ours and the manifest are not."""
        original(*args)
        step = self._attached.trainer.state.global_step
        for fault in [each for each in self._due if each.kind == "torn-save" and each.step <= step]:
            self._due.remove(fault)
            if world.rank() == 0:
                self._strike(fault, signal.SIGKILL)

    def _strike(self, fault: Fault, number: signal.Signals) -> None:
        where = " in the middle of a save" if fault.kind == "torn-save" else ""
        self._note(fault, f"{number.name} to the trainer of rank {world.rank()}{where}, {this_process()}")
        os.kill(os.getpid(), number)

    def _note(self, fault: Fault, means: str) -> None:
        note_fault(self._attached.context.run, fault, self._attached.trainer.state.global_step, means)

    def _spoil(self, fault: Fault) -> None:
        times = _CLEARLY * self._attached.context.config.spike.ratio
        means = spoil(self._attached.trainer, times)
        if world.rank() == 0:
            self._note(fault, means)

    def _wait_for(self, fault: Fault) -> None:
        """Stand still until the fault was done from outside, for less than what counts as a hang."""
        limit_s = min(_LONGEST_WAIT_S, self._attached.context.config.recovery.hang_timeout_s / 2)
        until = time.monotonic() + limit_s
        while inflicted(self._attached.context.run, fault) is None and time.monotonic() < until:
            time.sleep(_WAIT_LOOK_S)


def spoil(trainer: Trainer, times: float) -> str:
    """Add noise to the trained weights, more and more, until the probe's loss is ``times`` what it was; what was done.

    Every rank calls it together; copies of the same weights get the same noise.
    """
    before, scale = probe_loss(trainer), 0.25
    while True:
        _add_noise(trainer, scale)
        now = probe_loss(trainer)
        effect = f"the loss goes from {_told(before)} to {_told(now)}"
        is_enough = now is None or before is None or now > before + (times - 1) * max(abs(before), 1.0)
        if world.of_all_ranks(is_enough)[0] or scale == _STRONGEST:
            return f"noise of {scale:g} x their size on the trained weights: {effect}"
        scale *= 2


def _told(loss: float | None) -> str:
    return "no number" if loss is None else f"{loss:.4g}"


def _add_noise(trainer: Trainer, scale: float) -> None:
    model: Any = trainer.model
    parts = [own_part(each.detach()) for each in model.parameters() if each.requires_grad]
    for number, part in enumerate(parts):
        generator = torch.Generator(device=part.device).manual_seed(number)
        noise = torch.randn(part.shape, generator=generator, device=part.device, dtype=torch.float32)
        size = part.float().norm().item() / math.sqrt(max(1, part.numel())) or 1e-3
        part.add_((noise * size * scale).to(part.dtype))
