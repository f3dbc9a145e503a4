"""What slurmd is to a Slurm job, for a job of the local stand-in: `python -m slurm.local_controller JOBS_FOLDER`.

submitit's own controller starts the tasks; this one adds what it lacks: it waits for its turn (singleton), gives
SIGTERM time before SIGKILL, keeps the time limit in seconds, and writes down how the job ended.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from submitit.local.local import Controller

from slurm import local_record, processes
from slurm.job import JobState
from slurm.local_record import Record

LOOK_S = 0.05
RECORD_WAIT_S = 60.0


class JobController(Controller):
    """Runs the tasks of one job to their end."""

    def __init__(self, folder: Path, record: Record) -> None:
        super().__init__(folder)
        self.record = record
        self.cancelled = False
        self.preempted = False
        self.timed_out = False
        self._warned = False
        self._kill_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_cancel)
        signal.signal(local_record.PREEMPT, self._note_preemption)

    def _note_cancel(self, _number: int, _frame: FrameType | None) -> None:
        self.cancelled = True

    def _note_preemption(self, _number: int, _frame: FrameType | None) -> None:
        self.preempted = True

    def run_job(self) -> None:
        """Wait for the job's turn, run it, and leave how it ended in its record."""
        while not self.cancelled and any(local_record.live_before(self.folder, self.record)):
            time.sleep(LOOK_S)
        if self.cancelled:
            return self._end([])
        self.start_tasks()
        self._write(state=JobState.RUNNING, started=time.time())
        while any(task.poll() is None for task in self.tasks):
            self._enforce(time.time())
            time.sleep(LOOK_S)
        processes.signal_members(self.record.process, signal.SIGKILL)
        return self._end([task.returncode for task in self.tasks])

    def _enforce(self, now: float) -> None:
        """Carry out a cancellation, a preemption or the time limit, each with time to save before the kill."""
        if self._kill_at is not None:
            if now >= self._kill_at:
                processes.signal_members(self.record.process, signal.SIGKILL)
        elif self.cancelled or self.preempted or self._limit_reached(now, 0):
            self.timed_out = not self.cancelled and not self.preempted
            self._kill_at = now + self.record.kill_wait_s
            processes.signal_members(self.record.process, signal.SIGTERM)
        elif not self._warned and self._limit_reached(now, self.record.warn_before_s):
            self._warned = True
            processes.signal_members(self.record.process, signal.Signals[f"SIG{self.record.warn_signal}"])

    def _limit_reached(self, now: float, before_s: float) -> bool:
        started, limit_s = self.record.started, self.record.limit_s
        return started is not None and limit_s is not None and now >= started + limit_s - before_s

    def _end(self, codes: list[int]) -> None:
        bad = [code for code in codes if code]
        exit_code = None if not codes else 0 if not bad else bad[0] if bad[0] > 0 else 128 - bad[0]
        self._write(state=self._outcome(bad), ended=time.time(), exit_code=exit_code)

    def _outcome(self, bad: list[int]) -> JobState:
        if self.cancelled:
            return JobState.CANCELLED
        if self.preempted:
            return JobState.PREEMPTED
        if self.timed_out:
            return JobState.TIMEOUT
        return JobState.FAILED if bad else JobState.COMPLETED

    def _write(self, **changes: object) -> None:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        local_record.publish(self.folder, self.record)


def _own_record(folder: Path) -> Record | None:
    """The record that the submitting process writes right after it has started us, or None if it died before."""
    until = time.monotonic() + RECORD_WAIT_S
    while time.monotonic() < until:
        record = local_record.read(folder, str(os.getpid()))
        if record is not None and processes.is_alive(record.process):
            return record
        time.sleep(LOOK_S)
    return None


def main() -> None:
    """Run the job whose record has our pid."""
    folder = Path(sys.argv[1])
    record = _own_record(folder)
    if record is not None:
        JobController(folder, record).run_job()


if __name__ == "__main__":
    main()
