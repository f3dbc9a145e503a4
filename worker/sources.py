"""Which rows of which files the samples are made of, so that a person can look at the text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from worker.contract.loss_history import SourceRows
from worker.contract.recipe_config import DataConfig
from worker.documents import format_of
from worker.rows import WORD_OF_FORMAT
from worker.token_cache import Tokens

Locate = Callable[[Sequence[int]], list[tuple[SourceRows, ...]]]
"""Of each of the samples given by index: the rows that it is made of."""


class Piece(NamedTuple):
    """Tokens ``first`` to ``end`` of the document that is row ``row`` of ``file``."""

    file: str
    row: int
    first: int
    end: int


class Samples(Protocol):
    """Samples that know the documents they are made of."""

    def pieces(self, index: int) -> list[Piece]:
        """Of sample ``index``, in its order."""


def pieces_between(tokens: Tokens, begin: int, end: int) -> list[Piece]:
    """The documents that tokens ``begin`` to ``end`` belong to, without those that only fill up."""
    first, last = int(np.searchsorted(tokens.starts, begin, side="right")) - 1, int(np.searchsorted(tokens.starts, end))
    bounds = [*tokens.starts[first:last].tolist(), end]
    found = []
    for (file, row), start, stop in zip(tokens.rows[first:last].tolist(), bounds[:-1], bounds[1:], strict=True):
        if file >= 0:
            found.append(Piece(tokens.files[file], row, max(begin, start) - start, stop - start))
    return found


def rows_of_samples(
    samples: Samples, data: DataConfig, tokenizer: Any, indices: Sequence[int]
) -> list[tuple[SourceRows, ...]]:
    """The rows that each of the samples ``indices`` is made of, in the order of the text.

    Of a text file, which is one document, the lines that the sample holds: the file is read once more for that.
    """
    of_samples = [samples.pieces(index) for index in indices]
    texts: dict[str, TextFile] = {}
    return [tuple(_rows(piece, data, tokenizer, texts) for piece in pieces) for pieces in of_samples]


def _rows(piece: Piece, data: DataConfig, tokenizer: Any, texts: dict[str, "TextFile"]) -> SourceRows:
    path = Path(piece.file)
    kind = format_of(path, data) if path.is_file() else "hub"
    if kind != "text":
        return SourceRows(file=piece.file, unit=WORD_OF_FORMAT[kind], first=piece.row, last=piece.row)
    if piece.file not in texts:
        texts[piece.file] = TextFile(path, None if data.tokenizer == "bytes" else tokenizer)
    first, last = texts[piece.file].lines(piece)
    return SourceRows(file=piece.file, unit="line", first=first, last=last)


LARGEST_TEXT = 2**25
"""Bytes of a text file up to which its tokens are made once more, to see where they stand: a token takes 200 there."""


class TextFile:
    """A text file whose tokens know the lines that they stand in."""

    def __init__(self, path: Path, tokenizer: Any | None) -> None:
        """``tokenizer``: None where a token is a byte. A slow one does not tell where its tokens stand."""
        self._text: bytes | str = path.read_bytes()
        self._offsets: list[tuple[int, int]] | None = None
        tells = tokenizer is not None and tokenizer.is_fast and len(self._text) <= LARGEST_TEXT
        self._is_known = tokenizer is None or tells
        if tokenizer is not None and tells:
            self._text = self._text.decode("utf-8")
            self._offsets = tokenizer(self._text, verbose=False, return_offsets_mapping=True)["offset_mapping"]

    def lines(self, piece: Piece) -> tuple[int, int]:
        """The first and the last line that hold ``piece``, from 1; those of the whole file where nothing tells more."""
        begin, end = self._span(piece) if self._is_known else (0, len(self._text))
        return self._line_at(begin), self._line_at(end - 1)

    def _span(self, piece: Piece) -> tuple[int, int]:
        """Where in the text the tokens begin and end; special tokens stand nowhere."""
        if self._offsets is None:
            return piece.first, piece.end
        spans = [span for span in self._offsets[piece.first : piece.end] if span[1] > span[0]]
        return (spans[0][0], spans[-1][1]) if spans else (len(self._text) - 1, len(self._text))

    def _line_at(self, offset: int) -> int:
        text, end = self._text, max(0, offset)
        return 1 + (text.count(b"\n", 0, end) if isinstance(text, bytes) else text.count("\n", 0, end))


def joined(rows: Sequence[SourceRows]) -> tuple[SourceRows, ...]:
    """The same rows, each once: sorted, and ranges of one file that touch made one."""
    found: list[SourceRows] = []
    for one in sorted(rows, key=lambda each: (each.file, each.first, each.last)):
        before = found[-1] if found else None
        if before is not None and before.file == one.file and one.first <= before.last + 1:
            found[-1] = before.model_copy(update={"last": max(before.last, one.last)})
        else:
            found.append(one)
    return tuple(found)
