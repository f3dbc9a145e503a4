"""What is trained on: documents become tokens, tokens become the samples of a map-style data set.

Map-style, so that a resume finds its place in milliseconds, and without any random draw, so that a sample depends on
its index alone.  Tokens take one to four bytes each; those of a tokenizer are kept in the run's folder and mapped.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset

from worker.contract.config import Config
from worker.documents import DataError, read_documents
from worker.token_cache import Tokens, cached, key_of

IGNORED = -100
"""The label of a token that is not predicted."""

Sample = dict[str, torch.Tensor]
_DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True)
class TrainingData:
    """Samples for training and evaluation; ``digest`` changes when a training sample does."""

    train: Dataset[Sample]
    evaluation: Dataset[Sample] | None
    collator: Callable[[list[Sample]], Sample]
    digest: str


def build_data(config: Config, tokenizer: Any, base: Path, cache: Path | None = None) -> TrainingData:
    """The data that ``config`` names, relative paths taken from ``base``; DataError where there is none to train on.

    Tokens are made once where there is a folder ``cache`` to keep them in.
    """
    train = build_samples("train", config, tokenizer, base, cache)
    evaluation = build_samples("eval", config, tokenizer, base, cache) if config.data.eval else None
    flat = config.data.pack and config.model.attention == "flash_attention_2"
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    collator: Callable[[list[Sample]], Sample] = Stack(flat) if config.data.pack else Pad(padding)
    return TrainingData(train, evaluation, collator, train.digest())


def build_samples(
    key: Literal["train", "eval"], config: Config, tokenizer: Any, base: Path, cache: Path | None = None
) -> "Blocks | Rows":
    """The samples of ``data.train`` or ``data.eval``, packed into blocks or one document a row."""
    tokens = _tokens(key, config, tokenizer, base, cache)
    length = config.data.max_tokens
    samples = Blocks(tokens, length) if config.data.pack else Rows(tokens, length)
    if len(tokens.ids) == 0:
        raise DataError(f"data.{key}: it holds no document of two tokens or more; give it text")
    if len(samples) == 0:
        less = f"its {len(tokens.ids)} tokens do not fill one block of {length}"
        raise DataError(f"data.{key}: {less}; lower data.max_tokens or give more text")
    return samples


def _tokens(key: Literal["train", "eval"], config: Config, tokenizer: Any, base: Path, cache: Path | None) -> Tokens:
    """The documents' tokens; from the cache where making them is more work than reading the text."""
    if config.data.tokenizer == "bytes":
        documents = read_documents(key, config.data, base)
        return join((np.frombuffer(one, dtype=np.uint8) for one in documents), np.uint8)

    def make() -> Tokens:
        kind = np.uint16 if len(tokenizer) <= 2**16 else np.int32
        return join(tokenize(read_documents(key, config.data, base), tokenizer), kind)

    if cache is None:
        return make()
    return cached(cache, key_of(read_documents(key, config.data, base), tokenizer), make)


def tokenize(documents: Iterable[bytes], tokenizer: Any) -> Iterator[np.ndarray[Any, Any]]:
    """Token ids, a document each: with the special tokens that the tokenizer adds, and its end-of-text at the end."""
    documents = iter(documents)
    end = tokenizer.eos_token_id
    while batch := [one.decode("utf-8") for one in islice(documents, _DOCUMENTS_AT_ONCE)]:
        for ids in tokenizer(batch, verbose=False, return_attention_mask=False)["input_ids"]:
            needs_end = end is not None and ids and ids[-1] != end
            yield np.asarray([*ids, end] if needs_end else ids, dtype=np.int64)


def join(documents: Iterable[np.ndarray[Any, Any]], kind: type[np.generic]) -> Tokens:
    """Documents end to end, without those of less than two tokens: they hold no next token to learn."""
    kept = [one.astype(kind, copy=False) for one in documents if len(one) > 1]
    ids = np.concatenate(kept) if kept else np.empty(0, dtype=kind)
    lengths = np.asarray([0, *(len(one) for one in kept)], dtype=np.int64)
    return Tokens(ids, np.cumsum(lengths)[:-1])


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
        labels = ids.clone()
        labels[starts] = IGNORED
        labels[0] = IGNORED
        return {"input_ids": ids, "position_ids": torch.from_numpy(positions), "labels": labels}

    def _starts_within(self, begin: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        first, last = np.searchsorted(self._tokens.starts, [begin, begin + self.length])
        return self._tokens.starts[first:last] - begin

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
        return {"input_ids": ids, "labels": ids.clone()}

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


def _digest(tokens: Tokens, settings: str) -> str:
    hasher = xxhash.xxh3_128(f"{settings} {tokens.ids.dtype.str} {len(tokens.ids)}\n".encode())
    hasher.update(np.ascontiguousarray(tokens.ids).data)
    hasher.update(tokens.starts.data)
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
