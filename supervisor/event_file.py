"""TensorBoard event files, read without TensorBoard: the scalars of each step.

A file is a row of records: length, checksum, bytes, checksum.  Each record is a protobuf message, of which only these
fields matter: of an event the step (2) and the summary (5); of a summary its values (1); of a value the tag (1), the
number (2) or the tensor (8); of a tensor its type (1), its bytes (4) or its numbers (5, 6).  Checksums are not checked.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_HEAD: Final = 12
_FOOT: Final = 4
_FLOAT, _DOUBLE = 1, 2


def is_event_file(path: Path, head: bytes) -> bool:
    """Whether the first bytes of ``path`` are those of an event file."""
    return "tfevents" in path.name or (len(head) >= _HEAD and b"brain.Event:" in head)


def event_rows(data: bytes) -> list[dict[str, Any]]:
    """The scalars of each step, by tag, in the order of the file; what was written last may be torn."""
    rows: list[dict[str, Any]] = []
    for record in _records(data):
        step, scalars = _event(record)
        for tag, number in scalars:
            if not rows or rows[-1]["step"] != step or tag in rows[-1]:
                rows.append({"step": step})
            rows[-1][tag] = number
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _HEAD <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + _HEAD + length
        if end + _FOOT > len(data):
            return
        yield data[at + _HEAD : end]
        at = end + _FOOT


def _event(record: bytes) -> tuple[int, list[tuple[str, float]]]:
    step, scalars = 0, []
    for number, value in _fields(record):
        if number == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >> 63 else value
        elif number == 5 and isinstance(value, bytes):
            found = (_scalar(one) for field, one in _fields(value) if field == 1 and isinstance(one, bytes))
            scalars = [scalar for scalar in found if scalar is not None]
    return step, scalars


def _scalar(value: bytes) -> tuple[str, float] | None:
    tag, found = "", None
    for number, part in _fields(value):
        if number == 1 and isinstance(part, bytes):
            tag = part.decode("utf-8", "replace")
        elif number == 2 and isinstance(part, float):
            found = part
        elif number == 8 and isinstance(part, bytes):
            found = _tensor(part)
    return None if found is None else (tag, found)


def _tensor(tensor: bytes) -> float | None:
    """The number of a tensor that holds one; None for every other tensor."""
    kind, numbers = 0, b""
    for number, part in _fields(tensor):
        if number == 1 and isinstance(part, int):
            kind = part
        elif number in (4, 5, 6):
            numbers = struct.pack("<f" if number == 5 else "<d", part) if isinstance(part, float) else bytes(part)
    layout = {_FLOAT: "<f", _DOUBLE: "<d"}.get(kind)
    if layout is None or len(numbers) != struct.calcsize(layout):
        return None
    (found,) = struct.unpack(layout, numbers)
    return float(found)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, a float or bytes; ends where the message makes no sense."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        length = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            length, at = _varint(message, at)
        if length is None or at + length > len(message):
            return
        part, at = message[at : at + length], at + length
        yield number, part if kind == _BYTES else struct.unpack("<d" if kind == _FIXED64 else "<f", part)[0]


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if not byte & 0x80:
            break
    return value, at
