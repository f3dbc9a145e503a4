"""What is trained on: tokens become the samples of a map-style data set.

Map-style, so that a resume finds its place in milliseconds, and without any random draw, so that a sample depends on
its index alone.  Tokens take one to four bytes each; those of a tokenizer are kept in the run's folder and mapped.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from worker.contract.config import Config
from worker.contract.data_report import DataReport, SetReport
from worker.contract.recipe_config import DataConfig
from worker.documents import DataError, Row, SetKey, read_rows
from worker.row_filter import RowFilter, nothing_left
from worker.sources import Locate, Piece, pieces_between, rows_of_samples
from worker.token_cache import Notes, Tokens, cached, key_of
from worker.tokens import collect, encode_bytes, encoder

IGNORED = -100
"""The label of a token that is not predicted."""

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainingData:
    """Samples for training and evaluation; ``digest`` changes when a training sample does.

    ``locate`` names the rows of the files that each of the training samples, given by index, is made of.
    """

    train: Dataset[Sample]
    evaluation: Dataset[Sample] | None
    collator: Callable[[list[Sample]], Sample]
    digest: str
    report: DataReport
    locate: Locate
    longest: int
    """The most tokens of one document in a sample of either set."""
    lines: tuple[str, ...] = ()
    """A line for a person for each row that is broken."""


def build_data(
    config: Config,
    tokenizer: Any,
    base: Path,
    cache: Path | None = None,
    alive: Callable[[], None] = lambda: None,
    staged: Path | None = None,
) -> TrainingData:
    """The data that ``config`` names, relative paths taken from ``base``; DataError where there is none to train on.

    Tokens are made once where there is a folder ``cache`` to keep them in, and lie in ``staged`` until they are whole.
    ``alive`` is called with each row: it may take hours.
    """
    keys: tuple[SetKey, ...] = ("train", "eval") if config.data.eval else ("train",)
    made = {key: _tokens(key, config, tokenizer, base, cache, alive, staged) for key in keys}
    for key, (one, notes) in made.items():
        if len(one.starts) == 0:
            counts = {reason: gone.count for reason, gone in notes.left_out.items()}
            raise nothing_left(key, counts, config.data.max_tokens)
    tokens = {key: one for key, (one, _) in made.items()}
    if config.data.eval_share:
        tokens["train"], tokens["eval"] = split_tokens(tokens["train"], config.data.eval_share, config.run.seed)
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    samples = {key: samples_of(key, one, config.data, padding) for key, one in tokens.items()}
    reports = {key: _report(tokens[key], samples[key], made.get(key, (None, Notes()))[1]) for key in samples}
    flat = config.data.pack and config.model.attention == "flash_attention_2"
    digest = samples["train"].digest()
    return TrainingData(
        train=samples["train"],
        evaluation=samples.get("eval"),
        collator=Stack(flat) if config.data.pack else Pad(padding),
        digest=digest,
        report=DataReport(data_digest=digest, train=reports["train"], eval=reports.get("eval")),
        locate=partial(rows_of_samples, samples["train"], config.data, tokenizer),
        longest=max(one.longest for one in samples.values()),
        lines=tuple(line for _, notes in made.values() for line in notes.lines),
    )


def _report(tokens: Tokens, samples: "Blocks | Rows", notes: Notes) -> SetReport:
    return SetReport(
        documents=len(tokens.starts), tokens=len(tokens.ids), samples=len(samples), left_out=notes.left_out
    )


def samples_of(key: str, tokens: Tokens, data: DataConfig, padding: int) -> "Blocks | Rows":
    """The samples of one set of documents: packed into blocks, or one document a row."""
    length = data.max_tokens
    if not data.pack:
        return Rows(tokens, length)
    samples = Blocks(tokens if tokens.learned is None else kept_whole(tokens, length, padding), length)
    if len(samples) == 0:
        less = f"its {len(tokens.ids)} tokens do not fill one block of {length}"
        raise DataError(f"data.{key}: {less}; lower data.max_tokens or give more text")
    return samples


def _tokens(
    key: SetKey,
    config: Config,
    tokenizer: Any,
    base: Path,
    cache: Path | None,
    alive: Callable[[], None],
    staged: Path | None,
) -> tuple[Tokens, Notes]:
    """The documents' tokens; from the cache where making them is more work than reading the text."""
    data = config.data
    is_bytes = data.tokenizer == "bytes"
    kind: type[np.generic] = np.uint8 if is_bytes else np.uint16 if len(tokenizer) <= 2**16 else np.int32

    def read() -> Iterator[Row]:
        for row in read_rows(key, data, base):
            alive()
            yield row

    def make() -> tuple[Tokens, Notes]:
        row_filter = RowFilter(key, data.max_bad_rows)
        rows = row_filter.kept(read())
        encode = encode_bytes if is_bytes else encoder(tokenizer)
        tokens = collect(rows, encode, kind, data.max_tokens, data.pack, row_filter)
        return tokens, row_filter.notes()

    if cache is None or is_bytes:
        return make()
    settings = f"{data.max_tokens} {data.pack} {data.max_bad_rows}"
    return cached(cache, key_of(read(), tokenizer, settings), make, staged)


def split_tokens(tokens: Tokens, share: float, seed: int) -> tuple[Tokens, Tokens]:
    """The tokens without, and those of, a share of the documents that the seed draws; one of each kind at least."""
    count = len(tokens.starts)
    if count < 2:
        raise DataError("data.eval_share: there are not two documents to split; give data.eval, or more documents")
    held = min(max(1, round(share * count)), count - 1)
    is_held = np.zeros(count, dtype=np.bool_)
    is_held[random.Random(f"{seed} eval").sample(range(count), held)] = True
    return tokens.where(~is_held), tokens.where(is_held)


def kept_whole(tokens: Tokens, length: int, padding: int) -> Tokens:
    """The same documents, filled up so that none that fits into a block of ``length`` is cut by its end.

    What fills up is documents of their own, of which nothing is learned.
    """
    gaps, room = [], length
    lengths = np.diff(tokens.starts, append=len(tokens.ids))
    for size in lengths.tolist():
        gaps.append(room if size > room and size <= length and room < length else 0)
        room = (room - gaps[-1]) % length or length
        room = (room - size) % length or length
    return tokens.filled_up([*gaps, room % length], padding)


class Blocks(Dataset[Sample]):
    """Samples of exactly ``length`` tokens, filled with documents that do not see each other.

    Positions restart with each document, and there is no attention mask: that is how transformers knows packed
    documents apart (with ``use_cache`` off).  A document cut by a block's end goes on in the next block as one that
    starts there.  The first token of a piece is no label.  What does not fill the last block is left out.
    """

    def __init__(self, tokens: Tokens, length: int) -> None:
        self._tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return len(self._tokens.ids) // self.length

    def __getitem__(self, index: int) -> Sample:
        begin = _checked(index, len(self)) * self.length
        ids = torch.from_numpy(self._tokens.ids[begin : begin + self.length].astype(np.int64))
        starts = self._starts_within(begin)
        own_start = np.zeros(self.length, dtype=np.int64)
        own_start[starts] = starts
        positions = np.arange(self.length) - np.maximum.accumulate(own_start)
        labels = _labels(ids, self._tokens.learned, begin)
        labels[starts] = IGNORED
        labels[0] = IGNORED
        return {"input_ids": ids, "position_ids": torch.from_numpy(positions), "labels": labels}

    @property
    def longest(self) -> int:
        """The most tokens of one document in a sample."""
        return min(self.length, int(self._tokens.lengths.max()))

    def _starts_within(self, begin: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        first, last = np.searchsorted(self._tokens.starts, [begin, begin + self.length])
        return self._tokens.starts[first:last] - begin

    def pieces(self, index: int) -> list[Piece]:
        """The documents, and their tokens, that sample ``index`` holds."""
        begin = _checked(index, len(self)) * self.length
        return pieces_between(self._tokens, begin, begin + self.length)

    def digest(self) -> str:
        """Names every sample."""
        return _digest(self._tokens, f"pack {self.length}")


class Rows(Dataset[Sample]):
    """One document a sample, cut at ``length`` tokens."""

    def __init__(self, tokens: Tokens, length: int) -> None:
        self._tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return len(self._tokens.starts)

    def __getitem__(self, index: int) -> Sample:
        begin, end = self._bounds(_checked(index, len(self)))
        ids = torch.from_numpy(self._tokens.ids[begin : min(end, begin + self.length)].astype(np.int64))
        return {"input_ids": ids, "labels": _labels(ids, self._tokens.learned, begin)}

    @property
    def longest(self) -> int:
        """The most tokens of one document in a sample."""
        return min(self.length, int(self._tokens.lengths.max()))

    def pieces(self, index: int) -> list[Piece]:
        """The document, and its tokens, that sample ``index`` holds."""
        begin, end = self._bounds(_checked(index, len(self)))
        return pieces_between(self._tokens, begin, min(end, begin + self.length))

    def _bounds(self, index: int) -> tuple[int, int]:
        starts = self._tokens.starts
        end = starts[index + 1] if index + 1 < len(starts) else len(self._tokens.ids)
        return int(starts[index]), int(end)

    def digest(self) -> str:
        """Names every sample."""
        return _digest(self._tokens, f"rows {self.length}")


def _checked(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(f"sample {index} of {length}")
    return index


def _labels(ids: torch.Tensor, learned: np.ndarray[Any, np.dtype[np.bool_]] | None, begin: int) -> torch.Tensor:
    """What is to be predicted at the tokens ``ids``, which begin at ``begin``."""
    if learned is None:
        return ids.clone()
    return torch.where(torch.from_numpy(learned[begin : begin + len(ids)].copy()), ids, IGNORED)


def _digest(tokens: Tokens, settings: str) -> str:
    hasher = xxhash.xxh3_128(f"{settings} {tokens.ids.dtype.str} {len(tokens.ids)}\n".encode())
    hasher.update(np.ascontiguousarray(tokens.ids).data)
    hasher.update(tokens.starts.data)
    if tokens.learned is not None:
        hasher.update(np.ascontiguousarray(tokens.learned).data)
    return str(hasher.hexdigest())


@dataclass(frozen=True)
class Stack:
    """Samples of one length, stacked; ``flat`` lays them end to end in one row.

    flash_attention_2 keeps packed documents apart only in a batch of one row.
    """

    flat: bool = False

    def __call__(self, samples: list[Sample]) -> Sample:
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        return {name: value.reshape(1, -1) for name, value in batch.items()} if self.flat else batch


@dataclass(frozen=True)
class Pad:
    """Samples of any length, filled up on the right to the longest; what is filled is neither seen nor learned."""

    token: int

    def __call__(self, samples: list[Sample]) -> Sample:
        seen = [torch.ones_like(sample["input_ids"]) for sample in samples]
        return {
            "input_ids": _filled([sample["input_ids"] for sample in samples], self.token),
            "attention_mask": _filled(seen, 0),
            "labels": _filled([sample["labels"] for sample in samples], IGNORED),
        }


def _filled(rows: list[torch.Tensor], value: int) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
