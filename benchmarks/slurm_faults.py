"""What benchmarks.recovery does to jobs of a local Slurm, and how it knows when something happened to them."""

import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from slurm import processes
from slurm.local_cluster.cluster import Cluster

LIMIT_S = 240.0
Value = TypeVar("Value")


def until(look: Callable[[], Value | None], what: str, limit_s: float = LIMIT_S) -> Value:
    """The first answer that is one, asked for every 10 ms; TimeoutError, with what was waited for."""
    deadline = time.monotonic() + limit_s
    while (found := look()) is None or found is False:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {limit_s:.0f} s: {what}")
        time.sleep(0.01)
    return found


def note_start(folder: Path) -> str:
    """A shell line for a job's batch script: one more line, the time, in the file `starts`."""
    return f"date +%s.%N >> '{folder / 'starts'}'"


def starts(folder: Path) -> list[float]:
    """When the job of a folder was started, each time."""
    file = folder / "starts"
    return [float(line) for line in file.read_text().split()] if file.exists() else []


def logged(cluster: Cluster, pattern: str, since: float) -> float:
    """When slurmctld wrote the first line with `pattern` after `since`, by its log."""

    def look() -> float | None:
        for line in (cluster.folder / "log" / "slurmctld.log").read_text(errors="replace").splitlines():
            if re.search(pattern, line):
                told = datetime.fromisoformat(line[1 : line.index("]")]).timestamp()
                if told >= since - 0.002:
                    return told
        return None

    return until(look, f"slurmctld says {pattern}")


def agents_of(trainers: list[int]) -> list[int]:
    """The processes that started them."""
    return [int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in trainers]


def step_daemons(cluster: Cluster, name: str) -> list[int]:
    """Slurm's daemons of a job's steps, whose names begin with `name`."""
    pids = processes.descendants(cluster.keeper.pid)
    return [pid for pid in pids if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"slurmstepd: {name}".encode())]


def occupy(cluster: Cluster, partition: str, node: str) -> None:
    """A job of somebody else's, of a higher tier, on this very node, for three seconds."""
    argv = ["sbatch", "--parsable", f"--partition={partition}_high", f"--nodelist={node}", "--exclusive"]
    cluster.ask(*argv, "--output=/dev/null", "--wrap", "sleep 3")
