"""Tokens that were made once: kept in the run's folder, under a name that changes with the text or the tokenizer."""

import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import transformers
import xxhash

from worker.contract.files import sync_folder
from worker.documents import DataError


@dataclass(frozen=True)
class Tokens:
    """Documents end to end: ``ids`` in the smallest type that holds them, and where each document starts."""

    ids: np.ndarray[Any, Any]
    starts: np.ndarray[Any, np.dtype[np.int64]]


def cached(folder: Path, key: str, make: Callable[[], Tokens]) -> Tokens:
    """The tokens that lie under ``key`` in ``folder``, mapped into memory; made and put there the first time.

    Ranks that come at the same time each make them, and the first one's stay. DataError where what lies there cannot
    be read.
    """
    place = folder / key
    if not place.exists():
        _publish(place, make())
    try:
        return Tokens(np.load(place / "ids.npy", mmap_mode="r"), np.load(place / "starts.npy"))
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{place} cannot be read ({error}); remove it, and it is made again") from None


def _publish(place: Path, tokens: Tokens) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    staged = place.with_name(f".tmp-{place.name}-{secrets.token_hex(4)}")
    staged.mkdir()
    for name, values in (("ids.npy", tokens.ids), ("starts.npy", tokens.starts)):
        with open(staged / name, "xb") as file:
            np.save(file, values)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(staged)
    try:
        staged.rename(place)
    except OSError:
        shutil.rmtree(staged)
        if not place.exists():
            raise
    sync_folder(place.parent)


def key_of(documents: Iterable[bytes], tokenizer: Any) -> str:
    """32 hex digits that change with any document, with the tokenizer, and with the library's version."""
    hasher = xxhash.xxh3_128(f"{transformers.__version__} {tokenizer!r}\n".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    hasher.update((backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))).encode())
    for document in documents:
        hasher.update(f"{len(document)}\n".encode())
        hasher.update(document)
    return str(hasher.hexdigest())
