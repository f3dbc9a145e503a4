"""One picture of a run for a terminal: figures, progress, the curve, the last events.  Pure."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

from supervisor.journal import Continued, Event, GaveUp, Preempted, RolledBack, SegmentStarted, Stopped, VerdictSeen
from supervisor.report.curve import Point, curve_lines, mark_line
from supervisor.report.evaluations import evaluations, evaluations_text
from supervisor.report.figures import clipped, clipped_list, duration, local_clock, local_moment, local_time, printable
from supervisor.report.log_text import milestones
from supervisor.report.page_data import kind_of, last_steps
from supervisor.report.standing_text import facts_of
from supervisor.report.texts import WORD_WIDTH, is_told, left_at, text_of, word_of
from supervisor.run_state import OVER
from worker.contract.loss_history import Record

_MARKS: Final = {"V": "verdict", "R": "back to", "P": "preempted", "S": "stopped", "X": "trouble"}
_QUIT: Final = "q quits"
_BAR, _SHORTEST_BAR, _MOST_LINES = 10, 10, 3
"""Columns of a progress line beside bar and estimate; a bar that can still be read; lines of one fact."""


def frame(
    row: dict[str, Any],
    events: Sequence[Event],
    kept: Sequence[Record],
    left: Sequence[Record],
    columns: int,
    rows: int,
    now: float,
    *,
    is_unicode: bool = True,
) -> list[str]:
    """Exactly ``rows`` lines of at most ``columns`` characters; ``row`` is what ``status --json`` prints of the run.

    ``kept`` are the records that count, ``left`` those of abandoned branches.
    """
    top = [
        _title(row, columns, now),
        _progress(row, events, columns, now),
        _figures(row, kept, columns),
        *_where(row, kept, columns, now),
    ]
    num_told = max(3, min(8, rows // 5))
    height = max(3, rows - len(top) - num_told - 3)
    chart = curve_lines(_points(kept), _points(left), columns, height, is_unicode=is_unicode)
    first, last = _reach([*left, *kept])
    marks = list(_marks(events, [*left, *kept]))
    chart.append(mark_line(marks, first, last, columns))
    lines = [*top, *chart, *map(_event, _last_events(events, num_told))]
    lines = [clipped(printable(line), columns) for line in lines][: rows - 1]
    return [*lines, *[""] * (rows - 1 - len(lines)), _hint({letter for _, letter in marks}, left, columns)]


def _hint(letters: set[str], left: Sequence[Record], columns: int) -> str:
    """What the marks that are there mean, as far as there is room; how to leave comes first."""
    said = [f"{letter} {meaning}" for letter, meaning in _MARKS.items() if letter in letters]
    losses = [record.loss for record in left if record.loss is not None]
    dotted = f"dotted: abandoned{f', up to {max(losses):.4g}' if losses else ''}"
    return clipped_list([_QUIT, *said, *([dotted] if left else [])], columns)


def _last_events(events: Sequence[Event], most: int) -> list[Event]:
    """The newest ones, half of them kept for what matters: the start of a job must not hide the rollback before it."""
    told = [number for number, event in enumerate(events) if is_told(event)]
    begun = {number for number in told if getattr(events[number], "cause", None) == "first"}
    telling = sorted(milestones(events) & set(told) - begun)[-(most // 2) :]
    others = [number for number in told if number not in telling]
    return [events[number] for number in sorted([*telling, *others[len(telling) - most :]])]


def _title(row: dict[str, Any], columns: int, now: float) -> str:
    step = "no step yet" if row["step"] is None else f"step {row['step']:,}"
    of = f" of {row['max_steps']:,}" if row["max_steps"] else ""
    left = f"{row['name']}: {row['state'].replace('_', ' ')}, {step}{of}"
    for clock in (local_time(now), local_moment(now, now)):
        if len(left) + 2 + len(clock) <= columns:
            return f"{left:<{columns - len(clock)}}{clock}"
    return left


def _progress(row: dict[str, Any], events: Sequence[Event], columns: int, now: float) -> str:
    """A bar, and when the run will be done: at the pace of the last steps, and with interruptions as so far."""
    share = (row["step"] or 0) / row["max_steps"] if row["max_steps"] else 0.0
    told = ""
    for part in _estimate(row, events, now):
        told = f"{told}{part}" if len(told) + len(part) <= columns - _BAR - _SHORTEST_BAR else told
    width = max(_SHORTEST_BAR, columns - len(told) - _BAR)
    filled = int(share * width)
    return f"[{'#' * filled}{'.' * (width - filled)}] {100 * share:3.0f} %  {told}".rstrip()


def _estimate(row: dict[str, Any], events: Sequence[Event], now: float) -> list[str]:
    """In parts, the most telling first, of which a narrow terminal has room for some."""
    if row["state"] in OVER:
        return [f"over for {duration(now - row['since'])}"]
    if row["eta"] is None or row["eta"] <= now:
        if still := row.get("still_since"):
            return [f"no step since {local_clock(still)}"]
        return ["no estimate while no step is made"]
    told = [f"done {local_moment(row['eta'], now)}", f", in {duration(row['eta'] - now)}"]
    was_paused = any(isinstance(event, Stopped | GaveUp) for event in events)
    starts = [event for event in events if isinstance(event, SegmentStarted)]
    if was_paused or not row["step"] or len(starts) < 2:
        return told
    with_trouble = (now - starts[0].time) / row["step"] * (row["max_steps"] - row["step"])
    is_much_later = with_trouble > 1.2 * (row["eta"] - now)
    return [*told, f" ({duration(with_trouble)} if interrupted as so far)"] if is_much_later else told


def _figures(row: dict[str, Any], kept: Sequence[Record], columns: int) -> str:
    """The last step's, the most telling first; those that have no room are left out."""
    if not kept:
        return ""
    last = kept[-1]
    parts = [f"loss {'not finite' if last.loss is None else f'{last.loss:.4g}'}"]
    if last.lr is not None:
        parts.append(f"rate {last.lr:.3g}" + (f" (x {row['lr_scale']:g})" if row["lr_scale"] != 1 else ""))
    if last.grad_norm is not None:
        parts.append(f"grad norm {last.grad_norm:.3g}")
    if last.tokens_per_s is not None:
        parts.append(f"{last.tokens_per_s:,.0f} tokens/s")
    if last.step_s is not None:
        parts.append(f"{last.step_s:.3g} s/step")
    return clipped_list(parts, columns)


def _where(row: dict[str, Any], kept: Sequence[Record], columns: int, now: float) -> list[str]:
    """Job and supervisor, as the details of ``status`` say it, of a run that is over, why; and how it evaluates."""
    told = [f"{label} {text}" for label, text in facts_of(row, now) if label in ("job", "steps", "now", "supervisor")]
    if row["state"] in OVER:
        told = [row["reason"]]
    if found := evaluations(kept):
        told.append(f"evaluation loss {evaluations_text(found)}")
    return [line for text in told for line in textwrap.wrap(printable(text), columns)[:_MOST_LINES]]


def _points(records: Sequence[Record]) -> list[Point]:
    return [(record.step, record.loss) for record in records]


def _reach(records: Sequence[Record]) -> tuple[int, int]:
    steps = [record.step for record in records] or [0]
    return min(steps), max(steps)


def _marks(events: Sequence[Event], records: Sequence[Record]) -> Iterator[tuple[float, str]]:
    step, ends = 0, last_steps(records)
    for event in events:
        step = getattr(event, "step", None) or step
        match event:
            case SegmentStarted():
                step = ends.get(event.segment, event.step)
            case VerdictSeen():
                yield event.step, "V"
            case RolledBack():
                yield event.to_step, "R"
            case Preempted():
                yield step, "P"
            case Stopped():
                yield max(step, event.saved_step or 0), "S"
            case Continued() if event.cause not in ("first", "adopted", "resumed"):
                yield left_at(event), "P" if kind_of(event.cause) == "preempted" else "X"
            case _:
                continue


def _event(event: Event) -> str:
    return f"{local_clock(event.time)}  {word_of(event):<{WORD_WIDTH}}{text_of(event)}"
