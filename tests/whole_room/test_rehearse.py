"""The fire drill: a short copy of a run that meets every fault, and nothing that is left when it is interrupted."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm.local_cluster.cluster import Cluster
from supervisor import cli
from supervisor.journal import RolledBack, Stopped, SupervisorStarted
from supervisor.rehearsal import STANDARD
from tests.whole_room import light
from tests.whole_room.house import EXPLODING, House, environment, furnish, send, steps
from worker.contract.loss_history import surviving
from worker.contract.rehearsal import Fault, inflicted

pytestmark = pytest.mark.training
ROOT = Path(__file__).parents[2]
CALM = EXPLODING["training"] | {
    "max_steps": 5000,
    "batch_size": 2,
    "optimizer": {"name": "adamw", "learning_rate": 1e-3},
}
"""What explodes here is our own doing."""
REHEARSAL = "tiny-rehearsal-1"


@dataclass
class Drill:
    house: House
    code: int
    told: dict[str, Any]
    said: str


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drill]:
    """All faults, one after the other, with the trainer that everybody has, in two ranks."""
    folder = tmp_path_factory.mktemp("drill")
    cluster = {"tasks_per_node": 2}
    with furnish(folder, environment(), training=CALM, recovery={"hang_timeout_s": 4.0}, cluster=cluster) as house:
        house.name = REHEARSAL
        done = house.higgsfield("rehearse", "tiny.yaml", "--json")
        yield Drill(house, done.returncode, json.loads(done.stdout or "{}"), done.stderr)


def test_every_fault_came_once_and_was_survived(drill: Drill) -> None:
    assert drill.code == 0, drill.said + json.dumps(drill.told)
    rows = drill.told["faults"]
    assert [f"{row['kind']}@{row['step']}" for row in rows] == list(STANDARD)
    assert [row["why"] for row in rows] == [""] * 6
    assert all(row["recovery_s"] > 0 and row["cost_s"] > 0 for row in rows)
    repeated = {row["kind"]: row["steps_repeated"] for row in rows}
    assert repeated["spike"] == 43 - 36
    assert (repeated["kill"], repeated["supervisor"]) == (80 - 72, 0)
    assert repeated["torn-save"] == 126 - 117
    for row in rows:
        found = inflicted(drill.house.run, Fault(kind=row["kind"], step=row["step"]))
        assert found is not None
        assert (found.at_step, found.means) == (126 if row["kind"] == "torn-save" else row["step"], row["means"])


def test_the_run_is_whole_all_the_same_and_nothing_is_left_of_it(drill: Drill) -> None:
    house = drill.house
    assert (drill.told["state"], drill.told["steps"], drill.told["dir"]) == ("finished", 160, str(house.run.path))
    assert steps(surviving(house.records)) == list(range(1, 161))
    assert [event.to_step for event in house.those(RolledBack)] == [36]
    assert [event.term for event in house.those(SupervisorStarted)] == [1, 2]
    house.leaves_nothing()


def test_the_memory_is_what_the_ranks_held_and_the_batch_was_really_tried(drill: Drill) -> None:
    first, second = drill.told["memory"]
    assert (first["rank"], second["rank"], first["device"]) == (0, 1, "CPU")
    assert 50e6 < first["peak_bytes"] < first["total_bytes"]
    assert first["largest_batch"] in {2**power for power in range(1, 8)}
    assert (second["largest_batch"], first["trying"]) == (None, None)
    assert all(one["limit"] for one in drill.told["memory"])


def light_house(folder: Path, env: dict[str, str], **cluster: str) -> House:
    """A run of the light trainer."""
    house = furnish(folder, env, training=CALM | {"zygote": False}, cluster=cluster)
    house.command = light.COMMAND
    return house


def test_interrupted_by_somebody_impatient_it_leaves_no_job_and_no_process(tmp_path: Path) -> None:
    with light_house(tmp_path, environment(PYTHONPATH=str(ROOT))) as house:
        house.name = REHEARSAL
        process = house.start("rehearse", "tiny.yaml", "--fault", "kill@1000")
        house.waits_for_step(5)
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            send(process.pid, number)
            time.sleep(0.15)
        assert process.wait(60) == 130
        assert "\ntiny-rehearsal-1: its job is cancelled" in house.printed(process)
        assert len(house.those(Stopped)) == 1
        house.leaves_nothing()


@pytest.mark.parametrize(
    "argv",
    [
        ("--fault", "fire@40"),
        ("--fault", "kill@4"),
        ("--steps", "0"),
        ("--learning-rate", "1e-5"),
        ("--learning-rate", "1e-5,2e-5", "--fault", "kill@40"),
        ("--set", "run.dir=text.txt"),
    ],
)
def test_what_cannot_be_rehearsed_is_one_line_and_nothing_is_made(
    tmp_path: Path, argv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with furnish(tmp_path, environment(), training=CALM) as house:
        monkeypatch.chdir(tmp_path)
        assert cli.main(["rehearse", "tiny.yaml", *argv]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1), printed.err
        assert not house.run.path.parent.exists()


def test_rates_are_compared_by_short_runs_of_their_own(tmp_path: Path) -> None:
    with light_house(tmp_path, environment(PYTHONPATH=str(ROOT))) as house:
        done = house.higgsfield("rehearse", "tiny.yaml", "--learning-rate", "2e-5,1e-5", "--steps", "12")
        assert done.returncode == 0, done.stderr
        assert "1e-05               12           2         2" in done.stdout
        assert "highest that was tried" not in done.stdout  # the losses of this trainer are all the same
        names = sorted(path.name for path in (tmp_path / "runs").iterdir())
        assert names == [f"{REHEARSAL}-lr-1e-05", f"{REHEARSAL}-lr-2e-05"]


@pytest.mark.slurm
def test_on_a_real_cluster_a_preemption_is_a_requeue(slurm_cluster: Cluster, tmp_path: Path) -> None:
    env = environment(PYTHONPATH=str(ROOT), SLURM_CONF=str(slurm_cluster.conf))
    with light_house(tmp_path, env, kind="slurm") as house:
        house.name = REHEARSAL
        argv = ("--fault", "preempt@20", "--fault", "supervisor@40", "--steps", "60", "--json")
        done = house.higgsfield("rehearse", "tiny.yaml", *argv)
        assert done.returncode == 0, done.stderr + done.stdout
        preempted, lost = json.loads(done.stdout)["faults"]
        assert preempted["means"].startswith("scontrol requeue ")
        assert (preempted["survived"], lost["survived"]) == (True, True)
        assert {record.attempt for record in house.records} == {1}
        assert {record.restart for record in house.records} == {0, 1}
        slurm_cluster.wait_until_idle()
        house.leaves_nothing()
