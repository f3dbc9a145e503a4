"""Rows that are not trained on: why, how many, and which; and the limit on those that are broken."""

from collections import Counter
from collections.abc import Iterable, Iterator

from worker.contract.data_report import LeftOut, Reason
from worker.documents import ASSISTANT, Content, DataError, Pair, Row, SetKey
from worker.rows import BadRow
from worker.token_cache import Notes

_PLACES_KEPT = 1000
_LINES_KEPT = 20


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
