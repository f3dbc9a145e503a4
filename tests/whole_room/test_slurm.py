"""Whole runs on a real Slurm: submitted by a shell that is gone, on two nodes, stopped, cancelled, orphaned."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.local_cluster.cluster import Cluster
from supervisor.journal import (
    Continued,
    Finished,
    ResumeRequested,
    RolledBack,
    SegmentStarted,
    Stopped,
    StopRequested,
    Submitted,
    SupervisorStarted,
    VerdictSeen,
    WorkerLeft,
)
from tests.whole_room.house import EXPLODING, HIGGSFIELD, KILL, House, environment, furnish, send, steps
from worker.contract import config as configuration
from worker.contract.exit_report import ExitReport, Outcome
from worker.contract.files import read_message
from worker.contract.loss_history import surviving

pytestmark = [pytest.mark.slurm, pytest.mark.training]
ON_SLURM = {"kind": "slurm", "time_limit": "00:10:00"}
CALM = EXPLODING["training"] | {"max_steps": 300, "optimizer": {"name": "adamw", "learning_rate": 1e-4}}
"""Long enough to be stopped on the way."""


def jobs(cluster: Cluster) -> list[str]:
    """Live jobs of this user."""
    return cluster.ask("squeue", "--me", "-h", "-o", "%i").split()


@pytest.fixture
def env(slurm_cluster: Cluster) -> Iterator[dict[str, str]]:
    """An environment that finds the cluster; afterwards nothing runs on it."""
    yield environment(SLURM_CONF=str(slurm_cluster.conf))
    for job in jobs(slurm_cluster):
        slurm_cluster.ask("scancel", job)
    slurm_cluster.wait_until_idle()


def assert_is_whole(house: House) -> None:
    """The run finished, each verdict was answered once, and the curve that survived has every step once."""
    max_steps = configuration.read(house.run.config).training.max_steps or 0
    acted = [record.step for record in house.records if record.is_acted]
    assert [event.step for event in house.those(VerdictSeen)] == acted
    assert [event.verdict_step for event in house.those(RolledBack)] == acted
    assert steps(surviving(house.records)) == list(range(1, max_steps + 1))
    assert [event.final_step for event in house.those(Finished)] == [max_steps]
    assert (house.run.final / "model.safetensors").is_file()


def test_submitted_by_a_shell_that_is_gone(slurm_cluster: Cluster, env: dict[str, str], tmp_path: Path) -> None:
    with furnish(tmp_path, env, cluster=ON_SLURM) as house:
        shell = subprocess.run(
            ["bash", "-c", f"{HIGGSFIELD} submit tiny.yaml"],
            cwd=tmp_path,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
        )
        assert shell.returncode == 0, shell.stderr
        assert "you may log out now" in shell.stdout
        assert house.higgsfield("submit", "tiny.yaml").returncode in (0, 5)  # it waits in the queue, or holds the run
        house.waits_for(Finished)
        house.until(lambda: not jobs(slurm_cluster))
        house.leaves_nothing()
        assert_is_whole(house)
        assert house.those(RolledBack)
        assert len(house.those(Submitted)) == len(house.those(SupervisorStarted)) == 1
        assert "FINISHED" in house.run.supervisor_log.read_text()
        assert [row["state"] for row in house.json("status")["runs"]] == ["finished"]


def test_two_nodes_stop_at_the_same_step_whatever_happens_to_the_supervisor(
    slurm_cluster: Cluster, env: dict[str, str], tmp_path: Path
) -> None:
    training = EXPLODING["training"] | {"batch_size": 8}
    with furnish(tmp_path, env, cluster=ON_SLURM | {"nodes": 2}, training=training) as house:
        first = house.start("run", "tiny.yaml")
        [job] = house.until(lambda: jobs(slurm_cluster))
        send(first.pid, KILL)  # it may not even know the job's number yet
        second = house.start("run", "tiny.yaml")
        house.waits_for_step(1)
        send(second.pid, KILL)
        house.until(lambda: house.records[-1].is_acted)
        done = house.higgsfield("run", "tiny.yaml")
        assert done.returncode == 0, done.stderr
        assert_is_whole(house)
        assert [event.job_id for event in house.those(Submitted)] == [job]
        assert [event.term for event in house.those(SupervisorStarted)] == [1, 2, 3]
        assert {event.where for event in house.those(RolledBack)} == {"same_allocation"}
        reports = [read_message(house.run.exit_report(1, 0, rank), ExitReport) for rank in (0, 1)]
        stopped = (Outcome.VERDICT, house.those(RolledBack)[0].verdict_step, job)
        assert [report and (report.outcome, report.step, report.job_id) for report in reports] == [stopped] * 2
        house.until(lambda: not jobs(slurm_cluster))
        house.leaves_nothing()


def test_stopped_resumed_cancelled_by_a_person_and_resumed_to_the_end(
    slurm_cluster: Cluster, env: dict[str, str], tmp_path: Path
) -> None:
    with furnish(tmp_path, env, cluster=ON_SLURM, training=CALM, checkpoint={"every_steps": 50}) as house:
        first = house.start("run", "tiny.yaml")
        house.waits_for_step(5)
        asked = house.higgsfield("stop", "tiny")
        assert (asked.returncode, asked.stderr) == (0, "")
        assert first.wait() == 4
        last = house.records[-1].step
        assert [event.saved_step for event in house.those(Stopped)] == [last]
        assert [event.saved_step for event in house.those(WorkerLeft)] == [last]
        assert house.those(StopRequested)[0].by == house.those(Stopped)[0].by
        house.until(lambda: not jobs(slurm_cluster))
        house.leaves_nothing()
        before = house.run.journal.read_bytes()
        assert house.higgsfield("run", "tiny.yaml").returncode == 4
        assert house.run.journal.read_bytes() == before

        second = house.start("resume", "tiny")
        house.waits_for_step(last + 5)
        [job] = jobs(slurm_cluster)
        slurm_cluster.ask("scancel", job)
        assert second.wait() == 4, house.printed(second)
        by_name, by_scancel = house.those(Stopped)
        assert by_scancel.by in (by_name.by, None)  # the accounting may not know it yet
        assert by_scancel.reason == f"job {job} was CANCELLED by {by_scancel.by or 'a person'}, not by this supervisor"
        house.until(lambda: not jobs(slurm_cluster))
        house.leaves_nothing()

        done = house.higgsfield("resume", "tiny")
        assert done.returncode == 0, done.stderr
        assert_is_whole(house)
        assert [event.cause for event in house.those(Continued)] == ["first", "resumed", "resumed"]
        saved = [event.saved_step or 0 for event in house.those(Stopped)]
        assert [event.step for event in house.those(SegmentStarted)] == [1, saved[0] + 1, saved[1] + 1]
        assert len(house.those(Submitted)) == len(house.those(ResumeRequested)) + 1 == 3
