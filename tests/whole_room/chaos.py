"""Runs that meet faults at random times on a real cluster: `python -m tests.whole_room.chaos [--seed N] [--count N]`.

Each seed draws a shape (nodes, tasks) and faults; the same seed draws the same ones again, though not to the
millisecond. Each run has a cluster of three nodes of its own and trains in earnest. It has to finish, with the weights
of a run that nobody disturbed, and what `wrong_with` looks for must not have happened. Prints a line a run.
"""

from __future__ import annotations

import argparse
import functools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from slurm.commands import SchedulerError
from slurm.local_cluster.cluster import ClusterError, running
from supervisor.fold import ending_of
from supervisor.journal import Continued, SegmentStarted, Submitted
from tests.whole_room import light, light_trainer, paced_train
from tests.whole_room.chaos_faults import FAULTS, Fault
from tests.whole_room.chaos_watch import STEPS, Watch, digests, wrong_with
from tests.whole_room.house import EXPLODING, House, environment, furnish
from tests.whole_room.survival import Site
from worker.contract.loss_history import surviving

EVERY, STEP_S, HANG_S = 20, 0.1, 8.0
SHAPES = ((1, 1), (1, 2), (2, 1))
"""Nodes, and tasks on each."""


@dataclass(frozen=True)
class Plan:
    seed: int
    nodes: int
    tasks_per_node: int
    faults: tuple[Fault, ...]


def draw(seed: int, faults: int = 4) -> Plan:
    """What a seed stands for."""
    chance = random.Random(seed)
    nodes, tasks = chance.choice(SHAPES)
    drawn = []
    for kind in chance.sample([*FAULTS, "supervisor killed"], faults):
        lasts_s = chance.uniform(1, 15)
        drawn.append(Fault(kind, chance.random() < 0.6, chance.uniform(0, 6), lasts_s, chance.random()))
    return Plan(seed, nodes, tasks, tuple(drawn))


@dataclass
class Chaos:
    """A run in the middle of its faults."""

    plan: Plan
    site: Site
    house: House
    told: list[str] = field(default_factory=list)
    """The faults that happened, each with the step at which it did."""
    others: set[str] = field(default_factory=set)
    """Jobs that are not the run's."""
    away: str = ""
    """The node whose daemon was killed."""
    struck_at: float = 0.0
    has_supervisor: bool = True

    def play(self) -> None:
        """Let all faults happen, mend what is broken, and wait for the end of the run."""
        self.house.waits_for(SegmentStarted)
        for fault in self.plan.faults:
            if fault.settled:
                self.house.until(lambda: self.is_over or self.trains_again)
            time.sleep(fault.wait_s)
            step = self.step
            if (
                self.house.until(lambda fault=fault: self.is_over or FAULTS[fault.kind](self, fault))
                and not self.is_over
            ):
                self.told.append(f"{fault.kind} @{step}")
            self.struck_at = time.time()
            self.bring_supervisor(unless=fault.kind)
        self.bring_supervisor()
        self.bring_node()
        self.house.until(lambda: self.is_over)
        self.house.until(lambda: self.house.started[-1].poll() is not None and not self.house.processes())

    @property
    def is_over(self) -> bool:
        return ending_of(self.house.events) is not None

    @property
    def step(self) -> int:
        records = self.house.records
        return records[-1].step if records else 0

    @property
    def trains_again(self) -> bool:
        newest = [record for record in self.house.records if record.time > self.struck_at]
        return len(newest) > 15

    def job(self, *states: str) -> dict[str, str]:
        """What Slurm shows of the run's job; {} while it is in none of these states, or nobody answers."""
        try:
            shown = self.site.shown(self.site.job(self.house))
        except SchedulerError:
            return {}
        return shown if shown.get("JobState") in states else {}

    def ask(self, *argv: str) -> bool:
        """Whether Slurm did as it was told."""
        try:
            self.site.cluster.ask(*argv)
        except SchedulerError:
            return False
        return True

    def bring_supervisor(self, unless: str = "") -> None:
        """Start the supervisor again that was killed before."""
        if not self.has_supervisor and unless != "supervisor killed" and not self.is_over:
            self.site.start(self.house)
            self.has_supervisor = True

    def bring_node(self) -> None:
        """Start the node's daemon again once Slurm has given it up."""
        if self.away:
            node, self.away = self.away, ""
            self.house.until(lambda: self.is_over or self.is_down(node))
            self.site.cluster.start_slurmd(node)

    def is_down(self, node: str) -> bool:
        try:
            return self.site.cluster.node_states()[node].startswith("down")
        except SchedulerError:
            return False


# -- runs


def chaos_house(folder: Path, env: dict[str, str], nodes: int, tasks: int, step_s: float, kind: str) -> House:
    variables = {light_trainer.TRAINER: "tests.whole_room.paced_train", paced_train.STEP_S: str(step_s)}
    cluster = {"kind": kind, "time_limit": "00:30:00", "nodes": nodes, "tasks_per_node": tasks, "cpus_per_task": 1}
    optimizer = {"name": "adamw", "learning_rate": 1e-3}
    house = furnish(
        folder,
        env,
        training=EXPLODING["training"] | {"max_steps": STEPS, "batch_size": 2, "optimizer": optimizer},
        data=EXPLODING["data"] | {"max_tokens": 64},
        ema={"decay": 0.9, "every": 2},
        checkpoint={"every_steps": EVERY, "healthy_after": 5, "keep": 50},
        recovery={"hang_timeout_s": HANG_S, "absent_grace_s": 10.0, "max_submissions_per_hour": 30},
        cluster=cluster | {"environment": variables},
    )
    house.command = light.COMMAND
    return house


@functools.cache
def undisturbed(world: int) -> dict[str, str]:
    """The weights that a run of so many tasks ends with when nothing happens."""
    with tempfile.TemporaryDirectory(prefix="higgsfield-calm-") as name:
        env = environment(PYTHONPATH=str(Path(__file__).parents[2]))
        with chaos_house(Path(name), env, 1, world, 0.0, "local") as house:
            done = house.higgsfield("run", "tiny.yaml")
            assert done.returncode == 0, done.stderr
            return digests(house.run)


@dataclass(frozen=True)
class Told:
    """How a run went."""

    plan: Plan
    faults: Sequence[str]
    wrong: Sequence[str]
    result: str

    def __str__(self) -> str:
        plan = self.plan
        shape = f"{plan.nodes} x {plan.tasks_per_node}"
        end = f"WRONG: {'; '.join(self.wrong)}" if self.wrong else "finished, all as it should be"
        return f"seed {plan.seed} ({shape}): {', '.join(self.faults)}: {end} ({self.result})"


def survive(plan: Plan, keep: Path | None = None) -> Told:
    """Play a plan on a cluster of its own; `keep` is a folder for what is left of it."""
    begun = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="higgsfield-chaos-"))
    try:
        with running(nodes=3, accounting=True) as cluster:
            site = Site(cluster, "low", cluster.nodes, folder)
            env = environment(SLURM_CONF=str(cluster.conf), PYTHONPATH=str(Path(__file__).parents[2]))
            house = chaos_house(folder, env, plan.nodes, plan.tasks_per_node, STEP_S, "slurm")
            chaos = Chaos(plan, site, site.start(house))
            with house, Watch(chaos) as watch:
                wrong = _play(chaos, watch)
            if keep is not None:
                _keep(keep / str(plan.seed), house, cluster.folder if wrong else None)
        return Told(plan, chaos.told, wrong, _result(house, time.monotonic() - begun))
    except ClusterError as error:
        return Told(plan, (), (str(error),), "nothing was run")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _play(chaos: Chaos, watch: Watch) -> list[str]:
    try:
        chaos.play()
    except AssertionError as error:
        return [*dict.fromkeys(watch.wrong), f"it did not finish: {str(error).splitlines()[0]}"]
    return [*dict.fromkeys(watch.wrong), *wrong_with(chaos, undisturbed(chaos.plan.nodes * chaos.plan.tasks_per_node))]


def _result(house: House, wall_s: float) -> str:
    records = house.records
    jobs, causes = len(house.those(Submitted)), [event.cause for event in house.those(Continued)][1:]
    again = len(records) - len(surviving(records))
    return f"{jobs} jobs, attempts: {', '.join(causes) or 'one'}; {again} steps made again, {wall_s:.0f} s"


def _keep(place: Path, house: House, cluster: Path | None) -> None:
    skip = shutil.ignore_patterns("checkpoints", "final", "best", "quarantine", "tokens")
    shutil.copytree(house.run.path, place / "run", ignore=skip, dirs_exist_ok=True)
    for printed in house.folder.glob("printed-*"):
        shutil.copy(printed, place)
    if cluster is not None:
        shutil.copytree(cluster / "log", place / "slurm", dirs_exist_ok=True)


def main() -> int:
    """0 where every run is as it should be."""
    parser = argparse.ArgumentParser(description="Runs that meet faults at random times on a real cluster.")
    parser.add_argument("--seed", type=int, default=None, help="of the first run; the next one has the next seed")
    parser.add_argument("--count", type=int, default=12, help="faults in all, four a run")
    parser.add_argument("--beside", type=int, default=2, help="runs at once")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the files of the runs")
    options = parser.parse_args()
    first = random.randrange(100_000) if options.seed is None else options.seed
    seeds = range(first, first + -(-options.count // 4))
    print(f"seeds {seeds[0]} to {seeds[-1]}", flush=True)
    with ThreadPoolExecutor(options.beside) as pool:
        failed = 0
        for each in as_completed([pool.submit(survive, draw(seed), options.keep) for seed in seeds]):
            print(each.result(), flush=True)
            failed += bool(each.result().wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
