"""Events and numbers as a person reads them.  Pure."""

from datetime import datetime
from typing import Any

from supervisor.journal import (
    AttemptDecided,
    CancelIntended,
    Continued,
    Event,
    Finished,
    GaveUp,
    JobSeen,
    ProgressMade,
    RolledBack,
    Stopped,
    SubmitIntended,
    SupervisorStarted,
    VerdictSeen,
    WorkerLeft,
)
from supervisor.run_state import OVER

_QUIET = (AttemptDecided, SubmitIntended, CancelIntended, ProgressMade)
"""Intents, whose outcomes say the same a moment later, and progress, which status shows."""

_WORDS = {
    "RunCreated": "created",
    "SupervisorStarted": "supervisor",
    "RolledBack": "ROLLED BACK",
    "Continued": "continued",
    "Submitted": "submitted",
    "SubmitFailed": "not submitted",
    "Cancelled": "cancelled",
    "StartMoved": "start moved",
    "JobSeen": "job",
    "SegmentStarted": "training",
    "VerdictSeen": "VERDICT",
    "WorkerLeft": "worker",
    "Preempted": "preempted",
    "NodeStruck": "node",
    "NodeExcluded": "node excluded",
    "LookFailed": "no answer",
    "LookRecovered": "answers again",
    "StopRequested": "stop asked",
    "ResumeRequested": "resume asked",
    "Finished": "FINISHED",
    "Stopped": "STOPPED",
    "GaveUp": "GAVE UP",
}


def local_time(time: float) -> str:
    """``2026-11-29 17:40:02`` where the reader is."""
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """``42 s``, ``7 min``, ``3 h 20 min`` or ``2 d 4 h``."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 1:
        return f"{max(0, round(seconds))} s"
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days < 1 else f"{days} d {hours % 24} h"


def is_milestone(event: Event) -> bool:
    """Whether an event belongs to the rollback log proper: attempts, verdicts, and how it ended."""
    return isinstance(event, VerdictSeen | RolledBack | Continued | Finished | Stopped | GaveUp)


def event_lines(event: Event) -> list[str]:
    """An event for a person: [] for what another line says anyway."""
    if isinstance(event, _QUIET):
        return []
    head = f"{local_time(event.time)}  {_WORDS[event.event]:<13} "
    lines = [f"{head}{_text(event)}", *(f"{'':20} {'':13} {line}" for line in _more(event))]
    return [printable(line) for line in lines]


def printable(text: str) -> str:
    """``text`` without control characters: what comes from files shall not paint a terminal or forge a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _text(event: Event) -> str:
    match event:
        case RolledBack():
            start = event.resume_from or "the beginning"
            return (
                f"from step {event.from_step} to {start} at {event.lr_scale:g} of the configured rate "
                f"({event.cost.steps_repeated} steps again, attempt {event.attempt}, {_where(event.where)})"
            )
        case Continued():
            start = event.resume_from or "scratch"
            again = f", {event.cost.steps_repeated} steps again" if event.cost.steps_repeated else ""
            return f"attempt {event.attempt} from {start} ({event.cause}{again}, {_where(event.where)}): {event.reason}"
        case JobSeen():
            nodes = f" on {', '.join(event.nodes)}" if event.nodes else ""
            why = f" ({event.why})" if event.why and event.why != "None" else ""
            times = f", restart {event.restarts}" if event.restarts else ""
            return f"{event.job_id} is {event.state}{why}{nodes}{times}"
        case SupervisorStarted():
            return f"process {event.pid} on {event.host} holds the run (term {event.term})"
        case _:
            return event.reason or event.event


def _where(where: str) -> str:
    return {"same_allocation": "in the same allocation", "requeued": "in the queued job", "new_job": "in a new job"}[
        where
    ]


def _more(event: Event) -> list[str]:
    match event:
        case RolledBack():
            return [event.reason]
        case WorkerLeft() if event.error is not None and event.error.message:
            return [f"{event.error.type}: {event.error.message}".splitlines()[0]]
        case GaveUp():
            told = event.error is None or event.error in event.reason
            error = [] if told or event.error is None else event.error.rstrip().splitlines()[-12:]
            return [*(f"tried: {text}" for text in event.tried), *error]
        case Stopped():
            at = f"the newest checkpoint is at step {event.saved_step}" if event.saved_step else "nothing was saved yet"
            return [at]
        case Finished():
            return []
        case _:
            return []


def closing_summary(events: list[Event]) -> list[str]:
    """What a colleague wants to know who was not there."""
    if not events:
        return ["nothing has happened yet"]
    rollbacks = [event for event in events if isinstance(event, RolledBack)]
    attempts = max(event.attempt for event in events)
    repeated = sum(e.cost.steps_repeated for e in events if isinstance(e, RolledBack | Continued))
    last = events[-1]
    wall = duration(last.time - events[0].time)
    counted = (
        f"{_count(attempts, 'attempt')}, {_count(len(rollbacks), 'rollback')}, {_count(repeated, 'step')} repeated"
    )
    match last:
        case Finished():
            return [f"Finished at step {last.final_step} after {wall}: {counted}."]
        case Stopped():
            return [f"Stopped by {last.by or 'somebody'} after {wall}: {counted}."]
        case GaveUp():
            return [f"Gave up after {wall}: {counted}. {last.reason}."]
        case _:
            return [f"Under way, {wall} until the last event: {counted}."]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def status_lines(row: dict[str, Any], now: float) -> list[str]:
    """A run's row of ``supervisor.runs.standing`` for a person; ``now`` is UTC seconds."""
    if row["since"] is None:
        return [f"{row['name']}: {row['state']}", f"  {row['reason']}"]
    step = "no step yet" if row["step"] is None else f"step {row['step']}"
    step += f" of {row['max_steps']}" if row["max_steps"] else ""
    loss = "" if row["loss"] is None else f", loss {row['loss']:.4g}"
    scale = "" if row["lr_scale"] == 1 else f", rate x {row['lr_scale']:g}"
    ends = "" if row["eta"] is None else f", about {duration(row['eta'] - now)} to go"
    age = duration(now - row["since"])
    lines = [f"{row['name']}: {row['state']} for {age}, {step}{loss}{scale}, {row['rollbacks']} rollbacks{ends}"]
    if row["state"] not in OVER:
        job, holder = row["job"], row["supervisor"]
        where = (
            "no job now" if job is None else f"job {job['id']} {job['state']} {' '.join([*job['nodes'], job['why']])}"
        )
        alive = (
            f"nobody supervises it: higgsfield resume {row['dir']}"
            if holder is None or holder["alive"] is False
            else ""
        )
        watcher = alive or f"supervised from {holder['host']}"
        lines.append(f"  {where.strip()}; {watcher}")
    if row["reason"]:
        lines.append(f"  {row['reason']}")
    lines.extend(f"  checkpoint-{each['step']}: {each['health']}" for each in row.get("checkpoints", []))
    lines.extend(
        f"  {each['node']} is left out until {local_time(each['until'])}: {each['evidence']}"
        for each in row.get("excluded", [])
    )
    if "budgets" in row:
        left = row["budgets"]
        lines.append(
            f"  budget: {left['rollbacks_left']} more rollbacks, {left['attempts_left']} more attempts without progress"
        )
    return [printable(line) for line in lines]
