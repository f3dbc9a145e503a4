"""Where a run's time went: every second belongs to one kind, and they add up to the wall time.  Pure.

The journal says when there was a job and what it did, the history says when steps were made; where both speak, the
history wins, because the worker was there and the supervisor only looked now and then.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from slurm.job import JobState
from supervisor.fold import ending_of
from supervisor.journal import (
    Cancelled,
    Continued,
    Event,
    Finished,
    GaveUp,
    HangSeen,
    JobSeen,
    ResumeRequested,
    RolledBack,
    RunCreated,
    Stopped,
    Submitted,
    VerdictSeen,
    WorkerLeft,
)
from supervisor.report.interruptions import Interruption, first_step_began, interruptions
from supervisor.report.spans import Kind, Span
from worker.contract.exit_report import Outcome
from worker.contract.loss_history import Record


@dataclass(frozen=True)
class Accounting:
    """The run's time without a gap, from its making to the last thing that is known of it."""

    spans: tuple[Span, ...]
    interruptions: tuple[Interruption, ...]

    @property
    def wall_s(self) -> float:
        """From the first span's begin to the last one's end."""
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0.0

    @property
    def goodput(self) -> float | None:
        """Share of the time, pauses left out, that went into steps that count and evaluations; None before any."""
        active = self.wall_s - self.seconds("paused")
        return (self.seconds("training") + self.seconds("evaluating")) / active if active > 0 else None

    def seconds(self, kind: Kind, attempt: int | None = None) -> float:
        """Time of one kind, of one attempt or of all."""
        return sum(s.seconds for s in self.spans if s.kind == kind and attempt in (None, s.attempt))

    def node_s(self, *kinds: Kind) -> float:
        """Allocated node-seconds of some kinds, or of all."""
        return sum(s.seconds * s.nodes for s in self.spans if not kinds or s.kind in kinds)

    def costs_of_segment(self, number: int) -> list[Interruption]:
        """What went before a start of the trainer, cause by cause; nothing before the first one."""
        return [each for each in self.interruptions if each.segment == number]


@dataclass(frozen=True)
class _Mark:
    """From ``time`` on the run is in ``kind``; ``holds`` says whether nodes are allocated to it."""

    time: float
    kind: Kind
    attempt: int
    holds: bool


def account(events: Sequence[Event], records: Sequence[Record], now: float, nodes: int) -> Accounting:
    """The run's time up to ``now``; ``nodes`` is what a job asks for, used where the scheduler never said it."""
    if not events:
        return Accounting((), ())
    records = [one for one in records if not one.adopted]  # those took nobody's time here
    segments = _segments(records)
    told = list(_journal_marks(events, segments))
    marks = sorted(
        [*_history_marks(events, segments, _survivors(records)), *_waits(events, segments, told), *told],
        key=lambda mark: mark.time,
    )
    spans = tuple(_spans(marks, _end(events, records, now), _nodes_of_attempts(events), nodes))
    return Accounting(spans, tuple(interruptions(events, segments, spans)))


def _end(events: Sequence[Event], records: Sequence[Record], now: float) -> float:
    """Of a run that is over its ending; of one that waits, now; of one that trains, saves or evaluates, its last step.

    It trains as long as the journal has no word of its job or its worker since that step.
    """
    ending, trained = ending_of(events), records[-1].time if records else 0.0
    if ending is not None:
        return ending.time
    if records and not any(event.time > trained and _ends_steps(event) for event in events):
        return trained
    return max(now, events[-1].time)


def _ends_steps(event: Event) -> bool:
    return isinstance(event, VerdictSeen | HangSeen | WorkerLeft) or (
        _mark_of(event, None) is not None and not (isinstance(event, JobSeen) and event.state == JobState.RUNNING.value)
    )


def _segments(records: Sequence[Record]) -> list[list[Record]]:
    found: list[list[Record]] = []
    for record in records:
        if not found or found[-1][-1].segment != record.segment:
            found.append([])
        found[-1].append(record)
    return found


def _survivors(records: Sequence[Record]) -> set[int]:
    """Identities of the records that count."""
    branch: list[Record] = []
    for record in records:
        while branch and branch[-1].step >= record.step:
            branch.pop()
        branch.append(record)
    return {id(record) for record in branch}


# -- marks -------------------------------------------------------------------------------------------------------------

_IN_QUEUE: Final = frozenset({JobState.PENDING, JobState.REQUEUED, JobState.HELD})


def _journal_marks(events: Sequence[Event], segments: Sequence[Sequence[Record]]) -> Iterator[_Mark]:
    """What the journal says, left out while a segment was making steps."""
    job: JobSeen | None = None
    known_until = 0.0
    times = [(first_step_began(segment), segment[-1].time) for segment in segments]
    for event in events:
        mark = _mark_of(event, job)
        if isinstance(event, JobSeen):
            job = event
            stepped = max((end for _, end in times if end <= event.time), default=0.0)
            mark = mark and replace(mark, time=max(known_until, stepped, job_since(event)))
        known_until = mark.time if mark else known_until
        if mark is not None and not any(begin <= mark.time < end for begin, end in times):
            yield mark


def _mark_of(event: Event, job: JobSeen | None) -> _Mark | None:
    match event:
        case RunCreated() | ResumeRequested():
            return _Mark(event.time, "starting", event.attempt, holds=False)
        case Submitted():
            return _Mark(event.time, "queued", event.attempt, holds=False)
        case JobSeen():
            return _mark_of_job(event, job)
        case RolledBack() | Continued():
            kinds: dict[str, Kind] = {"same_allocation": "starting", "requeued": "queued"}
            in_job = event.where == "same_allocation"
            return _Mark(event.time, kinds.get(event.where, "lost"), event.attempt, holds=in_job)
        case Cancelled():
            return _Mark(event.time, "lost", event.attempt, holds=False)
        case Finished() | Stopped() | GaveUp():
            return _Mark(event.time, "paused", event.attempt, holds=False)
        case _:
            return None


def job_since(seen: JobSeen) -> float:
    """When a job came to be as it was seen: of one that is over its end, long ago where nobody supervised it."""
    return min(seen.ends_at, seen.time) if JobState(seen.state).is_over and seen.ends_at else seen.time


def _mark_of_job(seen: JobSeen, before: JobSeen | None) -> _Mark | None:
    state = JobState(seen.state)
    if state in _IN_QUEUE:
        return _Mark(seen.time, "queued", seen.attempt, holds=False)
    if state in (JobState.CONFIGURING, JobState.RUNNING):
        same = before is not None and (before.job_id, before.restarts) == (seen.job_id, seen.restarts)
        if same and before is not None and before.state == seen.state:
            return None  # another fact of it changed
        return _Mark(seen.time, "starting", seen.attempt, holds=True)
    if state is JobState.UNRECOGNISED:
        return None
    return _Mark(seen.time, "lost", seen.attempt, holds=not state.is_over)


def _history_marks(
    events: Sequence[Event], segments: Sequence[Sequence[Record]], survivors: set[int]
) -> Iterator[_Mark]:
    """What the history says: steps, evaluations and saves between them, and what followed the last one of a segment."""
    suspended = _suspensions(events)
    for segment in segments:
        attempt = segment[0].attempt
        kind: Kind = "training" if id(segment[0]) in survivors else "repeated"
        yield _Mark(first_step_began(segment), kind, attempt, holds=True)
        for before, record in pairwise(segment):
            evaluation_s, save_s = _evaluation_s(before, record), record.save_s or 0.0
            if evaluation_s:
                yield _Mark(before.time, "evaluating", attempt, holds=True)
            if save_s:
                yield _Mark(before.time + evaluation_s, "saving", attempt, holds=True)
            now: Kind = "training" if id(record) in survivors else "repeated"
            if now != kind or evaluation_s or save_s:
                kind = now
                yield _Mark(min(record.time, before.time + evaluation_s + save_s), kind, attempt, holds=True)
            for begin, end in suspended:
                if begin < record.time and end > before.time:
                    yield _Mark(max(begin, before.time), "lost", attempt, holds=True)
                    yield _Mark(min(end, record.time), kind, attempt, holds=True)
        yield _Mark(segment[-1].time, _after_the_last(events, segment[-1]), attempt, holds=True)


def _evaluation_s(before: Record, record: Record) -> float:
    """How long the evaluation after ``before`` took: what neither the next step nor a save did."""
    if record.step_s is None or before.eval_loss is None or before.evaluated_step != before.step:
        return 0.0
    return max(0.0, record.time - before.time - record.step_s - (record.save_s or 0.0))


def _suspensions(events: Sequence[Event]) -> list[tuple[float, float]]:
    jobs = [event for event in events if isinstance(event, JobSeen)]
    return [(a.time, b.time) for a, b in pairwise(jobs) if a.state == JobState.SUSPENDED.value]


def _after_the_last(events: Sequence[Event], last: Record) -> Kind:
    """What followed the last step of a segment: the end of the run's training, a save and an exit, or nothing good."""
    left = _left(events, last)
    if left is None:
        return "lost"
    if left.outcome is Outcome.DONE:
        return "finishing"
    return "saving" if left.outcome is Outcome.LEFT and left.saved_step == last.step else "lost"


def _left(events: Sequence[Event], last: Record) -> WorkerLeft | None:
    """How the start ended whose last step that is."""
    key = last.attempt, last.restart
    reports = [e for e in events if isinstance(e, WorkerLeft) and (e.attempt, e.restart) == key]
    return next((e for e in reports if e.time >= last.time), None)


def _waits(events: Sequence[Event], segments: Sequence[Sequence[Record]], told: Sequence[_Mark]) -> Iterator[_Mark]:
    """When a worker had saved and left, and its job only waits to be killed: no word of that job came before."""
    for segment in segments:
        last = segment[-1]
        left = _left(events, last)
        if left is None or _after_the_last(events, last) != "saving":
            continue
        if not any(last.time <= mark.time <= left.time for mark in told):
            yield _Mark(left.time, "lost", last.attempt, holds=True)


# -- spans -------------------------------------------------------------------------------------------------------------


def _spans(marks: Sequence[_Mark], end: float, seen: Counter[int], asked: int) -> Iterator[Span]:
    """Between two marks the first one's kind; a mark that a clock put before the one ahead of it begins there."""
    begin = marks[0].time
    for mark, after in pairwise([*marks, None]):
        until = min(end, after.time) if after is not None else end
        if mark is not None and until > begin:
            nodes = (seen[mark.attempt] or asked) if mark.holds else 0
            yield Span(begin, until, mark.kind, mark.attempt, nodes)
            begin = until


def _nodes_of_attempts(events: Sequence[Event]) -> Counter[int]:
    """How many nodes the scheduler gave each attempt, at most."""
    found: Counter[int] = Counter()
    for event in events:
        if isinstance(event, JobSeen):
            found[event.attempt] = max(found[event.attempt], len(event.nodes))
    return found
