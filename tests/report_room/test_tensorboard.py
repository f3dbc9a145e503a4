"""What TensorBoard's own reader finds in the files that are written without it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from supervisor.report import tensorboard, tfevents
from supervisor.report.tensorboard import TensorBoard
from tests.report_room.stories import Slow, one_spike, preemption_storm, put_into, recorded
from worker.contract.loss_history import record, surviving
from worker.contract.run_dir import RunDir

readers = pytest.importorskip("tensorboard.backend.event_processing.plugin_event_accumulator")


def read(folder: Path) -> Any:
    found = readers.EventAccumulator(str(folder), size_guidance={readers.TENSORS: 0})
    found.Reload()
    return found


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.util import tensor_util

    return [(e.step, float(tensor_util.make_ndarray(e.tensor_proto))) for e in read(folder).Tensors(tag)]


def test_crc32c_is_the_one_of_the_standard() -> None:
    """RFC 3720, B.4: 32 bytes of zeros, of ones, ascending."""
    for data, crc in ((b"\0" * 32, 0x8A9136AA), (b"\xff" * 32, 0x62A8AB43), (bytes(range(32)), 0x46DD794E)):
        rotated = tfevents.masked_crc32c(data) - 0xA282EAD8 & 0xFFFFFFFF
        assert (rotated << 15 | rotated >> 17) & 0xFFFFFFFF == crc


@pytest.fixture
def spiked(tmp_path: Path) -> Slow:
    stage = one_spike(tmp_path)
    TensorBoard(stage.run_dir).write()
    return stage


def test_the_surviving_curve_has_every_step_once(spiked: Slow) -> None:
    found = curve(spiked.run_dir.tensorboard / "survived", "loss")
    expected = [(each.step, each.loss or 0.0) for each in surviving(spiked.story.records)]
    assert [step for step, _ in found] == list(range(1, 101))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected])


def test_each_segment_is_as_it_was(spiked: Slow) -> None:
    folder = spiked.run_dir.tensorboard
    assert [step for step, _ in curve(folder / "segment-0001", "loss")] == list(range(1, 39))
    assert [step for step, _ in curve(folder / "segment-0002", "loss")] == list(range(31, 101))
    assert curve(folder / "segment-0001", "loss")[-1] == (38, 9.0)
    assert curve(folder / "segment-0001", "verdict")[-4:] == [(35, 0), (36, 2), (37, 2), (38, 5)]
    assert {scale for _, scale in curve(folder / "segment-0002", "rate_scale")} == {0.5}
    tags = {"loss", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "rate_scale", "verdict"}
    assert set(read(folder / "segment-0001").Tags()["tensors"]) == tags


def test_a_rollback_is_a_dot_at_its_step_and_a_text(spiked: Slow) -> None:
    folder = spiked.run_dir.tensorboard / "rollback-001"
    assert curve(folder, "loss") == [(38, 9.0)]
    found = read(folder)
    assert found.SummaryMetadata("rollback").plugin_data.plugin_name == "text"
    [text] = found.Tensors("rollback")
    said = text.tensor_proto.string_val[0].decode()
    assert text.step == 38
    assert said.startswith("**from step 38 back to checkpoint-30, at 0.5 of the configured rate**\n\n- seen: ")
    assert "- try: " in said


def contents(run_dir: RunDir) -> dict[str, bytes]:
    return {str(p.relative_to(run_dir.path)): p.read_bytes() for p in run_dir.tensorboard.rglob("events*")}


@pytest.mark.parametrize("cut", [0, 1, 11, 40, 300])
def test_a_supervisor_that_takes_over_goes_on_where_the_last_one_stopped(tmp_path: Path, cut: int) -> None:
    """Killed anywhere in an append, and with no memory but the files: the same bytes in the end."""
    stage = one_spike(tmp_path)
    TensorBoard(stage.run_dir).write()
    whole = contents(stage.run_dir)
    for path in stage.run_dir.tensorboard.rglob("events*"):
        path.write_bytes(path.read_bytes()[:-cut] if cut else path.read_bytes())
    TensorBoard(stage.run_dir).write()
    TensorBoard(stage.run_dir).write()
    again = contents(stage.run_dir)
    assert again.keys() == whole.keys()
    if cut <= 40:  # a marker that was cut together with its event is written with it again
        assert again == whole
    assert [step for step, _ in curve(stage.run_dir.tensorboard / "survived", "loss")] == list(range(1, 101))


def test_it_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    written = TensorBoard(stage.run_dir)
    stage.start_after(5)
    for until in (10, 20, 30):
        stage.train(until)
        written.write()
        assert curve(stage.run_dir.tensorboard / "survived", "loss")[-1][0] == until


def test_a_restart_of_the_same_attempt_has_a_segment_of_its_own(tmp_path: Path) -> None:
    stage = preemption_storm(tmp_path)
    TensorBoard(stage.run_dir).write()
    names = sorted(path.name for path in stage.run_dir.tensorboard.iterdir())
    assert names == [*(f"segment-{number:04d}" for number in range(1, 6)), "survived"]


def test_a_number_that_is_not_finite_is_told_as_what_it_was() -> None:
    one = record(
        segment=1, attempt=1, restart=0, step=1, epoch=0.0, time=0.0, loss=math.nan, grad_norm=math.inf, lr=None
    )
    values = tensorboard.scalars(one, None)
    assert math.isnan(values["loss"])
    assert values["grad_norm"] == math.inf
    assert "learning_rate" not in values
    huge = tfevents.scalars_event(0.0, 1, {"loss": 1e300, "other": -1e300, "nan": math.nan})
    assert [tfevents.kind_of(event) for _, event in tfevents.whole_events(huge)] == ["summary"]


def test_a_real_run_is_read_back(tmp_path: Path) -> None:
    story = recorded("demo")
    run = RunDir(tmp_path)
    put_into(story, run)
    TensorBoard(run).write()
    assert [step for step, _ in curve(run.tensorboard / "survived", "loss")] == list(range(1, 261))
