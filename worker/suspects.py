"""The rows of one global batch by themselves: which of them has a loss or a gradient that stands out."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from worker.attached import Attached
from worker.contract.files import Message
from worker.contract.loss_history import SourceRows
from worker.probe import loss_on
from worker.randomness import random_states_aside

STEEP: Final = 10.0
"""Times the median gradient norm of a batch's rows, beyond which a row stands out."""
_NAMED: Final = 5


class Row(Message):
    """One row of a step's global batch alone, before the step; null is a number that is not finite, or not known."""

    step: int
    number: int
    """In the global batch, from 1."""
    sample: int
    loss: float | None
    grad_norm: float | None
    is_finite: bool
    where: tuple[SourceRows, ...] = ()


class Rows(Message):
    """What was looked at."""

    rows: tuple[Row, ...] = ()


def look_at_rows(attached: Attached, step: int) -> list[Row]:
    """Every row of the global batch of ``step`` by itself, with the weights of now; every rank looks at all of them.

    Leaves no trace: neither in gradients nor in random states.
    """
    samples = attached.order.samples_of(step)
    locate = attached.context.locate
    places = locate(samples) if locate is not None else [()] * len(samples)
    with random_states_aside():
        seen = [_alone(attached, sample) for sample in samples]
    return [
        Row(
            step=step,
            number=number,
            sample=sample,
            loss=loss if math.isfinite(loss) else None,
            grad_norm=norm if norm is not None and math.isfinite(norm) else None,
            is_finite=math.isfinite(loss) and (norm is None or math.isfinite(norm)),
            where=tuple(place),
        )
        for number, (sample, (loss, norm), place) in enumerate(zip(samples, seen, places, strict=True), start=1)
    ]


def _alone(attached: Attached, sample: int) -> tuple[float, float | None]:
    """Loss and gradient norm of one row; the norm is None where the weights are spread over the ranks."""
    trainer = attached.trainer
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        with torch.no_grad():
            return float(loss_on(trainer, sample)), None
    loss = loss_on(trainer, sample)
    trained = [parameter for parameter in attached.model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    norms = [torch.linalg.vector_norm(each.float()) for each in gradients if each is not None]
    return float(loss), float(torch.linalg.vector_norm(torch.stack(norms)))


# -- which of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Suspects:
    """The rows of one step that stand out, and the others; none stand out where ``wild`` is empty."""

    wild: tuple[Row, ...] = ()
    others: tuple[Row, ...] = ()

    @property
    def is_some(self) -> bool:
        """Whether it is some of the rows, and not all."""
        return bool(self.wild and self.others)

    @property
    def instead(self) -> dict[int, int]:
        """For the sample of each row that stands out, one of the others."""
        return {row.sample: self.others[number % len(self.others)].sample for number, row in enumerate(self.wild)}


def suspects(rows: Sequence[Row], ratio: float) -> Suspects:
    """The rows that are not like the others of their step, of the first step that has any."""
    for step in sorted({row.step for row in rows}):
        own = [row for row in rows if row.step == step]
        wild = _standing_out(own, ratio)
        if wild:
            return Suspects(tuple(wild), tuple(row for row in own if row not in wild))
    return Suspects()


def _standing_out(rows: Sequence[Row], ratio: float) -> list[Row]:
    """Those that are not finite; where all are, those far above their median."""
    wild = [row for row in rows if not row.is_finite]
    if wild:
        return wild
    loss, norm = _median([row.loss for row in rows]), _median([row.grad_norm for row in rows])
    return [row for row in rows if _is_above(row.loss, ratio * loss) or _is_above(row.grad_norm, STEEP * norm)]


def _median(numbers: Sequence[float | None]) -> float:
    return statistics.median([one for one in numbers if one is not None] or [math.inf])


def _is_above(number: float | None, limit: float) -> bool:
    return number is not None and limit > 0 and number > limit


def in_words(found: Suspects) -> str:
    """Which rows they are, for a person."""
    if not found.wild:
        return "no row stands out by itself"
    if not found.others:
        return f"every row of step {found.wild[0].step} is not finite by itself"
    more = len(found.wild) - _NAMED
    named = ", ".join(map(_named, found.wild[:_NAMED])) + (f" and {more} more" if more > 0 else "")
    return f"of step {found.wild[0].step} {named}, by itself"


def _named(row: Row) -> str:
    numbers = f"loss {row.loss:.4g}" if row.is_finite and row.loss is not None else "not finite"
    return f"row {row.number} ({', '.join(map(_place, row.where)) or f'sample {row.sample}'}) is {numbers}"


def _place(rows: SourceRows) -> str:
    return f"{rows.file} {rows.unit} {rows.first}" + (f" to {rows.last}" if rows.last != rows.first else "")


class Instead(Dataset[Any]):
    """Samples, some of them replaced by others."""

    def __init__(self, samples: Any, instead: Mapping[int, int]) -> None:
        self._samples, self._instead = samples, instead

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._samples[self._instead.get(index, index)]
