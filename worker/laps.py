"""How long the parts of a trainer's start take, from the moment when its process began."""

import os
import time
from pathlib import Path

from worker.contract.claim import start_ticks


class Laps:
    """Seconds of each part so far, in order; ``began`` is when the process did, in UTC seconds."""

    def __init__(self) -> None:
        age_s = _age_s()
        self.began = time.time() - age_s
        self.took_s: dict[str, float] = {}
        self._since = time.monotonic() - age_s

    def lap(self, part: str) -> None:
        """``part`` ends now; it began where the one before ended."""
        now = time.monotonic()
        self.took_s[part] = round(now - self._since, 3)
        self._since = now


def _age_s() -> float:
    """Of this process, to a hundredth of a second; 0 where nobody can say."""
    ticks = start_ticks(os.getpid())
    uptime = Path("/proc/uptime").read_text(encoding="ascii").split()[0]
    return 0.0 if ticks is None else max(0.0, float(uptime) - ticks / os.sysconf("SC_CLK_TCK"))
