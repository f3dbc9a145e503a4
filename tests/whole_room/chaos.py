"""Runs that meet faults at random times on a real cluster: `python -m tests.whole_room.chaos [--seed N] [--count N]`.

Each seed draws a shape (nodes, tasks) and faults; the same seed draws the same ones again, though not to the
millisecond. Each run has a cluster of three nodes of its own and trains in earnest. It has to finish, with the weights
of a run that nobody disturbed, and what `wrong_with` looks for must not have happened. Prints a line a run.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import random
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from slurm.commands import SchedulerError
from slurm.local_cluster.cluster import ClusterError, running
from supervisor.journal import Continued, Finished, RolledBack, SegmentStarted, Submitted
from supervisor.run_state import ending_of
from tests.whole_room import light, paced_train
from tests.whole_room.house import EXPLODING, KILL, STOP, House, environment, furnish, send
from tests.whole_room.survival import Site
from worker.contract.loss_history import surviving
from worker.contract.manifest import complete_checkpoints
from worker.contract.run_dir import RunDir

STEPS, EVERY, STEP_S, HANG_S = 400, 20, 0.1, 8.0
SHAPES = ((1, 1), (1, 2), (2, 1))
"""Nodes, and tasks on each."""
GONE = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "COMPLETING")


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


# -- faults: each is tried until it finds what it needs


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


# -- what must not happen


@dataclass
class Watch:
    """Looks at the checkpoints and the queue of a run, again and again, and keeps what is wrong with them."""

    chaos: Chaos
    wrong: list[str] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        newest = 0
        while not self._end.wait(0.5):
            run = self.chaos.house.run
            published = run.checkpoint_steps() if run.checkpoints.exists() else []
            whole = [manifest.step for manifest in complete_checkpoints(run)] if published else []
            if torn := set(published) - set(whole):
                self.wrong.append(f"checkpoints {sorted(torn)} are not whole")
            if whole and whole[-1] < newest:
                self.wrong.append(f"the newest checkpoint went from {newest} back to {whole[-1]}")
            newest = max([newest, *whole])
            if len(live := self._live_jobs()) > 1:
                self.wrong.append(f"jobs {live} at once")

    def _live_jobs(self) -> list[str]:
        try:
            lines = self.chaos.site.cluster.ask("squeue", "--me", "-h", "-o", "%A|%j|%T").splitlines()
        except SchedulerError:
            return []
        jobs = [line.split("|") for line in lines]
        return [f"{job} {state}" for job, name, state in jobs if name.startswith("hf-") and state not in GONE]


def wrong_with(chaos: Chaos, weights: dict[str, str]) -> list[str]:
    """What is wrong with a run that finished, by its files and by what Slurm's controller wrote down."""
    house, wrong = chaos.house, []
    if house.started[-1].returncode not in (0, -KILL):
        wrong.append(f"its supervisor left with {house.started[-1].returncode}")
    left = [path.name for path in house.run.path.rglob(".tmp-*")]
    left += [path.name for path in house.run.staging.glob("*")]
    if left:
        wrong.append(f"{left} are left")
    if not isinstance(ending_of(house.events), Finished):
        return ["it did not finish"]
    if house.those(RolledBack):
        wrong.append("it rolled back")
    steps = [record.step for record in surviving(house.records)]
    if steps != list(range(1, STEPS + 1)):
        wrong.append("the curve that survived has not every step once")
    writers = [(record.attempt, record.restart) for record in house.records]
    if writers != sorted(writers):
        wrong.append("a start wrote that was superseded")
    log = (chaos.site.cluster.folder / "log" / "slurmctld.log").read_text(errors="replace")
    submitted = [job for job in re.findall(r"_slurm_rpc_submit_batch_job: JobId=(\d+)", log) if job not in chaos.others]
    if sorted(submitted) != sorted(event.job_id for event in house.those(Submitted)):
        wrong.append(f"Slurm was given jobs {submitted}, and the journal has others")
    wrong += began_from_older(house)
    if digests(house.run) != weights:
        wrong.append("its weights are not those of the undisturbed run")
    return wrong


def began_from_older(house: House) -> list[str]:
    """Segments that began before a checkpoint that was there when the segment before them ended."""
    wrong = []
    published = complete_checkpoints(house.run)
    for last, first in pairwise(house.records):
        if first.segment != last.segment:
            newest = max((each.step for each in published if each.time <= last.time), default=0)
            if first.step <= newest:
                wrong.append(f"segment {first.segment} began at step {first.step}, and checkpoint-{newest} was there")
    return wrong


def digests(run: RunDir) -> dict[str, str]:
    """The weights of the end, and their average, by name."""
    files = sorted(run.final.rglob("*.safetensors"))
    return {str(file.relative_to(run.final)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# -- runs


def chaos_house(folder: Path, env: dict[str, str], nodes: int, tasks: int, step_s: float, kind: str) -> House:
    variables = {light.TRAINER: "tests.whole_room.paced_train", paced_train.STEP_S: str(step_s)}
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
