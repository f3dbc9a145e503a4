"""Which samples make which global batch, and what a skip leaves out: pure, whatever the number of ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from worker.beginning import newly_left_out
from worker.contract.directive import SkippedBatches
from worker.contract.loss_history import LeftOutBatch
from worker.order import EpochOrder, FastForward, order_from


def order_of(num_samples: int, global_batch: int, **fields: Any) -> EpochOrder:
    told = {"seed": 1, "shuffle": True, "skipped": (), **fields}
    return EpochOrder(range(num_samples), global_batch, **told)


@given(st.integers(1, 60), st.integers(1, 20), st.booleans())
def test_an_epoch_is_whole_global_batches_over_all_samples(num_samples: int, batch: int, shuffle: bool) -> None:
    order = order_of(num_samples, batch, shuffle=shuffle)
    indices = list(order)
    assert len(indices) == len(order) == order.num_batches * batch
    assert set(indices) == set(range(num_samples))
    assert indices == [index for step in range(1, order.num_batches + 1) for index in order.samples_of(step)]
    assert len(indices) - num_samples < batch


def test_every_epoch_has_another_order_and_the_same_one_in_every_process() -> None:
    order = order_of(100, 10)
    first = list(order)
    order.epoch = 1
    assert list(order) != first
    assert list(order_of(100, 10)) == first
    assert order.samples_of(1) == first[:10]
    assert order.samples_of(11) == list(order)[:10]


@pytest.mark.parametrize(
    ("gone", "position", "behind", "expected"),
    [
        ({3, 4}, 0, 0, [0, 1, 2, 5, 6, 7, 8, 9]),  # the tail filled from the head: 8 is batch 0 again
        ({0, 1}, 0, 0, [2, 3, 4, 5, 6, 7, 10, 11]),  # what is left out is no filling either
        ({2, 3, 4, 5}, 4, 4, [0, 1, 2, 3, 6, 7, 8, 9]),  # 2 and 3 are behind: 6 comes next, none is dropped
        ({1, 2, 6}, 4, 6, [0, 1, 2, 3, 7, 8, 11, 12]),  # two batches were left out before position 4
        (set(), 4, 6, [0, 1, 2, 3, 6, 7, 8, 9]),  # the skip was taken back, what is behind stays behind
        ({2}, 7, 9, [0, 1, 2, 3, 4, 5, 6, 9]),  # on the second lap already
    ],
)
def test_a_skip_leaves_out_what_is_ahead_and_moves_no_other(
    gone: set[int], position: int, behind: int, expected: list[int]
) -> None:
    assert list(order_from(8, gone, position, behind)) == expected


def test_a_skip_is_of_one_epoch_and_of_whole_batches() -> None:
    skipped = [SkippedBatches(epoch=1, first=3, count=2)]
    order, plain = order_of(80, 10, skipped=skipped), order_of(80, 10)
    assert [order.batch_of(step) for step in range(1, 9)] == [(0, batch) for batch in range(8)]
    assert [order.batch_of(step) for step in range(9, 17)] == [(1, batch) for batch in (0, 1, 2, 5, 6, 7, 0, 1)]
    assert order.samples_of(8 + 4) == plain.samples_of(8 + 6)
    assert [order.batches_behind(step) for step in (7, 8, 9, 11, 12, 14, 15, 16)] == [7, 0, 1, 3, 6, 8, 9, 0]


def test_an_epoch_of_which_nothing_would_be_left_stays() -> None:
    order = order_of(
        8, 1, skipped=[SkippedBatches(epoch=0, first=0, count=5), SkippedBatches(epoch=0, first=4, count=9)]
    )
    assert [order.batch_of(step) for step in range(1, 9)] == [(0, batch) for batch in range(8)]
    assert order.left_out() == []


skips = st.lists(
    st.builds(SkippedBatches, epoch=st.integers(0, 2), first=st.integers(0, 9), count=st.integers(1, 3)), max_size=3
)


@given(st.integers(1, 10), skips, skips, st.integers(0, 30), st.integers(0, 30))
def test_resumed_anywhere_it_goes_on_as_if_never_interrupted(
    num_batches: int, before: list[SkippedBatches], skipped: list[SkippedBatches], begin: int, later: int
) -> None:
    """A branch under other skips, a rollback to ``begin`` under these, an interruption ``later`` steps after."""
    first = order_of(num_batches, 1, skipped=before)
    whole = order_of(num_batches, 1, skipped=skipped, begin=(begin, first.batches_behind(begin)))
    again = order_of(num_batches, 1, skipped=skipped, begin=(begin + later, whole.batches_behind(begin + later)))
    steps = range(begin + later + 1, begin + later + 2 * num_batches + 2)
    assert [again.batch_of(step) for step in steps] == [whole.batch_of(step) for step in steps]


@given(st.integers(2, 30), st.sets(st.integers(0, 29), max_size=9), st.integers(0, 29))
def test_every_batch_that_is_ahead_and_not_left_out_is_trained_on_in_its_order(
    num_batches: int, gone: set[int], position: int
) -> None:
    position, gone = position % num_batches, {batch for batch in gone if batch < num_batches - 1}
    ahead = list(order_from(num_batches, gone, position, position))[position:]
    kept = [batch for batch in range(position, num_batches) if batch not in gone]
    assert ahead[: len(kept)] == kept
    assert not {batch % num_batches for batch in ahead} & gone


@given(st.integers(1, 10), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), skips, st.integers(0, 30))
def test_a_resume_gets_the_batches_that_are_ahead_and_makes_no_other(
    num_batches: int, batch_size: int, world: int, accumulation: int, skipped: list[SkippedBatches], begin: int
) -> None:
    global_batch = batch_size * world * accumulation
    before = order_of(num_batches * global_batch, global_batch)
    place = {"skipped": skipped, "begin": (begin, before.batches_behind(begin))}
    order = order_of(num_batches * global_batch, global_batch, **place)
    order.epoch, position = divmod(begin, num_batches)
    num_behind = position * accumulation
    for rank in range(world):
        plain = BatchSamplerShard(BatchSampler(order, batch_size, drop_last=False), world, rank)
        ahead = list(FastForward(plain, order, num_behind))
        assert ahead == [[]] * num_behind + list(plain)[num_behind:]
        assert list(SkipBatchSampler(FastForward(plain, order, num_behind), num_behind)) == list(plain)[num_behind:]


def test_what_is_left_out_is_named_once_and_by_samples_where_no_file_is_known() -> None:
    """Ten samples in batches of two: batches 1 and 3 to 5 are asked for; 1 lies behind, and there is no 5."""
    skipped = (SkippedBatches(epoch=0, first=1, count=1), SkippedBatches(epoch=0, first=3, count=3))
    order = order_of(10, 2, shuffle=False, skipped=skipped, begin=(2, 2))
    known: Any = SimpleNamespace(manifest=SimpleNamespace(skip_batches=skipped[:1]))
    context = SimpleNamespace(chosen=known, locate=None)
    attached: Any = SimpleNamespace(order=order, context=context)
    named = [LeftOutBatch(epoch=0, batch=3, samples=(6, 7)), LeftOutBatch(epoch=0, batch=4, samples=(8, 9))]
    assert newly_left_out(attached) == tuple(named)
    known.manifest.skip_batches = (SkippedBatches(epoch=0, first=3, count=1),)
    assert newly_left_out(attached) == tuple(named[1:])
    known.manifest.skip_batches = skipped
    assert newly_left_out(attached) == ()
