"""A curve in characters: two by four dots each in Braille, or plain letters where a terminal has no Unicode.  Pure."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

Point = tuple[float, float | None]
"""Step and value; a value that is not known or not finite leaves a gap."""

_BRAILLE: Final = 0x2800
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""By row and column within a character."""
_LABEL: Final = 9
_ROOM_FOR_A_SPIKE: Final = 4.0
"""Times what the curve that counts reaches, above it."""


def curve_lines(
    kept: Sequence[Point], left: Sequence[Point], columns: int, rows: int, *, is_unicode: bool = True
) -> list[str]:
    """``rows`` lines of at most ``columns`` characters: a scale, and both curves; an abandoned one is dotted.

    The scale is that of the curve that counts, with room for a spike of an abandoned branch; one that is far higher
    leaves it at the top. It is logarithmic where the values span more than a factor of five.
    """
    width = max(1, columns - _LABEL - 1)
    values = _finite(kept) or _finite(left)
    if not values or rows < 1:
        return [""] * rows
    most = max(values) + _ROOM_FOR_A_SPIKE * abs(max(values))
    scale = _Scale(min(values), max([*values, *(min(value, most) for value in _finite(left))]))
    first = min(step for step, _ in (*kept, *left))
    last = max(step for step, _ in (*kept, *left))
    down, across = (4, 2) if is_unicode else (1, 1)
    grid = [[0] * width for _ in range(rows)]
    for points, is_left in ((left, True), (kept, False)):
        for column, low, high in _columns(points, first, last, width * across, scale, rows * down):
            for dot in range(low, high + 1):
                if not is_left or (column // across + dot) % 2 == 0:
                    grid[dot // down][column // across] |= _DOTS[dot % 4][column % 2] if is_unicode else 1 + is_left
    labels = {0: scale.high, rows - 1: scale.low, rows // 2: scale.at(0.5)} if rows > 2 else {0: scale.high}
    return [
        f"{_label(labels.get(number)):>{_LABEL}} {''.join(_character(cell, is_unicode) for cell in row)}".rstrip()
        for number, row in enumerate(grid)
    ]


def _finite(points: Sequence[Point]) -> list[float]:
    return [value for _, value in points if value is not None and math.isfinite(value)]


class _Scale:
    """From a value to its share of the height."""

    def __init__(self, low: float, high: float) -> None:
        self._is_log = low > 0 and high > 5 * low
        room = 0.0 if self._is_log else (high - low) * 0.05 or abs(high) * 0.1 or 1.0
        self.low, self.high = low - room, high + room
        if low >= 0:
            self.low = max(self.low, 0.0)

    def share(self, value: float) -> float:
        if self._is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def at(self, share: float) -> float:
        """The value at a share of the height."""
        if self._is_log:
            return self.low * float((self.high / self.low) ** share)
        return self.low + (self.high - self.low) * share


def _columns(
    points: Iterable[Point], first: float, last: float, width: int, scale: _Scale, height: int
) -> list[tuple[int, int, int]]:
    """For each column of dots that has values, the highest and the lowest dot, counted from the top.

    A column reaches as far as the next point of the step before, so that neighbours touch.
    """
    found: dict[int, tuple[int, int]] = {}
    span = max(last - first, 1.0)
    before: tuple[float, int] | None = None
    for step, value in points:
        if value is None or not math.isfinite(value):
            before = None
            continue
        column = min(width - 1, int((step - first) / span * (width - 1) + 0.5))
        dot = min(height - 1, max(0, round((1 - scale.share(value)) * (height - 1))))
        touches = before[1] if before is not None and before[0] == step - 1 else dot
        low, high = found.get(column, (dot, dot))
        found[column] = min(low, dot, touches), max(high, dot, touches)
        before = step, dot
    return [(column, low, high) for column, (low, high) in sorted(found.items())]


def _label(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _character(cell: int, is_unicode: bool) -> str:
    if is_unicode:
        return chr(_BRAILLE + cell) if cell else " "
    return " *."[min(cell, 2)] if cell != 3 else "*"


def mark_line(marks: Sequence[tuple[float, str]], first: float, last: float, columns: int) -> str:
    """Letters below the curve at their steps; where two meet the later one stays."""
    width = max(1, columns - _LABEL - 1)
    line = [" "] * width
    for step, letter in marks:
        if first <= step <= last:
            line[min(width - 1, int((step - first) / max(last - first, 1.0) * (width - 1) + 0.5))] = letter
    return (" " * (_LABEL + 1) + "".join(line)).rstrip()
