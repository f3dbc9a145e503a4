"""Which share of a run's time ends in its final weights, on paper: ``python -m benchmarks.goodput``.

A discrete-event simulation.  Faults come at random at published rates; a run under this project goes through the real
``news``, ``decide`` and fold of the journal, so that what it repeats and where it restarts is the product's own choice.
Beside it a script that Slurm requeues, and one that a person starts again.  Nothing is trained: a step is a minute.
"""

import argparse
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from benchmarks.heading import heading
from slurm.job import JobState, JobStatus
from supervisor.attempts import rules_of
from supervisor.decision import Begin, Cancel, Decision, Exclude, Finish, GiveUp, StartNow, Submit, Wait
from supervisor.fold import apply
from supervisor.journal import (
    CancelIntended,
    Cancelled,
    Continued,
    Event,
    Finished,
    GaveUp,
    NodeExcluded,
    RolledBack,
    StartMoved,
    SubmitIntended,
    Submitted,
)
from supervisor.news import news
from supervisor.observation import Observation
from supervisor.policy import decide
from supervisor.run_state import RunState
from supervisor.save_interval import SaveCosts, best_interval_s
from worker.checkpoints import kept_steps
from worker.contract.claim import Claim
from worker.contract.config import Config
from worker.contract.exit_report import ErrorDetail, ExitReport, Outcome
from worker.contract.loss_history import Probe, Record, Start
from worker.contract.manifest import Manifest

STAYS_BROKEN: Final = 0.5
"""Share of the faults of a GPU that come again on the same node; an assumption."""
STEP_S: Final = 60.0
NEVER_S: Final = 1e12
LOOK_S: Final = 30.0
WEEK_S: Final = 7 * 86_400.0
BEGIN_S: Final = 2800 * WEEK_S
"""The simulated time at which a run begins, at the end of a maintenance."""
INTERVALS_MIN: Final = (5, 10, 20, 40, 80, 160, 320)
NODE_FAULT: Final = ErrorDetail(type="AcceleratorError", message="CUDA error: uncorrectable ECC error encountered")
SOFTWARE: Final = ErrorDetail(type="RuntimeError", message="boom", traceback="RuntimeError: boom")
PREEMPTED: Final = ErrorDetail(type="Left", message="", what="preempted")
TIME_LIMIT: Final = ErrorDetail(type="Left", message="", what="time_limit")


@dataclass(frozen=True)
class Costs:
    """How long things take, in seconds; what was not measured here is an assumption that an option changes."""

    save_s: float
    """Training stands still for a save."""
    load_s: float
    """Reading weights and moments, at every start."""
    imports_s: float = 4.18
    """A cold start less the load; measured by benchmarks/relaunch.py."""
    relaunch_s: float = 0.38
    """A start from the zygote less the load; the same."""
    moved_start_s: float = 10.0
    """From a requeue to the start that was moved to now, with idle nodes."""
    requeue_s: float = 121.0
    """The same where nobody moves it; measured on Slurm 22.05."""
    node_timeout_s: float = 300.0
    """Until Slurm gives a silent node up: its default SlurmdTimeout."""
    hang_s: float = 1800.0
    """Until a hang is noticed: recovery.hang_timeout_s, and the time-out of torch's collectives."""
    person_s: float = 4 * 3600.0
    """Mean time until a person has seen that a run stands and started it again; exponential."""
    maintenance_s: float = 4 * 3600.0


@dataclass(frozen=True)
class Scenario:
    """Faults an hour of the whole job, by kind; and whether a weekly maintenance comes."""

    name: str
    rates: dict[str, Callable[[int], float]]
    is_maintained: bool = False

    def next_fault(self, nodes: int, draw: random.Random) -> tuple[float, str]:
        """Seconds until the next one, and its kind."""
        rates = {kind: rate(nodes) / 3600.0 for kind, rate in self.rates.items()}
        if not rates:
            return NEVER_S, ""
        kinds = list(rates)
        return draw.expovariate(sum(rates.values())), draw.choices(kinds, [rates[kind] for kind in kinds])[0]


def hardware(share: float) -> Callable[[int], float]:
    """A share of one fault every three hours on 16,384 GPUs (Llama 3, 2024), eight to a node."""
    return lambda nodes: share * nodes / (3.0 * 2048)


FAULTS: Final = {"gpu": hardware(0.55), "node": hardware(0.2), "software": hardware(0.13), "hang": hardware(0.12)}
SPIKES: Final = {"spike": lambda _: 1 / 72.0}
PREEMPTION: Final = {"preemption": lambda _: math.log(2) / 2.0}
SCENARIOS: Final = (
    Scenario("faults at the published rate", FAULTS),
    Scenario("and a spike every three days", FAULTS | SPIKES),
    Scenario("preempting partition, median run of 2 h", FAULTS | PREEMPTION),
    Scenario("weekly maintenance of 4 h", FAULTS, is_maintained=True),
)


@dataclass
class Clock:
    """Simulated seconds, and the weekly maintenance that nothing trains in."""

    scenario: Scenario
    costs: Costs
    now: float = BEGIN_S

    def next_maintenance(self) -> float:
        if not self.scenario.is_maintained:
            return math.inf
        return (math.floor(self.now / WEEK_S) + 1) * WEEK_S


@dataclass
class Supervised:
    """A run in the hands of the real policy; what happens to its job and its files is made up."""

    scenario: Scenario
    costs: Costs
    nodes: int
    steps: int
    every: int
    draw: random.Random
    run: RunState = field(default_factory=RunState)
    step: int = 0
    job: JobStatus | None = None
    last: Record | None = None
    """All of the branch that counts: a spike is the last record until the run has gone back to before its onset."""
    manifests: list[Manifest] = field(default_factory=list)
    report: ExitReport | None = None
    segment: Record | None = None
    segments: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    start_s: float = 0.0
    """What the start that was decided takes."""
    names: Iterator[int] = field(default_factory=lambda: iter(range(1, 10**9)))

    def __post_init__(self) -> None:
        self.clock = Clock(self.scenario, self.costs)
        self.config = Config.model_validate(
            {
                "run": {"name": "paper"},
                "model": {"config": {"model_type": "llama"}},
                "data": {"train": "stdlib"},
                "training": {"max_steps": self.steps, "optimizer": {"learning_rate": 1.0}},
                "checkpoint": {"every_steps": self.every},
                "cluster": {"nodes": self.nodes, "gpus_per_node": 8, "kind": "slurm"},
            }
        )
        self.rules = rules_of(self.config)

    # -- the supervisor

    def settle(self) -> None:
        """Everything that the supervisor wants to do now."""
        for _ in range(60):
            for event in list(news(self.run, self.seen, self.config.checkpoint.healthy_after)):
                self.tell(event)
            if self.run.is_over:
                return
            decision = decide(self.run, self.seen, self.rules)
            if isinstance(decision, Wait):
                return
            self.carry_out(decision)
        raise AssertionError("it never settles")

    @property
    def seen(self) -> Observation:
        runs = self.job is not None and self.job.state is JobState.RUNNING
        return Observation(
            now=self.clock.now,
            job=self.job,
            claim=self.claim if runs or self.report is not None else None,
            reports={0: self.report} if self.report is not None else {},
            started_segments=[self.segment] if self.segment is not None else [],
            branch=[self.last] if self.last is not None else [],
            manifests=self.manifests,
        )

    @property
    def claim(self) -> Claim:
        assert self.job is not None
        job = self.job
        return Claim(job_id=job.job_id, name="hf", restart=job.restarts, host="n", pid=1, started_ticks=1, time=0.0)

    def tell(self, event: Event, attempt: int | None = None) -> None:
        number = self.run.attempt if attempt is None else attempt
        self.run = apply(self.run, event.model_copy(update={"time": self.clock.now, "attempt": number}))
        self.counts[event.event] += 1

    def carry_out(self, decision: Decision) -> None:
        match decision:
            case Begin():
                self.begin(decision)
            case Submit():
                self.tell(SubmitIntended(name="hf"))
                number = str(next(self.names))
                self.job = JobStatus(number, "hf", JobState.RUNNING, nodes=(f"n{number}",), source="paper")
                self.tell(Submitted(name="hf", job_id=number))
                self.start_s = self.costs.moved_start_s + self.costs.imports_s
            case StartNow():
                self.tell(StartMoved(job_id=decision.job_id))
                assert self.job is not None
                self.job = replace(self.job, state=JobState.RUNNING, why="")
                self.step = max((one.step for one in self.manifests), default=0)  # a requeued worker goes on by itself
                self.report, self.segment = None, None
                self.start_s = self.costs.moved_start_s + self.costs.imports_s
            case Cancel():
                self.tell(CancelIntended(job_id=decision.job_id))
                assert self.job is not None
                self.job = replace(self.job, state=JobState.CANCELLED)
                self.tell(Cancelled(job_id=decision.job_id))
            case Exclude():
                self.tell(NodeExcluded(node=decision.node, until=decision.until, evidence=decision.evidence))
            case GiveUp():
                self.tell(GaveUp(tried=decision.tried, error=decision.error, reason=decision.reason))
            case Finish():
                self.tell(Finished(final_step=decision.final_step))
            case _:
                raise AssertionError(f"nobody asked for that: {decision}")

    def begin(self, decision: Begin) -> None:
        plan = decision.plan
        number = self.run.attempt + 1
        self.tell(plan, number)
        self.manifests = [one for one in self.manifests if f"checkpoint-{one.step}" not in plan.quarantine]
        shared = plan.model_dump(exclude={"event", "rollback", "time", "attempt", "term"})
        outcome = (
            RolledBack(**shared, **plan.rollback.model_dump()) if plan.rollback is not None else Continued(**shared)
        )
        self.tell(outcome, number)
        self.step, self.report, self.segment = plan.resume_step, None, None
        self.start_s = self.costs.relaunch_s

    # -- the worker and its cluster

    def train_to(self, step: int, verdict: str = "ok", onset: int | None = None) -> None:
        """Up to ``step``, with a save at each boundary on the way."""
        while self.step < step:
            here = min(step, (self.step // self.every + 1) * self.every)
            self.clock.now += (here - self.step) * STEP_S
            self.step = here
            is_odd = here == step and verdict != "ok"
            self.note(verdict if is_odd else "ok", onset if is_odd else None)
            if here % self.every == 0 and not is_odd:
                self.clock.now += self.costs.save_s
                self.save()
            if not is_odd:
                self.settle()

    def note(self, verdict: str, onset: int | None) -> None:
        told: dict[str, Any] = {"segment": self.segments, "attempt": self.run.attempt, "restart": self.claim.restart}
        record = Record(
            **told, step=self.step, epoch=0.0, time=self.clock.now, loss=2.0, verdict=verdict, onset_step=onset
        )
        if self.segment is None:
            self.segments += 1
            record = record.model_copy(update={"segment": self.segments})
            start = Start(max_steps=self.steps, lr=1.0, lr_expected=1.0, optimizer_steps=0, rng_digests=("r",),
                          next_samples=(1,), probe=Probe(expected=None, found=1.0), versions={})  # fmt: skip
            self.segment = record = record.model_copy(update={"start": start})
        self.last = record

    def save(self) -> None:
        fields: dict[str, Any] = {name: 1 for name, one in Manifest.model_fields.items() if one.is_required()}
        fields |= {"step": self.step, "attempt": self.run.attempt, "config_digest": "", "data_digest": ""}
        fields |= {"versions": {}, "files": {}, "weights_finite": True, "optimizer_steps": self.step}
        self.manifests.append(Manifest(**fields))
        kept = kept_steps(self.rules.checkpoint, self.manifests, self.seen.branch, ())
        self.manifests = [one for one in self.manifests if one.step in kept]

    def leave(self, outcome: Outcome, error: ErrorDetail | None = None) -> None:
        assert self.job is not None
        job_id, host = self.job.job_id, self.job.nodes[0]
        self.report = ExitReport(
            attempt=self.run.attempt, restart=self.claim.restart, rank=0, job_id=job_id, host=host,
            outcome=outcome, step=self.step, started=0.0, ended=self.clock.now, error=error,
        )  # fmt: skip

    def requeued(self) -> None:
        assert self.job is not None
        self.job = replace(self.job, state=JobState.PENDING, why="BeginTime", restarts=self.job.restarts + 1)

    def strike(self, kind: str) -> None:
        """One fault; the run is started again by what the policy says."""
        if kind == "spike":
            first = self.step + 1
            self.train_to(first + 2, "spike", first)
            self.leave(Outcome.VERDICT)
        elif kind == "node":
            self.clock.now += self.costs.node_timeout_s
            self.requeued()
        elif kind == "preemption":
            self.clock.now += self.costs.save_s
            self.save_here()
            self.leave(Outcome.LEFT, PREEMPTED)
            self.requeued()
        elif kind == "maintenance":
            self.clock.now += self.costs.save_s
            self.save_here()
            self.leave(Outcome.LEFT, TIME_LIMIT)
            assert self.job is not None
            self.job = replace(self.job, state=JobState.TIMEOUT)
            self.clock.now += self.costs.maintenance_s
        else:
            self.clock.now += self.costs.hang_s if kind == "hang" else 0.0
            self.leave(Outcome.CRASHED, NODE_FAULT if kind == "gpu" else SOFTWARE)
        here = self.job
        self.start_again()
        if kind == "gpu" and self.draw.random() < STAYS_BROKEN:
            while not self.run.is_over and self.job is not None and here is not None and self.job.job_id == here.job_id:
                self.leave(Outcome.CRASHED, NODE_FAULT)  # before a step
                self.start_again()

    def start_again(self) -> None:
        """What the supervisor does until training goes on, waits that it chooses (a budget of submissions) among it."""
        self.settle()
        while not self.run.is_over and not self.trains:
            self.clock.now += LOOK_S
            self.settle()
        self.clock.now += self.start_s + self.costs.load_s

    @property
    def trains(self) -> bool:
        return self.job is not None and self.job.state is JobState.RUNNING and self.report is None

    def save_here(self) -> None:
        if self.step > max((one.step for one in self.manifests), default=0):
            self.save()

    def to_the_end(self) -> float:
        """Simulated seconds until the run is finished; infinite where it gave up."""
        self.start_again()
        while not self.run.is_over:
            wait_s, kind = self.scenario.next_fault(self.nodes, self.draw)
            until, at = self.clock.now + wait_s, self.clock.next_maintenance()
            if at < until:
                until, kind = at, "maintenance"
            while self.step < self.steps and self.clock.now + STEP_S <= until:
                fit = math.floor((until - self.clock.now) / STEP_S)
                self.train_to(min(self.steps, self.step + fit, (self.step // self.every + 1) * self.every))
            if self.step >= self.steps:
                self.leave(Outcome.DONE)
                self.settle()
            else:
                self.clock.now = max(self.clock.now, until)
                self.strike(kind)
        return self.clock.now - BEGIN_S if self.run.state == "finished" else math.inf


def scripted(
    scenario: Scenario, costs: Costs, nodes: int, steps: int, every: int, draw: random.Random, requeues: bool
) -> float:
    """The same faults under a script that begins from its newest checkpoint: requeued by Slurm, or by a person.

    Slurm requeues after a lost node and a preemption; a trainer that died, hung or spiked waits for a person.
    """
    clock, step, saved = Clock(scenario, costs), 0, 0
    start_s = costs.imports_s + costs.load_s
    clock.now += start_s
    while True:
        wait_s, kind = scenario.next_fault(nodes, draw)
        until, at = clock.now + wait_s, clock.next_maintenance()
        if at < until:
            until, kind = at, "maintenance"
        while step < steps and clock.now + STEP_S <= until:
            step += 1
            clock.now += STEP_S
            if step % every == 0:
                clock.now += costs.save_s
                saved = step
        if step >= steps:
            return clock.now - BEGIN_S
        clock.now = max(clock.now, until)
        clock.now += {"node": costs.node_timeout_s, "hang": costs.hang_s, "maintenance": costs.maintenance_s}.get(
            kind, 0.0
        )
        is_requeued = requeues and kind in ("node", "preemption", "maintenance")
        clock.now += costs.requeue_s if is_requeued else draw.expovariate(1 / costs.person_s)
        clock.now += start_s
        step = saved


def shares(scenario: Scenario, costs: Costs, nodes: int, steps: int, every: int, seeds: int) -> dict[str, float]:
    """The median share of the time that ends in the final weights, by who looks after the run."""
    ways: dict[str, Callable[[random.Random], float]] = {
        "higgsfield": lambda draw: Supervised(scenario, costs, nodes, steps, every, draw).to_the_end(),
        "sbatch --requeue": lambda draw: scripted(scenario, costs, nodes, steps, every, draw, requeues=True),
        "by hand": lambda draw: scripted(scenario, costs, nodes, steps, every, draw, requeues=False),
    }
    useful_s = steps * STEP_S
    return {
        name: statistics.median(useful_s / way(random.Random(seed)) for seed in range(seeds))
        for name, way in ways.items()
    }


def main(argv: list[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=14.0, help="training without any fault")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="of eight GPUs")
    parser.add_argument("--every", type=int, default=30, help="minutes between saves")
    parser.add_argument("--save-s", type=float, default=20.0, help="training stands still for a save; an assumption")
    parser.add_argument("--load-s", type=float, default=60.0, help="reading a checkpoint; an assumption")
    args = parser.parse_args(argv)
    costs, steps = Costs(save_s=args.save_s, load_s=args.load_s), round(args.days * 86_400 / STEP_S)
    print("\n".join(heading("goodput")))
    print(f"figures    {args.days:g} days of training, median of {args.seeds} seeds, {costs}\n")
    print("| | nodes | higgsfield | sbatch --requeue | by hand |\n|---|---|---|---|---|")
    for scenario in SCENARIOS:
        for nodes in args.nodes:
            found = shares(scenario, costs, nodes, steps, args.every, args.seeds)
            print(
                f"| {scenario.name} | {nodes} | " + " | ".join(f"{one:.1%}" for one in found.values()) + " |",
                flush=True,
            )
    print("\n| nodes | " + " | ".join(f"{one} min" for one in INTERVALS_MIN) + " | best by arithmetic |")
    print("|---" * (len(INTERVALS_MIN) + 2) + "|")
    for nodes in args.nodes:
        every_s = 3600.0 / sum(rate(nodes) for rate in FAULTS.values())
        best = best_interval_s(SaveCosts(costs.save_s, every_s, costs.relaunch_s + costs.load_s)) / 60
        row = [shares(SCENARIOS[0], costs, nodes, steps, every, args.seeds)["higgsfield"] for every in INTERVALS_MIN]
        print(f"| {nodes} | " + " | ".join(f"{one:.2%}" for one in row) + f" | {best:.0f} min |", flush=True)


if __name__ == "__main__":
    main()
