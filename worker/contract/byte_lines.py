"""Lines of a file as bytes, read from its end, and how far a file was really written."""

import os
from collections.abc import Iterator

_BLOCK_BYTES = 65_536


def lines_from_end(descriptor: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines of the first ``end`` bytes, the last one first: where each begins, and its bytes without the newline.

    Reads no more than a block beyond what is asked of it.
    """
    position, rest = end, b""
    while position > 0:
        length = min(_BLOCK_BYTES, position)
        position -= length
        block = os.pread(descriptor, length, position) + rest
        first = block.find(b"\n") + 1 if position > 0 else 0
        if position > 0 and first == 0:
            rest = block  # a line that is longer than a block
            continue
        begin = position + len(block)
        for line in reversed(block[first:].split(b"\n")):
            begin -= len(line)
            yield begin, line
            begin -= 1
        rest = block[: first - 1] if first else b""


def written_length(descriptor: int) -> int:
    """How many bytes come before the first zero: a host that crashes may leave zeros where a block should be."""
    block, position = bytearray(1 << 20), 0
    while length := os.preadv(descriptor, [block], position):
        zero = block.find(b"\0", 0, length)
        if zero >= 0:
            return position + zero
        position += length
    return position
