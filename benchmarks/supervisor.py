"""What supervising costs: `python -m benchmarks.supervisor [--runs 1 100 1000] [--seconds 60]`.

Memory, CPU, calls of Slurm a minute, and the time from a record to its decision, with real files on a local disk,
simulated workers (a step every 10 s and a pulse every 5 s a run) and a scheduler that counts what it is asked.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from slurm.job import JobRequest, JobState, JobStatus, Node, Reservation
from supervisor import fleet, supervise
from supervisor.journal import RolledBack, Submitted, read_journal
from supervisor.runs import open_or_create
from worker.contract.claim import Claim, take_claim
from worker.contract.config import Config
from worker.contract.directive import Directive, read_directive
from worker.contract.exit_report import ExitReport, Outcome
from worker.contract.files import encode, publish_message
from worker.contract.loss_history import BatchPosition, Probe, Start, record
from worker.contract.manifest import MANIFEST, Manifest
from worker.contract.pulse import Pulse
from worker.contract.run_dir import RunDir

STEP_S: Final = 10.0
PULSE_S: Final = 5.0
WANTED: Final = {1: (60, 0.2), 1000: (200, 20.0)}
"""MiB and per cent of a core, by the number of runs; 2 calls a minute and 2 s for all of them."""


class CountingScheduler:
    """Every job runs on one node from the moment it is submitted; each call stands for one program of Slurm."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobStatus] = {}
        self.calls = 0

    def submit(self, job: JobRequest) -> str:
        self.calls += 1
        job_id = str(len(self.jobs) + 1)
        self.jobs[job_id] = JobStatus(job_id, job.name, JobState.RUNNING, "", nodes=("n1",), source="counting")
        return job_id

    def find(self, name: str) -> list[JobStatus]:
        self.calls += 1
        return []

    def look(self, job_ids: Collection[str]) -> Mapping[str, JobStatus]:
        self.calls += 1
        return {job_id: self.jobs[job_id] for job_id in job_ids}

    def nodes(self, names: Collection[str]) -> Mapping[str, Node]:
        self.calls += bool(names)
        return {}

    def reservations(self) -> list[Reservation]:
        self.calls += 1
        return []


class SimulatedWorker:
    """Writes what a worker writes: claim, history, pulses, a checkpoint, and on demand a verdict."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.step = 0
        self.due_at = self.pulse_at = 0.0

    def directive(self) -> Directive | None:
        """What its job would begin with, once it is submitted."""
        is_submitted = any(isinstance(event, Submitted) for event in read_journal(self.run.journal))
        return read_directive(self.run.directive) if is_submitted else None

    def begin(self, directive: Directive) -> None:
        attempt = directive.attempt
        claim = Claim(job_id="1", name="hf", restart=0, host="n1", pid=1, started_ticks=1, time=time.time())
        take_claim(self.run.claim(attempt), claim)
        self.run.restart(attempt, 0).mkdir(parents=True, exist_ok=True)
        for _ in range(300):  # a run that is under way
            self.train(is_first=self.step == 0)
        self.save()

    def train(self, is_first: bool = False, verdict: str = "ok") -> float:
        self.step += 1
        start = Start(
            max_steps=100_000,
            lr=1.0,
            lr_expected=1.0,
            optimizer_steps=0,
            rng_digests=("r",),
            next_samples=(1,),
            probe=Probe(expected=None, found=1.0),
            versions={},
        )
        one = record(
            segment=1,
            attempt=1,
            restart=0,
            step=self.step,
            epoch=0.0,
            time=time.time(),
            loss=2.0 if verdict == "ok" else 90.0,
            grad_norm=1.0,
            lr=1e-5,
            step_s=STEP_S,
            tokens_per_s=1e4,
            data=BatchPosition(epoch=0, batch=self.step),
            verdict=verdict,
            onset_step=None if verdict == "ok" else self.step - 2,
            level=None if verdict == "ok" else 2.0,
            start=start if is_first else None,
        )
        line = encode({name: value for name, value in one.model_dump(mode="json").items() if value is not None})
        with open(self.run.history, "wb" if is_first else "r+b", buffering=0) as file:
            file.seek(0 if is_first else -3, os.SEEK_END)  # over the closing bracket, as HistoryWriter does
            file.write((b"[\n" if is_first else b",\n") + line.encode() + b"\n]\n")
        return time.time()

    def save(self) -> None:
        fields: dict[str, Any] = dict.fromkeys(("world_size", "batch_size", "gradient_accumulation"), 1)
        fields |= {"step": 200, "attempt": 1, "segment": 1, "time": 0.0, "epoch": 0.0, "batches_into_epoch": 200}
        fields |= {"samples_seen": 200, "max_steps": 100_000, "seed": 1, "config_digest": "c", "data_digest": "d"}
        fields |= {"lr_scale": 1.0, "weights_finite": True, "probe_loss": 1.0, "optimizer_steps": 200, "versions": {}}
        self.run.checkpoint(200).mkdir(parents=True)
        publish_message(self.run.checkpoint(200) / MANIFEST, Manifest(**fields, files={}))

    def pulse(self) -> None:
        pulse = Pulse(phase="training", step=self.step, time=time.time(), pid=1, host="n1", limit_s=1800.0)
        path = self.run.pulse(1, 0, 0)
        staged = path.with_name(".tmp-pulse")
        staged.write_text(encode(pulse.model_dump(mode="json")))
        staged.replace(path)

    def spike(self) -> float:
        """Stop on a verdict; when its record was written, UTC seconds."""
        written = self.train(verdict="spike")
        report = ExitReport(
            attempt=1, restart=0, rank=0, job_id="1", host="n1", outcome=Outcome.VERDICT, started=0.0, ended=written
        )
        publish_message(self.run.exit_report(1, 0, 0), report)
        return written


def make_runs(folder: Path, count: int) -> list[RunDir]:
    made = []
    for number in range(count):
        fields = {
            "run": {"name": f"run-{number:04d}", "dir": str(folder)},
            "model": {"config": {"model_type": "llama"}},
            "data": {"train": "stdlib", "tokenizer": "bytes"},
            "training": {"max_steps": 100_000, "optimizer": {"learning_rate": 1e-5}},
            "cluster": {"kind": "slurm"},
            "supervisor": {"place": "foreground"},
        }
        made.append(open_or_create(Config.model_validate(fields)))
    return made


def measure(count: int, seconds: float, settle_s: float) -> dict[str, float]:
    """Figures of one supervisor over `count` runs for so many seconds, after as many as `settle_s` of quiet work."""
    with tempfile.TemporaryDirectory() as name:
        runs = make_runs(Path(name), count)
        what = str(runs[0].path) if count == 1 else name
        argv = [sys.executable, "-m", "benchmarks.supervisor", "--child", what]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            workers = [SimulatedWorker(run) for run in runs]
            _begin_all(workers)
            _work(workers, settle_s)  # everything is seen, and the calls for the beginning are over
            return _watch(child, workers, seconds)
        finally:
            child.kill()
            child.wait()


def _begin_all(workers: list[SimulatedWorker]) -> None:
    waiting = list(workers)
    while waiting:
        for worker in list(waiting):
            directive = worker.directive()
            if directive is not None:
                worker.begin(directive)
                waiting.remove(worker)
        time.sleep(0.1)


def _ask(child: subprocess.Popen[str]) -> dict[str, float]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("figures\n")
    child.stdin.flush()
    found: dict[str, float] = json.loads(child.stdout.readline())
    return found


def _watch(child: subprocess.Popen[str], workers: list[SimulatedWorker], seconds: float) -> dict[str, float]:
    before = _ask(child)
    _work(workers, seconds)
    after = _ask(child)
    lags = _lags(workers[: min(5, len(workers))])
    wall_s = after["time"] - before["time"]
    return {
        "runs": len(workers),
        "memory_mib": after["memory_mib"],
        "cpu_percent": 100.0 * (after["cpu_s"] - before["cpu_s"]) / wall_s,
        "calls_a_minute": 60.0 * (after["calls"] - before["calls"]) / wall_s,
        "decided_after_s": max(lags),
    }


def _work(workers: list[SimulatedWorker], seconds: float) -> None:
    """Steps and pulses, spread evenly."""
    until = time.monotonic() + seconds
    for number, worker in enumerate(workers):
        worker.due_at = worker.due_at or time.monotonic() + STEP_S * number / len(workers)
    while (now := time.monotonic()) < until:
        for worker in workers:
            if now >= worker.due_at:
                worker.train()
                worker.due_at = now + STEP_S
            if now >= worker.pulse_at:
                worker.pulse()
                worker.pulse_at = now + PULSE_S
        time.sleep(0.05)


def _lags(workers: list[SimulatedWorker]) -> list[float]:
    """Seconds from a verdict's record to the decision in the journal."""
    lags = []
    for worker in workers:
        written = worker.spike()
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            decided = [one.time for one in read_journal(worker.run.journal) if isinstance(one, RolledBack)]
            if decided:
                lags.append(decided[0] - written)
                break
            time.sleep(0.1)
    return lags or [float("nan")]


# -- the process that is measured --------------------------------------------------------------------------------------


def supervise_here(what: Path) -> None:
    """Supervise a run or a folder of them, and answer each line of standard input with the figures so far."""
    scheduler: Any = CountingScheduler()
    for module in (fleet, supervise):
        module.choose = lambda kind, *folders: scheduler  # type: ignore[attr-defined]
    threading.Thread(target=_answer, args=(scheduler,), daemon=True).start()
    with open(os.devnull, "w") as out:
        if (what / "config.yaml").exists():
            supervise.supervise(RunDir(what), out)
        else:
            fleet.supervise_all(what, out, lambda: False)


def _answer(scheduler: CountingScheduler) -> None:
    for _ in sys.stdin:
        status = Path("/proc/self/status").read_text()
        kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
        figures = {"time": time.monotonic(), "cpu_s": time.process_time(), "memory_mib": kib / 1024}
        print(json.dumps(figures | {"calls": scheduler.calls}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--settle", type=float, default=50.0, help="seconds of quiet work before the figures count")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return supervise_here(args.child)
    print("| runs | memory | CPU, of a core | calls of Slurm a minute | record to decision |\n|---|---|---|---|---|")
    for count in args.runs:
        found = measure(count, args.seconds, args.settle)
        memory, cpu = f"{found['memory_mib']:.0f} MiB", f"{found['cpu_percent']:.2f} %"
        if count in WANTED:
            memory, cpu = f"{memory} (wanted {WANTED[count][0]})", f"{cpu} (wanted {WANTED[count][1]})"
        calls, lag = f"{found['calls_a_minute']:.1f} (wanted 2)", f"{found['decided_after_s']:.2f} s (wanted 2)"
        print(f"| {count} | {memory} | {cpu} | {calls} | {lag} |", flush=True)
    return None


if __name__ == "__main__":
    main()
