"""A shard of random bytes in the text: it spikes, and again at the same batches; then they are left out, and named."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.journal import Finished, RolledBack, SegmentStarted
from tests.whole_room.house import EXPLODING, House, environment, furnish
from worker.contract.loss_history import surviving
from worker.order import EpochOrder

pytestmark = pytest.mark.training

MAX_STEPS, BATCH, BLOCK = 600, 2, 64
FIRST_BAD, NUM_BAD = 204, 5
"""Batches of the shard: more than ``spike.patience``, fewer than the 1 % of the run that may be left out."""


def write_data(folder: Path) -> None:
    """Text, the shard, and text again; one file each, and each a whole number of batches."""
    batch = BATCH * BLOCK
    lines = "".join(f"line {number}: {number * number} and {number % 7}\n" for number in range(9000))
    before, after = FIRST_BAD * batch, (MAX_STEPS + 50) * batch
    (folder / "a.txt").write_text(lines[:before])
    (folder / "shard.txt").write_bytes(random.Random(4).randbytes(NUM_BAD * batch))
    (folder / "c.txt").write_text(lines[before:after])


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    sections = {
        "data": {
            "train": ["a.txt", "shard.txt", "c.txt"],
            "tokenizer": "bytes",
            "max_tokens": BLOCK,
            "shuffle": False,
        },
        "training": {
            **EXPLODING["training"],
            "max_steps": MAX_STEPS,
            "batch_size": BATCH,
            "optimizer": {"name": "adamw", "learning_rate": 1e-2},
            "schedule": {"name": "constant", "warmup": 20},
            "max_grad_norm": 1.0,
        },
        "recovery": {"spike": {"lr_factor": 0.5}},
        "spike": {},
        "checkpoint": {"every_steps": 20, "healthy_after": 10, "keep": 3, "keep_quarantined": 1},
    }
    with furnish(tmp_path_factory.mktemp("shard"), environment(), **sections) as house:
        write_data(house.folder)
        done = house.higgsfield("run", "tiny.yaml")
        assert done.returncode == 0, done.stdout + done.stderr
        yield house


def test_it_is_rolled_back_then_the_batches_are_left_out_and_it_finishes(house: House) -> None:
    first, second, *_ = house.those(RolledBack)
    assert first.kind == "spike"
    assert first.skip_batches == ()
    assert FIRST_BAD <= first.batches[-1].batch < FIRST_BAD + NUM_BAD
    assert second.skip_batches != ()
    assert {one.batch for one in second.batches} & {one.batch for one in first.batches}
    [finished] = house.those(Finished)
    assert finished.final_step == MAX_STEPS


def test_the_run_that_survives_never_saw_them_and_all_others_in_their_order(house: House) -> None:
    skipped = house.those(RolledBack)[-1].skip_batches
    gone = {batch for one in skipped for batch in range(one.first, one.first + one.count)}
    assert len(gone) <= MAX_STEPS // 100
    trained = [record.data.batch for record in surviving(house.records) if record.data]
    assert trained == [batch for batch in range(MAX_STEPS + len(gone)) if batch not in gone]
    assert surviving(house.records)[-1].verdict == "ok"


def test_the_log_names_file_and_lines_of_each(house: House) -> None:
    skipped = house.those(RolledBack)[1].skip_batches
    gone = [batch for one in skipped for batch in range(one.first, one.first + one.count)]
    named = [one for event in house.those(SegmentStarted) if event.start for one in event.start.left_out]
    assert [one.batch for one in named][: len(gone)] == gone
    data = b"".join((house.folder / name).read_bytes() for name in ("a.txt", "shard.txt", "c.txt"))
    order = EpochOrder(range(len(data) // BLOCK), BATCH, seed=42, shuffle=False, skipped=())
    for one in named:
        text = b"".join(data[sample * BLOCK : (sample + 1) * BLOCK] for sample in order.samples_in(0, one.batch))
        told = b"".join(
            b"\n".join(Path(rows.file).read_bytes().split(b"\n")[rows.first - 1 : rows.last]) for rows in one.rows
        )
        assert text in told
    log = house.higgsfield("log", "tiny").stdout
    assert "left out" in log
    assert str(house.folder / "shard.txt") in log
    assert str(house.folder / "shard.txt") in house.higgsfield("log", "tiny", "--json").stdout
