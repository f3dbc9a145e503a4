"""What one optimizer step was like, measured on a Trainer instance without waiting for its device."""

import math
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import Trainer, TrainerState

from worker import world
from worker.guard import OwnGradient, innermost, withhold
from worker.interrupts import Ask
from worker.judgement import GRAVITY, Judgement
from worker.shards import whole
from worker.wrap import wrap

Number = torch.Tensor | float | None
"""A scalar, on whatever device; None is not known."""


class Later:
    """Numbers that are on their way from a device; ``read`` waits for them and for nothing that was asked later."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self._arrived: torch.cuda.Event | None = None
        if rows.device.type == "cuda":
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._rows.copy_(rows, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> list[list[float]]:
        """The numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[list[float]] = self._rows.tolist()
        return numbers


class Here:
    """Numbers of the only rank that are at hand: no tensor is made of them."""

    def __init__(self, row: Sequence[Number]) -> None:
        self._row = row

    def read(self) -> list[list[float]]:
        """The numbers; those of tensors in single precision, as from any device."""
        return [[_single(number) for number in self._row]]


class Measured(NamedTuple):
    """One finished step. ``rows`` has, of every rank: loss, norm, ask, own largest gradient, alarm, fp16 scale."""

    step: int
    epoch: float
    rows: Later | Here
    rate: float
    knows_norm: bool
    knows_scale: bool
    step_s: float
    data_wait_s: float
    tokens_per_s: float
    alarm: Judgement
    """What this rank's watched numbers say; ``rows`` has its gravity, on which all ranks agree."""


class StepTap:
    """Measures every optimizer step of one Trainer.

    The step's loss is the sum of what ``training_step`` returns over its micro-steps: detached, normalised, and not
    what the log shows, which averages several steps and may filter. The norm is that of the unclipped gradient.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._loss: torch.Tensor | None = None
        self._norm: torch.Tensor | float | None = None
        self._own_gradient = OwnGradient()
        self._rate = 0.0
        self._tokens = 0
        self._device, self._num_ranks = trainer.args.device, world.world_size()
        self._began = self._got_data = time.monotonic()
        wrap(trainer, "training_step", self._add_loss)
        wrap(trainer, "_get_grad_norm", self._keep_norm)
        wrap(trainer, "get_batch_samples", self._time_data)

    def begin(self) -> None:
        """The Trainer is about to train the model that it has wrapped."""
        self._own_gradient.watch(self._trainer.model_wrapped)

    def _add_loss(self, original: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = original(*args, **kwargs)
        self._loss = loss if self._loss is None else self._loss + loss
        return loss

    def _keep_norm(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        norm = original(*args, **kwargs)
        self._norm = whole(norm) if isinstance(norm, torch.Tensor) else norm
        return norm

    def _time_data(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._began = time.monotonic()
        batches, num_items = original(*args, **kwargs)
        self._got_data = time.monotonic()
        self._tokens = sum(batch["input_ids"].numel() for batch in batches if "input_ids" in batch)
        return batches, num_items

    def before_update(self) -> None:
        """Note the rate of the coming update, and withhold it where its gradient is not finite.

        Under fp16 the scaler does that.
        """
        optimizer: Any = self._trainer.optimizer
        self._rate = float(innermost(optimizer).param_groups[0]["lr"])
        if self._scaler is None and self._norm is not None:
            withhold(optimizer, self._norm)

    @property
    def _scaler(self) -> Any:
        return getattr(self._trainer.accelerator, "scaler", None)

    def take(self, state: TrainerState, ask: Ask, alarm: Judgement) -> Measured:
        """The step that just ended; the next one is measured from here."""
        seconds = time.monotonic() - self._began
        measured = Measured(
            step=state.global_step,
            epoch=float(state.epoch or 0.0),
            rows=_rows(self._row(ask, alarm), self._device, self._num_ranks),
            rate=self._rate,
            knows_norm=self._norm is not None,
            knows_scale=self._scaler is not None,
            step_s=seconds,
            data_wait_s=self._got_data - self._began,
            tokens_per_s=self._tokens * self._num_ranks / max(seconds, 1e-9),
            alarm=alarm,
        )
        self._loss = self._norm = None
        return measured

    def scale(self) -> float | None:
        """The fp16 scaler's scale, for which a device is waited for; None where there is none."""
        return None if self._scaler is None else float(self._scaler.get_scale())

    def _row(self, ask: Ask, alarm: Judgement) -> tuple[Number, ...]:
        own_gradient = self._own_gradient.take()
        gravity = float(GRAVITY.index(alarm.verdict))
        scale = None if self._scaler is None else self._scaler.scale(_filled(1.0, self._device))  # one scaled is it
        return self._loss, self._norm, float(ask), 0.0 if own_gradient is None else own_gradient, gravity, scale


def _rows(row: Sequence[Number], device: torch.device, num_ranks: int) -> Later | Here:
    """The rows of all ranks; nobody waits for a device."""
    if device.type == "cpu" and num_ranks == 1:
        return Here(row)
    return Later(world.rows_of_all_ranks(torch.stack([_on_device(number, device) for number in row])))


def _single(number: Number) -> float:
    """A scalar that is at hand; what is not known is NaN."""
    if isinstance(number, torch.Tensor):
        return (number if number.dtype is torch.float32 else number.detach().float()).item()
    return math.nan if number is None else number


def _on_device(number: Number, device: torch.device) -> torch.Tensor:
    """A scalar on the device, only to be read. What is not known is NaN."""
    if isinstance(number, torch.Tensor):
        return number.detach().float().reshape(()).to(device)
    return _filled(number, device)


@lru_cache(maxsize=16)
def _filled(number: float | None, device: torch.device) -> torch.Tensor:
    """Filled on the device, not copied to it, and kept: nearly every step says the same three."""
    return torch.full((), float("nan") if number is None else number, dtype=torch.float32, device=device)


def peak_memory_bytes() -> int | None:
    """The most that tensors took on this rank's GPU at once; None where there is none.

    What ``torch.cuda.max_memory_allocated`` says, which sorts a hundred other numbers first.
    """
    if not torch.cuda.is_available():
        return None
    told: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict()
    return int(told["allocated_bytes"]["all"]["peak"]) if told else 0
