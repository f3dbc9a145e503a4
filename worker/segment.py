"""Rank 0's side of the history: the records of one segment, and what health needs to know of those before."""

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from worker.contract.files import publish
from worker.contract.loss_history import HistoryWriter, Record, last_record, record
from worker.contract.loss_history import Start as SegmentStart
from worker.contract.run_dir import RunDir
from worker.start import Start

_PLAINLY_OK = re.compile(rb'\{"segment": \d+, "attempt": \d+, "restart": \d+, "step": (\d+), .*"verdict": "ok"')


def telling_records(history: bytes, begin_step: int) -> tuple[list[Record], list[Record]]:
    """Of the surviving records up to ``begin_step``: those that are not ``ok``, and the last one.

    Only these are parsed: a resume at step 20,000 is to cost no more than one at step 20. The history is whole, as its
    writer leaves it when it opens.
    """
    branch: list[tuple[int, bytes, bool]] = []
    for line in history.splitlines():
        if not line.startswith(b"{"):
            continue
        found = _PLAINLY_OK.match(line)
        step = int(found[1]) if found else _parsed(line).step
        while branch and branch[-1][0] >= step:
            branch.pop()
        branch.append((step, line, found is not None))
    before = [one for one in branch if one[0] <= begin_step]
    return [_parsed(line) for _, line, is_ok in before if not is_ok], [_parsed(line) for _, line, _ in before[-1:]]


def _parsed(line: bytes) -> Record:
    return Record.model_validate_json(line.removesuffix(b","))


def restore_history(run: RunDir, checkpoint: Path | None, begin_step: int) -> tuple[str, ...]:
    """Put the checkpoint's copy back where the history no longer reaches its step; what was done, for the record."""
    last = last_record(run.history)
    reached = last.step if last else 0
    if checkpoint is None or reached >= begin_step:
        return ()
    copy = (checkpoint / run.history.name).read_text(encoding="ascii")
    publish(run.history, copy)
    return (f"the history ended at step {reached}: put back from {checkpoint.name}",)


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
        self._telling, self._last = telling_records(run.history.read_bytes(), begin_step)
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
        """Write one step's record."""
        warnings = (*self._warnings, *(fields.pop("warnings", None) or ()))
        new = record(
            warnings=warnings or None,
            segment=self.number,
            attempt=self._start.attempt,
            restart=self._start.restart,
            time=time.time(),
            **fields,
            **self._once,
        )
        self._writer.append(new)
        self._once.clear()
        self._warnings = ()
        self._last = [new]
        if new.verdict != "ok":
            self._telling.append(new)

    @property
    def newest(self) -> Record | None:
        """The last record of the branch."""
        return self._last[-1] if self._last else None

    def branch(self) -> list[Record]:
        """The surviving records that say something about health: all that are not ``ok``, and the last."""
        return [*self._telling, *self._last]

    def sync(self) -> None:
        """Make all records durable."""
        self._writer.sync()
