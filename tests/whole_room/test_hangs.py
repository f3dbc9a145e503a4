"""Whole runs whose trainers are stopped, crash, or are suspended together with their job; and what is left of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.local_cluster.cluster import Cluster
from supervisor.journal import (
    Continued,
    Finished,
    HangSeen,
    JobSeen,
    NodeExcluded,
    NodeStruck,
    Submitted,
    WorkerLeft,
)
from tests.whole_room.house import EXPLODING, House, environment, furnish, steps
from worker.contract.files import read_message
from worker.contract.loss_history import surviving
from worker.contract.pulse import Pulse

pytestmark = pytest.mark.training
CALM = EXPLODING["training"] | {"max_steps": 60, "batch_size": 8, "optimizer": {"name": "adamw", "learning_rate": 1e-4}}
SHORT = CALM | {"max_steps": 4, "schedule": {"name": "constant", "warmup": 0}}
TIMEOUT_S = 6.0
CHECKPOINT = {"every_steps": 5, "healthy_after": 2, "keep": 2, "keep_healthy": 1}


def pulse(house: House, attempt: int, rank: int) -> Pulse | None:
    return read_message(house.run.pulse(attempt, 0, rank), Pulse)


def trainer(house: House, attempt: int, rank: int) -> int:
    """The process of a rank that makes steps."""
    found = house.until(lambda: (one := pulse(house, attempt, rank)) and one.phase == "training" and one)
    return int(found.pid)


def test_a_rank_that_hangs_and_one_that_crashes_cost_a_relaunch_each_and_nothing_is_left(tmp_path: Path) -> None:
    cluster = EXPLODING["cluster"] | {"tasks_per_node": 2}
    recovery = {"hang_timeout_s": TIMEOUT_S}
    data = EXPLODING["data"] | {"workers": 1}
    with furnish(
        tmp_path, environment(), training=CALM, cluster=cluster, recovery=recovery, checkpoint=CHECKPOINT, data=data
    ) as house:
        run = house.start("run", "tiny.yaml")
        house.waits_for_step(12)
        os.kill(trainer(house, 1, rank=1), signal.SIGSTOP)
        hang = house.waits_for(HangSeen)
        assert (hang.phase, hang.stacks) == ("training", "attempts/0001/r0")
        assert hang.quiet_s >= hang.limit_s >= TIMEOUT_S
        house.waits_for(Continued, 2)
        for rank in (0, 1):
            stacks = house.run.stacks(1, 0, rank)
            house.until(lambda stacks=stacks: "hread" in stacks.read_text())  # an agent may notice a little later
        hung = house.records[-1].step
        house.waits_for_step(hung + 8)
        os.kill(trainer(house, 2, rank=0), signal.SIGSEGV)
        house.waits_for(Continued, 3)
        assert run.wait(300) == 0, house.printed(run)
        assert [event.cause for event in house.those(Continued)] == ["first", "hang", "crash"]
        assert {event.where for event in house.those(Continued)[1:]} == {"same_allocation"}
        assert len(house.those(Submitted)) == 1
        assert steps(surviving(house.records)) == list(range(1, 61))
        assert [event.until for event in house.those(NodeExcluded)] in ([], [None])
        assert "killed by signal 11" in (house.those(WorkerLeft)[1].error or hang).model_dump_json()
        house.leaves_nothing()


@pytest.fixture
def on_slurm(slurm_cluster: Cluster) -> Iterator[Cluster]:
    yield slurm_cluster
    for job in slurm_cluster.ask("squeue", "--me", "-h", "-o", "%i").split():
        slurm_cluster.ask("scancel", job)
    slurm_cluster.wait_until_idle()


@pytest.mark.slurm
def test_a_suspended_job_does_not_hang(on_slurm: Cluster, tmp_path: Path) -> None:
    env = environment(SLURM_CONF=str(on_slurm.conf))
    cluster = {"kind": "slurm", "time_limit": "00:10:00"}
    recovery = {"hang_timeout_s": TIMEOUT_S}
    with furnish(tmp_path, env, training=CALM | {"max_steps": 80}, cluster=cluster, recovery=recovery) as house:
        run = house.start("run", "tiny.yaml")
        house.waits_for_step(5)
        job = house.those(Submitted)[0].job_id
        on_slurm.ask("scontrol", "suspend", job)
        house.until(lambda: "SUSPENDED" in on_slurm.ask("squeue", "-h", "-j", job, "-o", "%T"))
        suspended_at, before = time.monotonic(), house.records[-1].step
        house.until(lambda: time.monotonic() - suspended_at > 1.5 * TIMEOUT_S)
        assert house.records[-1].step <= before + 1
        on_slurm.ask("scontrol", "resume", job)
        assert run.wait(300) == 0, house.printed(run)
        assert house.those(HangSeen) == []
        assert [event.cause for event in house.those(Continued)] == ["first"]
        assert len(house.those(Finished)) == 1
        assert {event.job_id for event in house.those(JobSeen)} == {job}


@pytest.mark.slurm
def test_a_node_on_which_every_job_fails_is_left_out_and_costs_no_budget(on_slurm: Cluster, tmp_path: Path) -> None:
    env = environment(SLURM_CONF=str(on_slurm.conf))
    cluster = {"kind": "slurm", "time_limit": "00:10:00", "setup": ['[ "$SLURMD_NODENAME" != n1 ] || exit 7']}
    recovery = {"max_attempts_without_progress": 2, "max_submissions_per_hour": 2}  # all of it goes into the hole
    with furnish(tmp_path, env, training=SHORT, cluster=cluster, recovery=recovery) as house:
        run = house.start("run", "tiny.yaml")
        assert run.wait(300) == 0, house.printed(run)
        assert [(event.attempt, event.node) for event in house.those(NodeStruck)] == [(1, "n1"), (2, "n1")]
        [excluded] = house.those(NodeExcluded)
        assert excluded.node == "n1"
        assert "FAILED there before its first step" in excluded.evidence
        assert len(house.those(Submitted)) == 3
        assert house.those(Submitted)[-1].reason.endswith("without n1")
        [told] = house.json("status", "tiny")["runs"]
        assert [each["node"] for each in told["excluded"]] == ["n1"]
        house.leaves_nothing()
