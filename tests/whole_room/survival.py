"""A cluster in which every scenario has partitions and nodes of its own, so that long waits lie beside each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slurm import parsing
from slurm.local_cluster.cluster import Cluster, running
from supervisor.journal import Continued, Event, Finished, SegmentStarted, Submitted
from tests.whole_room import light, light_trainer, paced_train
from tests.whole_room.house import EXPLODING, House, environment, furnish
from worker.contract.loss_history import Record, surviving

ROOT = Path(__file__).parents[2]
MAY_END = "may-end"
"""In a run's house: its scenario is through with its faults."""
AT_ONCE = 12
"""Scenarios: all of them at once would take half a minute to import anything."""


class Scenario(Protocol):
    """A run and a fault, from its beginning to its last assertion; its name is that of its partition."""

    __name__: str

    def __call__(self, site: Site) -> None: ...


@dataclass
class Site:
    """What one scenario has: the cluster, its partition `NAME`, the one above it `NAME_high`, and a folder."""

    cluster: Cluster
    name: str
    nodes: tuple[str, ...]
    folder: Path
    houses: list[House] = field(default_factory=list)

    def house(self, name: str = "tiny", variables: Mapping[str, str] | None = None, **sections: Any) -> House:
        """A run's folder on this partition, with the light trainer; `variables` are of `light_trainer`."""
        cluster = {
            "kind": "slurm",
            "time_limit": "00:30:00",
            "partition": self.name,
            "environment": {light_trainer.END: str(self.folder / name / MAY_END)} | dict(variables or {}),
        }
        settings = {
            "run": {"name": name, "dir": "runs"},
            "training": TRAINING | sections.pop("training", {}),
            "checkpoint": {"every_steps": 20, "healthy_after": 5, "keep": 5},
            "cluster": cluster | sections.pop("cluster", {}),
        }
        env = environment(SLURM_CONF=str(self.cluster.conf), PYTHONPATH=str(ROOT))
        house = furnish(self.folder / name, env, **settings, **sections)
        house.name, house.command = name, light.COMMAND
        self.houses.append(house)
        return house

    def real_house(self, name: str) -> House:
        """A run's folder on this partition, with real training of a small model, paced to leave time for a fault."""
        optimizer = {"name": "adamw", "learning_rate": 1e-4}
        paced = {light_trainer.TRAINER: "tests.whole_room.paced_train", paced_train.STEP_S: "0.1"}
        cluster = {"kind": "slurm", "time_limit": "00:30:00", "partition": self.name, "cpus_per_task": 2}
        env = environment(SLURM_CONF=str(self.cluster.conf), PYTHONPATH=str(ROOT))
        house = furnish(
            self.folder / name,
            env,
            training=EXPLODING["training"] | {"max_steps": 240, "batch_size": 1, "optimizer": optimizer},
            cluster=cluster | {"environment": paced},
            checkpoint={"every_steps": 50},
        )
        house.command = light.COMMAND
        self.houses.append(house)
        return house

    def start(self, house: House) -> House:
        """Supervise it in the foreground."""
        house.start("run", "tiny.yaml")
        return house

    def occupy(self, partition: str = "", seconds: int = 5, **options: str) -> str:
        """A job of somebody else's on a whole node of this scenario's; its id."""
        given = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        where = partition or f"{self.name}_high"
        argv = ["sbatch", "--parsable", f"--partition={where}", "--cpus-per-task=2", "--output=/dev/null", *given]
        return self.cluster.ask(*argv, "--wrap", f"sleep {seconds}").strip()

    def job(self, house: House) -> str:
        """The newest job of the run."""
        return house.waits_for(Submitted, len(house.those(Submitted)) or 1).job_id

    def shown(self, job_id: str) -> dict[str, str]:
        return parsing.fields(self.cluster.ask("scontrol", "show", "--oneliner", "job", job_id))

    def nodes_of(self, job_id: str) -> tuple[str, ...]:
        return parsing.nodes(self.shown(job_id)["NodeList"])

    def resume(self, node: str) -> None:
        """Undo a drain."""
        self.cluster.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def node_of(self, house: House) -> str:
        """The node on which its job runs."""
        return self.nodes_of(self.job(house))[0]


TRAINING = {
    "max_steps": 400,
    "batch_size": 1,
    "zygote": False,
    "optimizer": {"name": "sgd", "learning_rate": 1.0},
    "schedule": {"name": "constant", "warmup": 0},
}


def jobs_of(house: House) -> list[str]:
    return [event.job_id for event in house.those(Submitted)]


def causes(house: House) -> list[str]:
    return [event.cause for event in house.those(Continued)]


def first_steps(house: House) -> list[int]:
    """The first step of each segment."""
    return [event.step for event in house.those(SegmentStarted)]


def ends_whole(house: House) -> None:
    """The run may end now and does, and the curve that survived has every step once."""
    (house.folder / MAY_END).touch()
    house.waits_for(Finished)
    records: list[Record] = house.records
    last = house.those(Finished)[0].final_step
    assert [record.step for record in surviving(records)] == list(range(1, last + 1))
    house.until(lambda: not house.processes())


def told(house: House, kind: type[Event]) -> str:
    """The reason of the last event of a kind."""
    return house.those(kind)[-1].reason


@contextmanager
def survival_cluster(
    folder: Path, sizes: Mapping[str, int], conf: Mapping[str, str]
) -> Iterator[tuple[Cluster, dict[str, tuple[str, ...]]]]:
    """A cluster with accounting and, for each scenario, `sizes` nodes under partitions NAME and NAME_high.

    `conf` adds to or replaces what a scenario's own partition says.
    """
    flag = folder / "fail-prolog"
    prolog = folder / "prolog"
    prolog.write_text(f'#!/bin/sh\n[ ! -e "{flag}-$SLURM_JOB_PARTITION" ]\n', encoding="utf-8")
    prolog.chmod(0o755)
    with running(nodes=sum(sizes.values()), accounting=True) as cluster:
        names = iter(cluster.nodes)
        own = {name: tuple(next(names) for _ in range(size)) for name, size in sizes.items()}
        lines = [f"Prolog={prolog}"]
        for name, nodes in own.items():
            listed = ",".join(nodes)
            words = conf.get(name, "PreemptMode=REQUEUE GraceTime=10")
            lines.append(f"PartitionName={name} Nodes={listed} PriorityTier=1 MaxTime=INFINITE State=UP {words}")
            lines.append(f"PartitionName={name}_high Nodes={listed} PriorityTier=10 PreemptMode=OFF State=UP")
        cluster.conf.write_text(cluster.conf.read_text() + "\n".join(lines) + "\n", encoding="utf-8")
        cluster.ask("scontrol", "reconfigure")
        yield cluster, own


class Together:
    """Runs scenarios beside each other, in their order; `result` waits for one and raises what it raised."""

    def __init__(self, scenarios: Mapping[str, Scenario], sites: Mapping[str, Site]) -> None:
        self._pool = ThreadPoolExecutor(max_workers=AT_ONCE)
        self._futures: dict[str, Future[None]] = {
            name: self._pool.submit(_play, scenario, sites[name]) for name, scenario in scenarios.items()
        }

    def result(self, name: str) -> None:
        self._futures[name].result()

    def end(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _play(scenario: Scenario, site: Site) -> None:
    try:
        scenario(site)
    finally:
        for house in site.houses:
            house.__exit__()
        for line in site.cluster.ask("squeue", "--me", "-h", "-o", "%i|%P").splitlines():
            job, _, partition = line.partition("|")
            if partition.removesuffix("_high") == site.name:
                site.cluster.ask("scancel", job)
