"""What a relaunch in the allocation costs, cold and from the zygote, side by side: ``python benchmarks/relaunch.py``.

One agent of each kind trains the same tiny model in its own folder, one at a time.  The trainer is killed, its agent
reports, and the clock runs from the publication of the next directive to that attempt's first record: the agent's look,
the start of the process, its imports or none, model, data, checkpoint, proof and one step.  What comes before, seeing
the end and deciding, is the same for both and not in it.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.heading import heading  # noqa: E402 (the tree that this file lies in)
from worker.contract import config  # noqa: E402
from worker.contract.directive import Directive, publish_directive  # noqa: E402
from worker.contract.loss_history import last_record  # noqa: E402
from worker.contract.manifest import complete_checkpoints  # noqa: E402
from worker.contract.run_dir import RunDir, checkpoint_name  # noqa: E402

LIMIT_S = 300.0
MODEL = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def settings(name: str, text: Path, threads: int) -> config.Config:
    """0.86 million parameters on bytes; a checkpoint every five steps."""
    return config.Config.model_validate(
        {
            "run": {"name": name},
            "model": {"config": MODEL},
            "data": {"train": str(text), "tokenizer": "bytes", "max_tokens": 128},
            "training": {
                "max_steps": 1_000_000,
                "batch_size": 8,
                "precision": "fp32",
                "optimizer": {"learning_rate": 1e-4},
                "schedule": {"name": "constant", "warmup": 0},
                "zygote": name == "zygote",
            },
            "checkpoint": {"every_steps": 5},
            "recovery": {"relaunches_in_allocation": 1_000},
            "cluster": {"cpus_per_task": threads},
        }
    )


def wait_until(look: Callable[[], bool]) -> None:
    """Return when ``look`` is true; asked every 2 ms."""
    deadline = time.monotonic() + LIMIT_S
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S:.0f} s")
        time.sleep(0.002)


class Run:
    """One agent with its run folder."""

    def __init__(self, folder: Path, name: str, threads: int) -> None:
        self.name, self.run_dir, self.attempt = name, RunDir(folder / name), 0
        self.run_dir.path.mkdir()
        text = folder / "text.txt"
        text.write_text("".join(f"line {number}: {number * number}\n" for number in range(20_000)))
        config.write(self.run_dir.config, settings(name, text, threads))
        task = {"job_id": "1", "name": "hf-bench", "restart": 0, "rank": 0, "world": 1, "local_rank": 0}
        code = f"from worker.agent import main; main({str(self.run_dir.path)!r}, {task!r})"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        environment.pop("OMP_NUM_THREADS", None)
        with open(folder / f"{name}.log", "w") as log:
            self.agent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=log, stderr=log)

    def begin(self) -> float:
        """Direct the next attempt; seconds from there to its first record."""
        self.attempt += 1
        checkpoints = complete_checkpoints(self.run_dir)
        told: dict[str, Any] = {"cause": "crash", "reason": "a benchmark", "time": time.time()}
        newest = checkpoint_name(max(one.step for one in checkpoints)) if checkpoints else None
        began = time.monotonic()
        publish_directive(self.run_dir.directive, Directive(attempt=self.attempt, resume_from=newest, **told))
        wait_until(self._has_record)
        return time.monotonic() - began

    def _has_record(self) -> bool:
        ended = self.run_dir.exit_report(self.attempt, 0, 0)
        if ended.exists():
            sys.exit(f"attempt {self.attempt} of {self.name} trains not: {ended.read_text()}")
        last = last_record(self.run_dir.history)
        return last is not None and last.attempt == self.attempt

    def kill_trainer(self) -> None:
        """SIGKILL the trainer after its next checkpoint, and wait for its agent's report."""
        wait_until(lambda: bool(complete_checkpoints(self.run_dir)))
        os.kill(self.processes()["trainer"], signal.SIGKILL)
        wait_until(lambda: self.run_dir.exit_report(self.attempt, 0, 0).exists())

    def processes(self) -> dict[str, int]:
        """The agent's trainer, which leads a process group, and its zygote, which does not."""
        pids = map(int, Path(f"/proc/{self.agent.pid}/task/{self.agent.pid}/children").read_text().split())
        return {"trainer" if os.getpgid(pid) == pid else "zygote": pid for pid in pids}

    def end(self) -> None:
        """End the agent, and with it all that it started."""
        self.agent.kill()
        self.agent.wait()


def memory_mib(pid: int) -> tuple[float, float]:
    """Proportional and private memory of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    numbers = {name: int(value.split()[0]) / 1024 for name, value in lines.items()}
    return numbers["Pss"], numbers["Private_Dirty"] + numbers["Private_Clean"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--relaunches", type=int, default=5, help="of each kind")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of the trainers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [Run(Path(folder), name, options.threads) for name in ("cold", "zygote")]
        try:
            measure(runs, options.relaunches)
        finally:
            for run in runs:
                run.end()


def measure(runs: list[Run], relaunches: int) -> None:
    """First starts, then relaunches in turn; only one of the two runs trains at any time."""
    first: dict[str, float] = {}
    again: dict[str, list[float]] = {run.name: [] for run in runs}
    memory: list[tuple[str, float, float]] = []
    for run in runs:
        first[run.name] = run.begin()
        memory += [(f"{who} of {run.name}", *memory_mib(pid)) for who, pid in sorted(run.processes().items())]
        run.kill_trainer()
    for _ in range(relaunches):
        for run in runs:
            again[run.name].append(run.begin())
            run.kill_trainer()
    report(first, again, memory)


def report(first: dict[str, float], again: dict[str, list[float]], memory: list[tuple[str, float, float]]) -> None:
    """Print the tables."""
    print("\n".join(heading("relaunch")))
    print("\ndirective to first record, s     first start (once)   relaunch: median   least   most   n")
    for name, times in again.items():
        print(
            f"{name:32} {first[name]:18.2f} {statistics.median(times):18.2f} {min(times):7.2f} "
            f"{max(times):6.2f} {len(times):3d}"
        )
    print("\nmemory while the first trainer runs, MiB      PSS   private")
    for who, pss, private in memory:
        print(f"{who:40} {pss:9.0f} {private:9.0f}")


if __name__ == "__main__":
    main()
