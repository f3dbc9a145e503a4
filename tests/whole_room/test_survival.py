"""True faults of a real cluster, many beside each other: preemption, lost nodes, drains, limits, holds, a scancel."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from datetime import datetime

import pytest

from slurm.local_cluster.configuration import missing_packages
from supervisor.journal import (
    Cancelled,
    Continued,
    DrainSeen,
    JobChanged,
    JobSeen,
    NodeStruck,
    Preempted,
    StartMoved,
    Stopped,
    Submitted,
    WorkerLeft,
)
from tests.conftest import need
from tests.waiting import eventually
from tests.whole_room.house import KILL, House, parent_of, send
from tests.whole_room.light_trainer import LAST_SAVE_S, REQUEUE, SAVE_S, STEP_S
from tests.whole_room.survival import (
    Scenario,
    Site,
    Together,
    causes,
    ends_whole,
    first_steps,
    jobs_of,
    survival_cluster,
    told,
)
from worker.contract.exit_report import ExitReport, Outcome
from worker.contract.files import read_message

pytestmark = [pytest.mark.slurm, pytest.mark.training]
SLOW = {STEP_S: "0.1"}
"""Forty seconds of training: enough for a fault to come and go."""


def last_step(house: House) -> int:
    return house.records[-1].step


# -- preemption


def preempted(site: Site) -> None:
    """Saved at the next step, requeued by its own agent, hurried, on as if nothing had been."""
    house = site.start(site.house(variables=SLOW))
    house.waits_for_step(25)
    preemptor = site.occupy(seconds=3)
    moved = house.waits_for(StartMoved)
    ends_whole(house)
    saved = read_message(house.run.exit_report(1, 0, 0), ExitReport)
    assert saved is not None
    began = datetime.fromisoformat(site.shown(preemptor)["StartTime"]).timestamp()
    assert began - saved.ended < 45  # a minute of grace was left: it waited for the save, and for nothing else
    left = house.those(WorkerLeft)[0]
    assert (left.outcome, left.saved_step) == (Outcome.LEFT, left.step)
    assert first_steps(house) == [1, (left.step or 0) + 1]
    assert [record.step for record in house.records] == list(range(1, 401))  # no step was lost, none was made twice
    assert len(house.those(Preempted)) == 1
    assert (jobs_of(house), causes(house)) == ([moved.job_id], ["first"])


def exact(site: Site) -> None:
    """A real training that was preempted ends with the same weights, to the byte, as one that was not."""
    cut, plain = site.start(site.real_house("cut")), site.start(site.real_house("plain"))
    cut.waits_for_step(20)
    site.occupy(seconds=3, nodelist=site.node_of(cut))
    cut.waits_for(StartMoved)
    ends_whole(cut)
    ends_whole(plain)
    assert (len(cut.those(Preempted)), len(plain.those(Preempted))) == (1, 0)
    weights = [(house.run.final / "model.safetensors").read_bytes() for house in (cut, plain)]
    assert weights[0] == weights[1]


def stays_until_killed(site: Site) -> None:
    """Where the job has no scontrol Slurm itself requeues it, later: all of them stay until they are killed."""
    house = site.start(site.house(variables=SLOW | {REQUEUE: "0"}))
    house.waits_for_step(25)
    site.occupy(seconds=3)
    house.waits_for(StartMoved)
    ends_whole(house)
    assert len(house.those(Preempted)) == len(jobs_of(house)) == 1
    assert [record.step for record in house.records] == list(range(1, 401))


def cancel_mode(site: Site) -> None:
    """PreemptMode=CANCEL ends the job for good: a new one is submitted."""
    house = site.house(variables=SLOW | {REQUEUE: "0"}, recovery={"absent_grace_s": 3.0})
    site.start(house)
    house.waits_for_step(25)
    site.occupy(seconds=3)
    house.waits_for(Submitted, 2)
    ends_whole(house)
    assert causes(house) == ["first", "preempted"]
    assert [record.step for record in house.records] == list(range(1, 401))
    assert [event.state for event in house.those(JobSeen)].count("PREEMPTED") == 1


def no_grace(site: Site) -> None:
    """A save that takes longer than the grace: the last whole checkpoint, and the log says what that cost."""
    house = site.start(site.house(variables=SLOW | {LAST_SAVE_S: "60"}))
    house.waits_for_step(25)
    site.occupy(seconds=3)
    house.waits_for(StartMoved)
    house.until(lambda: len(first_steps(house)) == 2)
    begun = first_steps(house)[1]
    made = [record.step for record in house.records if record.restart == 0]
    assert begun == (made[-1] - 1) // 20 * 20 + 1
    lost = [step for step in made if step >= begun]
    log = " ".join(house.higgsfield("log", "tiny").stdout.split())
    assert f"{len(lost)} step" in log, log
    ends_whole(house)


def half_rate(site: Site) -> None:
    """With a factor on preemption the requeued worker waits for the supervisor's word."""
    house = site.start(site.house(variables=SLOW, recovery={"preemption": {"lr_factor": 0.5}}))
    house.waits_for_step(25)
    site.occupy(seconds=3)
    ends_whole(house)
    [_, second] = house.those(Continued)
    assert (second.cause, second.lr_scale, second.where) == ("preempted", 0.5, "requeued")
    assert len(jobs_of(house)) == 1
    assert {record.lr for record in house.records if record.attempt == 2} == {0.5}


def alone(site: Site) -> None:
    """With its supervisor dead a requeued worker goes on by itself, after the two minutes that nobody takes away."""
    house = site.start(site.house(variables=SLOW))
    house.waits_for_step(25)
    house.started[0].kill()
    site.occupy(seconds=3)
    house.until(lambda: house.records[-1].restart == 1)
    assert {record.attempt for record in house.records} == {1}
    site.start(house)
    ends_whole(house)
    assert (jobs_of(house), causes(house)) == ([site.job(house)], ["first"])
    assert [record.step for record in house.records] == list(range(1, 401))


# -- nodes


def node_lost(site: Site) -> None:
    """slurmd dies, its trainer lives on: the next start is elsewhere, and the old one ends by itself."""
    house = site.start(site.house(variables=SLOW, training={"max_steps": 700}))
    house.waits_for_step(25)
    node = site.node_of(house)
    old = house.trainers()
    site.cluster.kill_slurmd(node)
    excluded = house.waits_for(JobChanged)
    assert (excluded.what, excluded.new) == ("exclude", node)
    house.until(lambda: len(first_steps(house)) == 2)
    eventually(lambda: not set(old) & set(house.trainers()), 30.0)
    assert site.node_of(house) != node
    assert node in site.shown(site.job(house))["ExcNodeList"]
    ends_whole(house)
    assert (causes(house), len(jobs_of(house))) == (["first"], 1)
    assert [strike.node for strike in house.those(NodeStruck)] == [node]
    writers = [record.restart for record in house.records]
    assert writers == sorted(writers)  # once the new start had written, the old one wrote nothing more


def batch_node_lost(site: Site) -> None:
    """Of two nodes the batch step's."""
    lose_one_of_two(site, is_batch_node=True)


def other_node_lost(site: Site) -> None:
    """Of two nodes the other one."""
    lose_one_of_two(site, is_batch_node=False)


def lose_one_of_two(site: Site, is_batch_node: bool) -> None:
    """The job stays RUNNING without the node, so it is ended and a fresh one submitted; never do two train at once."""
    house = site.start(site.house(variables=SLOW, cluster={"nodes": 2}, training={"max_steps": 1000}))
    house.waits_for_step(25)
    first = site.job(house)
    batch = site.shown(first)["BatchHost"]
    (other,) = set(site.nodes_of(first)) - {batch}
    node = batch if is_batch_node else other
    site.cluster.kill_slurmd(node)
    house.waits_for(Submitted, 2)
    house.until(lambda: len(first_steps(house)) == 2)
    assert node not in site.nodes_of(site.job(house))
    ends_whole(house)
    assert causes(house) == ["first", "node_failed"]
    assert f"{node} is down" in told(house, Continued)
    assert site.shown(first)["JobState"] == "CANCELLED"
    attempts = [record.attempt for record in house.records]
    assert attempts == sorted(attempts)  # once the new job had written, nobody on the lost node wrote any more


def drained(site: Site) -> None:
    """Training goes on where an administrator drains; the next start is elsewhere."""
    house = site.start(site.house(variables=SLOW, training={"max_steps": 800}))
    house.waits_for_step(25)
    node, job = site.node_of(house), site.job(house)
    site.cluster.ask("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=kernel update")
    drain = house.waits_for(DrainSeen)
    seen = last_step(house)  # before the verb, which may take until the last step
    assert (drain.nodes, drain.job_id) == ((node,), job)
    assert house.json("status", "tiny")["runs"][0]["job"]["draining"] == [node]
    house.waits_for_step(seen + 20)
    assert len(first_steps(house)) == 1
    site.cluster.ask("scontrol", "requeue", job)
    house.until(lambda: len(first_steps(house)) == 2)
    assert site.node_of(house) != node
    ends_whole(house)


def maintenance(site: Site) -> None:
    """What fits before a maintenance is used, and the full limit comes back when it is over."""
    made = [f"reservationname={site.name}", "starttime=now+540", "duration=60", "user=root", "flags=maint"]
    site.cluster.ask("scontrol", "create", "reservation", *made, f"nodes={','.join(site.nodes)}")
    house = site.start(site.house(variables=SLOW, cluster={"min_time": "00:01:00"}))
    change = house.waits_for(JobChanged)
    assert (change.what, change.old) == ("time_limit", "00:30:00")
    assert change.new in ("00:08:00", "00:07:00", "00:06:00")
    house.waits_for_step(25)
    site.cluster.ask("scontrol", "delete", f"reservationname={site.name}")
    job = site.job(house)
    site.cluster.ask("scontrol", "requeue", job)
    again = house.waits_for(JobChanged, 2)
    assert (again.what, again.new) == ("time_limit", "00:30:00")
    house.waits_for_step(60)
    assert site.shown(job)["TimeLimit"] == "00:30:00"
    ends_whole(house)


def reserved(site: Site) -> None:
    """Without a shortest time the job waits, and status says for what and until when."""
    made = [f"reservationname={site.name}", "starttime=now+3600", "duration=60", "user=root", "flags=maint"]
    site.cluster.ask("scontrol", "create", "reservation", *made, f"nodes={','.join(site.nodes)}")
    house = site.start(site.house(cluster={"time_limit": "02:00:00"}))  # nobody else's limit reaches so far
    why = house.until(lambda: [e.reason for e in house.those(JobSeen) if "maintenance" in e.reason])
    assert "after which it can start" in why[-1]
    assert "kept free for a maintenance" in house.json("status", "tiny")["runs"][0]["reason"]
    assert house.those(JobChanged) == []
    site.cluster.ask("scontrol", "delete", f"reservationname={site.name}")
    ends_whole(house)


# -- limits and queues


def time_limit(site: Site) -> None:
    """A run longer than three limits passes through all of them, told early enough to save."""
    settings = {"time_limit": "00:02:00"}  # Slurm may tell it 70 seconds ahead: of one minute a slow start leaves none
    house = site.house(
        variables=SLOW | {SAVE_S: "0.2"},
        cluster=settings,
        recovery={"max_submissions_per_hour": 20},
        training={"max_steps": 1200},
    )
    site.start(house)
    house.waits_for(Submitted, 3)
    ends_whole(house)
    assert set(causes(house)[1:]) == {"time_limit"}
    assert [record.step for record in house.records] == list(range(1, 1201))


def over_time_limit(site: Site) -> None:
    """Where jobs may run past their limit the worker still leaves ahead of it, and the run goes on."""
    settings = {"time_limit": "00:02:00"}
    house = site.start(site.house(variables=SLOW, cluster=settings, training={"max_steps": 500}))
    house.waits_for(Submitted, 2)
    ends_whole(house)
    assert causes(house)[:2] == ["first", "time_limit"]
    assert {event.state for event in house.those(JobSeen)} <= {"PENDING", "RUNNING", "COMPLETING", "COMPLETED"}
    assert [record.step for record in house.records] == list(range(1, 501))


def failed_launch(site: Site) -> None:
    """Held because its prolog failed: released, and it starts."""
    flag = site.folder.parent / f"fail-prolog-{site.name}"
    flag.touch()
    house = site.start(site.house())
    house.until(lambda: any("launch failed" in event.why for event in house.those(JobSeen)))
    flag.unlink()
    for node in site.nodes:
        site.resume(node)
    house.waits_for(JobChanged)
    assert [event.what for event in house.those(JobChanged)] == ["released"]
    ends_whole(house)
    assert len(jobs_of(house)) == 1


def failed_launch_twice(site: Site) -> None:
    """Held again after it was released: a fresh job."""
    flag = site.folder.parent / f"fail-prolog-{site.name}"
    flag.touch()
    house = site.start(site.house())
    house.until(lambda: any("launch failed" in event.why for event in house.those(JobSeen)))
    site.resume(site.nodes[0])
    house.waits_for(Submitted, 2)
    flag.unlink()
    site.resume(site.nodes[0])
    ends_whole(house)
    assert [event.what for event in house.those(JobChanged)] == ["released"]
    assert [event.job_id for event in house.those(Cancelled)] == jobs_of(house)[:1]
    assert (causes(house), len(jobs_of(house))) == (["first"], 2)  # nothing of its attempt was made


def agent_killed(site: Site) -> None:
    """Its trainer dies with it, the job ends without a report, and a fresh one goes on from the newest checkpoint."""
    house = site.start(site.house(variables=SLOW))
    house.waits_for_step(45)
    [trainer] = house.trainers()
    send(parent_of(trainer), KILL)
    house.until(lambda: len(first_steps(house)) == 2)
    last = max(record.step for record in house.records if record.attempt == 1)
    assert first_steps(house) in ([1, last // 20 * 20 + 1], [1, (last - 1) // 20 * 20 + 1])
    ends_whole(house)
    assert (causes(house), len(jobs_of(house))) == (["first", "vanished"], 2)


def fallback(site: Site) -> None:
    """A limit of the QOS keeps the job waiting: named, and after a while another QOS is tried."""
    site.cluster.ask("sacctmgr", "--immediate", "add", "qos", site.name, "MaxJobsPerUser=1")
    site.cluster.ask(
        "sacctmgr", "--immediate", "modify", "user", pwd.getpwuid(os.getuid()).pw_name, "set", f"qos+={site.name}"
    )
    site.occupy(site.name, seconds=300, qos=site.name)
    house = site.house(cluster={"qos": site.name, "fallback": [{"qos": "normal", "after_s": 6.0}]})
    site.start(house)
    house.until(lambda: any("one person run no more jobs" in event.reason for event in house.those(JobSeen)))
    change = house.waits_for(JobChanged)
    assert (change.what, change.new, change.error) == ("qos", "QOS normal", None)
    ends_whole(house)


def impossible(site: Site) -> None:
    """A request that no partition can ever satisfy is refused before anything is made."""
    house = site.house(cluster={"nodes": len(site.nodes) + 1})
    refused = house.higgsfield("run", "tiny.yaml")
    assert (refused.returncode, house.run.path.exists()) == (2, False), refused.stderr
    assert "Requested node configuration is not available" in refused.stderr


def cancelled(site: Site) -> None:
    """A person's scancel stops the run for good; the worker saves, and nothing requeues it."""
    house = site.start(site.house(variables=SLOW))
    house.waits_for_step(25)
    job = site.job(house)
    site.cluster.ask("scancel", job)
    stopped = house.waits_for(Stopped)
    assert stopped.by == pwd.getpwuid(os.getuid()).pw_name
    assert stopped.saved_step == last_step(house)
    house.until(lambda: not house.processes())
    assert (site.shown(job)["JobState"], site.shown(job)["Restarts"]) == ("CANCELLED", "0")
    assert site.cluster.ask("squeue", "--me", "-h", f"--name={site.shown(job)['JobName']}") == ""
    assert house.started[0].wait() == 4


SCENARIOS: dict[Scenario, int] = {
    alone: 1,
    time_limit: 1,
    over_time_limit: 1,
    batch_node_lost: 3,
    other_node_lost: 3,
    node_lost: 2,
    drained: 2,
    maintenance: 1,
    preempted: 1,
    exact: 2,
    stays_until_killed: 1,
    cancel_mode: 1,
    no_grace: 1,
    half_rate: 1,
    failed_launch: 1,
    failed_launch_twice: 1,
    agent_killed: 1,
    fallback: 2,
    reserved: 1,
    impossible: 1,
    cancelled: 1,
}
"""With the number of nodes that each needs, the longest first."""
CONF = {
    "preempted": "PreemptMode=REQUEUE GraceTime=60",
    "over_time_limit": "OverTimeLimit=1",
    "cancel_mode": "PreemptMode=CANCEL GraceTime=5",
    "no_grace": "PreemptMode=REQUEUE GraceTime=0",
}


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    """All scenarios of this session, begun in their order."""
    need(missing_packages(accounting=True))
    wanted = {item.callspec.params["scenario"] for item in request.session.items if item.module is request.module}  # type: ignore[attr-defined]
    folder = tmp_path_factory.mktemp("survival")
    sizes = {each.__name__: size for each, size in SCENARIOS.items() if each in wanted}
    with survival_cluster(folder, sizes, CONF) as (cluster, nodes):
        sites = {name: Site(cluster, name, nodes[name], folder / name) for name in sizes}
        running = Together({each.__name__: each for each in SCENARIOS if each in wanted}, sites)
        try:
            yield running
        finally:
            running.end()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_a_run_survives(together: Together, scenario: Scenario) -> None:
    together.result(scenario.__name__)
