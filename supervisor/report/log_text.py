"""The rollback log for people: every event with what it cost, by day, and a closing summary.  Pure."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from supervisor.fold import ending_of
from supervisor.how_it_left import cause_of
from supervisor.journal import (
    Continued,
    Diagnosis,
    Event,
    Finished,
    GaveUp,
    HangSeen,
    JobSeen,
    Pinned,
    Preempted,
    RequestRefused,
    ResumeRequested,
    RollbackRequested,
    RolledBack,
    SegmentStarted,
    Stopped,
    StopRequested,
    Submitted,
    SupervisorStarted,
    VerdictSeen,
    WorkerLeft,
    WouldHaveDone,
)
from supervisor.lease import BEAT_EVERY_S
from supervisor.report.accounting import Accounting, job_since
from supervisor.report.diagnosis_text import in_one_line
from supervisor.report.evaluations import evaluations_text
from supervisor.report.figures import (
    duration,
    local_clock,
    local_day,
    local_time,
    node_hours,
    printable,
    rate_text,
    share,
)
from supervisor.report.interruptions import Interruption, put_back
from supervisor.report.spans import KINDS
from supervisor.report.texts import (
    WIDTH,
    Listing,
    cost_text,
    detail_lines,
    is_told,
    lay_out,
    step_of,
    word_of,
)
from worker.contract.exit_report import Outcome
from worker.contract.words import count

_STAMP_WIDTH: Final = 22
_UNITS_S: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


class SinceError(ValueError):
    """What ``--since`` cannot mean; the message is one line for a person."""


def since_time(text: str, now: float | None = None) -> float:
    """UTC seconds of ``2h``, ``30min``, ``1d``, ``17:40``, ``2026-11-29`` or ``2026-11-29 17:40``, local time.

    A time of day is the last one that there was: in the night, ``17:40`` is yesterday's.
    """
    now = time.time() if now is None else now
    moment = text.strip()
    ago = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", moment)
    if ago:
        return now - float(ago[1]) * _UNITS_S[ago[2]]
    try:
        if re.fullmatch(r"\d{1,2}:\d{2}(:\d{2})?", moment):
            today = datetime.fromisoformat(f"{datetime.fromtimestamp(now):%Y-%m-%d} {moment:0>5}")
            has_been = today.astimezone().timestamp() <= now
            return (today if has_been else today - timedelta(days=1)).astimezone().timestamp()
        return datetime.fromisoformat(moment).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise SinceError(f"--since {text!r}: give 2h, 30min, 1d, 17:40 or 2026-11-29 17:40") from None


def log_lines(
    events: Sequence[Event],
    accounting: Accounting,
    since: float = 0.0,
    width: int = WIDTH,
    findings: Sequence[Diagnosis] = (),
    still: str = "",
    folder: str = "",
    evaluated: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """The whole log of the run in ``folder`` from ``since`` on: days, events with their costs, closing summary."""
    costs, listing = costs_of(accounting), Listing(folder)
    told = [event for event in events if is_told(event)]
    if told and told[-1].time < since:
        last = f"the last event was {word_of(told[-1])}, at {local_time(told[-1].time)}"
        yield printable(f"nothing happened since {local_time(since)}; {last}")
    day = ""
    for number, event in enumerate(events):
        if event.time < since or not is_told(event):
            continue
        if local_day(event.time) != day:
            day = local_day(event.time)
            yield day
        yield from entry_lines(event, costs.get(number), width, listing)
        if isinstance(event, SupervisorStarted) and (since_s := _alone_since(events, number)) is not None:
            yield f"{'':24}its job had ended at {local_clock(since_s)}, {duration(event.time - since_s)} before"
    yield ""
    yield from closing_summary(events, accounting, findings, still, evaluated)


def _alone_since(events: Sequence[Event], started: int) -> float | None:
    """When the run's job had ended that the supervisor of that place found over, long before it came; None else."""
    for event in events[started + 1 :]:
        if isinstance(event, SupervisorStarted | Submitted):
            return None
        if isinstance(event, JobSeen):
            begun = job_since(event)
            return begun if events[started].time - begun > BEAT_EVERY_S else None
    return None


def entry_lines(event: Event, cost: Interruption | None, width: int, listing: Listing) -> list[str]:
    """One event as the log shows it: time, step, word, text, details."""
    step = step_of(event)
    at = "" if step is None else f"step {step}"
    stamp = f"{local_clock(event.time)}  {at:<{_STAMP_WIDTH - 11}} "
    return lay_out(event, stamp, cost, width, listing)


def late_cost_lines(events: Sequence[Event], cost: Interruption, width: int) -> list[str]:
    """What an event had cost, told where that became known: below the start that it led to."""
    cause = None if cost.event is None else events[cost.event]
    named = "" if cause is None else f"of {word_of(cause)} at {local_clock(cause.time)}: "
    return detail_lines(_STAMP_WIDTH, "cost", f"{named}{cost_text(cost)}", width)


_BY_A_PERSON: Final = (StopRequested, ResumeRequested, RollbackRequested, Pinned, RequestRefused)
_WHAT_CAME: Final = (VerdictSeen, RolledBack, Continued, WouldHaveDone, HangSeen, Finished, Stopped, GaveUp)


def milestones(events: Sequence[Event]) -> set[int]:
    """Places of the events that are the rollback log proper: attempts, requeues, verdicts, hangs, what a person asked
    for, and how it ended."""
    told = _WHAT_CAME + _BY_A_PERSON
    return put_back(events) | {number for number, event in enumerate(events) if isinstance(event, told)}


def costs_of(accounting: Accounting) -> Mapping[int, Interruption]:
    """By the place of an event, what it cost: attempts that were begun again, and Slurm's restarts of one."""
    return {each.event: each for each in accounting.interruptions if each.event is not None}


# -- the closing summary -----------------------------------------------------------------------------------------------


def closing_summary(
    events: Sequence[Event],
    accounting: Accounting,
    findings: Sequence[Diagnosis] = (),
    still: str = "",
    evaluated: Mapping[str, Any] | None = None,
) -> list[str]:
    """What a colleague wants to know who was not there.

    ``findings`` is the run's diagnosis, the first of it is told; ``still`` says that no step is made any more.
    """
    if not events:
        return ["nothing has happened yet"]
    ending = ending_of(events)
    but = ending.reason.partition("; ")[2] if isinstance(ending, Finished) else ""
    standing = [f"{text[0].upper()}{text[1:]}." for text in (still, but) if text]
    story = [line for line in _story(events) if not (standing and line == _CALM)]
    lines = [
        _headline(events, accounting, still=bool(still)),
        *standing,
        *story,
        *([f"Evaluation loss: {evaluations_text(evaluated)}."] if evaluated else []),
        *map(in_one_line, findings[:1]),
        *time_lines(accounting),
    ]
    return [printable(line) for line in lines]


def _headline(events: Sequence[Event], accounting: Accounting, *, still: bool) -> str:
    attempts = max(event.attempt for event in events)
    rollbacks = sum(isinstance(event, RolledBack) for event in events)
    repeated = sum(each.steps_undone for each in accounting.interruptions)
    counted = f"{count(attempts, 'attempt')}, {count(rollbacks, 'rollback')}, {count(repeated, 'step')} repeated"
    last, wall = ending_of(events), duration(accounting.wall_s)
    match last:
        case Finished():
            return f"Finished at step {last.final_step} after {wall}: {counted}."
        case Stopped():
            return f"Stopped by {last.by or 'the scancel of a person'} after {wall}: {counted}."
        case GaveUp():
            return f"Gave up after {wall}: {counted}; why: {last.reason.rstrip('.')}."
        case _:
            return (
                f"Under way for {wall} up to its last sign: {counted}."
                if still
                else f"Under way for {wall} so far: {counted}."
            )


_CALM: Final = "Nothing interrupted it."
_HAPPENED: Final = {
    "spike": "the loss spiked",
    "divergence": "the loss rose and stayed",
    "nonfinite": "the numbers stopped being finite",
    "preempted": "preempted",
    "drained": "its node was drained",
    "node_failed": "a node failed",
    "time_limit": "the time limit came",
    "hang": "it hung",
    "crash": "it crashed",
    "killed": "its trainer was killed",
    "out_of_memory": "out of memory",
    "vanished": "the job ended without a word",
    "refused": "a checkpoint did not restore",
    "stopped": "a person stopped it",
    "resumed": "a person resumed it",
    "requeued": "Slurm put its job back into the queue",
    "rollback": "a person asked for a rollback",
    "gave_up": "it gave up",
}


def _story(events: Sequence[Event]) -> Iterator[str]:
    """How often what happened, and at which steps."""
    steps: dict[str, list[int]] = {}
    times: Counter[str] = Counter()
    for cause, step in _happenings(events):
        times[cause] += 1
        if step is not None:
            steps.setdefault(cause, []).append(step)
    if times := Counter({cause: number for cause, number in times.items() if cause in _HAPPENED}):
        told = [f"{_HAPPENED[cause]}{_times(number)}{_at(steps.get(cause, []))}" for cause, number in times.items()]
        yield f"What happened: {'; '.join(told)}."
    rate = next((e.lr_scale for e in reversed(events) if isinstance(e, RolledBack | Continued)), 1.0)
    if rate != 1:
        yield f"The rate is at {rate_text(rate)}."
    noted = [event for event in events if isinstance(event, WouldHaveDone)]
    yield from _observed(noted)
    is_calm = not times and not noted and not isinstance(ending_of(events), Stopped | GaveUp)
    if is_calm and sum(isinstance(event, SegmentStarted) for event in events) == 1:
        yield _CALM


def _happenings(events: Sequence[Event]) -> Iterator[tuple[str, int | None]]:
    """What interrupted the run, each with its step where it has one; a requeue that an attempt answers is told once."""
    requeues, last = put_back(events), ending_of(events)
    verdict: VerdictSeen | None = None
    for number, event in enumerate(events):
        match event:
            case VerdictSeen() if not event.observed:
                verdict = event
                yield event.kind, event.step
            case RolledBack():
                if verdict is None or event.cause != verdict.kind:
                    yield event.cause, event.verdict_step
                verdict = None
            case Continued():
                verdict = None
                yield cause_of(event).replace(" ", "_"), None
            case GaveUp():
                yield from _unanswered(events[:number])
                if event is not last:
                    yield "gave_up", None
            case Stopped() if event is not last:
                yield "stopped", event.saved_step
            case Preempted() if not _is_answered(events[number + 1 :]):
                yield "preempted", None
            case JobSeen() if number in requeues and not _is_answered(events[number + 1 :]):
                yield "requeued", None
            case _:
                continue


_ENDED: Final = {Outcome.CRASHED: "crash", Outcome.ENDED: "crash", Outcome.OUT_OF_MEMORY: "out_of_memory"}


def _unanswered(before: Sequence[Event]) -> Iterator[tuple[str, int | None]]:
    """The end of the worker that a run gave up over, where no attempt has answered it."""
    for event in reversed(before):
        match event:
            case RolledBack() | Continued() | VerdictSeen():
                return
            case WorkerLeft() if event.outcome in _ENDED:
                is_kill = "killed by signal" in event.reason
                yield "killed" if is_kill else _ENDED[event.outcome], None
                return
            case _:
                continue


def _is_answered(later: Sequence[Event]) -> bool:
    """Whether a requeue led to an attempt of its own in the same job, which says why."""
    begun = next((event for event in later if isinstance(event, SegmentStarted | RolledBack | Continued)), None)
    return isinstance(begun, RolledBack | Continued) and begun.where == "requeued"


def _observed(noted: Sequence[WouldHaveDone]) -> Iterator[str]:
    """What would have been made in ``recovery.mode: act``."""
    at = [step for event in noted if event.rollback is not None and (step := step_of(event)) is not None]
    starts = len(noted) - len(at)
    would = [f"{count(len(at), 'rollback')}{_at(at)}"] if at else []
    would += [f"{count(starts, 'new start')}"] if starts else []
    if would:
        verb = "would have been made; nothing was, for recovery.mode is observe"
        yield f"{' and '.join(would)} {verb}."


def _times(number: int) -> str:
    return "" if number == 1 else f" {number} times"


def _at(steps: Sequence[int]) -> str:
    if not steps:
        return ""
    named = ", ".join(str(step) for step in steps[:6]) + (", ..." if len(steps) > 6 else "")
    return f" (step{'' if len(steps) == 1 else 's'} {named})"


_TOLD_AS: Final = {"queued": "waiting in the queue"}


def time_lines(accounting: Accounting) -> Iterator[str]:
    """Where the time and the node-hours went."""
    wall = accounting.wall_s
    if wall <= 0:
        return
    parts = [
        f"{_TOLD_AS.get(kind, kind)} {share(accounting.seconds(kind), wall)} ({duration(accounting.seconds(kind))})"
        for kind in KINDS
        if accounting.seconds(kind) > 0
    ]
    yield f"Of {duration(wall)}: {', '.join(parts)}."
    held, trained = accounting.node_s(), accounting.node_s("training")
    if held > 0:
        kept = sum(each.kept_node_s for each in accounting.interruptions)
        cost = sum(each.lost_node_s for each in accounting.interruptions)
        told = f"{node_hours(trained, whole_s=held)} ({share(trained, held)}) were training"
        told += f" and {node_hours(cost, whole_s=held)} ({share(cost, held)}) went into interruptions" if cost else ""
        yield f"Of {node_hours(held, whole_s=held)} allocated, {told}."
        if kept:
            yield f"Checkpoints saved {node_hours(kept, whole_s=held)}, against starting from the first step each time."
