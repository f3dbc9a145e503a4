"""One picture of a run for a terminal: figures, progress, the curve, the last events.  Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from supervisor.journal import Continued, Event, GaveUp, Preempted, RolledBack, Stopped, VerdictSeen
from supervisor.report.curve import Point, curve_lines, mark_line
from supervisor.report.figures import duration, local_clock, local_moment, local_time, printable
from supervisor.report.standing_text import detail_lines
from supervisor.report.texts import is_told, text_of, word_of
from supervisor.run_state import OVER
from worker.contract.loss_history import Record

_HINT: Final = "V verdict  R back to  P preempted or moved  dotted: abandoned  q quits the view"


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
    top = [_title(row, columns, now), _progress(row, events, columns, now), _figures(row, kept), *_where(row, now)]
    told = [event for event in events if is_told(event)]
    num_told = max(3, min(8, rows // 5))
    height = max(3, rows - len(top) - num_told - 3)
    chart = curve_lines(_points(kept), _points(left), columns, height, is_unicode=is_unicode)
    first, last = _reach([*left, *kept])
    chart.append(mark_line(list(_marks(events)), first, last, columns))
    lines = [*top, *chart, *(_event(event) for event in told[-num_told:])]
    lines = [printable(line)[:columns] for line in lines][: rows - 1]
    return [*lines, *[""] * (rows - 1 - len(lines)), _HINT[:columns]]


def _title(row: dict[str, Any], columns: int, now: float) -> str:
    step = "no step yet" if row["step"] is None else f"step {row['step']:,}"
    of = f" of {row['max_steps']:,}" if row["max_steps"] else ""
    left = f"{row['name']}: {row['state'].replace('_', ' ')}, {step}{of}"
    clock = local_time(now)
    room = columns - len(clock)
    return f"{left[: room - 2]:<{room}}{clock}" if room > len(row["name"]) else left


def _progress(row: dict[str, Any], events: Sequence[Event], columns: int, now: float) -> str:
    """A bar, and when the run will be done: at the pace of the last steps, and with interruptions as so far."""
    share = (row["step"] or 0) / row["max_steps"] if row["max_steps"] else 0.0
    told = _estimate(row, events, now)
    width = max(10, columns - len(told) - 10)
    filled = int(share * width)
    return f"[{'#' * filled}{'.' * (width - filled)}] {100 * share:3.0f} %  {told}".rstrip()


def _estimate(row: dict[str, Any], events: Sequence[Event], now: float) -> str:
    if row["state"] in OVER:
        return f"for {duration(now - row['since'])}"
    if row["eta"] is None:
        return "no estimate while no step is made"
    told = f"done {local_moment(row['eta'], now)}, in {duration(row['eta'] - now)}"
    was_paused = any(isinstance(event, Stopped | GaveUp) for event in events)
    if was_paused or not row["step"] or not events:
        return told
    with_trouble = (now - events[0].time) / row["step"] * (row["max_steps"] - row["step"])
    is_much_later = with_trouble > 1.2 * (row["eta"] - now)
    return f"{told} ({duration(with_trouble)} if interrupted as so far)" if is_much_later else told


def _figures(row: dict[str, Any], kept: Sequence[Record]) -> str:
    if not kept:
        return ""
    last = kept[-1]
    parts = [f"loss {'not finite' if last.loss is None else f'{last.loss:.4g}'}"]
    if last.lr is not None:
        parts.append(f"rate {last.lr:.3g}" + (f" (x {row['lr_scale']:g})" if row["lr_scale"] != 1 else ""))
    if last.grad_norm is not None:
        parts.append(f"gradient norm {last.grad_norm:.3g}")
    if last.tokens_per_s is not None:
        parts.append(f"{last.tokens_per_s:,.0f} tokens/s")
    if last.step_s is not None:
        parts.append(f"{last.step_s:.3g} s/step")
    return "  ".join(parts)


def _where(row: dict[str, Any], now: float) -> list[str]:
    """Job and supervisor, as the details of ``status`` say it."""
    if row["state"] in OVER:
        return [row["reason"]]
    wanted = ("  job ", "  supervisor ")
    return [" ".join(line.split()) for line in detail_lines(row, now) if line.startswith(wanted)]


def _points(records: Sequence[Record]) -> list[Point]:
    return [(record.step, record.loss) for record in records]


def _reach(records: Sequence[Record]) -> tuple[int, int]:
    steps = [record.step for record in records] or [0]
    return min(steps), max(steps)


def _marks(events: Sequence[Event]) -> Iterator[tuple[float, str]]:
    step = 0
    for event in events:
        step = getattr(event, "step", None) or step
        match event:
            case VerdictSeen():
                yield event.step, "V"
            case RolledBack():
                yield event.to_step, "R"
            case Preempted():
                yield step, "P"
            case Continued() if event.cause != "first":
                yield event.resume_step, "P"
            case _:
                continue


def _event(event: Event) -> str:
    return f"{local_clock(event.time)}  {word_of(event):<14}{text_of(event)}"
