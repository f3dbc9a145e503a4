"""Copies into memory that is there already, by as many threads as it takes to keep the memory busy."""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

_CHUNK_BYTES = 1 << 24
_MOST_THREADS = 4
"""Memory has no more to give to more of them."""


def copy_bytes(places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source, [its bytes], to its place in main memory, which is as long.

    torch copies in one thread where it computes in one, as it does where several ranks share a host.
    """
    pairs = list(zip(places, sources, strict=True))
    for place, source in pairs:
        if source.device.type != "cpu":
            place.copy_(source, non_blocking=True)
    _copy_in_threads([pair for pair in pairs if pair[1].device.type == "cpu"])
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _copy_in_threads(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    left = deque[tuple[Any, Any]]()
    for place, source in pairs:
        for begin in range(0, len(source), _CHUNK_BYTES):
            part = slice(begin, begin + _CHUNK_BYTES)
            left.append((place[part].numpy(), source[part].numpy()))
    number = min(len(left), len(os.sched_getaffinity(0)), _MOST_THREADS)
    with ThreadPoolExecutor(max(1, number), thread_name_prefix="copy") as threads:
        helpers = [threads.submit(_copy_what_is_left, left) for _ in range(number - 1)]
        _copy_what_is_left(left)
        for helper in helpers:
            helper.result()


def _copy_what_is_left(left: deque[tuple[Any, Any]]) -> None:
    while True:
        try:
            place, source = left.popleft()
        except IndexError:
            return
        np.copyto(place, source)  # lets the other threads run
