"""The files STOP and SAVE, made by a person with nothing but a shell, in a run on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.journal import Continued, SaveAnswered, Stopped, Submitted
from tests.whole_room import light
from tests.whole_room.house import environment, furnish
from tests.whole_room.survival import ROOT, TRAINING

pytestmark = pytest.mark.training


def test_save_saves_and_goes_on_and_stop_stops_until_a_person_says_resume(tmp_path: Path) -> None:
    env = environment(PYTHONPATH=str(ROOT))
    checkpoint = {"every_steps": 100, "healthy_after": 5}
    with furnish(
        tmp_path, env, cluster={"kind": "local"}, training=TRAINING | {"max_steps": 150}, checkpoint=checkpoint
    ) as house:
        house.command = light.COMMAND
        first = house.start("run", "tiny.yaml")
        house.waits_for_step(5)
        house.run.save_file.touch()
        house.until(lambda: not house.run.save_file.exists())
        [saved] = house.run.checkpoint_steps()
        house.waits_for_step(saved + 1)
        house.until(lambda: [each.step for each in house.those(SaveAnswered)] == [saved])
        house.run.stop_file.touch()
        assert first.wait() == 4
        assert [(each.by, each.saved_step) for each in house.those(Stopped)] == [
            ("a STOP file", house.records[-1].step)
        ]
        house.leaves_nothing()
        assert house.json("status")["runs"][0]["state"] == "stopped"

        assert house.higgsfield("run", "tiny.yaml").returncode == 4  # it stays stopped
        assert house.run.stop_file.exists()
        resumed = house.start("resume", "tiny")
        house.waits_for_step(house.records[-1].step + 1)
        resumed.terminate()  # as Ctrl-C: in one line what goes on, and how to come back
        assert resumed.wait() == 130
        assert "the worker goes on without a supervisor; `higgsfield resume" in house.printed(resumed)
        assert house.higgsfield("resume", "tiny").returncode == 0
        assert not house.run.stop_file.exists()
        assert [each.cause for each in house.those(Continued)] == ["first", "resumed"]
        assert [record.step for record in house.records] == list(range(1, 151))
        assert len(house.those(Submitted)) == 2
        assert [each.reason for each in house.those(SaveAnswered)] == [
            f"a SAVE file asked for it: checkpoint-{saved} is whole"
        ]
