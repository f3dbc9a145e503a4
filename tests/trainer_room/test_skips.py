"""Data left out, in real runs: whole global batches, once, and everything else as if they had never been there."""

import json
import signal
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from supervisor.journal import SegmentStarted
from supervisor.report.texts import details_of
from tests.trainer_room.rig import Rig, same_end
from worker.contract.manifest import complete_manifest
from worker.order import EpochOrder

pytestmark = pytest.mark.training

STEPS_AN_EPOCH, MAX_STEPS, EVERY_STEPS = 14, 10, 4
BLOCK = 32


def documents(num_samples: int) -> list[str]:
    """A text of one block of 32 bytes a sample."""
    return [
        f"sample {number}, {number * number * 7919 % 1000003:06}".ljust(BLOCK, ".") for number in range(num_samples)
    ]


def write(path: Path, texts: list[str], *, is_packed: bool) -> str:
    """One document that is packed into a block a text, or a document a text."""
    rows = ["".join(texts)] if is_packed else texts
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def skip(epoch: int, first: int, count: int) -> list[dict[str, int]]:
    return [{"epoch": epoch, "first": first, "count": count}]


def positions(rig: Rig) -> list[tuple[int, int]]:
    return [(record.data.epoch, record.data.batch) for record in rig.history() if record.data]


def left_out_lines(rig: Rig) -> dict[int, str]:
    """Batches 3 and 4 of the second epoch, and the lines of the text that their four blocks of 32 bytes hold."""
    text = Path(str(rig.config.data.train)).read_bytes()
    order = EpochOrder(range(20), global_batch=4, seed=7, shuffle=True, skipped=())
    found = {}
    for batch in (3, 4):
        lines: set[int] = set()
        for sample in order.samples_in(1, batch):
            begin, end = sample * BLOCK, (sample + 1) * BLOCK
            lines |= set(range(text.count(b"\n", 0, begin) + 1, text.count(b"\n", 0, end - 1) + 2))
        runs = [list(run) for _, run in groupby(sorted(lines), key=lambda line: line - sorted(lines).index(line))]
        found[batch] = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return found


@pytest.mark.parametrize(("is_packed", "world", "accumulation"), [(True, 1, 1), (False, 2, 2)])
def test_a_run_without_them_is_the_run_whose_data_never_held_them(
    make_rig: Callable[..., Rig], tmp_path: Path, is_packed: bool, world: int, accumulation: int
) -> None:
    """The skip reaches back over what was trained on already, and holds through a kill and a restart."""
    global_batch = 2 * world * accumulation
    texts = documents(STEPS_AN_EPOCH * global_batch)
    left_out = range(4 * global_batch, 6 * global_batch)
    others = [text for number, text in enumerate(texts) if number not in left_out]
    sections: dict[str, Any] = {
        "training": {"max_steps": MAX_STEPS, "batch_size": 2, "gradient_accumulation": accumulation},
        "checkpoint": {"every_steps": EVERY_STEPS},
    }
    data = {"pack": is_packed, "shuffle": False}
    skipping = make_rig(
        "skipping", data=data | {"train": write(tmp_path / "all.jsonl", texts, is_packed=is_packed)}, **sections
    )
    never = make_rig(
        "never", data=data | {"train": write(tmp_path / "some.jsonl", others, is_packed=is_packed)}, **sections
    )
    never.finish(world=world)

    skipping.start(world=world, die_at=[7, "end", signal.SIGKILL, 0])
    assert skipping.processes[0].wait() == -signal.SIGKILL, skipping.processes[0].said()
    skipping.is_killed()
    skipping.direct(2, resume_from="checkpoint-4", skip_batches=skip(0, 2, 4))
    skipping.start(2, world=world, die_at=[9, "end", signal.SIGKILL, 0])
    assert skipping.processes[-world].wait() == -signal.SIGKILL, skipping.processes[-world].said()
    skipping.is_killed()
    skipping.finish(attempt=2, restart=1, world=world)

    assert positions(skipping) == [(0, batch) for batch in (0, 1, 2, 3, 6, 7, 8, 9, 10, 11)]
    assert [record.step for record in skipping.history() if record.start] == [1, 5, 9]
    same_end(skipping, never)
    first, second, restarted = [record.start for record in skipping.history() if record.start]
    assert first.left_out == restarted.left_out == ()
    assert [(one.epoch, one.batch) for one in second.left_out] == [(0, 4), (0, 5)]
    lines = [(rows.first, rows.last) for one in second.left_out for rows in one.rows]
    row = [number + 1 for number in left_out]
    assert lines == ([(1, 1)] * 2 if is_packed else [(row[0], row[global_batch - 1]), (row[global_batch], row[-1])])
    manifest = complete_manifest(skipping.run.checkpoint(8))
    assert [(one.first, one.count) for one in manifest.skip_batches] == [(2, 4)]
    assert (manifest.batches_into_epoch, manifest.samples_seen) == (10, 8 * global_batch)


def test_an_epochs_tail_is_filled_from_its_head_and_an_interruption_changes_nothing(
    make_rig: Callable[..., Rig],
) -> None:
    """Five shuffled batches an epoch; the second epoch loses its last two, the third none."""
    undisturbed, disturbed = make_rig("undisturbed"), make_rig("disturbed")
    for rig in (undisturbed, disturbed):
        rig.direct(skip_batches=skip(1, 3, 2))
    undisturbed.finish()
    second = [(1, batch) for batch in (0, 1, 2, 0, 1)]
    assert positions(undisturbed) == [(0, batch) for batch in range(5)] + second + [(2, 0), (2, 1)]
    told = details_of(SegmentStarted(segment=1, restart=0, step=1, start=undisturbed.history()[0].start))
    assert [each for each in told if each[0] != "start took"] == [
        ("left out", f"batch {batch} of epoch 1: line {lines} of {undisturbed.config.data.train}")
        for batch, lines in left_out_lines(undisturbed).items()
    ]
    disturbed.finish(21, die_at=[9, "begin", signal.SIGTERM, 0])
    disturbed.start(restart=1, die_at=[11, "end", signal.SIGKILL, 0])
    assert disturbed.processes[-1].wait() == -signal.SIGKILL, disturbed.processes[-1].said()
    disturbed.finish(restart=2)
    assert positions(disturbed) == positions(undisturbed)
    same_end(undisturbed, disturbed)
