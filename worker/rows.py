"""The rows of one file, by its format: each with its number, and what is wrong with it where it cannot be read."""

import csv
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT_OF_ENDING = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
WORD_OF_FORMAT = {"jsonl": "line", "json": "entry", "csv": "line", "parquet": "row", "hub": "row"}
"""What a row's number counts, from 1; in a CSV file it is the row's last line."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used: what is wrong, and the mend."""

    why: str


class BadFileError(Exception):
    """A file of which no row can be had: what is wrong, and the mend."""


Rows = Iterator[tuple[int, Any]]
"""Numbers and fields; a BadRow in place of the fields that cannot be had."""


def rows_of_jsonl(path: Path) -> Rows:
    """One object a line; empty lines are none."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, _parsed(line)


def rows_of_json(path: Path) -> Rows:
    """An array of objects; BadFileError where it is none."""
    rows = _parsed(path.read_bytes())
    if isinstance(rows, BadRow):
        raise BadFileError(f"the file {rows.why}")
    if not isinstance(rows, list):
        raise BadFileError("is no array of objects; name it *.jsonl if it holds one object a line")
    yield from enumerate(rows, start=1)


class _KeyTwiceError(Exception):
    """An object that has a key twice: json itself would keep the last one and say nothing."""


def _fields_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise _KeyTwiceError(next(name for name in names if names.count(name) > 1))
    return fields


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_fields_once)
    except _KeyTwiceError as error:
        return BadRow(f"has the key {str(error)!r:.60} twice in one object; keep one of them")
    except json.JSONDecodeError as error:
        where = f", line {error.lineno}" if error.lineno > 1 else ""
        return BadRow(f"is not JSON ({error.msg}{where}); mend or remove it")
    except UnicodeDecodeError:
        return BadRow("is not UTF-8; convert it")
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        return BadRow(f"is JSON that nothing can read ({type(error).__name__}); mend or remove it")


def rows_of_csv(path: Path) -> Rows:
    """Fields by the names in the first line; BadFileError where one is there twice, or the quotes do not add up."""
    csv.field_size_limit(sys.maxsize)  # a document may be longer than the 128 KiB that csv allows
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.DictReader(file, strict=True)
        try:
            _check_names(rows.fieldnames or ())
            for row in rows:
                yield rows.line_num, _checked_fields(row)
        except csv.Error as error:
            raise BadFileError(f"line {rows.line_num} is not CSV ({error}); mend or remove it") from None


def _check_names(names: Sequence[str]) -> None:
    """BadFileError where two columns have one name: nobody could say which of them is meant."""
    twice = next((name for name in names if name and names.count(name) > 1), None)
    if twice is not None:
        raise BadFileError(f"has the column {twice!r} {names.count(twice)} times; rename all but one")


def _checked_fields(row: dict[Any, Any]) -> Any:
    if None in row:
        return BadRow("has more fields than the header; quote the text that holds commas")
    whole = "".join(value for value in row.values() if value)
    if any("\udc80" <= character <= "\udcff" for character in whole):
        return BadRow("is not UTF-8; convert it")
    return row


def rows_of_parquet(path: Path) -> Rows:
    """The table's rows; BadFileError where it is no Parquet file, or has two columns of one name."""
    import pyarrow  # here, because all other formats do without it
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_names(file.schema_arrow.names)
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pyarrow.ArrowException as error:
        raise BadFileError(f"is not Parquet ({' '.join(str(error).split())}); write it again") from None


def rows_of_hub(name: str) -> Rows:
    """A data set of the hub, or a folder that ``datasets`` knows how to load; BadFileError where it cannot be had.

    ``name`` is ``owner/name``, ``owner/name:split`` or ``owner/name:subset:split``; no split means ``train``.
    """
    import datasets  # here: it takes a second to import, and only this needs it

    whole, *parts = name.split(":")
    *subset, split = parts or ["train"]
    try:
        rows = datasets.load_dataset(whole, *subset, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        said = " ".join(str(error).split())
        raise BadFileError(f"is no file, and the hub does not give it ({type(error).__name__}: {said:.300})") from None
    yield from enumerate(rows, start=1)


ROWS_OF_FORMAT: dict[str, Callable[[Path], Rows]] = {
    "jsonl": rows_of_jsonl,
    "json": rows_of_json,
    "csv": rows_of_csv,
    "parquet": rows_of_parquet,
}
