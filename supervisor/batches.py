"""Which global batch each step was trained on, and which of them are left out.  Pure.

A batch is named by its epoch and its number in the epoch's own order, so the name holds whatever was left out before.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from worker.contract.directive import SkippedBatches
from worker.contract.loss_history import BatchPosition
from worker.contract.words import count

NEAR_BATCHES: Final = 3
"""Two spikes this few batches apart are at the same ones: a lower rate may show the same harm a little later."""


def left_out(number: int) -> str:
    """``7 batches are left out``."""
    return f"{count(number, 'batch', 'batches')} {'is' if number == 1 else 'are'} left out"


@dataclass(frozen=True)
class Stretch:
    """Steps from ``step`` on, ``count`` of them, trained on consecutive batches from ``batch`` of ``epoch`` on."""

    step: int
    epoch: int
    batch: int
    count: int

    def positions(self, first_step: int, last_step: int) -> Iterator[BatchPosition]:
        """The batches of those of its steps that lie within the bounds."""
        for step in range(max(first_step, self.step), min(last_step + 1, self.step + self.count)):
            yield BatchPosition(epoch=self.epoch, batch=self.batch + step - self.step)


def extend(trail: list[Stretch], step: int, position: BatchPosition | None) -> None:
    """Note the batch of ``step`` at the end of ``trail``; what a former branch trained on from there on is dropped."""
    while trail and trail[-1].step >= step:
        trail.pop()
    if trail and trail[-1].step + trail[-1].count > step:
        last = trail.pop()
        trail.append(Stretch(last.step, last.epoch, last.batch, step - last.step))
    if position is None:
        return
    last = trail[-1] if trail else Stretch(-1, -1, -1, 0)
    follows = (last.step + last.count, last.epoch, last.batch + last.count) == (step, position.epoch, position.batch)
    if follows:
        trail[-1] = Stretch(last.step, last.epoch, last.batch, last.count + 1)
    else:
        trail.append(Stretch(step, position.epoch, position.batch, 1))


def trained_on(trail: Iterable[Stretch], first_step: int, last_step: int) -> tuple[BatchPosition, ...]:
    """The batches of the steps from ``first_step`` to ``last_step``, both included, as far as they are known."""
    return tuple(position for stretch in trail for position in stretch.positions(first_step, last_step))


def as_skips(positions: Iterable[BatchPosition]) -> tuple[SkippedBatches, ...]:
    """The same batches as ranges, ascending and without overlaps."""
    ranges: list[SkippedBatches] = []
    for epoch, batch in sorted((one.epoch, one.batch) for one in set(positions)):
        if ranges and (ranges[-1].epoch, ranges[-1].first + ranges[-1].count) == (epoch, batch):
            ranges[-1] = ranges[-1].model_copy(update={"count": ranges[-1].count + 1})
        else:
            ranges.append(SkippedBatches(epoch=epoch, first=batch, count=1))
    return tuple(ranges)


def positions_of(skipped: Iterable[SkippedBatches]) -> Iterator[BatchPosition]:
    """Each batch of the ranges."""
    for one in skipped:
        for batch in range(one.first, one.first + one.count):
            yield BatchPosition(epoch=one.epoch, batch=batch)


def are_near(some: Sequence[BatchPosition], others: Sequence[BatchPosition]) -> bool:
    """Whether a batch of the one lies at, or within ``NEAR_BATCHES`` of, one of the other."""
    known = {(one.epoch, one.batch) for one in others}
    near = range(-NEAR_BATCHES, NEAR_BATCHES + 1)
    return any((one.epoch, one.batch + shift) in known for one in some for shift in near)


def in_words(skipped: Sequence[SkippedBatches]) -> str:
    """The ranges, for a person; batches and epochs count from 0, as in the history."""
    return ", ".join(
        f"{one.first}{f' to {one.first + one.count - 1}' if one.count > 1 else ''} of epoch {one.epoch}"
        for one in skipped
    )
