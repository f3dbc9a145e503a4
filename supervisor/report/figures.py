"""Times, durations, sizes and numbers as a person reads them.  Pure but for the reader's time zone."""

import math
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from worker.contract.words import count

FAR_S: Final = 14 * 86400.0
"""An expected start further away than this is Slurm's way to say that it does not know."""

_SECONDS_MATTER_S: Final = 600
"""Up to here a duration has its seconds: beside its parts, two minutes are not one."""

_NEARBY: Final = 12
"""Columns that are given up so that a text ends with a whole word."""

_SIZES: Final = ("B", "kB", "MB", "GB", "TB")


def local_time(time: float) -> str:
    """``2026-11-29 17:40:02 CET`` where the reader is."""
    return _here(time).strftime("%Y-%m-%d %H:%M:%S %Z")


def local_clock(time: float) -> str:
    """``17:40:02`` where the reader is."""
    return _here(time).strftime("%H:%M:%S")


_LAST_DAY: Final = 253_370_000_000.0
"""In the year 9998, in seconds since 1970."""


def local_day(time: float) -> str:
    """``Sun 29 Nov 2026, times in CET (UTC+01:00)`` where the reader is."""
    here = _here(time)
    offset = here.strftime("%z")
    return here.strftime("%a %d %b %Y, times in %Z") + f" (UTC{offset[:3]}:{offset[3:5]})"


def local_moment(time: float, now: float) -> str:
    """``17:40 CET`` today, ``Mon 30 Nov 17:40 CET`` on another day."""
    here = _here(time)
    form = "%H:%M %Z" if here.date() == _here(now).date() else "%a %d %b %H:%M %Z"
    return here.strftime(form)


def _here(time: float) -> datetime:
    """The moment where the reader is; what no calendar has is its first day or its last."""
    return datetime.fromtimestamp(min(max(time, 0.0), _LAST_DAY)).astimezone()


def duration(seconds: float) -> str:
    """``0.4 s``, ``42 s``, ``1 min 55 s``, ``7 min``, ``3 h 20 min`` or ``2 d 4 h``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    whole, minutes, hours = round(seconds), round(seconds / 60), round(seconds / 3600)
    if whole < 60:
        return f"{whole} s"
    if whole < _SECONDS_MATTER_S:
        return f"{whole // 60} min {whole % 60} s".removesuffix(" 0 s")
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min".removesuffix(" 0 min")
    return f"{hours // 24} d {hours % 24} h".removesuffix(" 0 h")


def node_hours(node_s: float, whole_s: float | None = None) -> str:
    """``3.2 node-hours``, ``1 node-hour`` or, below a hundredth, ``12 node-seconds``.

    Beside others in a sentence the largest of them, ``whole_s``, decides the unit: all in seconds below a tenth.
    """
    hours = node_s / 3600
    if (0 < hours < 0.01 and whole_s is None) or (whole_s is not None and 0 < whole_s < 360):
        return count(max(min(1, math.ceil(node_s)), round(node_s)), "node-second")
    if 0 < hours < 0.01:
        return "under 0.01 node-hours"
    text = f"{hours:.2f}" if hours < 10 else f"{hours:,.0f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"{text} node-hour{'' if text == '1' else 's'}"


def rate_text(scale: float) -> str:
    """``0.5 of the configured rate``, ``the configured rate``, ``3 x the configured rate``."""
    if scale == 1:
        return "the configured rate"
    return f"{scale:g} {'of' if scale < 1 else 'x'} the configured rate"


def share(part: float, whole: float) -> str:
    """``97 %``; more than nothing is never ``0 %``, less than all never ``100 %``."""
    if whole <= 0 or part <= 0:
        return "0 %"
    percent = 100 * part / whole
    if percent < 1:
        return "under 1 %"
    return "over 99 %" if 99.5 <= percent < 100 else f"{percent:.0f} %"


def size(number_bytes: float) -> str:
    """``812 B``, ``1.4 GB``."""
    value, unit = float(number_bytes), 0
    while value >= 999.5 and unit < len(_SIZES) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_SIZES[unit]}" if unit == 0 or value >= 99.5 else f"{value:.2g} {_SIZES[unit]}"


def clipped(text: str, width: int) -> str:
    """``text`` in at most ``width`` columns, cut between words where one ends nearby; what is cut off is three dots."""
    if len(text) <= width:
        return text
    room = max(0, width - 3)
    at = text.rfind(" ", max(0, room - _NEARBY), room + 1)
    return f"{text[: at if at > 0 else room].rstrip()}..."[:width]


def clipped_list(parts: Iterable[str], width: int) -> str:
    """The parts beside each other, as many as there is room for; the first one clipped where there is none."""
    line = ""
    for part in parts:
        longer = f"{line}  {part}" if line else clipped(part, width)
        if len(longer) > width:
            break
        line = longer
    return line


def printable(text: str) -> str:
    """``text`` without control characters: what comes from files shall not paint a terminal or forge a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
