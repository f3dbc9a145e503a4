"""DataLoader processes: a signal to the job is not theirs, and a trainer that is killed takes them along."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from agent_rooms import ROOT, is_alive

from tests.waiting import eventually

LOADS = """
import os, sys, time
from pathlib import Path
from torch.utils.data import DataLoader, Dataset
from worker.interrupts import IgnoreSignals

class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):  # so that torch's own look at the parent, between two batches, never comes
        (Path(sys.argv[1]) / str(os.getpid())).touch()
        time.sleep(1e6)

next(iter(DataLoader(Slow(), num_workers=2, worker_init_fn=IgnoreSignals(None))))
"""


def test_data_workers_ignore_the_jobs_signals_and_die_with_their_trainer(tmp_path: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", LOADS, str(tmp_path)], cwd=ROOT, process_group=0)
    try:
        eventually(lambda: len(list(tmp_path.iterdir())) == 2)
        workers = [int(path.name) for path in tmp_path.iterdir()]
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGUSR2)
        assert all(is_alive(pid) for pid in workers)
        trainer.kill()
        eventually(lambda: not any(is_alive(pid) for pid in workers))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()
