"""How an agent starts its trainers: forked by a zygote where that is asked for and works, else each one cold."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from worker.child import Child, spawn
from worker.zygote import Zygote, ZygoteGoneError

IMPORT_LIMIT_S = 300.0


class Trainers:
    """One task's trainers: all run the same module in the same environment with the same log."""

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str],
        log: Path,
        has_zygote: bool,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._module, self._environment, self._log = module, environment, log
        self._say, self._clock = say, clock
        self._is_cold = not has_zygote
        self._zygote: Zygote | None = None
        self._is_waited_for = True
        self._begun = 0.0
        self.waited_s = 0.0
        """For how long the next start had to wait for imports."""

    def are_ready(self) -> bool:
        """Whether a start need not wait for imports any more; the first call begins them."""
        if self._is_cold:
            return True
        if self._zygote is None:
            self._begun = self._clock()
            self._zygote = Zygote(self._module, self._environment, self._log)
        try:
            is_ready = self._zygote.is_ready()
        except ZygoteGoneError as error:
            self._go_on_cold(str(error))
            return True
        if self._is_waited_for:
            self.waited_s = self._clock() - self._begun
            self._is_waited_for = not is_ready
        if not is_ready and self.waited_s > IMPORT_LIMIT_S:
            self._go_on_cold(f"not ready after {IMPORT_LIMIT_S:.0f} s, {self._zygote.close()}")
            return True
        return is_ready

    def _go_on_cold(self, reason: str) -> None:
        self._say(f"its zygote is gone, trainers start without it: {reason}")
        self._zygote, self._is_cold = None, True

    def start(self, arguments: Sequence[str]) -> Child:
        """Start a trainer with these arguments."""
        self.waited_s = 0.0
        if self._zygote is not None:
            try:
                return self._zygote.fork(arguments, self._environment, self._log)
            except ZygoteGoneError as error:
                self._go_on_cold(str(error))
        return spawn([sys.executable, "-m", self._module, *arguments], self._environment, self._log)
