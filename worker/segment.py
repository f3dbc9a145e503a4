"""Rank 0's side of the history: the records of one segment, and what health needs to know of those before."""

import time
from collections.abc import Callable
from typing import Any

from worker.contract.loss_history import HistoryWriter, Record, read_history, record, surviving
from worker.contract.loss_history import Start as SegmentStart
from worker.contract.run_dir import RunDir
from worker.start import Start


class Segment:
    """Appends this start's records; keeps in memory only those of the branch that are not plainly ``ok``."""

    def __init__(self, run: RunDir, start: Start, begin_step: int, check: Callable[[], None]) -> None:
        self._writer = HistoryWriter(run.history, check)
        self.number = self._writer.next_segment
        self._start = start
        before = [one for one in surviving(read_history(run.history)) if one.step <= begin_step]
        self._telling = [one for one in before if one.verdict != "ok"]
        self._last = before[-1:]
        self._once: dict[str, Any] = {}

    def begin(self, start: SegmentStart) -> None:
        """The next record, the segment's first, states what the segment began with."""
        self._once["start"] = start

    def note(self, **fields: Any) -> None:
        """What happened between two steps, for the next record."""
        self._once.update(fields)

    def append(self, **fields: Any) -> None:
        """Write one step's record."""
        new = record(
            segment=self.number,
            attempt=self._start.attempt,
            restart=self._start.restart,
            time=time.time(),
            **fields,
            **self._once,
        )
        self._writer.append(new)
        self._once.clear()
        self._last = [new]
        if new.verdict != "ok":
            self._telling.append(new)

    def branch(self) -> list[Record]:
        """The surviving records that say something about health: all that are not ``ok``, and the last."""
        return [*self._telling, *self._last]

    def sync(self) -> None:
        """Make all records durable."""
        self._writer.sync()
