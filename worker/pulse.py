"""A rank's sign of life, from its main thread: a thread of its own would hide a hang."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from worker.contract.files import publish_message
from worker.contract.pulse import Phase, Pulse, hang_limit_s

_EVERY_S = 5.0
_TIMES_WITHIN_TIMEOUT = 6


class Heart:
    """Publishes the pulse at each change of phase, and at most every 5 s within one.

    It learns how long the things of each phase take, from one beat to the next.
    """

    def __init__(self, path: Path, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """``timeout_s`` is ``recovery.hang_timeout_s``."""
        self._path, self._timeout_s, self._clock = path, timeout_s, clock
        self._every_s = min(_EVERY_S, timeout_s / _TIMES_WITHIN_TIMEOUT)
        self._host = socket.gethostname()
        self._phase: Phase | None = None
        self._beat_at = self._published_at = 0.0
        self._longest_s: dict[Phase, float] = {}

    def beat(self, phase: Phase, step: int) -> None:
        """Say what is being done, when that is new or was said a while ago."""
        now = self._clock()
        if self._phase is not None:
            self._longest_s[self._phase] = max(self._longest_s.get(self._phase, 0.0), now - self._beat_at)
        self._beat_at = now
        if phase == self._phase and now - self._published_at < self._every_s:
            return
        self._phase, self._published_at = phase, now
        limit_s = hang_limit_s(phase, self._timeout_s, self._longest_s.get(phase, 0.0))
        pulse = Pulse(phase=phase, step=step, time=time.time(), pid=os.getpid(), host=self._host, limit_s=limit_s)
        publish_message(self._path, pulse, is_durable=False)  # a host that crashes has no life to tell of
