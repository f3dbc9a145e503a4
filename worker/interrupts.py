"""What may ask a trainer to save or to leave: signals, the directive, and the files STOP and SAVE.

A handler only sets a flag; every rank learns of it at the next step boundary, all at the same one.
"""

import logging
import math
import multiprocessing
import os
import signal
import stat
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any

from worker.child import die_with
from worker.contract.claim import FencedError
from worker.contract.directive import Directive, read_directive
from worker.contract.files import UnusableFileError, is_left, remove_left
from worker.contract.run_dir import RunDir

_log = logging.getLogger(__name__)


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


_TIMES_LOOK = 99
_SHORTEST_REST_S, _LONGEST_REST_S = 0.05, 1.0
_LOOKS = 8

Identity = tuple[int, int, int]

_ASK_OF_SIGNAL = {signal.SIGTERM: Ask.PREEMPTED, signal.SIGUSR2: Ask.TIME_LIMIT}


class Signals:
    """SIGTERM and SIGUSR2 as flags from ``__init__`` on."""

    def __init__(self) -> None:
        self.asked = Ask.NOTHING
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._note) for number in _ASK_OF_SIGNAL
        }

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = max(self.asked, _ASK_OF_SIGNAL[signal.Signals(number)])

    def restore(self) -> None:
        """Put back the handlers that stood before; without one the flag stays: the weights are to be published yet."""
        for number, handler in self._before.items():
            if handler is not signal.SIG_DFL:
                signal.signal(number, handler)


class RunFiles:
    """Rank 0's look at the run directory before each step's record: directive, claim, STOP and SAVE.

    Between two looks it rests for 50 ms, and for longer where the disk answers slowly, so that they take a hundredth of
    the time, but for no more than a second.
    """

    def __init__(
        self,
        run: RunDir,
        directive: Directive,
        check_claim: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``check_claim`` raises FencedError when the attempt's claim is another start's."""
        self.directive = directive
        self._attempt = directive.attempt
        self._check_claim = check_claim
        self._directive, self._stop, self._save = run.directive, run.stop_file, run.save_file
        self._directive_name, self._claim_name = str(run.directive), str(run.claim(directive.attempt))
        self._asking_names = str(run.stop_file), str(run.save_file)
        self._directive_seen: Identity | None = None
        self._claim_seen: Identity | None = None
        self._answered_ns: int | None = None
        """When that SAVE was touched which was obeyed and may not be removed."""
        self._clock = clock
        self._took_s: deque[float] = deque(maxlen=_LOOKS)
        self._looked_at = -math.inf

    def check(self) -> None:
        """Return while this attempt is the directive's and the claim its own; FencedError otherwise.

        A directive that cannot be read just now is no news; a claim that cannot be read is an OSError.
        """
        self._read_directive()
        if self.directive.attempt != self._attempt:
            raise FencedError(f"attempt {self.directive.attempt} is under way")
        identity = identity_of(self._claim_name)
        if identity is None or identity != self._claim_seen:
            try:
                self._check_claim()
            except UnusableFileError as error:
                raise OSError(str(error)) from error
            self._claim_seen = identity

    def _read_directive(self) -> None:
        """Take the directive in when it is not the one of the last look.

        It is published whole, so that each has an inode of its own.
        """
        identity = identity_of(self._directive_name)
        if identity is None or identity == self._directive_seen:
            return
        try:
            self.directive = read_directive(self._directive) or self.directive
        except UnusableFileError:
            return
        self._directive_seen = identity

    def recheck(self) -> None:
        """The same, unless there was a look just now."""
        if not self._rests():
            self.check()

    def _rests(self) -> bool:
        """Whether the last look still counts. The quickest of some tells how long one takes: any may be held up."""
        if len(self._took_s) < _LOOKS:
            return False
        rest_s = max(_SHORTEST_REST_S, min(_TIMES_LOOK * min(self._took_s), _LONGEST_REST_S))
        return self._clock() - self._looked_at < rest_s

    def look(self) -> Ask:
        """What the files ask for; nothing while it rests."""
        if self._rests():
            return Ask.NOTHING
        began = self._clock()
        try:
            self.check()
        except FencedError:
            return Ask.FENCED
        asked = self._asked()
        self._looked_at = self._clock()
        self._took_s.append(self._looked_at - began)
        return asked

    def _asked(self) -> Ask:
        if self.directive.stop is not None:
            return Ask.STOP_NOW if self.directive.stop == "now" else Ask.STOP
        if not any(os.access(name, os.F_OK) for name in self._asking_names):  # raises nothing, which would cost more
            return Ask.NOTHING
        if is_left(self._stop):
            return Ask.STOP
        return Ask.NOTHING if self._save_touched() in (None, self._answered_ns) else Ask.SAVE

    def _save_touched(self) -> int | None:
        """When SAVE was touched, in ns; None where no file is to be seen there."""
        try:
            found = self._save.stat()
        except OSError:
            return None
        return None if stat.S_ISDIR(found.st_mode) else found.st_mtime_ns

    def saved(self) -> None:
        """A save that SAVE asked for is done; one that we may not remove asks again when it is touched again."""
        touched_ns = self._save_touched()
        try:
            remove_left(self._save)
        except OSError as error:
            self._answered_ns = touched_ns
            _log.warning("%s: was obeyed and cannot be removed (%s)", self._save, error.strerror)


def identity_of(path: str) -> Identity | None:
    """Inode, time and size of a file, None where there is none; opened, because NFS answers a mere stat from memory."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return found.st_ino, found.st_mtime_ns, found.st_size


class IgnoreSignals:
    """A ``worker_init_fn`` for DataLoader processes: signals are the trainer's business, and they die with it."""

    def __init__(self, before: Callable[[int], None] | None) -> None:
        self._before = before

    def __call__(self, worker: int) -> None:
        for number in _ASK_OF_SIGNAL:
            signal.signal(number, signal.SIG_IGN)
        die_with(os.getppid())
        trainer = multiprocessing.parent_process()
        if trainer is not None and not trainer.is_alive():
            os._exit(1)  # it was gone before this process could ask to be told
        if self._before is not None:
            self._before(worker)
