"""The run's curves for TensorBoard, written while the run goes on: each segment, the surviving curve, every rollback.

``tensorboard/survived`` holds the curve that counts: where steps come again, a start marker tells readers to drop what
they had of them.  ``tensorboard/segment-0001`` and so on hold each start of the trainer as it was, abandoned branches
too.  ``tensorboard/rollback-001`` and so on hold a dot on the loss chart at the verdict's step, and the log's text.

What was written is counted in the files themselves, so a supervisor that takes over goes on where the last one stopped.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from supervisor.journal import Continued, Event, Plan, RolledBack, VerdictSeen, read_journal
from supervisor.observation import Observation
from supervisor.report import tfevents
from supervisor.report.texts import details_of, text_of
from supervisor.run_state import RunState
from worker.contract.directive import Directive, scale_at
from worker.contract.files import UnusableFileError, make_folder
from worker.contract.loss_history import HistoryReader, Record, Verdict
from worker.contract.run_dir import RunDir

WRITE_EVERY_S: Final = 5.0
_FILE: Final = "events.out.tfevents.0000000001.higgsfield"
_VERDICTS: Final[dict[Verdict, int]] = {
    "ok": 0, "skipped": 1, "pending": 2, "suspect": 3, "divergence": 4, "spike": 5, "nonfinite": 6,
}  # fmt: skip
_SCALARS: Final = {
    "loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "loss_scale": "loss_scale",
    "tokens_per_s": "tokens_per_s",
    "step_s": "step_s",
    "eval_loss": "eval_loss",
    "ema_eval_loss": "ema_eval_loss",
}
"""Tag and the record's field; a field that is null because it was not finite is written as what it was."""


class TensorBoard:
    """Appends what is new since the last time; a failure leaves nothing that the next time does not mend."""

    def __init__(self, run_dir: RunDir, check: Callable[[], None] = lambda: None) -> None:
        """``check`` raises where the run is another supervisor's by now: a file has one writer."""
        self._run_dir = run_dir
        self._check = check
        self._written_at = float("-inf")
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._reader = HistoryReader(self._run_dir.history)
        self._written: dict[str, int] = {}
        self._passed: Counter[str] = Counter()
        self._last: Record | None = None
        self._shown: Record | None = None
        self._plans: dict[int, Plan] = {}
        self._journal_bytes = -1

    def event(self, event: Event) -> None:
        """Events are read from the journal, together with the records."""

    def progress(self, run: RunState, seen: Observation) -> None:
        """Write what is new, every few seconds at most."""
        if seen.last is not self._shown and time.monotonic() - self._written_at >= WRITE_EVERY_S:
            self.write()
            self._shown = seen.last

    def close(self, run: RunState) -> None:
        """Write the rest."""
        self.write()

    def write(self) -> None:
        """Bring the files up to date; OSError or UnusableFileError where that cannot be."""
        self._written_at = time.monotonic()
        self._check()
        try:
            records = self._reader.new_records()
            if records:
                events = self._new_events()
                self._plans |= _plans(events)
                self._write_records(records, self._plans)
                self._write_rollbacks(events)
        except (OSError, UnusableFileError):
            self._begin_anew()
            raise

    def _new_events(self) -> Sequence[Event]:
        """All of the journal, where it has grown since the last time."""
        before, self._journal_bytes = self._journal_bytes, self._run_dir.journal.stat().st_size
        return read_journal(self._run_dir.journal) if self._journal_bytes != before else ()

    def _write_records(self, records: Sequence[Record], plans: dict[int, Plan]) -> None:
        pending: dict[str, list[bytes]] = {}
        for record in records:
            values = scalars(record, plans.get(record.attempt))
            event = tfevents.scalars_event(record.time, record.step, values)
            comes_again = self._last is not None and record.step <= self._last.step
            mark = tfevents.start_event(record.time, record.step) if comes_again else b""
            self._last = record
            self._add(pending, f"segment-{record.segment:04d}", event)
            self._add(pending, "survived", mark + event)
        for name, parts in pending.items():
            _append(self._file(name), b"".join(parts), records[0].time)

    def _write_rollbacks(self, events: Sequence[Event]) -> None:
        rollbacks = [event for event in events if isinstance(event, RolledBack)]
        verdicts = {e.attempt: e for e in events if isinstance(e, VerdictSeen)}
        for number, rolled in enumerate(rollbacks, 1):
            name = f"rollback-{number:03d}"
            pending: dict[str, list[bytes]] = {}
            self._passed[name] = 0
            for event in rollback_events(rolled, verdicts.get(rolled.attempt - 1)):
                self._add(pending, name, event)
            for part in pending.values():
                _append(self._file(name), b"".join(part), rolled.time)

    def _file(self, name: str) -> Path:
        return self._run_dir.tensorboard / name / _FILE

    def _add(self, pending: dict[str, list[bytes]], name: str, event: bytes) -> None:
        """Keep an event for the file of that curve, unless the file has it already."""
        if name not in self._written:
            self._written[name] = _mend_and_count(self._file(name))
        self._passed[name] += 1
        if self._passed[name] > self._written[name]:
            pending.setdefault(name, []).append(event)
            self._written[name] = self._passed[name]


def scalars(record: Record, plan: Plan | None) -> dict[str, float]:
    """What one step shows, by tag."""
    found = {}
    for tag, field in _SCALARS.items():
        value = getattr(record, field)
        if value is None and field in record.nonfinite:
            value = float(record.nonfinite[field])
        if value is not None:
            found[tag] = float(value)
    if plan is not None:
        found["rate_scale"] = _scale(plan, record)
    return found | {"verdict": float(_VERDICTS[record.verdict])}


def _scale(plan: Plan, record: Record) -> float:
    published = Directive(
        attempt=record.attempt, cause=plan.cause, reason="", time=0.0, lr_scale=plan.lr_scale, lr_ramp=plan.lr_ramp
    )
    return scale_at(published, record.step)


def rollback_events(rolled: RolledBack, verdict: VerdictSeen | None) -> list[bytes]:
    """A dot on the loss chart where it was given up, and the words of the log."""
    known = [verdict.loss, verdict.level] if verdict is not None else []
    loss = next((value for value in known if value is not None), 0.0)
    lines = [
        f"**{text_of(rolled)}**\n",
        *(f"- {label}: {text}" if label else f"    {text}" for label, text in details_of(rolled)),
    ]
    return [
        tfevents.scalars_event(rolled.time, rolled.verdict_step, {"loss": loss}),
        tfevents.text_event(rolled.time, rolled.verdict_step, "rollback", "\n".join(lines)),
    ]


def _plans(events: Sequence[Event]) -> dict[int, Plan]:
    return {event.attempt: event for event in events if isinstance(event, RolledBack | Continued)}


# -- files -------------------------------------------------------------------------------------------------------------


def _mend_and_count(path: Path) -> int:
    """How many events with values the file holds; a torn one at its end is cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    end = count = 0
    for end, event in tfevents.whole_events(data):  # noqa: B007 - the last end is where the file is cut
        count += tfevents.kind_of(event) == "summary"
    if end != len(data):
        os.truncate(path, end)
    return count


def _append(path: Path, data: bytes, time: float) -> None:
    """Add events to a file that begins with a version and, for readers that count starts, a first start."""
    make_folder(path.parent, within=path.parents[2])
    with open(path, "ab") as file:
        if file.tell() == 0:
            data = tfevents.version_event(time) + tfevents.start_event(time, 0) + data
        file.write(data)
