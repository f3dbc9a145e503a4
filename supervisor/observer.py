"""Looks at a run: whole, or no more than a glance, which costs next to nothing where nothing has happened."""

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from slurm.job import JobState, JobStatus
from supervisor.batches import Stretch, extend
from supervisor.observation import Observation
from supervisor.requests import read_request
from supervisor.run_state import RunState
from supervisor.signs import Signs
from worker.contract.claim import Claim, read_claim
from worker.contract.exit_report import WAITS_FOR_A_DIRECTIVE, ExitReport
from worker.contract.files import AnyMessage, UnusableFileError, is_left, read_message
from worker.contract.loss_history import HistoryReader, Record
from worker.contract.manifest import MANIFEST, Manifest, UnusableCheckpointError, complete_manifest
from worker.contract.pulse import Pulse, Quiet
from worker.contract.run_dir import RunDir

_LONGEST_GAP_S: Final = 60.0


class Glance(StrEnum):
    """What a glance at a run's files shows."""

    NOTHING = "nothing"
    """Nothing has changed but signs of life."""
    STEPS = "steps"
    """Steps that went well."""
    NEWS = "news"
    """Something else: it takes a look to say what."""


class Observer:
    """Looks at one run again and again; keeps only what can be read again from the files."""

    def __init__(self, run_dir: RunDir, stat: Callable[[Path], os.stat_result] = Path.stat) -> None:
        self.run_dir = run_dir
        self._signs = Signs(run_dir, stat)
        self._unsettled: set[Path] = set()
        """Folders that changed a moment ago, and may have changed again without a sign."""
        self._begin_anew()
        self._manifests: dict[tuple[int, int], Manifest] = {}
        self._saves_s: deque[float] = deque(maxlen=5)
        self._quiet = Quiet(_LONGEST_GAP_S)

    def _begin_anew(self) -> None:
        self._reader = HistoryReader(self.run_dir.history)
        self._branch: list[Record] = []
        self._trail: list[Stretch] = []
        self._started: list[Record] = []

    @property
    def branch(self) -> tuple[Record, ...]:
        """Of the surviving branch: every record that is not ``ok``, and the last one."""
        return tuple(self._branch)

    @property
    def has_verdict(self) -> bool:
        """Whether the worker stopped on one."""
        return bool(self._branch) and self._branch[-1].is_acted

    def glance(self) -> Glance:
        """What has happened since the last look, by a few stamps; what is new in the history is taken up."""
        changed, history = self._signs.changed(), self.run_dir.history
        starts = changed & self._signs.starts.keys()
        looked_at, self._unsettled = starts | self._unsettled, starts
        are_steps = history in changed and self._are_steps()
        if changed - starts - ({history} if are_steps else set()):
            return Glance.NEWS
        if any(map(self._signs.has_new_report, looked_at)):
            return Glance.NEWS
        return Glance.STEPS if are_steps else Glance.NOTHING

    def _are_steps(self) -> bool:
        """Whether what is new in the history are steps that went well, and nothing else."""
        try:
            new = self._read_history()
        except (UnusableFileError, OSError):
            return False  # a look says what is wrong
        return bool(new) and all(record.verdict == "ok" and record.start is None for record in new)

    def look(self, run: RunState, now: float, job: JobStatus | None, look_error: str | None) -> Observation:
        """Everything there is to see of the run, beside the job status that was asked for all runs at once."""
        self._signs.take(run.attempt)
        self._unsettled = set(self._signs.starts)
        self._read_history()
        told = run.segment or 0
        self._started = [one for one in self._started if one.attempt >= run.attempt and one.segment > told]
        claim, reports = _claim(self.run_dir, run.attempt), newest_reports(self._signs.starts)
        odd_ranks = (self._branch[-1].nonfinite_ranks or ()) if self._branch else ()
        pulses = self._newest_pulses(run.attempt, {0, *odd_ranks})
        is_running = job is not None and job.state is JobState.RUNNING and claim is not None and not reports
        sign = (run.attempt, claim, pulses.get(0)) if is_running else object()  # which is like no other
        manifests, unusable = self._checkpoints()
        return Observation(
            now=now,
            job=job,
            look_error=look_error,
            claim=claim,
            reports=reports,
            pulses=pulses,
            quiet_s=self._quiet.look(sign, now),
            started_segments=tuple(self._started),
            branch=self.branch,
            trail=tuple(self._trail),
            manifests=manifests,
            unusable=unusable,
            request=read_request(self.run_dir.request),
            has_stop_file=is_left(self.run_dir.stop_file),
            save_s=max(self._saves_s, default=None),
        )

    def _read_history(self) -> Sequence[Record]:
        """Take up what is new, and hand it on."""
        try:
            new = self._reader.new_records()
        except UnusableFileError:
            self._begin_anew()  # it was cut behind our back: read it whole again
            new = self._reader.new_records()
        for record in new:
            if record.start is not None:
                self._started.append(record)
            if record.save_s is not None:
                self._saves_s.append(record.save_s + (record.step_s or 0.0))
            if record.write_s is not None:  # who is told to leave waits for such a write, and saves once more
                self._saves_s.append(2.0 * record.write_s)
            self._add(record)
        return new

    def _add(self, record: Record) -> None:
        if self._branch and self._branch[-1].verdict == "ok":
            self._branch.pop()  # only the last record is kept when it is ok
        while self._branch and self._branch[-1].step >= record.step:
            self._branch.pop()
        self._branch.append(record)
        extend(self._trail, record.step, record.data)

    def _newest_pulses(self, attempt: int, ranks: Iterable[int]) -> dict[int, Pulse]:
        """Pulses of some ranks in the newest start; all of them would be thousands of files."""
        if not self._signs.restarts:
            return {}
        newest = self._signs.restarts[-1]
        found = {rank: _read(self.run_dir.pulse(attempt, newest, rank), Pulse) for rank in ranks}
        return {rank: pulse for rank, pulse in found.items() if pulse is not None}

    def _checkpoints(self) -> tuple[tuple[Manifest, ...], dict[int, str]]:
        """Those that are complete, and why each of the others is not."""
        found: dict[tuple[int, int], Manifest] = {}
        unusable: dict[int, str] = {}
        for step in self.run_dir.checkpoint_steps():
            folder = self.run_dir.checkpoint(step)
            try:
                key = (step, (folder / MANIFEST).stat().st_mtime_ns)
                found[key] = self._manifests.get(key) or complete_manifest(folder)
            except FileNotFoundError:
                unusable[step] = "it has no manifest"
                continue
            except (OSError, UnusableCheckpointError) as error:
                unusable[step] = str(error)
                continue
            if found[key].step != step:
                unusable[step] = f"its manifest is that of step {found[key].step}"
        self._manifests = found
        return tuple(each for (step, _), each in found.items() if step not in unusable), unusable


def _claim(run_dir: RunDir, attempt: int) -> Claim | None:
    """The attempt's claim; one that cannot be read claims nothing."""
    try:
        return read_claim(run_dir.claim(attempt)) if attempt else None
    except UnusableFileError:
        return None


def newest_reports(starts: Mapping[Path, Collection[str]]) -> dict[int, ExitReport]:
    """Exit reports of the attempt's newest start that left any folder, by rank.

    Of an earlier start, where the newest has none, if it ended so that the agents of a later one wait for a directive.
    """
    newest_first = list(starts)[::-1]
    for start in newest_first:
        found = {report.rank: report for name in sorted(starts[start]) if (report := _read(start / name, ExitReport))}
        is_awaited = any(report.outcome in WAITS_FOR_A_DIRECTIVE for report in found.values())
        if is_awaited or (found and start == newest_first[0]):
            return found
    return {}


def _read(path: Path, kind: type[AnyMessage]) -> AnyMessage | None:
    """What a rank left; what cannot be read says nothing, and its job will be seen to be over."""
    try:
        return read_message(path, kind)
    except UnusableFileError:
        return None
