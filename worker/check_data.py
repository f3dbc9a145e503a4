"""What the data of a configuration holds: read as a run would read it, for a limited time."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from worker.contract.check_report import DataLook, Found, Lengths, LookedAt
from worker.contract.config import Config
from worker.data import samples_of, split_tokens
from worker.documents import Content, DataError, Row, SetKey, read_rows
from worker.row_filter import RowFilter, nothing_left
from worker.token_cache import Tokens
from worker.tokens import collect, encode_bytes, encoder

READ_FOR_S = 60.0
"""For so long each set is read."""
_ALL = 2**62
_THE_HUB = "the hub does not give it"
_WORTH_A_WORD = 0.01
"""Of the documents of a set."""
_MANY = 0.05


@dataclass
class DataFindings:
    """What was read, and what is to be said of it."""

    look: DataLook
    found: list[Found]


@dataclass
class _Read:
    tokens: Tokens
    row_filter: RowFilter
    digests: list[int]
    """Of each row that was read and holds something, those that have no tokens to learn included."""
    num_rows: int
    """All that were read."""
    is_whole: bool


def look_at_data(config: Config, tokenizer: Any, base: Path, read_for_s: float = READ_FOR_S) -> DataFindings:
    """Both sets of ``config`` as ``tokenizer`` reads them, each for ``read_for_s`` seconds at most."""
    found: list[Found] = []
    read: dict[SetKey, _Read] = {}
    keys: tuple[SetKey, ...] = ("train", "eval") if config.data.eval else ("train",)
    for key in keys:
        try:
            read[key] = _read(key, config, tokenizer, base, read_for_s)
        except DataError as error:
            found.append(_not_here(key, error) if _THE_HUB in str(error) else _error(error))
    looked = {key: _looked_at(key, one, config, tokenizer, found) for key, one in read.items()}
    overlap = _overlap(read, found) if len(read) == 2 else None
    return DataFindings(DataLook(train=looked.get("train"), eval=looked.get("eval"), overlap=overlap), found)


def _not_here(key: SetKey, error: DataError) -> Found:
    name = str(error).partition(": ")[2].partition(" is no file")[0]
    return Found(level="not checked", key=f"data.{key}", message=f"{name} is of the hub, and not on this machine")


def _error(error: DataError) -> Found:
    """``data.KEY: what; mend``, as the worker says it, taken apart."""
    key, _, said = str(error).partition(": ")
    message, _, mend = said.partition("; ")
    return Found(level="error", key=key, message=message, mend=mend)


def _read(key: SetKey, config: Config, tokenizer: Any, base: Path, read_for_s: float) -> _Read:
    data, ends_at = config.data, time.monotonic() + read_for_s
    row_filter, digests = RowFilter(key, _ALL), []
    num_rows, is_whole = 0, True

    def rows() -> Iterator[Row]:
        nonlocal num_rows, is_whole
        for row in read_rows(key, data, base):
            if time.monotonic() > ends_at:
                is_whole = False
                return
            num_rows += 1
            yield row

    def noted() -> Iterator[tuple[Row, Content]]:
        for row, content in row_filter.kept(rows()):
            digests.append(_digest(content))
            yield row, content

    is_bytes = data.tokenizer == "bytes"
    kind: type[np.generic] = np.uint8 if is_bytes else np.uint16 if len(tokenizer) <= 2**16 else np.int32
    encode = encode_bytes if is_bytes else encoder(tokenizer)
    tokens = collect(noted(), encode, kind, data.max_tokens, data.pack, row_filter)
    return _Read(tokens, row_filter, digests, num_rows, is_whole)


def _digest(content: Content) -> int:
    text = content if isinstance(content, bytes) else repr(content).encode("utf-8", "backslashreplace")
    return int(xxhash.xxh3_64_intdigest(text))


def _looked_at(key: SetKey, read: _Read, config: Config, tokenizer: Any, found: list[Found]) -> LookedAt:
    notes = read.row_filter.notes()
    counts = {reason: one.count for reason, one in notes.left_out.items()}
    is_usable = counts.get("broken", 0) <= config.data.max_bad_rows
    if read.is_whole and is_usable and len(read.tokens.starts) == 0:
        found.append(_error(nothing_left(key, counts, config.data.max_tokens)))
    else:
        found += _of_rows(key, counts, notes.lines, read.num_rows, config)
    duplicates = len(read.digests) - len(set(read.digests))
    if duplicates:
        found.append(_of_duplicates(key, duplicates, len(read.digests)))
    samples = None
    if read.is_whole and is_usable and len(read.tokens.starts):
        samples = _samples(key, read, config, tokenizer, found)
    elif not read.is_whole:
        found.append(_not_read(key, read.num_rows))
    lengths = _lengths(read.tokens, config.data.max_tokens)
    return LookedAt(
        documents=len(read.tokens.starts), tokens=len(read.tokens.ids), samples=samples, left_out=counts,
        lengths=lengths, duplicates=duplicates, is_whole=read.is_whole,
    )  # fmt: skip


def _not_read(key: SetKey, rows: int) -> Found:
    why = f"what comes after the first {rows} rows: reading stops after {READ_FOR_S:g} s"
    return Found(level="not checked", key=f"data.{key}", message=why)


def _samples(key: SetKey, read: _Read, config: Config, tokenizer: Any, found: list[Found]) -> int | None:
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    tokens = read.tokens
    try:
        if key == "train" and config.data.eval_share:
            tokens, _ = split_tokens(tokens, config.data.eval_share, config.run.seed)
        return len(samples_of(key, tokens, config.data, padding))
    except DataError as error:
        found.append(_error(error))
        return None


def _of_rows(
    key: SetKey, counts: dict[Any, int], lines: tuple[str, ...], total: int, config: Config
) -> Iterator[Found]:
    broken = counts.get("broken", 0)
    if broken > config.data.max_bad_rows:
        first = lines[0].partition(": ")[2]
        where, _, mend = first.rpartition("; ")
        evidence = f"broken: {broken} of {total} rows; data.max_bad_rows allows {config.data.max_bad_rows}"
        yield Found(level="error", key=f"data.{key}", message=where or first, evidence=evidence, mend=mend)
    gone = {reason: count for reason, count in counts.items() if reason not in ("broken", "cut")}
    if sum(gone.values()) > _MANY * max(1, total):
        told = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in gone.items())
        message = f"{sum(gone.values()) / total:.0%} of the rows are not trained on"
        mend = "look at these rows; too long ones want a larger data.max_tokens"
        yield Found(level="warning", key=f"data.{key}", message=message, evidence=told, mend=mend)
    cut = counts.get("cut", 0)
    if cut > _MANY * max(1, total):
        message = f"{cut / total:.0%} of the rows are cut at data.max_tokens ({config.data.max_tokens})"
        mend = "set data.pack: true, where the rest goes on in the next block, or raise data.max_tokens"
        yield Found(level="warning", key="data.max_tokens", message=message, evidence=f"{cut} of {total}", mend=mend)


def _of_duplicates(key: SetKey, duplicates: int, documents: int) -> Found:
    message = f"{duplicates / documents:.1%} of the documents are there more than once"
    evidence = f"{duplicates} of {documents} repeat{'s' * (duplicates == 1)} the whole text of an earlier one"
    is_much = duplicates > _WORTH_A_WORD * documents
    mend = "remove the copies: what is read often is learned by heart" if is_much else ""
    return Found(
        level="warning" if is_much else "note", key=f"data.{key}", message=message, evidence=evidence, mend=mend
    )


def _overlap(read: dict[SetKey, _Read], found: list[Found]) -> int:
    train, held = set(read["train"].digests), read["eval"].digests
    both = sum(digest in train for digest in held)
    if both:
        message = f"{both / len(held):.1%} of the documents to evaluate on are trained on too"
        mend = "remove them from one of the two: the evaluation would praise what was learned by heart"
        evidence = f"{both} of {len(held)} are in data.train, whole text for whole text"
        found.append(Found(level="warning", key="data.eval", message=message, evidence=evidence, mend=mend))
    return both


def _lengths(tokens: Tokens, most: int) -> Lengths | None:
    lengths = tokens.lengths
    if len(lengths) == 0:
        return None
    median, p90 = (int(np.percentile(lengths, share, method="lower")) for share in (50, 90))
    return Lengths(median=median, p90=p90, longest=int(lengths.max()), above_max=int((lengths > most).sum()))
