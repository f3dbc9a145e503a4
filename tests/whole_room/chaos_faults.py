"""The faults of `tests.whole_room.chaos`: each is tried until it finds what it needs; True when it happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.whole_room.house import KILL, STOP, send

if TYPE_CHECKING:
    from tests.whole_room.chaos import Chaos


@dataclass(frozen=True)
class Fault:
    """One fault, before it happens."""

    kind: str
    settled: bool
    """Whether it waits until the run trains again after the last one."""
    wait_s: float
    lasts_s: float
    pick: float
    """Which of several nodes or ranks, as a share of them."""


def kill_node(chaos: Chaos, fault: Fault) -> bool:
    chaos.bring_node()
    nodes = sorted(chaos.site.nodes_of(job["JobId"])) if (job := chaos.job("RUNNING")) else []
    if nodes:
        chaos.away = nodes[int(fault.pick * len(nodes))]
        chaos.site.cluster.kill_slurmd(chaos.away)
    return bool(nodes)


def drain_node(chaos: Chaos, fault: Fault) -> bool:
    """Drain it, end the job there, and let the node be used again after a while."""
    job = chaos.job("RUNNING")
    if not job or not chaos.ask("scontrol", "update", f"NodeName={job['BatchHost']}", "State=DRAIN", "Reason=kernel"):
        return False
    time.sleep(fault.lasts_s / 2)
    chaos.ask("scontrol", "requeue", job["JobId"])
    time.sleep(fault.lasts_s)
    chaos.house.until(lambda: chaos.ask("scontrol", "update", f"NodeName={job['BatchHost']}", "State=RESUME"))
    return True


def preempt(chaos: Chaos, fault: Fault) -> bool:
    job = chaos.job("RUNNING")
    if job:
        chaos.others.add(chaos.site.occupy("high", max(1, int(fault.lasts_s / 3)), nodelist=job["BatchHost"]))
    return bool(job)


def requeue(chaos: Chaos, fault: Fault) -> bool:
    job = chaos.job("RUNNING")
    return bool(job) and chaos.ask("scontrol", "requeue", job["JobId"])


def kill_trainer(chaos: Chaos, fault: Fault) -> bool:
    trainers = sorted(chaos.house.trainers())
    if trainers:
        send(trainers[int(fault.pick * len(trainers))], KILL)
    return bool(trainers)


def stop_trainer(chaos: Chaos, fault: Fault) -> bool:
    trainers = sorted(chaos.house.trainers())
    if trainers:
        send(trainers[int(fault.pick * len(trainers))], STOP)
    return bool(trainers)


def kill_controller(chaos: Chaos, fault: Fault) -> bool:
    chaos.site.cluster.kill_controller()
    time.sleep(fault.lasts_s)
    chaos.site.cluster.start_controller()
    return True


def freeze_controller(chaos: Chaos, fault: Fault) -> bool:
    chaos.site.cluster.stop("slurmctld")
    time.sleep(fault.lasts_s)
    chaos.site.cluster.cont("slurmctld")
    return True


def suspend(chaos: Chaos, fault: Fault) -> bool:
    job = chaos.job("RUNNING")
    if not job or not chaos.ask("scontrol", "suspend", job["JobId"]):
        return False
    time.sleep(fault.lasts_s)
    chaos.house.until(lambda: chaos.ask("scontrol", "resume", job["JobId"]) or not chaos.job("SUSPENDED"))
    return True


def reach_time_limit(chaos: Chaos, fault: Fault) -> bool:
    """The end comes near: with its warning, or before that."""
    job = chaos.job("RUNNING")
    if not job or not chaos.ask("scontrol", "update", f"JobId={job['JobId']}", f"EndTime=now+{3 * fault.lasts_s:.0f}"):
        return False
    start = job["JobId"], job["Restarts"]
    chaos.house.until(lambda: (now := chaos.job("RUNNING")) == {} or (now["JobId"], now["Restarts"]) != start)
    return True


def kill_accounting(chaos: Chaos, fault: Fault) -> bool:
    chaos.site.cluster.kill_accounting()
    time.sleep(fault.lasts_s)
    chaos.site.cluster.start_accounting()
    return True


def kill_supervisor(chaos: Chaos, fault: Fault) -> bool:
    """Killed, and started again at once, or only after the next fault."""
    chaos.bring_supervisor()
    chaos.house.started[-1].kill()
    chaos.house.started[-1].wait()
    chaos.has_supervisor = False
    if fault.pick < 0.5:
        time.sleep(fault.lasts_s / 5)
        chaos.bring_supervisor()
    return True


FAULTS: dict[str, Callable[[Chaos, Fault], bool]] = {
    "node killed": kill_node,
    "node drained": drain_node,
    "preempted": preempt,
    "requeued": requeue,
    "trainer killed": kill_trainer,
    "trainer stopped": stop_trainer,
    "controller killed": kill_controller,
    "controller frozen": freeze_controller,
    "job suspended": suspend,
    "time limit": reach_time_limit,
    "accounting killed": kill_accounting,
    "supervisor killed": kill_supervisor,
}
