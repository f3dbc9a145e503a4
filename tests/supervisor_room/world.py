"""A run without files: the real fold, news and decide over a cluster and a worker that a test makes up.  Fast."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slurm.job import JobState, JobStatus
from supervisor.attempt_actions import outcome_event
from supervisor.attempts import Rules
from supervisor.bad_nodes import strikes
from supervisor.batches import Stretch, extend, positions_of
from supervisor.decision import Begin, Cancel, Decision, Exclude, Finish, GiveUp, StartNow, Submit, Wait
from supervisor.fold import apply
from supervisor.hangs import hang_news
from supervisor.journal import (
    CancelIntended,
    Cancelled,
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
from tests.manifests import manifest
from tests.supervisor_room.stage import BEGIN, config
from worker.contract.claim import Claim
from worker.contract.exit_report import ErrorDetail, ExitReport, Outcome
from worker.contract.loss_history import BatchPosition, Probe, Record, Start
from worker.contract.manifest import Manifest
from worker.contract.pulse import Hang

_PASSES = 60
"""More decisions in a row than any answer takes."""
NODES = [f"n{number}" for number in range(1, 100)]
"""More than can be excluded before a run is over."""
CLAIM = Claim(job_id="1", name="hf", restart=0, host="n1", pid=1, started_ticks=1, time=0.0)


@dataclass
class World:
    """Settled after each move: the supervisor has done all that it wants to do for now."""

    max_steps: int
    sections: dict[str, Any]
    run: RunState = field(default_factory=RunState)
    now: float = BEGIN
    step: int = 0
    job: JobStatus | None = None
    branch: list[Record] = field(default_factory=list)
    trail: list[Stretch] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=list)
    report: ExitReport | None = None
    segment: Record | None = None
    events: list[Event] = field(default_factory=list)
    attempts_without_progress: int = 0

    def __post_init__(self) -> None:
        self.config = config(Path(), **self.sections)
        self.rules = Rules(self.config.recovery, self.config.checkpoint, self.config.cluster)
        self.settle()

    # -- the supervisor

    def settle(self) -> None:
        for _ in range(_PASSES):
            for event in list(news(self.run, self.seen, self.config.checkpoint.healthy_after)):
                self.tell(event)
            for later in (*hang_news(self.run, self.seen, 1800.0), *strikes(self.run, self.seen)):
                self.tell(later)
            if self.run.is_over:
                return
            decision = decide(self.run, self.seen, self.rules)
            assert decision == decide(self.run, self.seen, self.rules)
            if isinstance(decision, Wait):
                return
            assert getattr(decision, "reason", True), decision
            self.carry_out(decision)
            if self.run.is_over:
                return
        raise AssertionError(f"it never settles: {self.events[-6:]}")

    def tell(self, event: Event, attempt: int | None = None) -> None:
        number = self.run.attempt if attempt is None else attempt
        stamped = event.model_copy(update={"time": self.now, "attempt": number})
        self.run = apply(self.run, stamped)
        self.events.append(stamped)

    @property
    def seen(self) -> Observation:
        started = [self.segment] if self.segment is not None else []
        is_claimed = self.job is not None and self.job.state is JobState.RUNNING
        return Observation(
            now=self.now,
            job=self.job,
            claim=CLAIM if is_claimed or self.report is not None else None,
            reports={0: self.report} if self.report is not None else {},
            started_segments=started,
            branch=tuple(self.branch),
            trail=tuple(self.trail),
            manifests=tuple(self.manifests),
        )

    def carry_out(self, decision: Decision) -> None:
        match decision:
            case Begin():
                self.begin(decision)
            case Submit():
                self.tell(SubmitIntended(name="hf"))
                node = next(name for name in NODES if name not in self.run.excluded(self.now))
                self.job = JobStatus(f"{len(self.events)}", "hf", JobState.RUNNING, "", nodes=(node,), source="world")
                self.tell(Submitted(name="hf", job_id=self.job.job_id))
            case Cancel():
                self.tell(CancelIntended(job_id=decision.job_id))
                assert self.job is not None
                self.job = replace(self.job, state=JobState.CANCELLED)
                self.tell(Cancelled(job_id=decision.job_id))
            case StartNow():
                self.tell(StartMoved(job_id=decision.job_id))
            case Exclude():
                self.tell(NodeExcluded(node=decision.node, until=decision.until, evidence=decision.evidence))
            case GiveUp():
                self.tell(GaveUp(tried=decision.tried, error=decision.error, reason=decision.reason))
            case Finish():
                self.tell(Finished(final_step=decision.final_step))
            case _:
                raise AssertionError(f"nobody asked for that: {decision}")

    def begin(self, decision: Begin) -> None:
        number = self.run.attempt + 1
        assert decision.plan.attempt == number
        self.tell(decision.plan, number)
        self.manifests = [m for m in self.manifests if f"checkpoint-{m.step}" not in decision.plan.quarantine]
        assert {m.step for m in self.manifests} <= set(range(decision.plan.resume_step + 1))
        assert decision.plan.resume_step in {0, *(m.step for m in self.manifests)}
        self.tell(outcome_event(decision.plan), number)
        self.step, self.report, self.segment = decision.plan.resume_step, None, None

    @property
    def rollbacks(self) -> list[RolledBack]:
        return [event for event in self.events if isinstance(event, RolledBack)]

    # -- the worker

    @property
    def trains(self) -> bool:
        return self.job is not None and self.job.state is JobState.RUNNING and self.report is None

    @property
    def batches(self) -> list[int]:
        assert self.run.plan is not None
        gone = {one.batch for one in positions_of(self.run.plan.skip_batches)}
        return [batch for batch in range(self.max_steps * 3) if batch not in gone]

    def train(self, steps: int) -> None:
        batches = self.batches
        for step in range(self.step + 1, min(self.step + steps, self.max_steps) + 1):
            self.append(step, batches[step - 1])
            if step % self.config.checkpoint.every_steps == 0:
                self.manifests.append(manifest(step, self.run.attempt))
        self.step = min(self.step + steps, self.max_steps)
        if self.step == self.max_steps:
            self.leave(Outcome.DONE)

    def spike(self, kind: str, loss: float, length: int = 3) -> None:
        """The next steps are odd, and the last of them is acted on."""
        onset, batches = self.step + 1, self.batches
        for step in range(onset, onset + length):
            verdict = kind if step == onset + length - 1 else "pending"
            number = None if kind == "nonfinite" else loss
            self.append(step, batches[step - 1], verdict=verdict, onset_step=onset, loss=number, level=2.0)
        self.step = onset + length - 1
        self.leave(Outcome.VERDICT)

    def append(self, step: int, batch: int, **fields: Any) -> None:
        plain = {"segment": self.run.attempt, "attempt": self.run.attempt, "restart": 0, "epoch": 0.0, "time": self.now}
        record = Record(
            **plain | {"step": step, "loss": 2.0, "data": BatchPosition(epoch=0, batch=batch), "start": None} | fields
        )
        if self.segment is None:
            self.segment = record = record.model_copy(update={"start": self._start(step - 1)})
        while self.branch and (self.branch[-1].step >= step or self.branch[-1].verdict == "ok"):
            self.branch.pop()
        self.branch.append(record)
        extend(self.trail, step, record.data)

    def _start(self, step: int) -> Start:
        return Start(
            checkpoint=f"checkpoint-{step}" if step else None,
            max_steps=self.max_steps,
            lr=1.0,
            lr_expected=1.0,
            optimizer_steps=step,
            rng_digests=("r",),
            next_samples=(1,),
            probe=Probe(expected=1.0, found=1.001 if step % 20 else 1.0),
            versions={},
        )

    def leave(self, outcome: Outcome, error: ErrorDetail | None = None, **fields: Any) -> None:
        assert self.job is not None
        self.report = ExitReport(
            attempt=self.run.attempt,
            restart=0,
            rank=0,
            job_id=self.job.job_id,
            host=self.job.nodes[0],
            outcome=outcome,
            step=self.step,
            started=0.0,
            ended=self.now,
            error=error,
            **fields,
        )

    def hang(self) -> None:
        """The worker is ended by its agent."""
        hung = Hang(phase="training", step=self.step, quiet_s=1801.0, limit_s=1800.0, process="T (stopped)")
        self.leave(Outcome.ENDED, ErrorDetail(type="Ended", message="no progress", what="hang"), hang=hung)

    def lose_job(self, state: JobState) -> None:
        assert self.job is not None
        self.job = replace(self.job, state=state)
