"""TensorBoard's event files, without TensorBoard: the few messages that are needed, and their framing.

Format: tensorflow/core/util/event.proto and summary.proto, framed as TFRecords (length, masked CRC-32C, data, masked
CRC-32C).  An append that was cut leaves a torn record, which ``whole_events`` finds.
"""

import struct
from collections.abc import Iterator, Mapping
from typing import Final, Literal

_DOUBLE, _BYTES, _FLOAT = 1, 2, 5
_DT_STRING: Final = 7
_START: Final = 1
_TENSOR_DATA: Final = 2


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_TABLE: Final = _crc_table()


def masked_crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli), rotated and offset as TFRecords have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """``data`` as one TFRecord."""
    length = struct.pack("<Q", len(data))
    return b"".join([length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))])


def whole_events(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Every whole record with the offset just past it; a torn tail ends the iteration."""
    offset = 0
    while offset + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        end = offset + 12 + length + 4
        if end > len(data):
            return
        yield end, data[offset + 12 : end - 4]
        offset = end


# -- messages ----------------------------------------------------------------------------------------------------------


def version_event(time: float) -> bytes:
    """The first event of every file."""
    return framed(_event(time, 0, _text(3, "brain.Event:2")))


def start_event(time: float, step: int) -> bytes:
    """From here on ``step`` and what follows it come again: readers drop what they had of them."""
    return framed(_event(time, step, _nested(7, _varint_field(1, _START))))


def scalars_event(time: float, step: int, values: Mapping[str, float]) -> bytes:
    """Several scalars of one step."""
    return framed(_event(time, step, _nested(5, b"".join(_scalar(tag, value) for tag, value in values.items()))))


def text_event(time: float, step: int, tag: str, text: str) -> bytes:
    """A text, in Markdown, for the text dashboard."""
    plugin = _nested(1, _text(1, "text"))
    metadata = _nested(9, plugin + _varint_field(4, _TENSOR_DATA))
    tensor = _nested(8, _varint_field(1, _DT_STRING) + _nested(2, b"") + _text(8, text))
    return framed(_event(time, step, _nested(5, _nested(1, _text(1, tag) + metadata + tensor))))


def kind_of(event: bytes) -> Literal["summary", "other"]:
    """Whether an event, without its frame, carries values; read from its first field after time and step."""
    offset = 9  # the time
    if event[offset : offset + 1] == b"\x10":
        offset += 1
        while event[offset] & 0x80:
            offset += 1
        offset += 1
    return "summary" if event[offset : offset + 1] == bytes([5 << 3 | _BYTES]) else "other"


def _event(time: float, step: int, what: bytes) -> bytes:
    return bytes([1 << 3 | _DOUBLE]) + struct.pack("<d", time) + _varint_field(2, step) + what


def _scalar(tag: str, value: float) -> bytes:
    return _nested(1, _text(1, tag) + bytes([2 << 3 | _FLOAT]) + struct.pack("<f", _single(value)))


def _single(value: float) -> float:
    """``value`` as a single can hold it; what is too large becomes infinite."""
    return value if abs(value) < 3.4e38 or value != value else float("inf") * (1 if value > 0 else -1)


def _nested(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _nested(field, text.encode())


def _varint_field(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
