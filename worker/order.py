"""Which samples make which global batch: a pure function of seed and epoch, whatever the number of ranks.

An epoch is a whole number of global batches; its tail is filled from its head.  So another world size with the same
global batch sees the same samples in the same order, and a global batch can be left out without moving the others.
"""

import random
from collections.abc import Iterator, Sequence, Sized
from functools import lru_cache

import torch
from torch.utils.data import Sampler

from worker.contract.directive import SkippedBatches


def batches_an_epoch(num_samples: int, global_batch: int) -> int:
    """Global batches, and so optimizer steps, in an epoch."""
    return -(-num_samples // global_batch)


def batch_order(num_batches: int, epoch: int, skipped: Sequence[SkippedBatches]) -> Sequence[int]:
    """The epoch's global batches as they are trained on: without the skipped ones, the tail filled from the head."""
    gone = {batch for one in skipped if one.epoch == epoch for batch in range(one.first, one.first + one.count)}
    kept = [batch for batch in range(num_batches) if batch not in gone]
    if not gone or not kept:
        return range(num_batches)
    return [kept[position % len(kept)] for position in range(num_batches)]


class EpochOrder(Sampler[int]):
    """Sample indices of ``epoch``, one global batch after the other."""

    def __init__(
        self, samples: Sized, global_batch: int, seed: int, shuffle: bool, skipped: Sequence[SkippedBatches]
    ) -> None:
        self.num_samples = len(samples)
        self.global_batch = global_batch
        self.num_batches = batches_an_epoch(self.num_samples, global_batch)
        self.epoch = 0
        self._seed = seed
        self._shuffle = shuffle
        self._skipped = tuple(skipped)
        self._batches = lru_cache(maxsize=2)(lambda epoch: batch_order(self.num_batches, epoch, self._skipped))

    def __len__(self) -> int:
        return self.num_batches * self.global_batch

    def __iter__(self) -> Iterator[int]:
        order = self._samples(self.epoch)
        for batch in self._batches(self.epoch):
            yield from self._batch(order, batch)

    def batch_of(self, step: int) -> tuple[int, int]:
        """(epoch, global batch in the epoch's own order) that optimizer step ``step`` trains on; steps count from 1."""
        epoch, position = divmod(step - 1, self.num_batches)
        return epoch, self._batches(epoch)[position]

    def samples_of(self, step: int) -> list[int]:
        """The sample indices of optimizer step ``step``."""
        epoch, batch = self.batch_of(step)
        return self._batch(self._samples(epoch), batch)

    def _samples(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(self.num_samples))
        generator = torch.Generator()
        generator.manual_seed(random.Random(f"{self._seed} {epoch}").getrandbits(63))
        return torch.randperm(self.num_samples, generator=generator).tolist()

    def _batch(self, order: list[int], batch: int) -> list[int]:
        begin = batch * self.global_batch
        return [order[index % self.num_samples] for index in range(begin, begin + self.global_batch)]
