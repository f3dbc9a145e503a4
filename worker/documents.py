"""Reads documents: the files that a setting names, and in each of their rows a text, a pair or a conversation."""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from worker.contract.data_names import is_hub_name
from worker.contract.recipe_config import DataConfig
from worker.rows import FORMAT_OF_ENDING, ROWS_OF_FORMAT, WORD_OF_FORMAT, BadFileError, BadRow, rows_of_hub

SetKey = Literal["train", "eval"]
ASSISTANT = "assistant"
"""The role whose messages are learned."""


class DataError(Exception):
    """Data that cannot be trained on; one line that names the key, the file and what to do."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and its completion; only the completion is learned."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as a chat template takes it; only the assistant's answers are learned."""

    messages: tuple[dict[str, Any], ...]


Content = bytes | Pair | Chat
"""A text is UTF-8 encoded, so that the bytes of a file stay what they are."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, or a whole text file, with what it holds or why it cannot be used."""

    path: str
    number: int
    word: str
    """What the number counts; empty where the row is the file."""
    content: Content | BadRow

    def told(self, why: str) -> str:
        """Where it is and what is wrong there, for a person; ``why`` may go on with a colon."""
        if not self.word:
            return f"{self.path}: {why}"
        return f"{self.path}: {self.word} {self.number}{'' if why.startswith(':') else ' '}{why}"


def read_rows(key: SetKey, data: DataConfig, base: Path) -> Iterator[Row]:
    """Every row that ``data.<key>`` names, in the order of the sorted files; DataError where a file cannot be read.

    Text files are taken byte for byte where the tokenizer is ``bytes``, and must be UTF-8 for any other.
    """
    wanted = data.train if key == "train" else data.eval
    for path in find_files(key, (wanted,) if isinstance(wanted, str) else wanted or (), base):
        try:
            yield from _rows_of(path, data)
        except OSError as error:
            raise DataError(f"data.{key}: {path} cannot be read ({error.strerror or error})") from None
        except BadFileError as error:
            colon = "" if isinstance(path, str) else ":"
            raise DataError(f"data.{key}: {path}{colon} {error}") from None


def _rows_of(path: Path | str, data: DataConfig) -> Iterator[Row]:
    if isinstance(path, str):
        kind, rows = "hub", rows_of_hub(path)
    else:
        kind = format_of(path, data)
        if kind == "text":
            yield Row(str(path), 1, "", _text_of_file(path, any_bytes=data.tokenizer == "bytes"))
            return
        rows = ROWS_OF_FORMAT[kind](path)
    for number, fields in rows:
        yield Row(str(path), number, WORD_OF_FORMAT[kind], content_of(fields, data))


def format_of(path: Path, data: DataConfig) -> str:
    """How a file is read: as ``data.format`` says, or by its ending, ``text`` for all others."""
    return data.format if data.format != "auto" else FORMAT_OF_ENDING.get(path.suffix.lower(), "text")


def find_files(key: str, wanted: Sequence[str], base: Path) -> list[Path | str]:
    """The files behind each entry: a file, a glob, everything in a folder, or ``stdlib``; sorted within an entry.

    A file that several entries name comes once, where it is named first. A name of the hub stays as it is.
    """
    found = (path for entry in wanted for path in _files_of(key, entry, base))
    return list({os.path.normpath(path): path for path in found}.values())


def _files_of(key: str, entry: str, base: Path) -> Sequence[Path | str]:
    if entry == "stdlib":
        return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    path = base / Path(entry).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        found = [one for one in path.rglob("*") if not _is_hidden(one.relative_to(path))]
    else:
        pattern = str(Path(glob.escape(str(base))) / Path(entry).expanduser())
        found = [Path(name) for name in glob.glob(pattern, recursive=True)]  # noqa: PTH207 (absolute patterns too)
    files = sorted(one for one in found if one.is_file())
    if not files and is_hub_name(entry) and not path.is_dir():
        return [entry]
    if not files:
        what = "holds no file" if path.is_dir() else "is not there"
        raise DataError(f"data.{key}: {path} {what}; name a file, a folder, a glob, a hub name or stdlib")
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _text_of_file(path: Path, *, any_bytes: bool) -> bytes | BadRow:
    data = path.read_bytes()
    if not any_bytes:
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            return BadRow(f"line {line} is not UTF-8; convert the file, or set data.tokenizer: bytes")
    return data


def content_of(fields: Any, data: DataConfig) -> Content | BadRow:
    """What a row holds: messages before a prompt with its completion before a text; a null field is none."""
    if isinstance(fields, BadRow):
        return fields
    if not isinstance(fields, dict):
        return BadRow(f"is no object with named fields; write {{{data.text or data.messages!r}: ...}}")
    if fields.get(data.messages) is not None:
        return _chat(fields[data.messages], str(data.messages))
    if fields.get(data.prompt) is not None and fields.get(data.completion) is not None:
        return _pair(fields, str(data.prompt), str(data.completion))
    if fields.get(data.text) is not None:
        text = _bad_text(fields[data.text], str(data.text))
        return text or str(fields[data.text]).encode("utf-8")
    return _nothing_in(fields, data)


def _nothing_in(fields: dict[Any, Any], data: DataConfig) -> BadRow:
    known = (data.text, data.prompt, data.completion, data.messages)
    empty = next((name for name in known if name is not None and name in fields), None)
    if empty is not None and fields[empty] is None:
        return BadRow(f": {empty!r} is null; give it text or remove it")
    there = ", ".join(repr(name) for name in fields if name is not None)
    pair = f"{data.prompt!r} with {data.completion!r}" if data.prompt and data.completion else None
    wanted = " or ".join(filter(None, (data.text and repr(data.text), pair, data.messages and repr(data.messages))))
    return BadRow(f"has no {wanted} (it has {there or 'nothing'}); mend it, or name the column in data.text")


def _pair(fields: dict[Any, Any], prompt: str, completion: str) -> Pair | BadRow:
    bad = _bad_text(fields[prompt], prompt) or _bad_text(fields[completion], completion)
    return bad or Pair(fields[prompt], fields[completion])


def _chat(messages: Any, column: str) -> Chat | BadRow:
    if not isinstance(messages, list) or not messages:
        return BadRow(
            f": {column!r} is no list of messages but {messages!r:.40}; write [{{'role': .., 'content': ..}}]"
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return BadRow(f": message {number} of {column!r} has no role; write {{'role': .., 'content': ..}}")
        if message.get("content") is not None:
            bad = _bad_text(message["content"], f"content of message {number}")
            if bad is not None:
                return bad
    return Chat(tuple(messages))


def _bad_text(text: Any, name: str) -> BadRow | None:
    if not isinstance(text, str):
        return BadRow(f": {name!r} is not text but {text!r:.40}; put it in quotes, or name another column")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return BadRow(f": {name!r} holds half of a character (a lone surrogate); mend it")
    return None
