"""Rank 0's side of the history: the records of one segment, and what health needs to know of those before."""

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from worker.contract.byte_lines import lines_from_end
from worker.contract.files import publish
from worker.contract.loss_history import HistoryWriter, Record, last_record, record
from worker.contract.loss_history import Start as SegmentStart
from worker.contract.run_dir import RunDir
from worker.start import Start

_HEAD = re.compile(rb'\{"segment": \d+, "attempt": \d+, "restart": \d+, "step": (\d+), ')
_OK = b'"verdict": "ok"'


def telling_records(history: Path, oldest_step: int, begin_step: int) -> tuple[list[Record], list[Record]]:
    """Of the surviving records up to ``begin_step``: those from ``oldest_step`` on that are not ``ok``, and the last.

    The history is read from its end, no further than it has to be, and only what is returned is parsed: a resume at
    step 20,000 is to cost no more than one at step 20. It is whole, as its writer leaves it when it opens.
    """
    telling: list[Record] = []
    last: list[Record] = []
    for step, line in _branch_from_end(history) if begin_step else ():
        if step <= begin_step and not (last and _OK in line):
            one = _parsed(line)
            last = last or [one]
            telling += [] if one.verdict == "ok" else [one]
        if last and step <= oldest_step:
            break
    return telling[::-1], last


def _branch_from_end(history: Path) -> Iterator[tuple[int, bytes]]:
    """The surviving records, the last one first: the step, and the line."""
    lowest = math.inf
    with open(history, "rb", buffering=0) as file:
        for _, line in lines_from_end(file.fileno(), os.fstat(file.fileno()).st_size):
            if line.startswith(b"{"):
                found = _HEAD.match(line)
                step = int(found[1]) if found else _parsed(line).step
                if step < lowest:
                    lowest = step
                    yield step, line


def _parsed(line: bytes) -> Record:
    return Record.model_validate_json(line.removesuffix(b","))


def restore_history(run: RunDir, checkpoint: Path | None, begin_step: int) -> tuple[str, ...]:
    """Put the checkpoint's copy back where the history no longer reaches as far; what was done, for the record."""
    last = last_record(run.history)
    reached = last.step if last else 0
    if checkpoint is None or reached >= begin_step or _reaches(checkpoint / run.history.name) <= reached:
        return ()
    copy = (checkpoint / run.history.name).read_text(encoding="ascii")
    publish(run.history, copy)
    return (f"the history ended at step {reached}: put back from {checkpoint.name}",)


def _reaches(history: Path) -> int:
    """The last step of a copy; that of an adopted checkpoint has only the steps that were logged."""
    last = last_record(history)
    return last.step if last else 0


class Segment:
    """Appends this start's records; keeps in memory only those of the branch that are not plainly ``ok``."""

    def __init__(
        self,
        run: RunDir,
        start: Start,
        begin_step: int,
        check: Callable[[], None],
        checkpoint: Path | None = None,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """``warnings`` go into the first record."""
        check()
        self._warnings = (*warnings, *restore_history(run, checkpoint, begin_step))
        self._writer = HistoryWriter(run.history, check)
        self.number = self._writer.next_segment
        self._start = start
        oldest_step = min(run.checkpoint_steps(), default=0)  # what lies before speaks of no checkpoint
        self._telling, last = telling_records(run.history, oldest_step, begin_step)
        self._last: Record | dict[str, Any] | None = last[-1] if last else None
        self._once: dict[str, Any] = {}

    def begin(self, start: SegmentStart) -> None:
        """The next record, the segment's first, states what the segment began with."""
        self._once["start"] = start

    def note(self, **fields: Any) -> None:
        """What happened between two steps, for the next record."""
        self._once.update(fields)

    def warn(self, text: str) -> None:
        """A warning for the next record."""
        self._warnings = (*self._warnings, text)

    def append(self, **fields: Any) -> None:
        """Write one step's record; ``time`` is when the step ended, where that is not now."""
        fields["segment"] = self.number
        fields.setdefault("time", time.time())
        fields["attempt"], fields["restart"] = self._start.attempt, self._start.restart
        if self._is_plain(fields):
            self._writer.append_plain(fields)
            self._last = fields
            return
        warnings = (*self._warnings, *(fields.pop("warnings", None) or ()))
        new = record(warnings=warnings or None, **fields, **self._once)
        self._writer.append(new)
        self._once.clear()
        self._warnings = ()
        self._last = new
        if new.verdict != "ok":
            self._telling.append(new)

    def _is_plain(self, fields: dict[str, Any]) -> bool:
        """Whether there is nothing to say of a step but its numbers."""
        is_quiet = fields["verdict"] == "ok" and not (self._once or self._warnings or fields["warnings"])
        numbers = (fields["loss"], fields["grad_norm"], fields["lr"], fields["loss_scale"])
        return (
            is_quiet and fields["nonfinite_ranks"] is None and all(one is None or math.isfinite(one) for one in numbers)
        )

    @property
    def newest(self) -> Record | None:
        """The last record of the branch."""
        if isinstance(self._last, dict):
            self._last = Record(**self._last)
        return self._last

    def branch(self) -> list[Record]:
        """The surviving records that say something about health: all that are not ``ok``, and the last."""
        return [*self._telling, *([] if self.newest is None else [self.newest])]

    @property
    def history_bytes(self) -> int:
        """How much of the history its records are, up to now; none of these bytes is written again."""
        return self._writer.end

    def sync(self) -> None:
        """Make all records durable."""
        self._writer.sync()
