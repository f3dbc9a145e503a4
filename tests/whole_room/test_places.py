"""Where a supervisor lives, on a real cluster: a job of its own that ends, or loses its node; the worker's own job."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slurm.local_cluster.configuration import missing_packages
from supervisor.journal import (
    Cancelled,
    Finished,
    Preempted,
    Stopped,
    StopRequested,
    SubmitFailed,
    Submitted,
    SupervisorStarted,
)
from supervisor.lease import read_holder
from tests.conftest import need
from tests.waiting import eventually
from tests.whole_room.house import KILL, House, send
from tests.whole_room.light import DIE
from tests.whole_room.light_trainer import STEP_S
from tests.whole_room.survival import (
    Scenario,
    Site,
    Together,
    causes,
    ends_whole,
    first_steps,
    jobs_of,
    survival_cluster,
)

pytestmark = [pytest.mark.slurm, pytest.mark.training]
SLOW = {STEP_S: "0.1"}


def submitted(site: Site, **sections: Any) -> House:
    """A run whose supervisor lives in a job, on the scenario's own partition."""
    supervisor = {"partition": site.name} | sections.pop("supervisor", {})
    house = site.house(variables=SLOW, supervisor=supervisor, **sections)
    asked = house.higgsfield("submit", "tiny.yaml")
    assert asked.returncode == 0, asked.stderr
    return house


def hurry(site: Site, job_id: str) -> None:
    """What a person may do, too: not to wait the two minutes after a requeue."""
    eventually(lambda: site.shown(job_id).get("Reason") == "BeginTime", 60)
    time.sleep(1.1)  # within the second of its end its node would refuse it: "Job credential revoked"
    site.cluster.ask("scontrol", "update", f"JobId={job_id}", "StartTime=now")


def own_limit(site: Site) -> None:
    """A supervisor's job of a minute supervises a run of longer than that, one after the other."""
    house = submitted(site, supervisor={"time_limit": "00:01:00"}, training={"max_steps": 500})
    ends_whole(house)
    assert len(house.those(SupervisorStarted)) > 1
    assert len(jobs_of(house)) == 1
    assert "goes on" in house.run.supervisor_log.read_text()


def own_node(site: Site) -> None:
    """Its node is lost, its process lives on: Slurm starts the job again elsewhere, and the old process leaves."""
    house = submitted(site, cluster={"nodelist": site.nodes[-1]}, training={"max_steps": 600})
    house.waits_for_step(5)
    holder = read_holder(house.run)
    assert holder is not None
    assert holder.job_id is not None
    [node] = site.nodes_of(holder.job_id)
    assert node != site.nodes[-1]
    site.cluster.kill_slurmd(node)
    hurry(site, holder.job_id)
    house.waits_for(SupervisorStarted, 2)
    second = read_holder(house.run)
    assert second is not None
    assert (second.job_id, second.restart) == (holder.job_id, 1)
    eventually(lambda: holder.pid not in house.processes(), 30)
    ends_whole(house)
    assert len(house.those(Submitted)) == len(house.those(Finished)) == 1


def embedded(site: Site, **sections: Any) -> House:
    """A run whose supervisor lives in the worker's job, and does now; its time limit comes long before its end."""
    cluster = {"time_limit": "00:01:00"} | sections.pop("cluster", {})
    house = submitted(site, supervisor={"place": "embedded"}, cluster=cluster, **sections)
    house.until(lambda: (holder := read_holder(house.run)) is not None and holder.job_id is not None)
    return house


def one_job(site: Site) -> None:
    """A QOS that lets a person have one job, running or waiting: it is put back for each next part of the run."""
    limits = ["MaxJobsPerUser=1", "MaxSubmitJobsPerUser=1"]
    site.cluster.ask("sacctmgr", "--immediate", "add", "qos", site.name, *limits)
    user = pwd.getpwuid(os.getuid()).pw_name
    site.cluster.ask("sacctmgr", "--immediate", "modify", "user", user, "set", f"qos+={site.name}")
    house = embedded(site, cluster={"qos": site.name}, training={"max_steps": 500})
    again = house.waits_for(Submitted, 2)
    assert "put back" in again.reason
    while not house.those(Finished):
        house.until(lambda: house.those(Finished) or site.shown(again.job_id)["Reason"] == "BeginTime")
        if not house.those(Finished):
            hurry(site, again.job_id)
    ends_whole(house)
    assert set(causes(house)[1:]) == {"time_limit"}
    assert len(set(jobs_of(house))) == 1
    assert [record.step for record in house.records] == list(range(1, 501))
    eventually(lambda: site.shown(again.job_id)["JobState"] == "COMPLETED")
    assert house.those(SubmitFailed) == []


def next_job(site: Site) -> None:
    """Where a second job may wait it is that one; a supervisor that is killed comes back; a stop ends job and all."""
    house = embedded(site, training={"max_steps": 3000})
    house.waits_for_step(1)
    holder = read_holder(house.run)
    assert holder is not None
    send(holder.pid, KILL)
    house.waits_for(Submitted, 2)
    assert len(house.those(SupervisorStarted)) >= 3  # the one that submitted, the one that was killed, the one after it
    first, second = jobs_of(house)
    assert first != second
    house.until(lambda: len(first_steps(house)) == 2)
    assert site.shown(first)["JobState"] == "COMPLETED"
    (house.run.path / "STOP").touch()
    house.waits_for(Stopped)
    eventually(lambda: site.shown(second)["JobState"] == "COMPLETED")
    assert [record.step for record in house.records] == list(range(1, len(house.records) + 1))
    house.leaves_nothing()


def embedded_preempted(site: Site) -> None:
    """The supervisor goes with the worker, and comes back with it, in the same job."""
    house = embedded(site, cluster={"time_limit": "00:30:00"}, training={"max_steps": 300})
    house.waits_for_step(20)
    job = site.job(house)
    site.occupy(seconds=3)
    hurry(site, job)
    ends_whole(house)
    assert jobs_of(house) == [job]
    assert causes(house) == ["first"]
    assert len(house.those(Preempted)) == 1
    assert [record.step for record in house.records] == list(range(1, 301))


def embedded_node(site: Site) -> None:
    """The node is lost, supervisor and trainer there live on: both leave once the job runs elsewhere."""
    house = embedded(site, cluster={"time_limit": "00:30:00"}, training={"max_steps": 900})
    refused = house.higgsfield("submit", "tiny.yaml")
    assert (refused.returncode, "holds this run" in refused.stderr) == (5, True), refused.stderr
    house.waits_for_step(20)
    job, old = site.job(house), house.processes()
    site.cluster.kill_slurmd(site.node_of(house))
    hurry(site, job)
    house.until(lambda: house.records[-1].restart == 1)
    eventually(lambda: not set(old) & set(house.processes()), 40)
    ends_whole(house)
    assert jobs_of(house) == [job]
    writers = [record.restart for record in house.records]
    assert writers == sorted(writers)


def dies(house: House, where: str) -> None:
    """A supervisor is killed with SIGKILL there."""
    died = house.higgsfield("run", "tiny.yaml", **{DIE: where})
    assert died.returncode == -KILL, (where, died.stdout, died.stderr)


def killed_while_it_submits(site: Site) -> None:
    """Before and after sbatch, and after a start was moved: one job, and every step once."""
    house = site.house(variables=SLOW, training={"max_steps": 300})
    dies(house, "before submit")
    assert site.cluster.ask("squeue", "--me", "-h", "-p", site.name) == ""
    dies(house, "after submit")
    [job] = site.cluster.ask("squeue", "--me", "-h", "-p", site.name, "-o", "%i").split()
    house.start("run", "tiny.yaml")
    assert (house.waits_for(Submitted).job_id, house.those(Submitted)[0].adopted) == (job, True)
    house.waits_for_step(10)
    send(house.started[0].pid, KILL)
    site.cluster.ask("scontrol", "requeue", job)
    dies(house, "after start_now")
    house.start("run", "tiny.yaml")
    ends_whole(house)
    assert jobs_of(house) == [job]
    assert [record.step for record in house.records] == list(range(1, 301))


def killed_while_it_cancels(site: Site) -> None:
    """Before and after scancel of a job that waits: told once, and nothing is left."""
    site.occupy(seconds=300)
    house = site.house()
    first = site.start(house).started[0]
    job = house.waits_for(Submitted).job_id
    send(first.pid, KILL)
    first.wait()
    house.run.stop_file.touch()
    dies(house, "before cancel")
    assert site.shown(job)["JobState"] == "PENDING"
    dies(house, "after cancel")
    assert site.shown(job)["JobState"] == "CANCELLED"
    assert house.higgsfield("run", "tiny.yaml").returncode == 4
    assert [len(house.those(kind)) for kind in (StopRequested, Cancelled, Stopped, Submitted)] == [1, 1, 1, 1]
    house.leaves_nothing()


SCENARIOS: dict[Scenario, int] = {own_limit: 2, own_node: 3, one_job: 1, next_job: 1}
SCENARIOS |= {embedded_preempted: 1, embedded_node: 2, killed_while_it_submits: 1, killed_while_it_cancels: 1}
"""With the number of nodes that each needs."""


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    """All scenarios of this session, begun at once."""
    need(missing_packages(accounting=True))
    wanted = {item.callspec.params["scenario"] for item in request.session.items if item.module is request.module}  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("places")
    sizes = {each.__name__: size for each, size in SCENARIOS.items() if each in wanted}
    with survival_cluster(folder, sizes, {}) as (cluster, nodes):
        sites = {name: Site(cluster, name, nodes[name], folder / name) for name in sizes}
        running = Together({each.__name__: each for each in wanted}, sites)
        try:
            yield running
        finally:
            running.end()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_a_supervisor_lives(together: Together, scenario: Scenario) -> None:
    together.result(scenario.__name__)
