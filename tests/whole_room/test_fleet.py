"""`run --all` as a person gives it: real processes, agents and files, a trainer that only counts steps."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from supervisor.journal import SupervisorStarted, read_journal
from supervisor.lease import read_holder
from supervisor.supervise import read_state
from tests.whole_room.house import environment, furnish, write_config
from tests.whole_room.light import COMMAND
from tests.whole_room.light_trainer import STEP_S
from worker.contract.run_dir import RunDir

pytestmark = pytest.mark.training
LIGHT = {"zygote": False}


def test_a_folder_of_runs_one_process_and_a_submit_into_it(tmp_path: Path) -> None:
    with furnish(tmp_path, environment(**{STEP_S: "0.02"})) as house:
        house.command = COMMAND
        for name in ("one", "two", "three"):
            place = {"place": "foreground"} if name == "three" else {}
            write_config(tmp_path / f"{name}.yaml", run={"name": name}, supervisor=place, training=LIGHT)
        (tmp_path / "runs").mkdir()
        told = house.start("run", "--all", "runs")
        house.until(lambda: read_holder(RunDir(tmp_path / "runs")))
        for name in ("one", "two", "three"):
            done = house.higgsfield("submit", f"{name}.yaml")
            assert done.returncode == 0, done.stderr
            assert f"{name}: the supervisor of every run in" in done.stdout
        runs = [RunDir(tmp_path / "runs" / name) for name in ("one", "two", "three")]
        for run in runs:
            house.until(lambda run=run: read_state(run).state == "finished")
            started = [event.pid for event in read_journal(run.journal) if isinstance(event, SupervisorStarted)]
            assert started == [told.pid]
        again = house.higgsfield("run", "--all", "runs")
        assert again.returncode == 5
        assert f"process {told.pid}" in again.stderr
        told.send_signal(signal.SIGTERM)
        assert told.wait(60) == 130
        assert all(read_holder(run) is None for run in [*runs, RunDir(tmp_path / "runs")])
        assert "Traceback" not in house.printed(told)
