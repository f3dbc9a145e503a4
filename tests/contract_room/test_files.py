"""Files that are whole at every moment: under readers, kills and full disks."""

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract_room.disks import fill, small_disk
from worker.contract.files import (
    Message,
    UnusableFileError,
    append_line,
    encode,
    make_folder,
    publish,
    publish_message,
    read_message,
)

FORK = multiprocessing.get_context("fork")


class Note(Message):
    format: int
    text: str | None = None


def publish_for_ever(path: Path, texts: list[str]) -> None:
    while True:
        for text in texts:
            publish(path, text)


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class TestPublish:
    def test_a_reader_never_sees_a_part_and_a_kill_leaves_a_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "file.json"
        texts = [letter * 200_000 for letter in "abc"]
        publish(path, texts[0])
        writer = FORK.Process(target=publish_for_ever, args=(path, texts))
        writer.start()
        seen: set[str] = set()
        looks = 0
        while len(seen) < 3 or looks < 200:
            text = path.read_text()
            assert text in texts
            seen.add(text)
            looks += 1
        os.kill(writer.pid or 0, signal.SIGKILL)
        writer.join()
        assert path.read_text() in texts
        leftovers = [one.name for one in tmp_path.iterdir() if one != path]
        assert all(name.startswith(".tmp-") for name in leftovers)

    def test_a_full_disk_leaves_the_old_file(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk") as disk:
            publish(disk / "file", "old")
            filler = fill(disk)
            with pytest.raises(OSError, match="No space"):
                publish(disk / "file", "new" * 10_000)
            assert (disk / "file").read_text() == "old"
            assert {one.name for one in disk.iterdir()} == {"file", "filler"}
            filler.unlink()
            publish(disk / "file", "new")
            assert (disk / "file").read_text() == "new"

    def test_a_failed_sync_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        publish(tmp_path / "file", "old")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            publish(tmp_path / "file", "new")
        assert [one.name for one in tmp_path.iterdir()] == ["file"]
        assert (tmp_path / "file").read_text() == "old"

    def test_the_file_follows_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            publish(tmp_path / "file", "text")
            append_line(tmp_path / "lines", "text")
        finally:
            os.umask(before)
        assert {one.stat().st_mode & 0o777 for one in tmp_path.iterdir()} == {0o640}

    @pytest.mark.parametrize("name", ["with space", "quote'\"", "$HOME", "line\nbreak", "世界"])
    def test_any_folder_name(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        publish(tmp_path / name / "file", "text")
        assert (tmp_path / name / "file").read_text() == "text"


class TestAppendLine:
    def test_lines_add_up(self, tmp_path: Path) -> None:
        for n in range(3):
            append_line(tmp_path / "log", encode({"n": n}))
        assert [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()] == [
            {"n": n} for n in range(3)
        ]

    def test_a_full_disk_takes_nothing_of_a_line(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk") as disk:
            append_line(disk / "log", "first")
            filler = fill(disk)
            with pytest.raises(OSError, match="No space"):
                append_line(disk / "log", "second" * 2_000)
            assert (disk / "log").read_text() == "first\n"
            filler.unlink()
            append_line(disk / "log", "third")
            assert (disk / "log").read_text() == "first\nthird\n"

    def test_a_failed_sync_takes_nothing_of_a_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        append_line(tmp_path / "log", "first")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            append_line(tmp_path / "log", "second")
        assert (tmp_path / "log").read_text() == "first\n"


class TestMessages:
    def test_nothing_there_is_none(self, tmp_path: Path) -> None:
        assert read_message(tmp_path / "note.json", Note) is None

    @given(st.builds(Note, format=st.integers(-(2**60), 2**60), text=st.one_of(st.none(), st.text())))
    def test_what_is_published_is_read(self, tmp_path_factory: pytest.TempPathFactory, note: Note) -> None:
        path = tmp_path_factory.mktemp("note") / "note.json"
        publish_message(path, note)
        assert read_message(path, Note) == note
        path.read_bytes().decode("ascii")

    def test_unknown_fields_are_ignored(self, tmp_path: Path) -> None:
        (tmp_path / "note.json").write_text('{"format": 1, "later": [1]}')
        assert read_message(tmp_path / "note.json", Note) == Note(format=1)

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": "x"}', b"\xff", b'{"format": 1', b"\0" * 40])
    def test_what_cannot_be_read_is_named(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "note.json"
        path.write_bytes(content)
        with pytest.raises(UnusableFileError) as caught:
            read_message(path, Note)
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
    def test_json_has_only_finite_numbers(self, number: float) -> None:
        with pytest.raises(ValueError, match="not JSON compliant"):
            encode({"loss": number})


def test_folders_are_made_below_one_that_is_there_and_that_one_never(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(FileNotFoundError):
        make_folder(run / "attempts" / "0001", within=run)
    assert not run.exists()
    run.mkdir()
    for _ in range(2):
        make_folder(run / "attempts" / "0001", within=run)
    assert (run / "attempts" / "0001").is_dir()
