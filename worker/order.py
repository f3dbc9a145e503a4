"""Which samples make which global batch: a pure function of seed and epoch, whatever the number of ranks.

An epoch is a whole number of global batches; its tail is filled from its head.  So another world size with the same
global batch sees the same samples in the same order, and a global batch can be left out without moving the others.
"""

import random
from collections.abc import Iterator, Sequence, Set, Sized
from functools import lru_cache
from itertools import chain, count, islice, repeat

import torch
from torch.utils.data import BatchSampler, Sampler

from worker.contract.directive import SkippedBatches


def batches_an_epoch(num_samples: int, global_batch: int) -> int:
    """Global batches, and so optimizer steps, in an epoch."""
    return -(-num_samples // global_batch)


def order_from(num_batches: int, gone: Set[int], position: int = 0, behind: int = 0) -> Sequence[int]:
    """An epoch's global batches from ``position`` on, when the first ``behind`` of its own order are behind.

    Those in ``gone`` are left out where they are still ahead; all others keep their order, and the tail is filled from
    the head: a number of ``num_batches`` or more is a batch of this second lap. What was trained on before ``position``
    is not known here and stands as it would have been without a skip.
    """
    laps = (batch for batch in count(behind) if batch % num_batches not in gone)
    return [*range(position), *islice(laps, num_batches - position)]


class EpochOrder(Sampler[int]):
    """Sample indices of ``epoch``, one global batch after the other, from where training begins on.

    ``begin`` is that place: finished steps, and the batches of its epoch that were behind then. A skip changes what is
    ahead of it and nothing else, so that one which reaches back over what was trained on already moves no other batch.
    """

    def __init__(
        self,
        samples: Sized,
        global_batch: int,
        seed: int,
        shuffle: bool,
        skipped: Sequence[SkippedBatches],
        begin: tuple[int, int] = (0, 0),
    ) -> None:
        self.num_samples = len(samples)
        self.global_batch = global_batch
        self.num_batches = batches_an_epoch(self.num_samples, global_batch)
        self.epoch = 0
        self.num_passed = 0
        """Global batches that the next iteration leaves out, because they are behind."""
        self._seed = seed
        self._shuffle = shuffle
        self._skipped = tuple(skipped)
        self._begin = begin
        self._laps = lru_cache(maxsize=2)(self._laps_of)
        self._samples = lru_cache(maxsize=2)(self._samples_of)

    def _gone(self, epoch: int) -> Set[int]:
        """The batches of ``epoch`` that are skipped; none where nothing would be left of it."""
        ranges = [(one.first, one.first + one.count) for one in self._skipped if one.epoch == epoch]
        gone = {batch for first, end in ranges for batch in range(max(0, first), min(end, self.num_batches))}
        return gone if len(gone) < self.num_batches else frozenset()

    def _laps_of(self, epoch: int) -> Sequence[int]:
        gone = self._gone(epoch)
        step, behind = self._begin
        begin_epoch, position = divmod(step, self.num_batches)
        if epoch != begin_epoch or position == 0:
            position = behind = 0
        is_shifted = gone or behind != position
        return order_from(self.num_batches, gone, position, behind) if is_shifted else range(self.num_batches)

    def __len__(self) -> int:
        return self.num_batches * self.global_batch

    def __iter__(self) -> Iterator[int]:
        passed, self.num_passed = self.num_passed, 0
        return iter(self._samples_in(self.epoch, self._laps(self.epoch)[passed:]))

    def num_behind(self) -> int:
        """Global batches of its first epoch that training, where it begins, passes by."""
        return self._begin[0] % self.num_batches

    def batch_of(self, step: int) -> tuple[int, int]:
        """(epoch, global batch in the epoch's own order) that optimizer step ``step`` trains on; steps count from 1."""
        epoch, position = divmod(step - 1, self.num_batches)
        return epoch, self._laps(epoch)[position] % self.num_batches

    def batches_behind(self, step: int) -> int:
        """Batches of the running epoch, trained on or left out, that are behind after ``step`` steps.

        In the epoch's own order; as many as the epoch has, or more, while its tail is filled from its head.
        """
        epoch, position = divmod(step, self.num_batches)
        return self._laps(epoch)[position - 1] + 1 if position else 0

    def samples_of(self, step: int) -> list[int]:
        """The sample indices of optimizer step ``step``."""
        return self.samples_in(*self.batch_of(step))

    def samples_in(self, epoch: int, batch: int) -> list[int]:
        """The sample indices of a global batch of the epoch's own order."""
        return self._samples_in(epoch, [batch])

    def left_out(self) -> list[tuple[int, int]]:
        """(epoch, batch) of everything that is skipped and lies ahead of where training begins."""
        step, behind = self._begin
        here = step // self.num_batches, behind
        skipped = [(epoch, batch) for epoch in {one.epoch for one in self._skipped} for batch in self._gone(epoch)]
        return sorted(place for place in skipped if place >= here)

    def _samples_of(self, epoch: int) -> torch.Tensor:
        if not self._shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator()
        generator.manual_seed(random.Random(f"{self._seed} {epoch}").getrandbits(63))
        return torch.randperm(self.num_samples, generator=generator)

    def _samples_in(self, epoch: int, laps: Sequence[int]) -> list[int]:
        """The sample indices of batches, one after the other."""
        numbers = torch.arange(laps.start, laps.stop) if isinstance(laps, range) else torch.tensor(laps)
        numbers = numbers % self.num_batches
        places = numbers[:, None] * self.global_batch + torch.arange(self.global_batch)
        indices: list[int] = self._samples(epoch)[places.flatten() % self.num_samples].tolist()
        return indices


class FastForward(BatchSampler):
    """A rank's batches of an epoch, of which the first ``num_behind`` are passed by: empty ones stand for those.

    Who resumes takes them out and throws them away; at step 20,000 the making of them would be most of that time.
    """

    def __init__(self, batches: BatchSampler, order: EpochOrder, num_behind: int) -> None:
        self.batch_size, self.drop_last = batches.batch_size, batches.drop_last  # accelerate's loader reads them
        self.num_processes = getattr(batches, "num_processes", 1)
        self._batches = batches
        self._order = order
        self._num_behind = num_behind

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        self._order.num_passed = self._order.num_behind()
        return chain(repeat([], self._num_behind), self._batches)
