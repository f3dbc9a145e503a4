"""Files that are whole at every moment: publish by rename, append by line, read as data.

One writer a file is the rule of the house, so nothing here locks.  Temporary files begin with ``.tmp-``,
which no reader's pattern matches.
"""

import contextlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

_ENCODER: Final = json.JSONEncoder(ensure_ascii=True, allow_nan=False, check_circular=False, separators=(", ", ": "))
_LARGEST_BYTES: Final = 64 << 20
"""Of any file that is read whole: the journal of a run that lives for years has a tenth of it."""


class UnusableFileError(Exception):
    """A file that is there and cannot be used; the message names it and says why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


class Message(BaseModel):
    """A frozen value that is read from or written to a file; unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


AnyMessage = TypeVar("AnyMessage", bound=Message)


def encode(value: Any) -> str:
    """JSON on one line: ASCII, finite numbers only (ValueError otherwise)."""
    return _ENCODER.encode(value)


def publish(path: Path, text: str, mode: int = 0o666, *, is_durable: bool = True) -> None:
    """Put ``text`` at ``path`` whole and durably: a reader sees the old file or the new one, never a part.

    ``mode`` is what the umask is taken from. Not ``is_durable``: what a crash of this host may undo, or spoil.
    """
    temporary = path.with_name(f".tmp-{path.name}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            temporary.unlink(missing_ok=True)
        raise
    if is_durable:
        sync_folder(path.parent)


def publish_message(path: Path, message: Message, *, is_durable: bool = True) -> None:
    """Publish a message as JSON with every field written out."""
    publish(path, encode(message.model_dump(mode="json")) + "\n", is_durable=is_durable)


def open_data(path: Path) -> BinaryIO:
    """A regular file, to be read; OSError where it cannot be opened, UnusableFileError where it is anything else.

    A run's folder may be somebody else's: reading a pipe or a device there might never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_other_kinds(path, os.fstat(descriptor).st_mode)
    except UnusableFileError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def refuse_what_is_no_file(path: Path) -> None:
    """UnusableFileError where something else than a regular file has this name; nothing is opened."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    _refuse_other_kinds(path, mode)


def _refuse_other_kinds(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        what = "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
        raise UnusableFileError(path, f"{what}; move it away, a file of the run has this name")


def read_data(path: Path) -> bytes:
    """All of a regular file; OSError and UnusableFileError as ``open_data``, also where it is far too large."""
    with open_data(path) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
            raise UnusableFileError(path, f"is larger than {_LARGEST_BYTES >> 20} MiB, which no file of a run is")
        return file.read()


def read_message(path: Path, kind: type[AnyMessage]) -> AnyMessage | None:
    """The message at ``path``; None where there is no file; UnusableFileError where it cannot be read."""
    try:
        text = read_data(path).decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UnusableFileError(path, f"cannot be read ({error})") from None
    try:
        message = kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UnusableFileError(path, f"{where}: {first['msg']}") from None
    return message


def is_left(path: Path) -> bool:
    """Whether somebody has left a file here, such as STOP or SAVE, of whatever kind; a folder asks for nothing."""
    return os.path.lexists(path) and path.exists() and not path.is_dir()


def remove_left(path: Path) -> None:
    """Remove a file that somebody has left; a folder stays."""
    with contextlib.suppress(IsADirectoryError):
        path.unlink(missing_ok=True)


def append_line(path: Path, line: str) -> None:
    """Append one line and make it durable; on a full disk nothing of it stays and OSError is raised."""
    data = (line + "\n").encode("ascii")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
    if size == 0:
        sync_folder(path.parent)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def make_folder(folder: Path, within: Path) -> None:
    """Make ``folder`` and what is missing between it and ``within``; FileNotFoundError where that itself is gone.

    A run's folder that was moved or removed under way must not come back as one with nothing in it.
    """
    for name in folder.relative_to(within).parts:
        within = within / name
        within.mkdir(exist_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
