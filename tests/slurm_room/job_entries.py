"""Entry points that the tests of this folder submit."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def obey(folder, start):
    """Write down how we were started, then do what the file `go` says: exit with its number."""
    note(folder, start, "started", {**start, "environment": dict(os.environ), "path": sys.path, "pid": os.getpid()})
    go = Path(folder, f"go-{start['name']}")
    while not go.exists():
        time.sleep(0.02)
    os._exit(int(go.read_text()))


def note_signals(folder, start):
    """Write down SIGTERM and SIGUSR2, and stay until killed, as an agent does."""
    came = []

    def handler(number, _frame):
        came.append(signal.Signals(number).name)
        note(folder, start, "signals", came)

    dispositions = {name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGTERM", "SIGUSR2", "SIGCONT")}
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, handler)
    note(folder, start, "started", {**start, "dispositions": dispositions, "pid": os.getpid()})
    while True:
        time.sleep(0.05)


def give_back(folder, start):
    """Return the exit code."""
    return int(Path(folder, "code").read_text())


def note(folder, start, what, value):
    staged = Path(folder, f".{what}-{start['job_id']}-{start['restart']}-{start['rank']}")
    staged.write_text(json.dumps(value))
    staged.replace(Path(folder, staged.name[1:]))


def submit_another(folder, start):
    """Submit a job from inside a job, as the supervisor's own job does."""
    from slurm.job import JobRequest, Resources
    from slurm.scheduler import SlurmScheduler

    here = Resources(time_limit="5", environment={"PYTHONPATH": str(Path(__file__).parent)})
    job = JobRequest("hf-0a0b0c0d", "job_entries:obey", (folder,), Path(folder, "jobs"), here)
    note(folder, start, "submitted", SlurmScheduler().submit(job))
