"""A scheduler that many runs share, and that one silence must not cost each of them a minute."""

import time
from collections.abc import Callable
from typing import Any, Final

from slurm.scheduler import Scheduler, SchedulerError

_SILENCE_S: Final = 10.0


class SparingScheduler:
    """A scheduler that is left in peace for a while when it did not answer: each silence takes 10 to 60 s."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._until = float("-inf")
        self._error = SchedulerError("")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """The call of that name; SchedulerError, at once, where none was answered a moment ago."""
        call = getattr(self._scheduler, name)

        def asked(*args: Any, **fields: Any) -> Any:
            if time.monotonic() < self._until:
                raise self._error
            try:
                return call(*args, **fields)
            except SchedulerError as error:
                if not error.answered:
                    self._until, self._error = time.monotonic() + _SILENCE_S, error
                raise

        return asked
