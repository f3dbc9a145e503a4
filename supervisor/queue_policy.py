"""What a job that waits in the queue calls for: let go, hurried, told to avoid, made to fit, moved elsewhere.  Pure."""

import math
from collections.abc import Sequence
from typing import Final

from slurm import reasons
from slurm.job import JobState, JobStatus, Reservation
from slurm.parsing import duration_s, duration_text
from supervisor.attempts import Rules, lost_nodes
from supervisor.decision import Cancel, ChangeJob, Decision, Exclude, StartNow, Wait
from supervisor.job_request import warning_s
from supervisor.observation import Observation
from supervisor.report.figures import duration
from supervisor.run_state import RunState

_MINUTE_S: Final = 60.0
"""Slurm counts limits in minutes; one of them is the margin before a maintenance."""

_REVOKED_S: Final = 1.0
"""A job that starts within the second in which it was put back is refused by its node (credential revoked)."""


def follow_queue(run: RunState, seen: Observation, rules: Rules, job: JobStatus) -> Decision:
    """What a job that is PENDING or HELD calls for."""
    if reasons.is_held_by_failed_launch(job):
        return _answer_failed_launch(run, job)
    if job.state is JobState.PENDING:
        step = (
            _readmit(run, seen, job)
            or _avoid(run, seen, job)
            or _fit(run, seen, rules, job)
            or _hurry(run, seen.now, job)  # after what can only be changed while it waits
            or _fall_back(run, seen, rules, job)
        )
        if step is not None:
            return step
    return Wait(reasons.explain(job) or "the job waits")


def _answer_failed_launch(run: RunState, job: JobStatus) -> Decision:
    """Released once; a job whose launch fails again is given up for a fresh one."""
    if not run.memory.was_released and not _is_refused(run, "released"):
        return ChangeJob(job.job_id, "released", "its launch failed on a node; nobody asked for the hold")
    if run.job_id in run.cancelled_by_us:
        return Wait("the cancelled job is about to end")
    return Cancel(job.job_id, "its launch failed again: a fresh job is needed")


def _readmit(run: RunState, seen: Observation, job: JobStatus) -> Decision | None:
    """Nodes that were left out while others were away come back where the job can never start without them.

    Slurm has put such a job aside, so that it needs a fresh one.
    """
    if "BadConstraints" not in job.why or run.job_id in run.cancelled_by_us:
        return None
    for excluded in run.excluded(seen.now).values():
        reason = f"the request does not fit without {excluded.node}: it may be used again"
        return Exclude(excluded.node, None, excluded.evidence, reason)
    if run.memory.avoids or run.memory.readmits:
        return Cancel(job.job_id, "it does not fit without the nodes that it was told to avoid: a fresh job is needed")
    return None


def _avoid(run: RunState, seen: Observation, job: JobStatus) -> Decision | None:
    """Nodes that went down under this job, and those excluded since it was submitted, are not given to it again."""
    if job.restarts == 0 or _is_refused(run, "exclude"):
        return None
    wanted = {*lost_nodes(run, seen), *run.excluded(seen.now)} | run.memory.avoids
    if wanted <= run.memory.avoids:
        return None
    named = ",".join(sorted(wanted))
    return ChangeJob(job.job_id, "exclude", f"{named} failed under it", new=named)


def _hurry(run: RunState, now: float, job: JobStatus) -> Decision | None:
    if run.job is None or now - run.job.time < _REVOKED_S:
        return None
    if job.restarts > 0 and job.why == "BeginTime" and run.memory.may_hurry:
        return StartNow(job.job_id, "it was requeued; its start need not wait")
    return None


def _fit(run: RunState, seen: Observation, rules: Rules, job: JobStatus) -> Decision | None:
    """The time limit that ends before a maintenance begins, and the full one again when that is over."""
    full_s = duration_s(rules.cluster.time_limit)
    if full_s is None or job.limit_s is None or _is_refused(run, "time_limit"):
        return None
    old = duration_text(job.limit_s)
    fits_s, reservation = fitting_limit_s(full_s, seen.now, seen.reservations, rules.cluster.reservation)
    shortest_s = _shortest_s(run, rules)
    if reservation is None or shortest_s is None or fits_s < shortest_s:
        if job.limit_s > full_s - _MINUTE_S:
            return None
        reason = f"its time limit is {rules.cluster.time_limit} again"
        return ChangeJob(job.job_id, "time_limit", reason, old, duration_text(full_s))
    if not reasons.waits_for_maintenance(job) or fits_s >= job.limit_s:
        return None
    reason = f"{duration_text(fits_s)} fit before the maintenance {reservation.name}; the next job has the full limit"
    return ChangeJob(job.job_id, "time_limit", reason, old, duration_text(fits_s))


def _shortest_s(run: RunState, rules: Rules) -> float | None:
    """The shortest limit that may be used before a maintenance; None where the job is to wait.

    A job keeps the warning that it was submitted with, which is to be at most a third of the time that it has.
    """
    if rules.cluster.min_time is None:
        return None
    warned_s = run.memory.warning_s or warning_s(rules.cluster.time_limit)
    return max(duration_s(rules.cluster.min_time) or 0.0, 3.0 * warned_s)


def fitting_limit_s(
    full_s: float, now: float, reservations: Sequence[Reservation], own: str | None = None
) -> tuple[float, Reservation | None]:
    """The longest limit in whole minutes that ends a minute before a reservation begins, and that reservation.

    None where the full limit fits. Maintenances count; where there is none, everybody's reservation but ``own``. Which
    nodes they take is not looked at: the first that is to come decides, and one under way only where none is.
    """
    coming = [r for r in reservations if r.name != own and r.starts_at is not None and (r.ends_at or math.inf) > now]
    coming = [r for r in coming if r.is_maintenance] or coming
    coming = [r for r in coming if (r.starts_at or 0.0) > now] or coming
    first = min(coming, key=lambda each: each.starts_at or 0.0, default=None)
    if first is None or first.starts_at is None or now + full_s <= first.starts_at:
        return full_s, None
    minutes = math.floor((first.starts_at - now) / _MINUTE_S) - 1
    return max(0.0, minutes * _MINUTE_S), first


def _fall_back(run: RunState, seen: Observation, rules: Rules, job: JobStatus) -> Decision | None:
    """The next partition or QOS of ``cluster.fallback``, when its wait is over."""
    memory, ways = run.memory, rules.cluster.fallback
    if memory.waits_since is None or memory.fallbacks >= len(ways) or "Dependency" in job.why:
        return None
    way = ways[memory.fallbacks]
    since = max(memory.waits_since, memory.fallback_at)
    if seen.now - since < way.after_s:
        return None
    named = _named(way.partition, way.qos)
    return ChangeJob(
        job.job_id,
        "partition" if way.partition is not None else "qos",
        f"not started within {duration(way.after_s)} ({job.why}): moved to {named}",
        new=named,
        partition=way.partition,
        qos=way.qos,
    )


def _named(partition: str | None, qos: str | None) -> str:
    parts = [f"partition {partition}" if partition else "", f"QOS {qos}" if qos else ""]
    return " with ".join(part for part in parts if part)


def _is_refused(run: RunState, what: str) -> bool:
    return (run.memory.restarts, what) in run.memory.refused
