"""Whoever only listens can neither end a run nor write into one that is somebody else's."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from supervisor import supervise as module
from supervisor.audience import Audience
from supervisor.journal import Event
from supervisor.lease import LostError
from supervisor.observation import Observation
from supervisor.report.screen import Screen
from supervisor.report.tensorboard import TensorBoard
from supervisor.run_state import RunState
from supervisor.supervise import supervise
from tests.report_room.stories import one_spike
from tests.supervisor_room.stage import Stage

QUIET = Observation(now=0.0)


class Deaf:
    """Fails at everything."""

    def event(self, event: Event) -> None:
        raise ValueError("event")

    def progress(self, run: RunState, seen: Observation) -> None:
        raise OSError(28, "No space left on device")

    def close(self, run: RunState) -> None:
        raise RuntimeError("close")


def test_a_listener_that_fails_is_said_once_and_the_others_hear_all_the_same(tmp_path: Path) -> None:
    out, stage = io.StringIO(), one_spike(tmp_path)
    audience = Audience(Screen(out, "r", None), (Deaf(), TensorBoard(stage.run_dir)))
    for event in stage.events:
        audience.event(event)
    for _ in range(3):
        audience.progress(RunState(), QUIET)
    audience.close(RunState())
    said = out.getvalue()
    assert said.count("Deaf: ValueError: event") == said.count("No space left") == said.count("Deaf: Runtime") == 1
    assert "OSError" not in said, "a full disk may happen to anybody"
    assert (stage.run_dir.tensorboard / "survived").is_dir()


def test_what_comes_after_a_lost_lease_is_its_new_holder_s_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = one_spike(tmp_path)
    stage.run_dir.journal.write_text(stage.run_dir.journal.read_text().rpartition('{"event": "Finished"')[0])
    stage.watched.run.lease.give_up()

    def lost(*args: object) -> None:
        raise LostError("somebody else holds r now")

    monkeypatch.setattr(module, "watch", lost)
    with pytest.raises(LostError):
        supervise(stage.run_dir, io.StringIO())
    assert not stage.run_dir.tensorboard.exists()
    assert not stage.run_dir.report.exists()


def test_one_supervisor_writes_the_curves(tmp_path: Path) -> None:
    def lost() -> None:
        raise LostError("somebody else holds r now")

    stage = Stage(tmp_path)
    with pytest.raises(LostError):
        TensorBoard(stage.run_dir, lost).write()
