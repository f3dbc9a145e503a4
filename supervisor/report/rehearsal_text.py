"""What a rehearsal found, as a person reads it.  Pure."""

import textwrap
from collections.abc import Iterable, Sequence

from supervisor.rehearsal import FaultRow, RateRow
from supervisor.report.figures import duration, printable, size
from worker.contract.rehearsal import MemoryFound
from worker.contract.words import count


def fault_lines(rows: Sequence[FaultRow], width: int) -> list[str]:
    """A table of the faults, and under each what was done and why it was not survived."""
    head = ("fault", "survived", "training again", "steps again", "further than before", "")
    lines = [_columns(head)]
    for row in rows:
        fault = f"{row.kind}@{row.step}"
        again = "" if row.steps_repeated is None else f"{row.steps_repeated:,}"
        times = (_after(row.recovery_s), again, _after(row.cost_s))
        lines.append(_columns((fault, "yes" if row.survived else "NO", *times, "")))
        for text in filter(None, (row.means, row.why)):
            lines += textwrap.wrap(printable(text), width, initial_indent="  ", subsequent_indent="    ")
    survived = sum(row.survived for row in rows)
    return [*lines, "", f"{survived} of {count(len(rows), 'fault')} survived."]


def _columns(cells: Sequence[str]) -> str:
    widths = (15, 9, 15, 12, 19, 0)
    return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def _after(seconds: float | None) -> str:
    return "" if seconds is None else f"after {duration(seconds)}"


def memory_lines(found: Iterable[MemoryFound]) -> list[str]:
    """What each rank's device needed, and the largest batch that fits."""
    return [line for one in found for line in _memory_lines(one)]


def _memory_lines(one: MemoryFound) -> list[str]:
    how = "resident" if one.device == "CPU" else "allocated"
    whose = f"rank {one.rank} on {one.host} ({one.device})"
    held = f"{size(one.peak_bytes)} of {size(one.total_bytes)} {how} at most, at training.batch_size {one.batch_size}"
    largest = "" if one.largest_batch is None else f"the largest batch that was seen to fit is {one.largest_batch}; "
    return [printable(f"{whose}: {held}"), printable(f"  {largest}{one.limit}")]


def rate_lines(rows: Sequence[RateRow], advice: str, width: int) -> list[str]:
    """A table of the rates, and what to take from it."""
    form = "{:<14} {:>7} {:>11} {:>9}  {}"
    lines = [form.format("learning rate", "steps", "loss, first", "last", "").rstrip()]
    for row in rows:
        said = row.verdict or ("" if row.state == "finished" else row.state)
        losses = ("" if loss is None else f"{loss:.4g}" for loss in (row.loss_start, row.loss_end))
        lines.append(form.format(f"{row.learning_rate:g}", f"{row.steps:,}", *losses, said).rstrip())
    return [*lines, "", *textwrap.wrap(advice[:1].upper() + advice[1:] + ".", width)]
