"""The history: JSON at every moment, whole at any cut, one writer, the same cost for every record."""

import errno
import json
import math
import multiprocessing
import os
import signal
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract_room.disks import fill, small_disk
from tests.waiting import eventually
from worker.contract import syncs
from worker.contract.claim import FencedError
from worker.contract.files import UnusableFileError
from worker.contract.loss_history import (
    HistoryReader,
    HistoryWriter,
    Probe,
    Record,
    Start,
    broken_line,
    last_record,
    read_history,
    record,
    surviving,
)

START = Start(
    max_steps=9,
    lr=0.1,
    lr_expected=0.1,
    optimizer_steps=0,
    rng_digests=("a",),
    next_samples=(1,),
    probe=Probe(expected=None, found=1.0),
    versions={},
)


def one(step: int, loss: float | None = 1.0, **more: Any) -> Record:
    return record(
        **{"segment": 1, "attempt": 1, "restart": 0, "step": step, "epoch": 0.5, "time": 1e9, "loss": loss, **more}
    )


records = st.builds(
    one,
    step=st.integers(1, 30),
    loss=st.one_of(st.none(), st.floats()),
    grad_norm=st.floats(),
    segment=st.integers(1, 5),
    verdict=st.sampled_from(["ok", "pending", "spike", "nonfinite"]),
    warnings=st.one_of(st.none(), st.tuples(st.text(max_size=20))),
    start=st.one_of(st.none(), st.just(START)),
)


class AtOnce:
    """A thread that is done before its starter goes on."""

    def __init__(self, target: Callable[[], None], **kwargs: Any) -> None:
        self._target = target

    def start(self) -> None:
        self._target()

    def join(self) -> None:
        """It is done."""


class AtItsEnd(AtOnce):
    """A thread that gets to work only when somebody waits for it."""

    def start(self) -> None:
        """Not yet."""

    def join(self) -> None:
        self._target()


def free() -> None:
    """The claim still stands."""


def newest_step(writer: HistoryWriter) -> int:
    last = last_record(writer.path)
    return last.step if last else 0


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history")


def written(path: Path, found: list[Record]) -> list[bytes]:
    """The file's bytes before the first append and after each."""
    path.unlink(missing_ok=True)
    with HistoryWriter(path, free) as writer:
        states = [path.read_bytes()]
        for new in found:
            writer.append(new)
            states.append(path.read_bytes())
    return states


def whole_at(length: int, states: list[bytes]) -> int:
    """How many records end within the first ``length`` bytes."""
    return sum(length >= len(state) - len(b"\n]\n") for state in states[1:])


class TestAnyCut:
    @given(st.lists(records, max_size=6), st.data())
    def test_is_readable_and_the_writer_goes_on(
        self, tmp_path_factory: pytest.TempPathFactory, found: list[Record], data: st.DataObject
    ) -> None:
        path = tmp_path_factory.mktemp("cut") / "loss_history.json"
        states = written(path, found)
        cut = states[-1][: data.draw(st.integers(0, len(states[-1])))]
        zeros = data.draw(st.sampled_from([b"", b"\0", b"\0" * 100]))
        path.write_bytes(cut + zeros)
        self.check(path, found[: whole_at(len(cut), states)])

    def check(self, path: Path, expected: list[Record]) -> None:
        reader = HistoryReader(path)
        assert reader.new_records() == expected
        new = one(99)
        with HistoryWriter(path, free) as writer:
            assert writer.last == (expected[-1] if expected else None)
            assert writer.next_segment == (expected[-1].segment + 1 if expected else 1)
            assert last_record(path) == writer.last
            assert len(json.loads(path.read_bytes())) == len(expected)
            writer.append(new)
        assert len(json.loads(path.read_bytes())) == len(expected) + 1
        assert read_history(path) == [*expected, new]
        assert reader.new_records() == [new]

    def test_every_cut_of_a_small_file(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        found = [one(1, start=START), one(2, math.nan), one(3, verdict="spike", onset_step=2)]
        states = written(path, found)
        for length in range(len(states[-1]) + 1):
            path.write_bytes(states[-1][:length])
            whole = whole_at(length, states)
            assert last_record(path) == (found[whole - 1] if whole else None)
            self.check(path, found[:whole])

    def test_a_hole_of_zeros_midway(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        found = [one(step) for step in range(1, 9)]
        states = written(path, found)
        hole = len(states[3])
        path.write_bytes(states[-1][:hole] + b"\0" * 50 + states[-1][hole + 50 :])
        self.check(path, found[:3])

    def test_a_broken_line_is_named_where_whole_ones_follow_it(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        content = written(path, [one(step) for step in range(1, 9)])[-1]
        assert broken_line(path) is None
        lines = content.split(b"\n")
        lines[4] = b'{"step": "x", "loss": [},'
        path.write_bytes(b"\n".join(lines))
        assert broken_line(path) == 5
        path.write_bytes(b"\n".join(lines[:5]))  # torn: nothing follows
        assert broken_line(path) is None

    def test_no_cut_at_all(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        content = written(path, [one(1), one(2)])[-1]
        HistoryWriter(path, free).close()
        assert path.read_bytes() == content


class TestEveryMoment:
    @given(st.lists(records, max_size=8))
    def test_it_is_a_json_document_after_every_append(
        self, tmp_path_factory: pytest.TempPathFactory, found: list[Record]
    ) -> None:
        path = tmp_path_factory.mktemp("json") / "loss_history.json"
        states = written(path, found)
        assert [len(json.loads(state)) for state in states] == list(range(len(found) + 1))
        assert [json.loads(line.rstrip(b",")) for line in states[-1].split(b"\n")[1:-2]] == json.loads(states[-1])
        assert read_history(path) == found
        states[-1].decode("ascii")

    @given(st.lists(records, min_size=1, max_size=6), st.data())
    def test_a_reader_that_follows_sees_every_record_once(
        self, tmp_path_factory: pytest.TempPathFactory, found: list[Record], data: st.DataObject
    ) -> None:
        """It looks at any point of any append, when only some of the append's bytes have reached the file."""
        path = tmp_path_factory.mktemp("follow") / "loss_history.json"
        states = written(path, found)
        path.unlink()
        reader, seen = HistoryReader(path), []
        assert reader.new_records() == []
        for before, after in pairwise(states):
            changed = len(before) - len(b"\n]\n")
            for reached in sorted(data.draw(st.sets(st.integers(changed, len(after)), max_size=4))):
                path.write_bytes(after[:reached] + before[reached:])
                seen += reader.new_records()
        path.write_bytes(states[-1])
        seen += reader.new_records()
        assert seen == found
        assert reader.new_records() == []

    def test_a_killed_writer_and_its_successor(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        reader, seen = HistoryReader(path), []
        for start in (1, 2, 3):
            writer = FORK.Process(target=append_for_ever, args=(path,))
            writer.start()
            wanted = len(seen) + 300
            while len(seen) < wanted:
                seen += reader.new_records()
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
            seen += reader.new_records()
            assert seen[-1].segment == start
        HistoryWriter(path, free).close()
        assert json.loads(path.read_bytes())
        assert read_history(path) == seen
        assert [now.step - before.step for before, now in pairwise(seen)] == [1] * (len(seen) - 1)

    def test_a_file_that_shrank_is_not_followed(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        states = written(path, [one(1), one(2)])
        reader = HistoryReader(path)
        reader.new_records()
        path.write_bytes(states[1])
        with pytest.raises(UnusableFileError, match="shorter"):
            reader.new_records()


FORK = multiprocessing.get_context("fork")


def append_until_full(writer: HistoryWriter) -> int:
    """Append records from step 2 on; the first step that the disk did not take."""
    for step in count(2):
        try:
            writer.append(one(step, warnings=("x" * 700,)))
        except OSError as error:
            if error.errno == errno.ENOSPC:
                return step
            raise
    raise AssertionError("the disk is endless")


def append_for_ever(path: Path) -> None:
    with HistoryWriter(path, free) as writer:
        step, segment = writer.last.step if writer.last else 0, writer.next_segment
        while True:
            step += 1
            writer.append(one(step, segment=segment))


class TestOneWriter:
    def test_another_writer_fences_the_first(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        first, second = HistoryWriter(path, free), HistoryWriter(path, free)
        second.append(one(1))
        content = path.read_bytes()
        with pytest.raises(FencedError, match="changed under its writer"):
            first.append(one(1, 2.0))
        assert path.read_bytes() == content
        second.append(one(2))
        first.close()
        second.close()

    def test_a_lost_claim_fences_before_anything_is_written(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        lost: list[bool] = []

        def check() -> None:
            if lost:
                raise FencedError("another job")

        writer = HistoryWriter(path, check)
        writer.append(one(1))
        content = path.read_bytes()
        lost.append(True)
        with pytest.raises(FencedError, match="another job"):
            writer.append(one(2))
        with pytest.raises(FencedError, match="another job"):
            HistoryWriter(folder / "other.json", check)
        assert path.read_bytes() == content
        assert not (folder / "other.json").exists()
        writer.close()

    @pytest.mark.parametrize(
        "content", [b"{}", b"step,loss\n1,2\n", b'[{"step": 1, "loss": 2.0}]', b'[\n  {\n "a": 1\n  }\n]']
    )
    def test_a_file_of_another_program_is_left_alone(self, folder: Path, content: bytes) -> None:
        path = folder / "loss_history.json"
        path.write_bytes(content)
        with pytest.raises(UnusableFileError, match=r"loss_history\.json"):
            HistoryWriter(path, free)
        assert path.read_bytes() == content

    def test_whole_json_that_is_no_record_is_an_error(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        path.write_bytes(b'[\n{"step": "many"}\n]\n')
        for read in (read_history, last_record):
            with pytest.raises(UnusableFileError, match="cannot read"):
                read(path)


class TestCost:
    def test_the_20000th_append_writes_as_much_as_the_20th(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[str, int]] = []
        pwrite, pread = os.pwrite, os.pread

        def counted_pwrite(descriptor: int, data: bytes, offset: int) -> int:
            calls.append(("pwrite", len(data)))
            return pwrite(descriptor, data, offset)

        def counted_pread(descriptor: int, size: int, offset: int) -> bytes:
            calls.append(("pread", size))
            return pread(descriptor, size, offset)

        with HistoryWriter(folder / "loss_history.json", free) as writer:
            monkeypatch.setattr(os, "pwrite", counted_pwrite)
            monkeypatch.setattr(os, "pread", counted_pread)
            costs = []
            for step in range(100_001, 120_001):
                before = (folder / "loss_history.json").stat().st_size
                writer.append(one(step))
                costs.append((calls.copy(), (folder / "loss_history.json").stat().st_size - before))
                calls.clear()
        assert costs[19] == costs[19_999]
        assert [name for name, _ in costs[19_999][0]] == ["pwrite"]
        assert len(read_history(folder / "loss_history.json")) == 20_000

    def test_the_last_record_is_read_from_the_end(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = folder / "loss_history.json"
        written(path, [one(step) for step in range(1, 2_001)])
        read: list[int] = []
        pread = os.pread

        def counted(descriptor: int, size: int, offset: int) -> bytes:
            read.append(size)
            return pread(descriptor, size, offset)

        monkeypatch.setattr(os, "pread", counted)
        found = last_record(path)
        assert found is not None
        assert found.step == 2_000
        assert sum(read) < path.stat().st_size / 4

    def test_a_record_longer_than_a_chunk(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        long = one(2, warnings=("x" * 100_000,))
        content = written(path, [one(1), long])[-1]
        assert last_record(path) == long
        path.write_bytes(content[:-50])
        assert last_record(path) == one(1)

    def test_what_matters_is_on_disk_at_once_and_the_rest_within_two_seconds(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now, synced = [0.0], []
        monkeypatch.setattr(syncs, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(syncs, "threading", SimpleNamespace(Thread=AtOnce))
        with HistoryWriter(folder / "loss_history.json", free) as writer:
            monkeypatch.setattr(os, "fsync", lambda _: synced.append(newest_step(writer)))
            plan = [
                (1, "ok", 0.1),
                (2, "spike", 0.1),
                (3, "ok", 0.1),
                (4, "ok", 2.0),
                (5, "ok", 0.0),
                (6, "skipped", 0.0),
            ]
            for step, verdict, passed in plan:
                now[0] += passed
                writer.append(one(step, verdict=verdict))
            writer.append(one(7, start=START))
        assert synced == [2, 4, 6, 7, 7]

    def test_what_did_not_come_to_the_disk_is_told_at_the_next_record(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(descriptor: int) -> None:
            raise OSError(errno.EIO, "the disk lost it")

        writer = HistoryWriter(folder / "loss_history.json", free)
        monkeypatch.setattr(writer._syncs, "_every_s", 0.0)
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="the disk lost it"):
            eventually(lambda: writer.append(one(newest_step(writer) + 1)))
        monkeypatch.undo()
        for _ in range(2):  # the system tells of it once, and this writer for ever
            with pytest.raises(OSError, match="the disk lost it"):
                writer.sync()
        with pytest.raises(OSError, match="the disk lost it"):
            writer.close()

    def test_a_slow_disk_is_waited_for_by_the_next_sync(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        began: list[int] = []
        monkeypatch.setattr(syncs, "threading", SimpleNamespace(Thread=AtItsEnd))
        with HistoryWriter(folder / "loss_history.json", free) as writer:
            monkeypatch.setattr(writer._syncs, "_every_s", 0.0)
            monkeypatch.setattr(os, "fsync", lambda _: began.append(newest_step(writer)))
            for step in (1, 2, 3):
                writer.append(one(step))
            assert began == [2, 3]
        assert began == [2, 3, 3, 3]

    def test_a_full_disk_leaves_a_history_that_goes_on(self, tmp_path: Path) -> None:
        with small_disk(tmp_path / "disk") as disk:
            path = disk / "loss_history.json"
            with HistoryWriter(path, free) as writer:
                writer.append(one(1))
                filler = fill(disk)
                step = append_until_full(writer)
                assert [entry["step"] for entry in json.loads(path.read_bytes())] == list(range(1, step))
                filler.unlink()
                writer.append(one(step))
            assert [entry.step for entry in read_history(path)] == list(range(1, step + 1))


class TestRecords:
    @given(
        st.fixed_dictionaries(
            {
                **dict.fromkeys(("segment", "attempt", "restart", "step"), st.integers(0, 2**40)),
                **dict.fromkeys(("epoch", "time", "lr"), st.floats(allow_nan=False, allow_infinity=False)),
                **dict.fromkeys(
                    ("loss", "grad_norm", "loss_scale", "tokens_per_s", "step_s", "data_wait_s"),
                    st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False)),
                ),
                "peak_memory_bytes": st.one_of(st.none(), st.integers(0, 2**40)),
                "verdict": st.just("ok"),
                "data": st.builds(lambda epoch, batch: {"epoch": epoch, "batch": batch}, st.integers(), st.integers()),
            }
        )
    )
    def test_a_plain_one_has_the_bytes_that_it_has_when_it_is_built_and_checked(
        self, tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]
    ) -> None:
        folder = tmp_path_factory.mktemp("history")
        with HistoryWriter(folder / "plain", free) as plain, HistoryWriter(folder / "built", free) as built:
            for _ in range(2):
                plain.append_plain(fields)
                built.append(record(**fields))
        assert (folder / "plain").read_bytes() == (folder / "built").read_bytes()

    def test_a_plain_one_that_is_none_is_not_written(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        with HistoryWriter(path, free) as writer:
            writer.append(one(1))
            before = path.read_bytes()
            with pytest.raises(ValueError, match="not JSON compliant"):
                writer.append_plain(dict.fromkeys(vars(one(1))) | {"segment": 1, "loss": math.nan})
            assert path.read_bytes() == before

    @pytest.mark.parametrize(("number", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
    def test_a_number_that_is_not_finite_is_null_and_named(self, number: float, name: str) -> None:
        made = one(1, number, grad_norm=number, lr=0.1)
        assert (made.loss, made.grad_norm, made.lr) == (None, None, 0.1)
        assert made.nonfinite == {"loss": name, "grad_norm": name}

    def test_null_alone_is_not_known(self) -> None:
        assert one(1, None).nonfinite == {}

    def test_what_every_reader_asks_for_is_always_there(self, folder: Path) -> None:
        path = folder / "loss_history.json"
        written(path, [one(1, None)])
        assert json.loads(path.read_bytes())[0] == {
            "segment": 1, "attempt": 1, "restart": 0, "step": 1, "epoch": 0.5, "time": 1e9,
            "loss": None, "grad_norm": None, "lr": None, "verdict": "ok",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("verdict", "observed", "acted"),
        [("spike", False, True), ("spike", True, False), ("pending", False, False), ("ok", False, False)],
    )
    def test_acted(self, verdict: str, observed: bool, acted: bool) -> None:
        assert one(1, verdict=verdict, observed=observed).is_acted is acted


class TestSurviving:
    @given(st.lists(st.integers(1, 12), max_size=40))
    @settings(max_examples=300)
    def test_a_record_survives_when_no_later_one_is_at_or_before_its_step(self, steps: list[int]) -> None:
        found = [one(step, float(n)) for n, step in enumerate(steps)]
        naive = [new for n, new in enumerate(found) if all(later.step > new.step for later in found[n + 1 :])]
        assert surviving(found) == naive

    def test_a_short_new_branch_does_not_keep_the_old_ones_tail(self) -> None:
        old = [one(step) for step in range(1, 13)]
        new = [one(step, 2.0) for step in range(5, 7)]
        assert surviving([*old, *new]) == [*old[:4], *new]


def test_a_number_that_is_nought_is_told_and_read_back(tmp_path: Path) -> None:
    """As of an evaluation before the first step, which is not the record's own."""
    fields = {"eval_loss": 5.5, "eval_step": 0, "data_wait_s": 0.0}
    with HistoryWriter(tmp_path / "loss_history.json", lambda: None) as writer:
        writer.append(one(1, **fields))
    [read] = read_history(tmp_path / "loss_history.json")
    assert (read.evaluated_step, read.data_wait_s) == (0, 0.0)
