"""What was seen and is not yet in the journal.  Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final

from slurm import reasons
from slurm.job import JobState, JobStatus
from supervisor.batches import trained_on
from supervisor.evidence import first_verdicts, is_nonfinite, is_unlearned, onset_of
from supervisor.how_it_left import how_it_left
from supervisor.journal import (
    DrainSeen,
    Event,
    JobSeen,
    Preempted,
    ProgressMade,
    SaveAnswered,
    SegmentStarted,
    StopRequested,
    VerdictSeen,
    WorkerLeft,
)
from supervisor.observation import STOP_FILE, Observation
from supervisor.requests import request_news
from supervisor.run_state import RunState
from worker.contract.exit_report import WAITS_FOR_A_DIRECTIVE, ExitReport, Outcome
from worker.contract.loss_history import Record
from worker.contract.manifest import Health, health
from worker.contract.run_dir import checkpoint_name

ABSENT: Final = "the scheduler does not know it"
_ESTIMATE_MOVED_S: Final = 1800.0
_RANK_0_WAIT_S: Final = 60.0
"""From the last report of another rank: by then rank 0's agent has ended its trainer, if there is such an agent."""


def news(run: RunState, seen: Observation, healthy_after: int) -> Iterator[Event]:
    """What was seen and is not yet in the journal, in the order in which it is to be written."""
    yield from request_news(run, seen.request, seen.steps)
    yield from _stop_file_news(run, seen)
    yield from _job_news(run, seen)
    yield from _drain_news(run, seen)
    yield from _history_news(run, seen)
    yield from _worker_news(run, seen)
    yield from _save_file_news(run, seen)
    healthy = [m.step for m in seen.manifests if health(m, seen.branch, healthy_after) is Health.HEALTHY]
    if healthy and healthy[-1] > run.healthy_step:
        yield ProgressMade(healthy_step=healthy[-1], reason=f"checkpoint-{healthy[-1]} is healthy")


def _stop_file_news(run: RunState, seen: Observation) -> Iterator[StopRequested]:
    """The file STOP is a person's stop, also while no worker runs who would look for it."""
    asks = seen.request is not None and seen.request.verb == "stop"  # the verb's own word, said already
    if seen.has_stop_file and run.stop_by is None and not asks:
        yield StopRequested(by=STOP_FILE, reason=f"{STOP_FILE} asked for a stop")


def _save_file_news(run: RunState, seen: Observation) -> Iterator[SaveAnswered]:
    """Checkpoints that the file SAVE asked for; the worker removes it, so that it is seldom seen itself."""
    for made in seen.manifests:
        if made.asked and made.time > run.save_answered_at:
            reason = f"a SAVE file asked for it: {checkpoint_name(made.step)} is whole"
            yield SaveAnswered(step=made.step, saved_at=made.time, reason=reason)


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
            reason=_describe(last, onset, _first_nonfinite(seen.branch, last, onset)),
        )


def _unseen_verdict(run: RunState, seen: Observation) -> Record | None:
    """The record with a verdict that is not yet in the journal; of those that end nothing, one a streak."""
    if run.verdict is not None or seen.last is None:
        return None
    if seen.last.is_acted:
        return seen.last if seen.last.attempt == run.attempt else None
    told = run.observed.step if run.observed is not None else 0
    fresh = (each for each in seen.branch if each.observed and each.attempt == run.attempt and not each.adopted)
    return next((each for each in first_verdicts(fresh) if each.step > told), None)


def _nonfinite_ranks(branch: Sequence[Record], onset: int) -> tuple[int, ...]:
    """The ranks whose own numbers were not finite since the onset."""
    return tuple(sorted({rank for one in branch if one.step >= onset for rank in one.nonfinite_ranks or ()}))


def _first_nonfinite(branch: Sequence[Record], last: Record, onset: int) -> int:
    """The first step of the streak whose numbers are not finite; in those before it the loss only left its level."""
    return next((one.step for one in branch if onset <= one.step <= last.step and _has_failed(one)), last.step)


def _has_failed(record: Record) -> bool:
    return is_nonfinite(record) or is_unlearned(record)


def _describe(record: Record, onset: int, first_nonfinite: int) -> str:
    """What was seen, for a person."""
    if record.verdict == "nonfinite":
        named = ", ".join(f"{name} {value}" for name, value in record.nonfinite.items()) or "a non-finite gradient"
        left = f"from step {onset} the loss left its level; " if onset < first_nonfinite else ""
        since = "at" if first_nonfinite == record.step else f"since step {first_nonfinite}, at"
        return f"{left}not finite {since} step {record.step}: {named}"
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


def most_telling(reports: Iterable[ExitReport]) -> ExitReport | None:
    """Of one start's reports the one that says why it ended; None where there is none."""
    return min(reports, key=lambda each: (_TELLS_MOST.index(each.outcome), each.rank), default=None)


def _is_told(seen: Observation) -> bool:
    """Whether rank 0 has reported; or others did a while ago, so that rank 0's agent must be gone."""
    ended = [report.ended for report in seen.reports.values()]
    return 0 in seen.reports or (bool(ended) and seen.now - max(ended) > _RANK_0_WAIT_S)


def _worker_news(run: RunState, seen: Observation) -> Iterator[Event]:
    if run.left is not None or not _is_told(seen):
        return
    restarts = max(seen.job.restarts if seen.job else 0, run.job.restarts if run.job else 0)
    report = most_telling(seen.reports.values())
    if report is None or (report.restart < restarts and report.outcome not in WAITS_FOR_A_DIRECTIVE):
        return  # that start is over and done with: Slurm put the job back
    if run.awaits_attempt and report.outcome is not Outcome.DONE:
        return  # a person's resume has answered it: the next attempt is about to be decided
    yield WorkerLeft(
        restart=report.restart,
        outcome=report.outcome,
        step=report.step if report.step is not None else _last_made(seen, report),
        saved_step=report.saved_step,
        error=report.error,
        reason=how_it_left(report),
    )


def _last_made(seen: Observation, report: ExitReport) -> int | None:
    """The newest step of a start that could not report it, by the history; None where it made none."""
    last = seen.last
    is_own = last is not None and (last.attempt, last.restart) == (report.attempt, report.restart)
    return last.step if last is not None and is_own else None
