"""Tokens that were made once: kept in the run's folder, under a name that changes with the text or the tokenizer."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
import xxhash
from pydantic import Field

from worker.contract.data_report import LeftOut, Reason
from worker.contract.files import Message, UnusableFileError, publish_message, read_message, sync_folder
from worker.documents import DataError, Row


class Notes(Message):
    """What is known of tokens since they were made."""

    left_out: dict[Reason, LeftOut] = Field(default_factory=dict)
    lines: tuple[str, ...] = ()
    """A line for a person for each of the first broken rows."""
    files: tuple[str, ...] = ()
    """Of ``Tokens``."""


@dataclass(frozen=True)
class Tokens:
    """Documents end to end: ``ids`` in the smallest type that holds them, and where each document starts."""

    ids: np.ndarray[Any, Any]
    starts: np.ndarray[Any, np.dtype[np.int64]]
    rows: np.ndarray[Any, np.dtype[np.int64]]
    """Of each document: the number of its file in ``files``, and of its row there; both -1 for what only fills up."""
    files: tuple[str, ...]
    learned: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    """Which tokens are learned; None: all."""

    @property
    def lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Tokens of each document."""
        return np.diff(self.starts, append=len(self.ids))

    def where(self, is_wanted: np.ndarray[Any, np.dtype[np.bool_]]) -> "Tokens":
        """The documents for which ``is_wanted`` says so, in their order."""
        lengths = self.lengths
        of_token = np.repeat(is_wanted, lengths)
        return Tokens(
            ids=self.ids[of_token],
            starts=_starts(lengths[is_wanted]),
            rows=self.rows[is_wanted],
            files=self.files,
            learned=None if self.learned is None else self.learned[of_token],
        )

    def filled_up(self, gaps: Sequence[int], token: int) -> "Tokens":
        """The same documents with as many times ``token`` before each as ``gaps`` says, and at the end.

        Each gap is a document of its own, of which nothing is learned. There is one gap more than documents.
        """
        lengths = np.empty(2 * len(self.starts) + 1, dtype=np.int64)
        lengths[0::2], lengths[1::2] = gaps, self.lengths
        starts = _starts(lengths)
        place = np.repeat(starts[1::2] - self.starts, self.lengths) + np.arange(len(self.ids))
        ids = np.full(int(lengths.sum()), token, dtype=self.ids.dtype)
        learned = np.zeros(len(ids), dtype=np.bool_)
        ids[place], learned[place] = self.ids, True if self.learned is None else self.learned
        rows = np.full((len(lengths), 2), -1, dtype=np.int64)
        rows[1::2] = self.rows
        return Tokens(ids, starts[lengths > 0], rows[lengths > 0], self.files, learned)


def _starts(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), lengths]))[:-1]


def cached(
    folder: Path, key: str, make: Callable[[], tuple[Tokens, Notes]], staged: Path | None = None
) -> tuple[Tokens, Notes]:
    """The tokens that lie under ``key`` in ``folder``, mapped into memory, and the notes on them.

    Made and put there the first time. Ranks that come at the same time each make them, and the first one's stay.
    ``staged`` is where they lie until they are whole: a folder that nobody else uses, on the same disk.
    DataError where what lies there cannot be read.
    """
    place = folder / key
    if not place.exists():
        _publish(place, staged or folder / f".tmp-{key}-{secrets.token_hex(4)}", *make())
    try:
        return _read(place)
    except (OSError, ValueError, EOFError, UnusableFileError) as error:
        raise DataError(f"{place} cannot be read ({error}); remove it, and it is made again") from None


def _read(place: Path) -> tuple[Tokens, Notes]:
    notes = read_message(place / "notes.json", Notes) or Notes()
    tokens = Tokens(
        ids=np.load(place / "ids.npy", mmap_mode="r"),
        starts=np.load(place / "starts.npy"),
        rows=np.load(place / "rows.npy", mmap_mode="r"),
        files=notes.files,
        learned=np.load(place / "learned.npy", mmap_mode="r") if (place / "learned.npy").exists() else None,
    )
    return tokens, notes


def _publish(place: Path, staged: Path, tokens: Tokens, notes: Notes) -> None:
    place.parent.mkdir(exist_ok=True)
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    for name in ("ids", "starts", "rows", "learned"):
        values = getattr(tokens, name)
        if values is not None:
            with open(staged / f"{name}.npy", "xb") as file:
                np.save(file, values)
                file.flush()
                os.fsync(file.fileno())
    publish_message(staged / "notes.json", notes.model_copy(update={"files": tokens.files}))
    try:
        staged.rename(place)
    except OSError:
        shutil.rmtree(staged, ignore_errors=True)
        if not place.exists():
            raise
    sync_folder(place.parent)


def key_of(rows: Iterable[Row], tokenizer: Any, settings: str) -> str:
    """32 hex digits that change with any row, the tokenizer, its chat template, the settings, the library's version."""
    hasher = xxhash.xxh3_128(f"{transformers.__version__} {settings} {tokenizer!r}\n".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    hasher.update((backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))).encode())
    hasher.update(repr(getattr(tokenizer, "chat_template", None)).encode())
    for row in rows:
        content = (
            row.content if isinstance(row.content, bytes) else repr(row.content).encode("utf-8", "backslashreplace")
        )
        hasher.update(f"{row.path!r} {row.number} {len(content)}\n".encode())
        hasher.update(content)
    return str(hasher.hexdigest())
