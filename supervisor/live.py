"""The live view: a picture of a run on a terminal's other screen, drawn anew each second from the run's files alone."""

import contextlib
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Final, TextIO

from supervisor.journal import read_journal
from supervisor.report.frame import frame
from supervisor.runs import standing
from worker.contract.files import UnusableFileError
from worker.contract.loss_history import HistoryReader, Record
from worker.contract.run_dir import RunDir

DRAW_EVERY_S: Final = 1.0
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"


class Curves:
    """The records that count and those of abandoned branches, read on from where the last look ended."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._reader = HistoryReader(run_dir.history)
        self.kept: list[Record] = []
        self.left: list[Record] = []

    def look(self) -> None:
        """Take up what is new; a history that was cut is read from its beginning."""
        try:
            new = self._reader.new_records()
        except UnusableFileError:
            self._reader = HistoryReader(self._run_dir.history)
            self.kept.clear()
            self.left.clear()
            new = self._reader.new_records()
        for record in new:
            while self.kept and self.kept[-1].step >= record.step:
                self.left.append(self.kept.pop())
            self.kept.append(record)


def watch_run(run_dir: RunDir, out: TextIO) -> None:
    """Show the run until somebody presses q; the terminal is left as it was, however this ends."""
    curves = Curves(run_dir)
    is_unicode = (out.encoding or "").lower().replace("-", "") == "utf8"
    with _other_screen(out), _single_keys():
        while True:
            _draw(run_dir, curves, out, is_unicode)
            if _pressed(DRAW_EVERY_S) in ("q", "Q", "\x1b", "\x03"):
                return


def _draw(run_dir: RunDir, curves: Curves, out: TextIO, is_unicode: bool) -> None:
    columns, rows = shutil.get_terminal_size()
    try:
        curves.look()
        row, events = standing(run_dir, in_detail=False), read_journal(run_dir.journal)
        lines = frame(row, events, curves.kept, curves.left, columns, rows, time.time(), is_unicode=is_unicode)
    except (UnusableFileError, OSError) as error:
        lines = [f"{error}"[:columns], "looking again"]
    out.write("\x1b[H" + "\r\n".join(f"{line}\x1b[K" for line in lines) + "\x1b[J")
    out.flush()


def _pressed(timeout_s: float) -> str:
    """The key that was pressed within a time, "" for none; a closed keyboard counts as q."""
    if not select.select([sys.stdin], [], [], timeout_s)[0]:
        return ""
    return sys.stdin.read(1) or "q"


@contextlib.contextmanager
def _other_screen(out: TextIO) -> Iterator[None]:
    """The terminal's other screen, without a cursor; SIGTERM and SIGHUP leave it in order too, Ctrl-Z does nothing."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    out.write(_ENTER)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal itself may be gone
            out.write(_LEAVE)
            out.flush()
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextlib.contextmanager
def _single_keys() -> Iterator[None]:
    """Keys arrive one by one and are not shown."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
