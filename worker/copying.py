"""Copies into memory that is there already, by as many threads as it takes to keep the memory busy."""

import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

_CHUNK_BYTES = 1 << 24
_MOST_THREADS = 4
"""Memory has no more to give to more of them."""


class Copying:
    """Copies that are under way beside whoever began them, until ``finish``.

    torch copies in one thread where it computes in one, as it does where several ranks share a host.
    """

    def __init__(self) -> None:
        self._left = deque[tuple[Any, Any]]()
        self._helpers = list[Future[None]]()
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, places: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source, [its bytes], which nobody changes meanwhile, to its place in main memory, as long."""
        for place, source in zip(places, sources, strict=True):
            if source.device.type == "cpu":
                self._left += _chunks(place.numpy(), source.numpy())
            else:
                place.copy_(source, non_blocking=True)
        number = min(len(self._left), len(os.sched_getaffinity(0)), _MOST_THREADS)
        self._threads = self._threads or ThreadPoolExecutor(_MOST_THREADS, thread_name_prefix="copy")
        self._helpers += [self._threads.submit(self._copy_what_is_left) for _ in range(number - 1)]

    def finish(self) -> None:
        """Take part until all is copied."""
        self._copy_what_is_left()
        for helper in self._helpers:
            helper.result()
        self._helpers.clear()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _copy_what_is_left(self) -> None:
        while True:
            try:
                place, source = self._left.popleft()
            except IndexError:
                return
            np.copyto(place, source)  # lets the other threads run


def _chunks(place: Any, source: Any) -> list[tuple[Any, Any]]:
    parts = [slice(begin, begin + _CHUNK_BYTES) for begin in range(0, len(source), _CHUNK_BYTES)]
    return [(place[part], source[part]) for part in parts]
