"""What supervising costs: `python -m benchmarks.supervisor [--runs 1 100 1000] [--seconds 120]`.

Memory, CPU, calls of Slurm a minute, and the time from a record to its decision, with real files on a local disk,
simulated workers (a step every 10 s and a pulse every 5 s a run) and a scheduler that counts what it is asked.  Each
number of runs has a supervisor, a process of its own whose CPU time is counted; they work beside each other, and the
workers of all are simulated in one more process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.heading import heading, met
from benchmarks.simulated import CountingScheduler, SimulatedWorker, runs_under_way
from supervisor import fleet, supervise
from supervisor.journal import AttemptDecided, read_journal
from supervisor.lease import read_holder
from worker.contract.run_dir import RunDir

WANTED: Final = {1: (60.0, 0.2), 1000: (200.0, 20.0)}
"""MiB and per cent of a core, by the number of runs."""
WANTED_CALLS: Final = 2.0
WANTED_S: Final = 2.0
VERDICTS: Final = 5
_PATIENCE_S: Final = 60.0


@dataclass
class Supervised:
    """Runs, their workers, and the supervisor that has all of them."""

    workers: list[SimulatedWorker]
    process: subprocess.Popen[str]

    def figures(self) -> dict[str, float]:
        """CPU seconds, MiB and calls of its process until now."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("figures\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found

    @property
    def is_taken_up(self) -> bool:
        """Whether each of its runs is in its hands."""
        return all(read_holder(worker.run) is not None for worker in self.workers)


def measure(counts: list[int], seconds: float, settle_s: float) -> Iterator[dict[str, float]]:
    """Figures of a supervisor for each number of runs, over the same ``seconds`` after ``settle_s`` of quiet work."""
    with ExitStack() as stack:
        every = [stack.enter_context(_supervised(count)) for count in counts]
        workers = [worker for one in every for worker in one.workers]
        until = time.monotonic() + _PATIENCE_S + sum(counts) * 0.1
        while not all(one.is_taken_up for one in every):
            assert time.monotonic() < until, "a supervisor did not take its runs up"
            _work(workers, 1.0)
        _work(workers, settle_s)
        before = [one.figures() for one in every]
        _work(workers, seconds)
        after = [one.figures() for one in every]
        for one, begun, ended in zip(every, before, after, strict=True):
            wall_s = ended["time"] - begun["time"]
            yield {
                "runs": len(one.workers),
                "memory_mib": ended["memory_mib"],
                "cpu_percent": 100.0 * (ended["cpu_s"] - begun["cpu_s"]) / wall_s,
                "calls_a_minute": 60.0 * (ended["calls"] - begun["calls"]) / wall_s,
                "decided_after_s": max(_lags(one.workers, workers)),
            }


@contextmanager
def _supervised(count: int) -> Iterator[Supervised]:
    with tempfile.TemporaryDirectory() as name:
        runs = runs_under_way(Path(name), count)
        what = str(runs[0].path) if count == 1 else name
        argv = [sys.executable, "-m", "benchmarks.supervisor", "--child", what]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            yield Supervised([SimulatedWorker(run, number / count) for number, run in enumerate(runs)], process)
        finally:
            process.kill()
            process.communicate()


def _work(workers: list[SimulatedWorker], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for worker in workers:
            worker.work()
        time.sleep(0.05)


def _lags(workers: list[SimulatedWorker], every: list[SimulatedWorker]) -> list[float]:
    """Seconds from a verdict's record to its decision in the journal, of some workers while all others go on."""
    count = min(VERDICTS, len(workers))
    lags = []
    for number in range(count):
        _work(every, 0.37)  # at no special moment of the supervisor's turns
        worker = workers[number * len(workers) // count]
        written = worker.spike()
        until = time.monotonic() + _PATIENCE_S
        while (decided := _decided(worker.run)) is None:
            assert time.monotonic() < until, f"no decision for {worker.run.path.name}"
            _work(every, 0.1)
        lags.append(decided - written)
    return lags


def _decided(run: RunDir) -> float | None:
    events = (event for event in read_journal(run.journal) if isinstance(event, AttemptDecided))
    return next((event.time for event in events if event.cause == "spike"), None)


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


# -- the table ---------------------------------------------------------------------------------------------------------


def _rows(found: dict[str, float]) -> Iterator[str]:
    """A row for each figure of one supervisor: measured, wanted, met or not."""
    memory_mib, cpu_percent = WANTED.get(int(found["runs"]), (None, None))
    yield _row(found, "memory_mib", "resident memory", "MiB", memory_mib)
    yield _row(found, "cpu_percent", "CPU, of a core", "%", cpu_percent)
    yield _row(found, "calls_a_minute", "Slurm calls a minute", "", WANTED_CALLS)
    yield _row(found, "decided_after_s", "record to decision", "s", WANTED_S)


def _row(found: dict[str, float], name: str, what: str, unit: str, wanted: float | None) -> str:
    measured = f"{found[name]:.2f}"
    judged = "" if wanted is None else f"{wanted:>8g} {unit:4}{met(float(measured) <= wanted)}"
    return f"{found['runs']:>6,.0f}  {what:24}{measured:>8} {unit:4}{judged}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--seconds", type=float, default=120.0, help="two minutes: in which the nodes are asked once")
    parser.add_argument("--settle", type=float, default=15.0, help="seconds of quiet work before the figures count")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return supervise_here(args.child)
    print("\n".join(heading("supervisor")))
    print(f"figures    over {args.seconds:g} s; record to decision: the longest of {VERDICTS}")
    print(f"\n{'runs':>6}  {'':24}{'':8} {'':4}{'wanted':>8}")
    for found in measure(args.runs, args.seconds, args.settle):
        print("\n".join(_rows(found)), flush=True)
    return None


if __name__ == "__main__":
    main()
