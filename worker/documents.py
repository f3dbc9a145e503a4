"""Reads documents from files: the files that a setting names, and the text in each of them."""

import csv
import glob
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from worker.contract.config import DataConfig

_FORMAT_OF_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


class DataError(Exception):
    """Data that cannot be trained on; one line that names the key, the file and what to do."""


class _BadFileError(Exception):
    """What is wrong inside a file, and the mend."""


def read_documents(key: Literal["train", "eval"], data: DataConfig, base: Path) -> Iterator[bytes]:
    """Every document that ``data.<key>`` names, UTF-8 encoded, in the order of the sorted files.

    Text files are taken byte for byte where the tokenizer is ``bytes``, and must be UTF-8 for any other.
    """
    wanted = data.train if key == "train" else data.eval
    for path in find_files(key, (wanted,) if isinstance(wanted, str) else wanted or (), base):
        kind = data.format if data.format != "auto" else _FORMAT_OF_ENDING.get(path.suffix.lower(), "text")
        try:
            if kind == "text":
                yield _read_text(path, any_bytes=data.tokenizer == "bytes")
            else:
                for place, row in _ROWS_OF_FORMAT[kind](path):
                    yield _text_of(row, data.text, place)
        except OSError as error:
            raise DataError(f"data.{key}: {path} cannot be read ({error.strerror or error})") from None
        except _BadFileError as error:
            raise DataError(f"data.{key}: {path}: {error}") from None


def find_files(key: str, wanted: Sequence[str], base: Path) -> list[Path]:
    """The files behind each entry: a file, a glob, everything in a folder, or ``stdlib``; sorted within an entry."""
    return [path for entry in wanted for path in _files_of(key, entry, base)]


def _files_of(key: str, entry: str, base: Path) -> list[Path]:
    if entry == "stdlib":
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    path = base / Path(entry).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [one for one in path.rglob("*") if not _is_hidden(one.relative_to(path))]
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]  # noqa: PTH207 (absolute patterns too)
    files = sorted(one for one in found if one.is_file())
    if not files:
        what = "holds no file" if path.is_dir() else "is not there"
        raise DataError(f"data.{key}: {path} {what}; name a file, a folder, a glob or stdlib")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_text(path: Path, *, any_bytes: bool) -> bytes:
    data = path.read_bytes()
    if not any_bytes:
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise _BadFileError(f"line {line} is not UTF-8; convert the file, or set data.tokenizer: bytes") from None
    return data


def _text_of(row: Any, column: str, place: str) -> bytes:
    """The text in a row, which may be empty."""
    if not isinstance(row, dict):
        raise _BadFileError(f"{place} is no object with named fields; write {{{column!r}: text}}")
    text = row.get(column)
    if text is None and column in row:
        raise _BadFileError(f"{place}: {column!r} is null; give it text or remove it")
    if text is None:
        there = ", ".join(repr(name) for name in row if name is not None)
        raise _BadFileError(f"{place} has no {column!r} (it has {there or 'nothing'}); mend it, or set data.text")
    if not isinstance(text, str):
        raise _BadFileError(f"{place}: {column!r} is not text but {text!r:.40}; put it in quotes, or set data.text")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadFileError(f"{place}: {column!r} holds half of a character (a lone surrogate); mend it") from None


def _rows_of_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"line {number}", _parse_json(line, f"line {number}")


def _rows_of_json(path: Path) -> Iterator[tuple[str, Any]]:
    rows = _parse_json(path.read_bytes(), "the file")
    if not isinstance(rows, list):
        raise _BadFileError("is no array of objects; name it *.jsonl if it holds one object a line")
    for number, row in enumerate(rows, start=1):
        yield f"entry {number}", row


def _parse_json(data: bytes, what: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        where = f", line {error.lineno}" if error.lineno > 1 else ""
        raise _BadFileError(f"{what} is not JSON ({error.msg}{where}); mend or remove it") from None
    except UnicodeDecodeError:
        raise _BadFileError(f"{what} is not UTF-8; convert it") from None
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise _BadFileError(
            f"{what} is JSON that nothing can read ({type(error).__name__}); mend or remove it"
        ) from None


def _rows_of_csv(path: Path) -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(sys.maxsize)  # a document may be longer than the 128 KiB that csv allows
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            for row in rows:
                place = f"line {rows.line_num}"
                if None in row:
                    raise _BadFileError(f"{place} has more fields than the header; quote the text that holds commas")
                yield place, row
        except csv.Error as error:
            raise _BadFileError(f"line {rows.line_num} is not CSV ({error}); mend or remove it") from None
        except UnicodeDecodeError:
            raise _BadFileError("is not UTF-8; convert it") from None


def _rows_of_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow  # here, because all other formats do without it
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except pyarrow.ArrowException as error:
        raise _BadFileError(f"is not Parquet ({' '.join(str(error).split())}); write it again") from None


_ROWS_OF_FORMAT: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    "jsonl": _rows_of_jsonl,
    "json": _rows_of_json,
    "csv": _rows_of_csv,
    "parquet": _rows_of_parquet,
}
