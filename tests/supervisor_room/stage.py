"""A run on real files with a scheduler in memory; the test plays the worker and the clock."""

import time
from pathlib import Path
from typing import Any

from slurm.job import JobState
from supervisor.batches import positions_of
from supervisor.decision import Decision
from supervisor.fold import replay
from supervisor.job_looks import JobLooks
from supervisor.journal import Event, SupervisorStarted, mend_journal, read_journal
from supervisor.lease import NO_JOB, read_holder, take_lease
from supervisor.observation import Observation
from supervisor.run_state import RunState
from supervisor.runs import open_or_create
from supervisor.supervised_run import SupervisedRun
from supervisor.watch import Watched, one_pass
from tests.fakes import FakeScheduler
from tests.manifests import manifest
from worker.contract.claim import Claim, take_claim
from worker.contract.config import Config
from worker.contract.directive import Directive, read_directive
from worker.contract.exit_report import ErrorDetail, ExitReport, Outcome
from worker.contract.files import publish_message
from worker.contract.loss_history import BatchPosition, HistoryWriter, Probe, Start, record
from worker.contract.manifest import MANIFEST
from worker.contract.pulse import Phase, Pulse

BEGIN = 1_700_000_000.0
PREEMPTED = ErrorDetail(type="Left", message="", what="preempted")
TIME_LIMIT = ErrorDetail(type="Left", message="", what="time_limit")
CRASHED = ErrorDetail(type="RuntimeError", message="boom", traceback='  File "train.py", line 7, in main\nRuntimeError')


def config(folder: Path, **sections: dict[str, Any]) -> Config:
    """A small configuration; ``sections`` are merged over it, one level deep."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "r", "dir": str(folder)},
        "model": {"config": {"model_type": "llama"}},
        "data": {"train": "stdlib", "tokenizer": "bytes"},
        "training": {"max_steps": 100, "optimizer": {"learning_rate": 1.0}},
        "checkpoint": {"every_steps": 10, "healthy_after": 5},
    }
    for name, keys in sections.items():
        base[name] = base.get(name, {}) | keys
    return Config.model_validate(base)


class Silent:
    """Nobody listens; troubles are kept for the test."""

    def __init__(self) -> None:
        self.troubles: list[str] = []

    def progress(self, run: RunState, seen: Observation) -> None:
        pass

    def trouble(self, message: str) -> None:
        self.troubles.append(message)


class Stage:
    """The run's folder, its supervisor (which may be restarted), its scheduler and its worker."""

    def __init__(self, folder: Path, **sections: dict[str, Any]) -> None:
        self.config = config(folder, **sections)
        self.run_dir = open_or_create(self.config)
        self.scheduler = FakeScheduler()
        self.now = BEGIN
        self.step = 0
        self.own = NO_JOB
        self.start_supervisor()

    # -- the supervisor

    def start_supervisor(self) -> None:
        """A supervisor process begins: all it knows is on disk."""
        mend_journal(self.run_dir.journal)
        self._forget_lease()
        lease = take_lease(self.run_dir, own=self.own)
        self.ears = Silent()
        state = replay(read_journal(self.run_dir.journal))
        run = SupervisedRun(
            self.config, self.run_dir, self.scheduler, lease, lambda: self.now, lambda event: None, state
        )
        run.record(SupervisorStarted(host="here", pid=1))
        self.watched = Watched(run, self.ears)
        self.looks = JobLooks(self.scheduler, 0.0, 0.0)

    def _forget_lease(self) -> None:
        """What a dead supervisor leaves: its lease, with a process that is no more."""
        held = read_holder(self.run_dir)
        if held is not None:
            publish_message(self.run_dir.lease, held.model_copy(update={"started_ticks": 1}))

    def look(self) -> Decision:
        """One pass."""
        self.now += 1
        self.looks.look_if_due([self.watched.run])
        return one_pass(self.watched, self.looks, [self.watched])

    def settle(self) -> Decision:
        """Passes until nothing changes any more; the last decision."""
        before = -1
        decision = self.look()
        for _ in range(50):
            if len(self.events) == before or self.watched.run.state.is_over:
                return decision
            before = len(self.events)
            decision = self.look()
        raise AssertionError(f"no end of events: {self.names[-6:]}")

    @property
    def events(self) -> list[Event]:
        return read_journal(self.run_dir.journal)

    @property
    def names(self) -> list[str]:
        return [event.event for event in self.events]

    @property
    def state(self) -> str:
        return self.watched.run.state.state

    @property
    def directive(self) -> Directive:
        found = read_directive(self.run_dir.directive)
        assert found is not None
        return found

    @property
    def job_id(self) -> str:
        assert self.watched.run.state.job_id is not None
        return self.watched.run.state.job_id

    @property
    def submissions(self) -> int:
        return sum(method == "submit" for method, _ in self.scheduler.calls)

    # -- the cluster and the worker

    def start_job(self, restarts: int = 0) -> None:
        """The scheduler starts the run's job, and its agent claims the attempt."""
        self.scheduler.set_state(self.job_id, JobState.RUNNING, nodes=("n1",), restarts=restarts)
        self.claim(restarts)

    def claim(self, restarts: int = 0) -> None:
        attempt = self.directive.attempt
        claim = Claim(
            job_id=self.job_id, name="hf", restart=restarts, host="n1", pid=1, started_ticks=1, time=time.time()
        )
        take_claim(self.run_dir.claim(attempt), claim)
        self.run_dir.restart(attempt, restarts).mkdir(parents=True, exist_ok=True)

    def train(
        self,
        until: int,
        verdict: str = "ok",
        onset: int | None = None,
        loss: float = 2.0,
        restart: int = 0,
        probe: float = 1.0,
        ranks: tuple[int, ...] = (),
        observed: bool = False,
        left_level: int | None = None,
        **fields: Any,
    ) -> None:
        """The worker makes steps up to ``until``; ``verdict`` is the last one's, ``loss`` that of all since ``onset``.

        ``probe`` is what the probe loss of 1.0 came out as, ``ranks`` are those whose numbers were not finite;
        ``left_level`` is where the streak began, if ahead of ``onset``; ``fields`` are the last record's.
        """
        directive = self.directive
        gone = set(positions_of(directive.skip_batches))
        batches = [BatchPosition(epoch=0, batch=batch) for batch in range(until + len(gone))]
        fed = [batch for batch in batches if batch not in gone]
        odd = {"spike": "pending", "divergence": "suspect", "nonfinite": "skipped"}
        with HistoryWriter(self.run_dir.history, lambda: None) as writer:
            is_new = writer.last is None or (writer.last.attempt, writer.last.restart) != (directive.attempt, restart)
            segment = writer.next_segment if is_new else writer.next_segment - 1
            begin = (
                int((directive.resume_from or "checkpoint-0").split("-")[1]) if is_new and restart == 0 else self.step
            )
            for step in range(begin + 1, until + 1):
                is_last, is_odd = step == until, onset is not None and step >= onset
                writer.append(
                    record(
                        segment=segment,
                        attempt=directive.attempt,
                        restart=restart,
                        step=step,
                        epoch=0.0,
                        time=self.now,
                        loss=None if verdict == "nonfinite" and is_odd else loss if is_odd or is_last else 2.0,
                        lr=directive.lr_scale,
                        verdict=verdict if is_last else odd[verdict] if is_odd else "ok",
                        observed=observed and is_last and verdict in odd,
                        onset_step=(left_level or onset) if is_odd else None,
                        level=2.0 if is_odd else None,
                        nonfinite_ranks=ranks if is_odd and ranks else None,
                        data=fed[step - 1],
                        start=self._start(begin, probe) if is_new and step == begin + 1 else None,
                        **(fields if is_last else {}),
                    )
                )
                if step % self.config.checkpoint.every_steps == 0:
                    self.save(step)
        self.step = until

    def _start(self, begin: int, probe: float) -> Start:
        return Start(
            checkpoint=f"checkpoint-{begin}" if begin else None,
            max_steps=self.config.training.max_steps or 100,
            lr=1.0,
            lr_expected=1.0,
            optimizer_steps=0,
            rng_digests=("r",) * self.config.cluster.world_size,
            next_samples=(1,),
            probe=Probe(expected=1.0 if begin else None, found=probe),
            versions={},
        )

    def spike(self, until: int, onset: int, verdict: str = "spike", loss: float = 9.0, **fields: Any) -> None:
        """The worker trains until a verdict and leaves; the supervisor answers, and the next attempt is claimed."""
        self.train(until, verdict, onset, loss, **fields)
        self.leave(Outcome.VERDICT)
        self.settle()
        if self.state == "queued":
            self.start_job()
            self.settle()
        elif self.state == "starting":
            self.claim()

    def pulse(self, phase: Phase = "training", limit_s: float = 30.0, rank: int = 0, host: str = "n1") -> None:
        """A trainer gives a sign of life."""
        path = self.run_dir.pulse(self.directive.attempt, 0, rank)
        publish_message(path, Pulse(phase=phase, step=self.step, time=self.now, pid=1, host=host, limit_s=limit_s))

    def save(self, step: int, **fields: Any) -> None:
        folder = self.run_dir.checkpoint(step)
        folder.mkdir(parents=True)
        publish_message(folder / MANIFEST, manifest(step, self.directive.attempt, **fields))

    def leave(
        self,
        outcome: Outcome,
        restart: int = 0,
        error: ErrorDetail | None = None,
        rank: int = 0,
        **fields: Any,
    ) -> None:
        """The worker's agent writes its exit report."""
        report = ExitReport(
            attempt=self.directive.attempt,
            restart=restart,
            rank=rank,
            job_id=self.job_id,
            outcome=outcome,
            started=0.0,
            ended=self.now,
            error=error,
            **{"host": "n1", "step": self.step} | fields,
        )
        path = self.run_dir.exit_report(self.directive.attempt, restart, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        publish_message(path, report)
