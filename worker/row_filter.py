"""Rows that are not trained on: why, how many, and which; and the limit on those that are broken."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from worker.contract.data_report import LeftOut, Reason
from worker.documents import ASSISTANT, Content, DataError, Pair, Row, SetKey
from worker.rows import BadRow
from worker.token_cache import Notes

_PLACES_KEPT = 1000
_LINES_KEPT = 20
_WHY: Final[dict[Reason, tuple[str, str]]] = {
    "broken": ("broken", "mend them"),
    "empty": ("empty", "give them text"),
    "special_characters": ("without a letter or digit", "give them text"),
    "no_trainable_token": (
        "without an answer to learn, or of a single token",
        "write an answer (role assistant, or a completion), or more text",
    ),
    "too_long": ("longer than data.max_tokens ({max_tokens})", "raise data.max_tokens"),
}
"""Of a reason to leave a row out: what is said of such rows, and the mend. A row that is cut is not left out."""


class RowFilter:
    """Passes the rows on that can be learned from, and remembers the others.

    DataError at the first broken row that ``data.max_bad_rows`` does not allow.
    """

    def __init__(self, key: SetKey, max_bad_rows: int) -> None:
        self._key = key
        self._max_bad_rows = max_bad_rows
        self._counts: Counter[Reason] = Counter()
        self._rows: dict[Reason, dict[str, list[int]]] = {}
        self._lines: list[str] = []

    def kept(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Content]]:
        """The rows that hold something to learn."""
        for row in rows:
            if isinstance(row.content, BadRow):
                self.broken(row, row.content.why)
                continue
            reason = what_is_wrong(row.content)
            if reason is None:
                yield row, row.content
            else:
                self.leave_out(reason, row)

    def broken(self, row: Row, why: str) -> None:
        """Leave out a row that cannot be used; ``why`` follows its place and ends with the mend."""
        self.leave_out("broken", row)
        line = f"data.{self._key}: {row.told(why)}"
        if self._counts["broken"] > self._max_bad_rows:
            allowed = f" (broken rows: {self._counts['broken']}; data.max_bad_rows allows {self._max_bad_rows})"
            raise DataError(line + (allowed if self._max_bad_rows else ""))
        if len(self._lines) < _LINES_KEPT:
            self._lines.append(line)

    def leave_out(self, reason: Reason, row: Row) -> None:
        """Count a row, and keep where it is."""
        self._counts[reason] += 1
        if self._counts[reason] <= _PLACES_KEPT:
            self._rows.setdefault(reason, {}).setdefault(row.path, []).append(row.number)

    def notes(self) -> Notes:
        """What was left out so far."""
        left_out = {reason: LeftOut(count=count, rows=self._rows[reason]) for reason, count in self._counts.items()}
        return Notes(left_out=left_out, lines=tuple(self._lines))


def what_is_wrong(content: Content) -> Reason | None:
    """Why there is nothing to learn from ``content``, as far as its text tells."""
    if isinstance(content, bytes):
        text = learned = content.decode("utf-8", "replace")
    elif isinstance(content, Pair):
        text, learned = content.prompt + content.completion, content.completion
    else:
        text = "".join(str(one.get("content") or "") for one in content.messages)
        learned = "".join(str(one.get("content") or "") for one in content.messages if one["role"] == ASSISTANT)
    if not text.strip():
        return "empty"
    if not learned.strip():
        return "no_trainable_token"
    return None if any(character.isalnum() for character in text) else "special_characters"


def nothing_left(key: SetKey, left_out: Mapping[Reason, int], max_tokens: int) -> DataError:
    """What is said of a set of which every row was left out, for the reasons that are counted in ``left_out``."""
    if not left_out:
        return DataError(f"data.{key}: it holds no row; give it text")
    told = ", ".join(f"{count} {_WHY[reason][0]}" for reason, count in left_out.items()).format(max_tokens=max_tokens)
    mend = _WHY[max(left_out, key=lambda reason: left_out[reason])][1]
    return DataError(f"data.{key}: none of its rows can be used: {told}; {mend}")
