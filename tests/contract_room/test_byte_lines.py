"""Lines from a file's end: the same as from its beginning, wherever a block ends."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.contract import byte_lines
from worker.contract.byte_lines import lines_from_end, written_length


@given(st.lists(st.sampled_from([b"", b"a", b"bc", b"def", b"a longer line"]), max_size=9), st.integers(1, 9))
def test_every_line_comes_with_its_place(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], block_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    data = b"\n".join(lines)
    path.write_bytes(data + b"more")
    descriptor = os.open(path, os.O_RDONLY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_lines, "_BLOCK_BYTES", block_bytes)
        found = list(lines_from_end(descriptor, len(data)))
    os.close(descriptor)
    assert [line for _, line in reversed(found)] == (data.split(b"\n") if data else [])
    assert all(data[begin : begin + len(line)] == line for begin, line in found)
    assert [begin for begin, _ in found] == sorted((begin for begin, _ in found), reverse=True)


@pytest.mark.parametrize("zero_at", [None, 0, 5, (1 << 20) - 1, 1 << 20, (1 << 20) + 7])
def test_what_comes_before_the_first_zero_was_written(tmp_path: Path, zero_at: int | None) -> None:
    data = bytearray(b"x" * ((1 << 20) + 10))
    if zero_at is not None:
        data[zero_at] = 0
    path = tmp_path / "file"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    assert written_length(descriptor) == (len(data) if zero_at is None else zero_at)
    os.close(descriptor)
