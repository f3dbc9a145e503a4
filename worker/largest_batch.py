"""At the end of a rehearsal: the memory that training took, and the largest micro-batch that fits, by real tries."""

import gc
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from worker import world
from worker.attached import Attached
from worker.contract.files import publish_message, read_message
from worker.contract.rehearsal import MemoryFound
from worker.fed import batch_of
from worker.leaving import is_out_of_memory
from worker.memory_events import free_bytes_of_group

_MOST_TIMES = 64
_LONGEST_TRY_S = 5.0
"""On a CPU, where memory alone would not end the tries for a long time."""


def measure_memory(attached: Attached) -> None:
    """Leave rehearsal/memory-rank-N.json; every rank calls it together, after the last step.

    A try that ended the process is not made again: the next start says so.
    """
    path = attached.context.run.memory(world.rank())
    path.parent.mkdir(exist_ok=True)
    found = read_message(path, MemoryFound)
    if found is None:
        found = _without_tries(attached)
        publish_message(path, found)
        why = _why_not_tried(attached)
        if why is None:
            found = _try_batches(attached, found, lambda one: publish_message(path, one))
        else:
            found = found.model_copy(update={"limit": why})
    elif found.trying is not None:
        found = found.model_copy(update={"limit": f"the process was ended while {found.trying} were tried"})
    publish_message(path, found.model_copy(update={"trying": None}))
    world.barrier()


def _without_tries(attached: Attached) -> MemoryFound:
    is_cuda = torch.cuda.is_available()
    return MemoryFound(
        rank=world.rank(),
        host=socket.gethostname(),
        device=torch.cuda.get_device_name() if is_cuda else "CPU",
        peak_bytes=torch.cuda.max_memory_allocated() if is_cuda else _resident_bytes(),
        total_bytes=torch.cuda.mem_get_info()[1] if is_cuda else _pages_bytes("SC_PHYS_PAGES"),
        batch_size=attached.trainer.args.train_batch_size,
    )


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _pages_bytes(name: str) -> int:
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")


def _why_not_tried(attached: Attached) -> str | None:
    if attached.trainer.is_fsdp_enabled or attached.trainer.is_deepspeed_enabled:
        return "not tried: the model is spread over the ranks, and one that ran out of memory would leave the others"
    if not torch.cuda.is_available() and world.rank() > 0:
        return "not tried: rank 0 tries for the ranks on CPUs"
    return None


def _try_batches(attached: Attached, found: MemoryFound, note: Callable[[MemoryFound], None]) -> MemoryFound:
    """Double the batch until one does not fit, or until there is a reason to stop."""
    base, most = found.peak_bytes, _MOST_TIMES * found.batch_size
    size = found.batch_size
    while size <= most:
        note(found.model_copy(update={"trying": size}))
        began = time.monotonic()
        if not _fits(attached, size):
            return _between(attached, found, size)
        found = found.model_copy(update={"largest_batch": size})
        why = _why_no_larger(base, time.monotonic() - began)
        if why is not None:
            return found.model_copy(update={"limit": why})
        size *= 2
    return found.model_copy(update={"limit": f"no more than {_MOST_TIMES} x training.batch_size were tried"})


def _between(attached: Attached, found: MemoryFound, too_large: int) -> MemoryFound:
    """What fits between the largest that did and one that did not, to within an eighth."""
    good, bad = found.largest_batch or 0, too_large
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        if _fits(attached, middle):
            good = middle
        else:
            bad = middle
    return found.model_copy(update={"largest_batch": good, "limit": f"{bad} ran out of memory"})


def _why_no_larger(base: int, try_s: float) -> str | None:
    """On a CPU, why twice the batch is not tried; a GPU says itself when it is full."""
    if torch.cuda.is_available():
        return None
    grown = _resident_bytes() - base
    free = min(_available_bytes(), free_bytes_of_group() or _available_bytes())
    if 2 * grown > free / 2:
        return "the next would take more than half of the memory that is free"
    return f"a try took {try_s:.0f} s, and on a CPU no longer ones are made" if try_s > _LONGEST_TRY_S else None


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _pages_bytes("SC_AVPHYS_PAGES")


def _fits(attached: Attached, size: int) -> bool:
    """Whether a forward and a backward pass over ``size`` samples find the memory, beside all that training keeps."""
    attached.heart.beat("finishing", attached.step)
    fits = True
    try:
        _pass_over(attached, size)
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        if not is_out_of_memory(error):
            raise
        fits = False
    attached.model.zero_grad(set_to_none=True)
    if not fits:
        gc.collect()  # what the failed pass had made hangs together in circles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return fits


def _pass_over(attached: Attached, size: int) -> None:
    """As a micro-step does it, but by this rank alone: not through what wraps the model in a world of several."""
    trainer: Any = attached.trainer
    count = len(trainer.train_dataset)
    inputs = trainer._prepare_inputs(batch_of(trainer, [index % count for index in range(size)]))
    model = attached.model.train()
    with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
        loss = trainer.compute_loss(model, inputs)
    trainer.accelerator.backward(loss)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
