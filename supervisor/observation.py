"""Look once: the job, new history records, complete checkpoints, exit reports, a person's request."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from slurm import reasons
from slurm.job import JobState, JobStatus, Node, Reservation
from slurm.scheduler import Scheduler, SchedulerError
from supervisor.batches import Stretch, extend, trained_on
from supervisor.how_it_left import how_it_left
from supervisor.journal import (
    DrainSeen,
    Event,
    JobSeen,
    Preempted,
    ProgressMade,
    SegmentStarted,
    StopRequested,
    VerdictSeen,
    WorkerLeft,
)
from supervisor.requests import Request, read_request, request_news
from supervisor.run_state import RunState
from worker.contract.claim import Claim, read_claim
from worker.contract.exit_report import WAITS_FOR_A_DIRECTIVE, ExitReport, Outcome
from worker.contract.files import AnyMessage, UnusableFileError, is_left, read_message
from worker.contract.loss_history import ACTED, HistoryReader, Record
from worker.contract.manifest import MANIFEST, Health, Manifest, UnusableCheckpointError, complete_manifest, health
from worker.contract.pulse import Pulse, Quiet
from worker.contract.run_dir import RunDir

_LONGEST_GAP_S: Final = 60.0
_RANK_0_WAIT_S: Final = 60.0
"""From the last report of another rank: by then rank 0's agent has ended its trainer, if there is such an agent."""
ABSENT: Final = "the scheduler does not know it"
_ESTIMATE_MOVED_S: Final = 1800.0
STOP_FILE: Final = "a STOP file"
"""Who asked, where nobody gave a name."""


@dataclass(frozen=True)
class Observation:
    """One look at a run. What could not be known is told apart from what is not there."""

    now: float
    job: JobStatus | None = None
    """The run's job; None = the scheduler does not know it, or there is none, or ``look_error`` says why not."""
    look_error: str | None = None
    """Why the scheduler could not be asked; None = it answered."""
    claim: Claim | None = None
    reports: Mapping[int, ExitReport] = field(default_factory=dict)
    """Exit reports of the attempt's newest start, by rank."""
    started_segments: Sequence[Record] = ()
    """First records of segments that this process has not seen before."""
    branch: Sequence[Record] = ()
    """Of the surviving branch: every record that is not ``ok``, and the last one."""
    trail: Sequence[Stretch] = ()
    """Which global batches the steps of the surviving branch were trained on."""
    manifests: Sequence[Manifest] = ()
    """Complete checkpoints, ascending by step."""
    unusable: Mapping[int, str] = field(default_factory=dict)
    """Why each of the others may not be begun from, ascending by step."""
    request: Request | None = None
    has_stop_file: bool = False
    """Whether a person has left a file STOP in the run's folder."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """The job's nodes, and those of its last start while it waits for the next; what is absent is not known."""
    reservations: Sequence[Reservation] = ()
    save_s: float | None = None
    """The longest of the last saves with the step before it; None before the first."""
    pulses: Mapping[int, Pulse] = field(default_factory=dict)
    """The last sign of life in the attempt's newest start, of rank 0 and of those that saw numbers not finite."""
    quiet_s: float = 0.0
    """For how long rank 0's was the same while the job was seen to run and nobody had reported."""

    @property
    def last(self) -> Record | None:
        """The newest record, None before the first step."""
        return self.branch[-1] if self.branch else None


class Observer:
    """Looks at one run again and again; keeps only what can be read again from the files."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._reader = HistoryReader(run_dir.history)
        self._branch: list[Record] = []
        self._trail: list[Stretch] = []
        self._manifests: dict[tuple[int, int], Manifest] = {}
        self._saves_s: deque[float] = deque(maxlen=5)
        self._quiet = Quiet(_LONGEST_GAP_S)

    def look(self, run: RunState, now: float, job: JobStatus | None, look_error: str | None) -> Observation:
        """Everything there is to see of the run, beside the job status that was asked for all runs at once."""
        started = self._read_history()
        claim, reports = _claim(self.run_dir, run.attempt), newest_reports(self.run_dir, run.attempt)
        odd_ranks = (self._branch[-1].nonfinite_ranks or ()) if self._branch else ()
        pulses = newest_pulses(self.run_dir, run.attempt, {0, *odd_ranks})
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
            started_segments=started,
            branch=tuple(self._branch),
            trail=tuple(self._trail),
            manifests=manifests,
            unusable=unusable,
            request=read_request(self.run_dir.request),
            has_stop_file=is_left(self.run_dir.stop_file),
            save_s=max(self._saves_s, default=None),
        )

    def _read_history(self) -> list[Record]:
        try:
            new = self._reader.new_records()
        except UnusableFileError:
            self._reader = HistoryReader(self.run_dir.history)  # it was cut behind our back: read it whole again
            self._branch.clear()
            self._trail.clear()
            new = self._reader.new_records()
        started = []
        for record in new:
            if record.start is not None:
                started.append(record)
            if record.save_s is not None:
                self._saves_s.append(record.save_s + (record.step_s or 0.0))
            if record.write_s is not None:  # who is told to leave waits for such a write, and saves once more
                self._saves_s.append(2.0 * record.write_s)
            self._add(record)
        return started

    def _add(self, record: Record) -> None:
        if self._branch and self._branch[-1].verdict == "ok":
            self._branch.pop()  # only the last record is kept when it is ok
        while self._branch and self._branch[-1].step >= record.step:
            self._branch.pop()
        self._branch.append(record)
        extend(self._trail, record.step, record.data)

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


def newest_reports(run_dir: RunDir, attempt: int) -> dict[int, ExitReport]:
    """Exit reports of the newest start of ``attempt`` that left any folder, by rank.

    Of an earlier start, where the newest has none, if it ended so that the agents of a later one wait for a directive.
    """
    newest_first = run_dir.restarts(attempt)[::-1] if attempt else []
    for restart in newest_first:
        paths = sorted(run_dir.restart(attempt, restart).glob("rank-*.exit.json"))
        found = {report.rank: report for path in paths if (report := _read(path, ExitReport))}
        is_awaited = any(report.outcome in WAITS_FOR_A_DIRECTIVE for report in found.values())
        if is_awaited or (found and restart == newest_first[0]):
            return found
    return {}


def newest_pulses(run_dir: RunDir, attempt: int, ranks: Iterable[int]) -> dict[int, Pulse]:
    """Pulses of some ranks in the same start; all of them would be thousands of files."""
    restarts = run_dir.restarts(attempt) if attempt else []
    if not restarts:
        return {}
    found = {rank: _read(run_dir.pulse(attempt, restarts[-1], rank), Pulse) for rank in ranks}
    return {rank: pulse for rank, pulse in found.items() if pulse is not None}


def _read(path: Path, kind: type[AnyMessage]) -> AnyMessage | None:
    """What a rank left; what cannot be read says nothing, and its job will be seen to be over."""
    try:
        return read_message(path, kind)
    except UnusableFileError:
        return None


def look_up(scheduler: Scheduler, job_ids: Sequence[str]) -> tuple[Mapping[str, JobStatus], str | None]:
    """One query for all jobs: their statuses, and the error where the scheduler did not answer."""
    if not job_ids:
        return {}, None
    try:
        return scheduler.look(job_ids), None
    except SchedulerError as error:
        return {}, str(error)


def news(run: RunState, seen: Observation, healthy_after: int) -> Iterator[Event]:
    """What was seen and is not yet in the journal, in the order in which it is to be written. Pure."""
    yield from request_news(run, seen.request)
    yield from _stop_file_news(run, seen)
    yield from _job_news(run, seen)
    yield from _drain_news(run, seen)
    yield from _history_news(run, seen)
    yield from _worker_news(run, seen)
    healthy = [m.step for m in seen.manifests if health(m, seen.branch, healthy_after) is Health.HEALTHY]
    if healthy and healthy[-1] > run.healthy_step:
        yield ProgressMade(healthy_step=healthy[-1], reason=f"checkpoint-{healthy[-1]} is healthy")


def _stop_file_news(run: RunState, seen: Observation) -> Iterator[StopRequested]:
    """The file STOP is a person's stop, also while no worker runs who would look for it."""
    asks = seen.request is not None and seen.request.verb == "stop"  # the verb's own word, said already
    if seen.has_stop_file and run.stop_by is None and not asks:
        yield StopRequested(by=STOP_FILE, reason=f"{STOP_FILE} asked for a stop")


def _job_news(run: RunState, seen: Observation) -> Iterator[Event]:
    job, told = seen.job, run.job
    if job is None:
        yield from _absence(run, seen)
        return
    if job.job_id != run.job_id:
        return
    is_back = job.restarts > (told.restarts if told else 0)
    is_told = run.preempted == (job.job_id, job.restarts)
    left_word = run.left.error.what if run.left is not None and run.left.error is not None else None
    # Slurm keeps the time of an earlier preemption through later starts of the job.
    was_cut_short = job.preempted_at is not None and job.preempted_at >= run.memory.ran_since
    if is_back and not is_told and (left_word == "preempted" or was_cut_short):
        yield Preempted(job_id=job.job_id, restart=job.restarts, reason="preempted; its job waits to start again")
    new = JobSeen(
        job_id=job.job_id,
        state=job.state.value,
        why=job.why,
        nodes=tuple(job.nodes),
        restarts=job.restarts,
        starts_at=job.starts_at,
        ends_at=job.ends_at,
        reason=_waits_because(job, seen),
    )
    if told is None or _facts(told) != _facts(new) or _estimate_moved(told, new):
        yield new


def _estimate_moved(told: JobSeen, new: JobSeen) -> bool:
    """Whether Slurm expects a pending job to start at quite another time than was told; it often changes its mind."""
    if new.state != JobState.PENDING.value or new.starts_at is None:
        return False
    return told.starts_at is None or abs(new.starts_at - told.starts_at) > _ESTIMATE_MOVED_S


def _drain_news(run: RunState, seen: Observation) -> Iterator[Event]:
    """Nodes that an administrator drains under the job, each once a job."""
    if seen.job is None or seen.job.state is not JobState.RUNNING:
        return
    found = [seen.nodes[name] for name in seen.job.nodes if name in seen.nodes and seen.nodes[name].is_draining]
    new = [node for node in found if node.name not in run.memory.draining]
    if new:
        told = ", ".join(f"{node.name} drains{f' ({node.why})' if node.why else ''}" for node in new)
        reason = f"{told}: training goes on there until the job ends, the next one starts elsewhere"
        yield DrainSeen(job_id=seen.job.job_id, nodes=tuple(node.name for node in new), reason=reason)


def _waits_because(job: JobStatus, seen: Observation) -> str:
    """Why a job does not run, for a person; empty where it does."""
    why = reasons.explain(job)
    if not why:
        return ""
    kept = [each for each in seen.reservations if each.starts_at is not None and (each.ends_at or math.inf) > seen.now]
    if reasons.waits_for_maintenance(job) and kept:
        first = min(kept, key=lambda each: each.starts_at or 0.0)
        ends = f" and ends {_moment(first.ends_at)}, after which it can start" if first.ends_at else ""
        return f"job {job.job_id} waits: {why}: {first.name} begins {_moment(first.starts_at or 0.0)}{ends}"
    return f"job {job.job_id} waits: {why} ({job.why})" if job.why else f"job {job.job_id} waits: {why}"


def _moment(time: float) -> str:
    return datetime.fromtimestamp(time).astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _absence(run: RunState, seen: Observation) -> Iterator[Event]:
    """A job that an answering scheduler does not know is noted once; how long ago tells whether it is over."""
    if run.job_id is None or not run.has_live_job or seen.look_error is not None:
        return
    if run.job is None or run.job.state != JobState.UNRECOGNISED.value:
        restarts = run.job.restarts if run.job else 0
        yield JobSeen(job_id=run.job_id, state=JobState.UNRECOGNISED.value, why=ABSENT, restarts=restarts)


def _facts(job: JobSeen) -> tuple[object, ...]:
    return job.job_id, job.state, job.why, job.nodes, job.restarts


def _history_news(run: RunState, seen: Observation) -> Iterator[Event]:
    for record in seen.started_segments:
        if record.attempt == run.attempt and record.segment > (run.segment or 0):
            begun = f"from {record.start.checkpoint}" if record.start and record.start.checkpoint else "from scratch"
            yield SegmentStarted(
                segment=record.segment,
                restart=record.restart,
                step=record.step,
                start=record.start,
                reason=f"step {record.step} is the first of segment {record.segment}, {begun}",
            )
    last = _unseen_verdict(run, seen)
    if last is not None:
        onset = onset_of(last)
        yield VerdictSeen(
            kind=last.verdict,
            step=last.step,
            onset_step=onset,
            loss=last.loss,
            level=last.level,
            batches=trained_on(seen.trail, onset, last.step),
            nonfinite_ranks=_nonfinite_ranks(seen.branch, onset),
            observed=last.observed,
            reason=_describe(last, onset),
        )


def onset_of(record: Record) -> int:
    """The first step of the streak that led to a verdict."""
    return record.onset_step if record.onset_step is not None else record.step


def _unseen_verdict(run: RunState, seen: Observation) -> Record | None:
    """The record with a verdict that is not yet in the journal; of those that end nothing, one a streak."""
    if run.verdict is not None or seen.last is None:
        return None
    if seen.last.is_acted:
        return seen.last if seen.last.attempt == run.attempt else None
    told = run.observed.onset_step if run.observed is not None else 0
    fresh = (each for each in seen.branch if each.observed and each.attempt == run.attempt and not each.adopted)
    return next((each for each in fresh if each.verdict in ACTED and onset_of(each) > told), None)


def _nonfinite_ranks(branch: Sequence[Record], onset: int) -> tuple[int, ...]:
    """The ranks whose own numbers were not finite since the onset."""
    return tuple(sorted({rank for one in branch if one.step >= onset for rank in one.nonfinite_ranks or ()}))


def _describe(record: Record, onset: int) -> str:
    """What was seen, for a person."""
    if record.verdict == "nonfinite":
        named = ", ".join(f"{name} {value}" for name, value in record.nonfinite.items()) or "a non-finite gradient"
        return f"not finite since step {onset}: {named} at step {record.step}"
    times = f", {record.loss / record.level:.1f} x the level {record.level:.4g}" if record.loss and record.level else ""
    return f"loss {record.loss:.4g} at step {record.step}{times}, above the band since step {onset}"


_TELLS_MOST = (
    Outcome.DONE,
    Outcome.VERDICT,
    Outcome.REFUSED,
    Outcome.OUT_OF_MEMORY,
    Outcome.CRASHED,
    Outcome.FENCED,
    Outcome.LEFT,
    Outcome.ENDED,
)


def _is_told(seen: Observation) -> bool:
    """Whether rank 0 has reported; or others did a while ago, so that rank 0's agent must be gone."""
    ended = [report.ended for report in seen.reports.values()]
    return 0 in seen.reports or (bool(ended) and seen.now - max(ended) > _RANK_0_WAIT_S)


def _worker_news(run: RunState, seen: Observation) -> Iterator[Event]:
    if run.left is not None or not _is_told(seen):
        return
    restarts = max(seen.job.restarts if seen.job else 0, run.job.restarts if run.job else 0)
    report = min(seen.reports.values(), key=lambda each: (_TELLS_MOST.index(each.outcome), each.rank))
    if report.restart < restarts and report.outcome not in WAITS_FOR_A_DIRECTIVE:
        return  # that start is over and done with: Slurm put the job back
    if run.awaits_attempt and report.outcome is not Outcome.DONE:
        return  # a person's resume has answered it: the next attempt is about to be decided
    yield WorkerLeft(
        restart=report.restart,
        outcome=report.outcome,
        step=report.step,
        saved_step=report.saved_step,
        error=report.error,
        reason=how_it_left(report),
    )
