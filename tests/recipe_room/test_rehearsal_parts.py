"""Parts of a rehearsal that no run on a CPU shows: memory that runs out, and noise that is the same on every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker import largest_batch, rehearsal
from worker.contract.files import publish_message, read_message
from worker.contract.rehearsal import MemoryFound
from worker.contract.run_dir import RunDir

FOUND = MemoryFound(rank=0, host="n1", device="GPU", peak_bytes=1, total_bytes=2, batch_size=4)


def attached(folder: Path) -> Any:
    """What measuring asks of a Trainer that has trained."""
    trainer = SimpleNamespace(
        is_fsdp_enabled=False, is_deepspeed_enabled=False, args=SimpleNamespace(train_batch_size=4)
    )
    heart = SimpleNamespace(beat=lambda phase, step: None)
    context = SimpleNamespace(run=RunDir(folder))
    return SimpleNamespace(trainer=trainer, context=context, heart=heart, step=7, model=torch.nn.Linear(2, 2))


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "empty_cache": None, "synchronize": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(largest_batch.gc, "collect", int)  # a second each, with all that the tests have imported


def room_for(count: int, tried: list[int]) -> Callable[[Any, int], None]:
    """A device that holds so many samples."""

    def pass_over(attached: Any, size: int) -> None:
        tried.append(size)
        if size > count:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return pass_over


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("room", "largest"), [(4, 4), (7, 7), (13, 13), (40, 40), (90, 88), (10_000, 256)])
def test_the_largest_batch_is_found_to_an_eighth(
    room: int, largest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(largest_batch, "_pass_over", room_for(room, tried))
    found = largest_batch._try_batches(attached(tmp_path), FOUND, lambda one: None)
    assert found.largest_batch == largest
    assert ("ran out of memory" in found.limit) == (room < 256)
    assert len(tried) <= 10


@pytest.mark.usefixtures("on_gpu")
def test_an_error_that_is_no_want_of_memory_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_over(attached: Any, size: int) -> None:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(largest_batch, "_pass_over", pass_over)
    with pytest.raises(RuntimeError, match="shapes"):
        largest_batch._try_batches(attached(tmp_path), FOUND, lambda one: None)


def test_a_try_that_ended_the_process_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = RunDir(tmp_path).memory(0)
    path.parent.mkdir()
    publish_message(path, FOUND.model_copy(update={"trying": 64, "largest_batch": 32}))
    tried: list[int] = []
    monkeypatch.setattr(largest_batch, "_pass_over", room_for(1000, tried))
    for _ in range(2):
        largest_batch.measure_memory(attached(tmp_path))
    found = read_message(path, MemoryFound)
    assert found is not None
    assert (found.trying, found.largest_batch, tried) == (None, 32, [])
    assert found.limit == "the process was ended while 64 were tried"


def test_a_machine_that_is_nearly_full_is_not_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    resident, page = largest_batch._resident_bytes(), os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(largest_batch, "_available_bytes", lambda: 1000 * page)
    assert largest_batch._why_no_larger(resident - 251 * page, 0.1) is not None
    assert largest_batch._why_no_larger(resident, 0.1) is None
    assert largest_batch._why_no_larger(resident, 9.0) == "a try took 9 s, and on a CPU no longer ones are made"


# -- noise


def spoilt(losses: Iterator[float | None], monkeypatch: pytest.MonkeyPatch) -> tuple[torch.nn.Sequential, str]:
    """A little model after `spoil`, of which the probe sees these losses; its first layer is frozen."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[0].requires_grad_(False)
    monkeypatch.setattr(rehearsal, "probe_loss", lambda trainer: next(losses))
    return model, rehearsal.spoil(SimpleNamespace(model=model), 8.0)  # type: ignore[arg-type]


def test_copies_get_the_same_noise_and_what_is_frozen_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    before = torch.nn.Linear(3, 3).weight
    one, told = spoilt(iter([2.0, 3.0, 17.0]), monkeypatch)
    other, _ = spoilt(iter([2.0, 3.0, 17.0]), monkeypatch)
    assert told == "noise of 0.5 x their size on the trained weights: the loss goes from 2 to 17"
    assert torch.equal(one[0].weight, before)
    assert torch.equal(one[1].weight, other[1].weight)


@pytest.mark.parametrize("losses", [[2.0, None], [None, 3.0], [2.0] * 20])
def test_noise_ends_at_a_loss_that_is_no_number_and_at_its_strongest(
    losses: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, told = spoilt(iter(losses), monkeypatch)
    assert told.startswith("noise of 64 x" if len(losses) == 20 else "noise of 0.25 x")
