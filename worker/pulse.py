"""A rank's sign of life, from its main thread: a thread of its own would hide a hang."""

import os
import socket
import time
from pathlib import Path
from typing import Literal

from worker.contract.exit_report import Pulse
from worker.contract.files import publish_message

Phase = Literal["starting", "training", "evaluating", "saving", "finishing"]
_EVERY_S = 5.0


class Heart:
    """Publishes the pulse at each change of phase, and at most every 5 s within one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._host = socket.gethostname()
        self._phase: Phase | None = None
        self._beaten_at = 0.0

    def beat(self, phase: Phase, step: int) -> None:
        """Say what is being done, when that is new or was said a while ago."""
        now = time.monotonic()
        if phase == self._phase and now - self._beaten_at < _EVERY_S:
            return
        self._phase, self._beaten_at = phase, now
        pulse = Pulse(phase=phase, step=step, time=time.time(), pid=os.getpid(), host=self._host)
        publish_message(self._path, pulse)
