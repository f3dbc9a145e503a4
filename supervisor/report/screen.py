"""A run as it goes on, on the stream that the command line hands over."""

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, TextIO

from supervisor.journal import Event
from supervisor.observation import Observation
from supervisor.report.figures import printable
from supervisor.report.texts import Listing, event_lines
from supervisor.run_state import RunState
from worker.contract.loss_history import Record

_PROGRESS_EVERY_S: Final = 10.0


class _Lossy(io.FileIO):
    """A stream's descriptor on which what cannot be written is left out; the next line is tried again."""

    def write(self, data: Any, /) -> int:
        """Answer as if all had been written."""
        with contextlib.suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


@contextlib.contextmanager
def printing_cannot_fail() -> Iterator[None]:
    """Within, neither a full disk under stdout or stderr nor a reader that is gone ends anything."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _lossy(stream: TextIO | None) -> TextIO:
    if stream is None:  # closed by who started us
        return open(os.devnull, "w", encoding="utf-8")
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:  # it is in memory
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    raw = io.BufferedWriter(_Lossy(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)


def _waits_for(run: RunState) -> str:
    if run.job is None:
        return "no job now"
    is_loading = run.job.state == "RUNNING" and run.state == "starting" and run.left is None
    return f"job {run.job.job_id} is {run.job.state}{': the worker loads' if is_loading else ''}"


class Screen:
    """Shows a run's events and its progress: a live line on a terminal, a plain line now and then elsewhere."""

    def __init__(self, out: TextIO, run: str, max_steps: int | None) -> None:
        self._out = out
        self._run = run
        self._of = f"/{max_steps}" if max_steps else ""
        self._is_live = out.isatty()
        self._shown_at = 0.0
        self._shown = ""
        self._trouble = ""
        self._listing = Listing()

    def event(self, event: Event) -> None:
        """Print an event of the journal."""
        self._clear()
        for line in event_lines(event, self._listing):
            self._write(line + "\n")

    def progress(self, run: RunState, seen: Observation) -> None:
        """Show where training is, or, on a terminal, what it waits for."""
        self._trouble = ""
        now = time.monotonic()
        if now - self._shown_at < (0.5 if self._is_live else _PROGRESS_EVERY_S):
            return
        last = seen.last
        is_training = last is not None and last.attempt == run.attempt and run.state == "training"
        text = self._step(last) if is_training and last is not None else f"{run.state}, {_waits_for(run)}"
        if text == self._shown or run.is_over or not (is_training or self._is_live):
            return
        self._shown, self._shown_at = text, now
        if self._is_live:
            self._write(f"\r\x1b[K{self._run}: {text}"[: shutil.get_terminal_size().columns + 4])
        else:
            self._write(f"{'':21}{text}\n")

    def _step(self, last: Record) -> str:
        loss = "not finite" if last.loss is None else f"{last.loss:.4f}"
        rate = "" if last.lr is None else f"  rate {last.lr:.3g}"
        return f"step {last.step}{self._of}  loss {loss}{rate}"

    def trouble(self, message: str) -> None:
        """Say once what is being tried again."""
        if message != self._trouble:
            self._clear()
            self._write(f"{'':21}{message}\n")
        self._trouble = message

    def _clear(self) -> None:
        if self._is_live and self._shown:
            self._write("\r\x1b[K")
            self._shown = ""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class Lines:
    """One of many runs on a stream that they share: its events under its name; `status` says where each one stands."""

    def __init__(self, out: TextIO, run: str) -> None:
        self._out = out
        self._run = printable(run)
        self._trouble = ""
        self._listing = Listing()

    def event(self, event: Event) -> None:
        """Print an event of the journal."""
        self._print(event_lines(event, self._listing))

    def progress(self, run: RunState, seen: Observation) -> None:
        """A pass went well: the next trouble is a new one."""
        self._trouble = ""

    def trouble(self, message: str) -> None:
        """Say once what is being tried again."""
        if message != self._trouble:
            self._print([f"{'':21}{printable(message)}"])
        self._trouble = message

    def _print(self, lines: Sequence[str]) -> None:
        self._out.write("".join(f"{self._run}  {line}\n" for line in lines))
        self._out.flush()
