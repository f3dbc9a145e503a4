"""What may ask a trainer to save or to leave: signals, the directive, and the files STOP and SAVE.

A handler only sets a flag; every rank learns of it at the next step boundary, all at the same one.
"""

import signal
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

from worker.contract.claim import FencedError
from worker.contract.directive import Directive, read_directive
from worker.contract.run_dir import RunDir


class Ask(IntEnum):
    """What is asked, the more urgent the higher: the highest of all ranks counts."""

    NOTHING = 0
    SAVE = 1
    """Save and go on."""
    STOP = 2
    """Save and leave: ``stop``."""
    TIME_LIMIT = 3
    """Save and leave: ``time_limit``."""
    PREEMPTED = 4
    """Save and leave: ``preempted``."""
    STOP_NOW = 5
    """Leave without a save: ``stop``."""
    FENCED = 6
    """The run is somebody else's."""

    @property
    def what(self) -> str:
        """The word for ``error.what``."""
        return "stop" if self is Ask.STOP_NOW else self.name.lower()


_ASK_OF_SIGNAL = {signal.SIGTERM: Ask.PREEMPTED, signal.SIGUSR2: Ask.TIME_LIMIT}


class Signals:
    """SIGTERM and SIGUSR2 as flags, from ``__init__`` until ``restore``."""

    def __init__(self) -> None:
        self.asked = Ask.NOTHING
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._note) for number in _ASK_OF_SIGNAL
        }

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = max(self.asked, _ASK_OF_SIGNAL[signal.Signals(number)])

    def restore(self) -> None:
        """Put back the handlers that stood before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class RunFiles:
    """Rank 0's look at the run directory before each step's record: directive, claim, STOP and SAVE."""

    def __init__(self, run: RunDir, directive: Directive, check_claim: Callable[[], None]) -> None:
        self.directive = directive
        self._attempt = directive.attempt
        self._run = run
        self._check_claim = check_claim
        self._seen: tuple[int, int, int] | None = None

    def check(self) -> None:
        """Return while this attempt is the directive's and the claim its own; FencedError otherwise."""
        self._read_directive()
        if self.directive.attempt != self._attempt:
            raise FencedError(f"attempt {self.directive.attempt} is under way")
        self._check_claim()

    def look(self) -> Ask:
        """What the files ask for."""
        try:
            self.check()
        except FencedError:
            return Ask.FENCED
        if self.directive.stop is not None:
            return Ask.STOP_NOW if self.directive.stop == "now" else Ask.STOP
        if self._run.stop_file.exists():
            return Ask.STOP
        return Ask.SAVE if self._run.save_file.exists() else Ask.NOTHING

    def saved(self) -> None:
        """A save that SAVE asked for is done."""
        self._run.save_file.unlink(missing_ok=True)

    def _read_directive(self) -> None:
        """Take the directive in when its file is another one than at the last look."""
        try:
            stat = self._run.directive.stat()
        except FileNotFoundError:
            return
        identity = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if identity != self._seen:
            self.directive = read_directive(self._run.directive) or self.directive
            self._seen = identity


class IgnoreSignals:
    """A ``worker_init_fn`` for DataLoader processes: a signal to the whole job is the trainer's business."""

    def __init__(self, before: Callable[[int], None] | None) -> None:
        self._before = before

    def __call__(self, worker: int) -> None:
        for number in _ASK_OF_SIGNAL:
            signal.signal(number, signal.SIG_IGN)
        if self._before is not None:
            self._before(worker)
