"""What the report's chart is drawn from: curves and marks as small JSON.  Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from supervisor.journal import (
    Continued,
    Event,
    GaveUp,
    Preempted,
    RolledBack,
    SegmentStarted,
    Stopped,
    VerdictSeen,
    WorkerLeft,
)
from supervisor.report.texts import left_at, text_of
from worker.contract.loss_history import Record, surviving

MOST_POINTS: Final = 60_000
"""Points of one curve that are kept; of a longer one each stretch keeps its lowest and its highest loss."""
_CURVES: Final = ("loss", "lr", "grad_norm")


def chart_data(events: Sequence[Event], records: Sequence[Record], checkpoints: Sequence[int]) -> dict[str, Any]:
    """Curves by segment, evaluations and marks by step; ``checkpoints`` are the steps of those that are there."""
    return {
        "segments": list(_segments(records)),
        "evaluations": [[one.evaluated_step, _short(one.eval_loss)] for one in surviving(records) if one.eval_loss],
        "marks": [*_marks(events, records), *_checkpoints(checkpoints)],
        "max_steps": next((e.start.max_steps for e in events if isinstance(e, SegmentStarted) and e.start), None),
    }


def _segments(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    survivors = {id(record) for record in surviving(records)}
    by_segment: dict[int, list[Record]] = {}
    for record in records:
        by_segment.setdefault(record.segment, []).append(record)
    for number, all_of_it in by_segment.items():
        kept = thinned(all_of_it, max(1000, MOST_POINTS * len(all_of_it) // len(records)))
        yield {
            "segment": number,
            "attempt": kept[0].attempt,
            "survivors": sum(id(record) in survivors for record in kept),
            "step": [record.step for record in kept],
            **{name: [_short(getattr(record, name)) for record in kept] for name in _CURVES},
            "noted": {n: record.verdict for n, record in enumerate(kept) if record.verdict != "ok"},
        }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def thinned(records: Sequence[Record], most: int) -> list[Record]:
    """At most about ``most`` of them: of each stretch the lowest and highest loss, and all that are not ``ok``."""
    if len(records) <= most:
        return list(records)
    length = 2 * len(records) // most + 1
    found: list[Record] = []
    for begin in range(0, len(records), length):
        stretch = records[begin : begin + length]
        known = [record for record in stretch if record.loss is not None] or stretch
        keep = {id(min(known, key=_loss)), id(max(known, key=_loss))}
        found += [record for record in stretch if id(record) in keep or record.verdict != "ok"]
    return found


def _loss(record: Record) -> float:
    return record.loss if record.loss is not None else 0.0


def _marks(events: Sequence[Event], records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Verdicts, rollbacks, where the run went on after something else, and where a person stopped and resumed it."""
    step, ends = 0, last_steps(records)
    for event in events:
        match event:
            case SegmentStarted():
                step = ends.get(event.segment, event.step)
            case VerdictSeen():
                step = event.step
                yield {"kind": "verdict", "step": event.step, "text": event.reason}
            case WorkerLeft() if event.step is not None:
                step = event.step
            case RolledBack():
                yield {"kind": "rollback", "step": event.verdict_step, "to": event.to_step, "text": text_of(event)}
            case Preempted():
                yield {"kind": "preempted", "step": step, "text": "preempted; it went on from its newest checkpoint"}
            case Stopped():
                yield {"kind": "stopped", "step": max(step, event.saved_step or 0), "text": event.reason}
            case Continued() if event.cause not in ("first", "adopted"):
                yield {"kind": kind_of(event.cause), "step": left_at(event), "text": text_of(event)}
            case GaveUp():
                yield {"kind": "trouble", "step": step, "text": f"gave up: {event.reason}"}
            case _:
                continue


def last_steps(records: Sequence[Record]) -> dict[int, int]:
    """The last step of each segment."""
    ends: dict[int, int] = {}
    for record in records:
        ends[record.segment] = max(record.step, ends.get(record.segment, 0))
    return ends


def kind_of(cause: str) -> str:
    """What an attempt's cause is to a reader: a person's word, an interruption by the cluster, or trouble."""
    if cause == "resumed":
        return "resumed"
    return "preempted" if cause in ("preempted", "drained", "time_limit") else "trouble"


def _checkpoints(steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    return ({"kind": "checkpoint", "step": step, "text": f"checkpoint-{step}"} for step in steps)
