"""A run that nobody supervises but a crontab: a pass at a time, in the bare environment that cron gives."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from supervisor.journal import Finished, Submitted
from tests.whole_room import light
from tests.whole_room.house import furnish
from tests.whole_room.survival import ROOT, TRAINING

pytestmark = pytest.mark.training


def test_a_pass_a_minute_brings_a_run_to_its_end(tmp_path: Path) -> None:
    bare = {"HOME": str(tmp_path), "LOGNAME": "somebody", "SHELL": "/bin/sh", "PATH": "/usr/bin:/bin"}
    training = TRAINING | {"max_steps": 60}
    with furnish(tmp_path, bare | {"PYTHONPATH": str(ROOT)}, cluster={"kind": "local"}, training=training) as house:
        house.command = light.COMMAND
        passes = []
        while not house.those(Finished):
            passes.append(house.higgsfield("run", "tiny.yaml", "--once"))
            assert (passes[-1].returncode, passes[-1].stderr) == (0, "")
            time.sleep(0.2)
        assert len(house.those(Submitted)) == 1
        assert [record.step for record in house.records] == list(range(1, 61))
        over = house.higgsfield("run", "tiny.yaml", "--once")
        assert (over.returncode, over.stdout) == (0, "")
        house.leaves_nothing()
