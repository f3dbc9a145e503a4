"""Runs under way, workers that write what workers write, and a scheduler that counts what it is asked."""

import os
import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from slurm.job import JobState, JobStatus, Node, Reservation
from supervisor.journal import (
    AttemptDecided,
    Continued,
    Event,
    JobSeen,
    ProgressMade,
    RunCreated,
    SegmentStarted,
    SubmitIntended,
    Submitted,
    SupervisorStarted,
    read_journal,
)
from supervisor.runs import open_or_create
from worker.contract.claim import Claim
from worker.contract.config import Config
from worker.contract.directive import Directive
from worker.contract.exit_report import ExitReport, Outcome
from worker.contract.files import Message, encode, publish_message
from worker.contract.loss_history import BatchPosition, Probe, Record, Start, record
from worker.contract.manifest import MANIFEST, Manifest
from worker.contract.pulse import Pulse
from worker.contract.run_dir import RunDir

STEP_S: Final = 10.0
PULSE_S: Final = 5.0
_STEPS: Final = 100
_SAVED: Final = 50
_START: Final = Start(
    max_steps=100_000, lr=1.0, lr_expected=1.0, optimizer_steps=0, rng_digests=("r",), next_samples=(1,), versions={},
    probe=Probe(expected=None, found=1.0),
)  # fmt: skip
_UNKNOWN: Final = dict.fromkeys(("batches_into_epoch", "samples_seen", "world_size", "batch_size", "config_digest"))
_MANIFEST: Final = Manifest(
    step=_SAVED, attempt=1, segment=1, time=0.0, epoch=0.0, gradient_accumulation=1, max_steps=100_000, seed=1,
    data_digest=None, lr_scale=1.0, weights_finite=True, probe_loss=1.0, optimizer_steps=_SAVED, versions={}, files={},
    **_UNKNOWN,
)  # fmt: skip


def job_name(number: int) -> str:
    """Of the run of that number: its id begins with it."""
    return f"hf-{number:08x}"


class CountingScheduler:
    """Every job runs on one node; each call stands for one program of Slurm."""

    def __init__(self) -> None:
        self.calls = 0

    def look(self, job_ids: Collection[str]) -> Mapping[str, JobStatus]:
        self.calls += 1
        running = {"state": JobState.RUNNING, "nodes": ("n1",), "source": "counting"}
        return {job_id: JobStatus(job_id, job_name(int(job_id)), **running) for job_id in job_ids}  # type: ignore[arg-type]

    def nodes(self, names: Collection[str]) -> Mapping[str, Node]:
        self.calls += bool(names)
        return {}

    def cancel(self, job_id: str) -> None:
        self.calls += 1

    def reservations(self) -> list[Reservation]:
        self.calls += 1
        return []


def runs_under_way(folder: Path, count: int) -> list[RunDir]:
    """So many runs, each with a job that runs, a hundred steps and a healthy checkpoint; nobody supervises them."""
    config = Config.model_validate(
        {
            "run": {"name": "run-0000", "dir": str(folder)},
            "model": {"config": {"model_type": "llama"}},
            "data": {"train": "stdlib", "tokenizer": "bytes"},
            "training": {"max_steps": 100_000, "optimizer": {"learning_rate": 1e-5}},
            "cluster": {"kind": "slurm"},
            "supervisor": {"place": "foreground"},
        }
    )
    first = open_or_create(config)
    created, text = read_journal(first.journal)[0], first.config.read_text()
    assert isinstance(created, RunCreated)
    runs = [RunDir(folder / f"run-{number:04d}") for number in range(count)]
    for run in runs[1:]:
        shutil.copytree(first.path, run.path)
    for number, run in enumerate(runs):
        run.config.write_text(text.replace("run-0000", run.path.name))
        _begin(run, number, created)
    return runs


def _begin(run: RunDir, number: int, created: RunCreated) -> None:
    _write(run.directive, Directive(attempt=1, cause="first", reason="", time=time.time(), lr_scale=1.0))
    claim = Claim(job_id=str(number), name="hf", restart=0, host="n1", pid=1, started_ticks=1, time=time.time())
    run.restart(1, 0).mkdir(parents=True)
    run.checkpoint(_SAVED).mkdir(parents=True)
    _write(run.claim(1), claim)
    _write(run.checkpoint(_SAVED) / MANIFEST, _MANIFEST)
    records = [_record(step, start=_START if step == 1 else None) for step in range(1, _STEPS + 1)]
    run.history.write_text("[\n" + ",\n".join(map(_line, records)) + "\n]\n")
    _pulse(run, _STEPS)
    events = _events(created, number)
    run.journal.write_text("".join(encode(event.model_dump(mode="json")) + "\n" for event in events))


def _events(created: RunCreated, number: int) -> Sequence[Event]:
    """What the journal of such a run says."""
    name, job_id = job_name(number), str(number)
    events: list[Event] = [
        created.model_copy(update={"run_id": f"{number:08x}{number:08x}"}),
        SupervisorStarted(host="n0", pid=1),
        AttemptDecided(cause="first", where="new_job"),
        Continued(cause="first", where="new_job"),
        SubmitIntended(name=name),
        Submitted(name=name, job_id=job_id),
        JobSeen(job_id=job_id, state="RUNNING", nodes=("n1",)),
        SegmentStarted(segment=1, restart=0, step=1, start=_START),
        ProgressMade(healthy_step=_SAVED),
    ]
    attempts = [0, 0, 0, *[1] * 6]
    stamps = [{"time": time.time(), "term": 1, "attempt": attempt} for attempt in attempts]
    return [event.model_copy(update=stamp) for event, stamp in zip(events, stamps, strict=True)]


class SimulatedWorker:
    """Writes a record and a pulse now and then, as HistoryWriter and the trainer do, and on demand a verdict."""

    def __init__(self, run: RunDir, phase: float) -> None:
        """``phase``: where in its first interval it begins, from 0 to 1, so that not all write at once."""
        self.run = run
        self.step = _STEPS
        self.is_over = False
        self._step_at = time.monotonic() + STEP_S * phase
        self._pulse_at = time.monotonic() + PULSE_S * phase

    def work(self) -> None:
        """Write what is due."""
        now = time.monotonic()
        if now >= self._step_at and not self.is_over:
            self._train(_record(self.step + 1))
            self._step_at += STEP_S
        if now >= self._pulse_at and not self.is_over:
            _pulse(self.run, self.step)
            self._pulse_at += PULSE_S

    def spike(self) -> float:
        """Stop on a verdict; when its record was written, UTC seconds."""
        self.is_over = True
        self._train(_record(self.step + 1, loss=90.0, verdict="spike", onset_step=self.step - 1, level=2.0))
        written = time.time()
        report = ExitReport(
            attempt=1, restart=0, rank=0, job_id="1", host="n1", outcome=Outcome.VERDICT, started=0.0, ended=written
        )
        publish_message(self.run.exit_report(1, 0, 0), report)
        return written

    def _train(self, one: Record) -> None:
        self.step += 1
        with open(self.run.history, "r+b", buffering=0) as file:
            file.seek(-3, os.SEEK_END)  # over the closing bracket
            file.write(f",\n{_line(one)}\n]\n".encode())


def _record(step: int, **changes: object) -> Record:
    fields: dict[str, object] = {"segment": 1, "attempt": 1, "restart": 0, "step": step, "epoch": 0.0}
    fields |= {"time": time.time(), "loss": 2.0, "grad_norm": 1.0, "lr": 1e-5, "step_s": STEP_S, "tokens_per_s": 1e4}
    return record(**fields | {"data": BatchPosition(epoch=0, batch=step)} | changes)


def _line(one: Record) -> str:
    fields = one.model_dump(mode="json")
    return encode({name: value for name, value in fields.items() if value not in (None, {})})


def _pulse(run: RunDir, step: int) -> None:
    path = run.pulse(1, 0, 0)
    staged = path.with_name(".tmp-pulse")
    _write(staged, Pulse(phase="training", step=step, time=time.time(), pid=1, host="n1", limit_s=1800.0))
    staged.replace(path)


def _write(path: Path, message: Message) -> None:
    path.write_text(encode(message.model_dump(mode="json")) + "\n")
