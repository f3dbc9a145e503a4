"""What each later start of the trainer cost, and which event of the journal answers for how much of it.  Pure.

Between the last step before and the first one after, a run may be interrupted more than once: a node fails, the next
job is preempted before its first step.  Each of them answers for the time until the next one: no second is told twice.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from supervisor.journal import Continued, Event, JobSeen, Preempted, RolledBack, Submitted
from supervisor.report.spans import Span
from worker.contract.loss_history import Record

_BEGINS = -1
"""In the place of a restart: the beginning of an attempt comes before each of its starts."""


@dataclass(frozen=True)
class Interruption:
    """What one interruption cost. ``kept_node_s`` is the training that need not be made again after it."""

    event: int | None
    """Place in the journal of what caused it; None where the journal has nothing of it."""
    segment: int
    """The start of the trainer that it led to."""
    steps_undone: int
    idle_s: float
    """Without a step; pauses are left out."""
    paused_s: float
    """Over, until a person let the run go on."""
    lost_node_s: float
    kept_node_s: float


@dataclass(frozen=True)
class _Cause:
    """An event after which the trainer had to be started again; ``start`` is attempt and restart."""

    event: int
    start: tuple[int, int]
    time: float
    resume_step: int | None
    """None where it is not said there: from the newest checkpoint of the attempt."""
    answers_requeue: bool


def add_up(shares: Sequence[Interruption]) -> Interruption:
    """Several interruptions before the same start as one."""
    return Interruption(
        event=shares[-1].event,
        segment=shares[-1].segment,
        steps_undone=sum(each.steps_undone for each in shares),
        idle_s=sum(each.idle_s for each in shares),
        paused_s=sum(each.paused_s for each in shares),
        lost_node_s=sum(each.lost_node_s for each in shares),
        kept_node_s=sum(each.kept_node_s for each in shares),
    )


def put_back(events: Sequence[Event]) -> set[int]:
    """Places of the events that tell first that Slurm put a job back into the queue."""
    found: set[int] = set()
    restarts: dict[str, int] = {}
    for number, event in enumerate(events):
        match event:
            case Submitted():
                restarts[event.job_id] = event.restarts
            case Preempted():
                restarts[event.job_id] = event.restart
                found.add(number)
            case JobSeen() if event.restarts > restarts.get(event.job_id, 0):
                restarts[event.job_id] = event.restarts
                found.add(number)
            case _:
                continue
    return found


def first_step_began(segment: Sequence[Record]) -> float:
    """When the first step of a start began, UTC seconds."""
    return segment[0].time - (segment[0].step_s or 0.0)


def interruptions(
    events: Sequence[Event], segments: Sequence[Sequence[Record]], spans: Sequence[Span]
) -> Iterator[Interruption]:
    """Those that came before each segment but the first, in order."""
    causes = list(_causes(events))
    branch: list[tuple[int, float]] = []  # step and the node-seconds that it took
    for number, segment in enumerate(segments):
        nodes = max((s.nodes for s in spans if s.attempt == segment[0].attempt), default=0)
        undone = [part for part in branch if part[0] >= segment[0].step]
        branch = branch[: len(branch) - len(undone)]
        if number:
            last = segments[number - 1][-1]
            yield from _shares(_between(causes, last, segment[0]), last, segment, spans, undone, branch)
        branch += [(segment[0].step, (segment[0].step_s or 0.0) * nodes)]
        branch += [(b.step, max(0.0, b.time - a.time - (b.save_s or 0.0)) * nodes) for a, b in pairwise(segment)]


def _causes(events: Sequence[Event]) -> Iterator[_Cause]:
    requeues = put_back(events)
    for number, event in enumerate(events):
        match event:
            case RolledBack() | Continued():
                in_queue = event.where == "requeued"
                yield _Cause(number, (event.attempt, _BEGINS), event.time, event.resume_step, in_queue)
            case Preempted() if number in requeues:
                yield _Cause(number, (event.attempt, event.restart), event.time, None, False)
            case JobSeen() if number in requeues:
                yield _Cause(number, (event.attempt, event.restarts), event.time, None, False)
            case _:
                continue


def _between(causes: Iterable[_Cause], last: Record, first: Record) -> list[_Cause]:
    """What led from one start to the next; a requeue that an attempt answers at once is told there."""
    begin, end = (last.attempt, last.restart), (first.attempt, first.restart)
    found = [each for each in causes if begin < each.start <= end]
    answered = {a for a, b in pairwise(found) if b.answers_requeue and a.resume_step is None}
    return [each for each in found if each not in answered]


def _shares(
    causes: Sequence[_Cause],
    last: Record,
    segment: Sequence[Record],
    spans: Sequence[Span],
    undone: Sequence[tuple[int, float]],
    kept: Sequence[tuple[int, float]],
) -> Iterator[Interruption]:
    """The time between two starts, each cause with what there was until the next one; the last one keeps the rest."""
    begin, end = last.time, first_step_began(segment)
    for number, cause in enumerate(causes or (None,)):
        after = causes[number + 1] if number + 1 < len(causes) else None
        until = end if after is None else min(end, max(begin, after.time))
        own = undone if after is None else _undone_by(cause, undone)
        undone = [part for part in undone if part not in own]
        times = [(max(0.0, min(until, span.end) - max(begin, span.begin)), span) for span in spans]
        yield Interruption(
            event=None if cause is None else cause.event,
            segment=segment[0].segment,
            steps_undone=len(own),
            idle_s=sum(seconds for seconds, span in times if span.kind != "paused"),
            paused_s=sum(seconds for seconds, span in times if span.kind == "paused"),
            lost_node_s=sum(seconds * span.nodes for seconds, span in times) + sum(part for _, part in own),
            kept_node_s=0.0 if after is not None else sum(part for _, part in kept),
        )
        begin = until


def _undone_by(cause: _Cause | None, undone: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """The steps that an attempt went back behind, which may not have come to a step itself."""
    if cause is None or cause.resume_step is None:
        return []
    return [part for part in undone if part[0] > cause.resume_step]
