"""What is remembered of the run's present job: where it ran, since when it waits, what was changed about it.  Pure."""

from dataclasses import dataclass, replace

from slurm import reasons
from slurm.job import JobState
from supervisor.journal import (
    Cancelled,
    DrainSeen,
    Event,
    JobChanged,
    JobSeen,
    NodeExcluded,
    StartMoved,
    SubmitIntended,
    Submitted,
)

_WAITS = frozenset({JobState.PENDING.value, JobState.HELD.value})
_RUNS = frozenset({JobState.RUNNING.value, JobState.CONFIGURING.value, JobState.SUSPENDED.value})


@dataclass(frozen=True)
class JobMemory:
    """The fold of one job's events, from the intent to submit it; only ``may_hurry`` outlives the job."""

    restarts: int = 0
    ran_on: tuple[str, ...] = ()
    """Nodes of its newest start, kept while it waits for the next one: Slurm takes a lost node off the list."""
    gone: frozenset[str] = frozenset()
    """Those of them that Slurm took off the job while it ran: it gave them up, however they are now."""
    ran_at_restart: int | None = None
    ran_since: float = 0.0
    """When that start was first seen."""
    waits_since: float | None = None
    """When it began to wait in the queue; None while it does not wait."""
    fallbacks: int = 0
    """How many of ``cluster.fallback`` were tried in this wait."""
    fallback_at: float = 0.0
    avoids: frozenset[str] = frozenset()
    """Nodes that it was told to avoid after its submission."""
    readmits: bool = False
    """Whether a node that was left out was allowed again since its submission."""
    cancelled_restart: int | None = None
    """Its restart count when we cancelled it; None while we did not."""
    was_released: bool = False
    refused: frozenset[tuple[int, str]] = frozenset()
    """Restart count and kind of the changes that the scheduler did not allow."""
    draining: frozenset[str] = frozenset()
    """Its nodes that an administrator drains, as far as it was told."""
    hurried_restart: int | None = None
    warning_s: int | None = None
    """How long before its limit it is told to save, where it was submitted with more than a guess."""
    may_hurry: bool = True
    """Whether a requeued job's start may be moved: not after a launch that failed where it was."""


def remember(memory: JobMemory, event: Event) -> JobMemory:
    """The memory after one more event."""
    match event:
        case SubmitIntended():
            return replace(memory, warning_s=event.warning_s)
        case Submitted():
            return JobMemory(may_hurry=memory.may_hurry, warning_s=memory.warning_s)
        case JobSeen():
            return _see(memory, event)
        case StartMoved():
            return replace(memory, hurried_restart=memory.restarts)
        case Cancelled():
            return replace(memory, cancelled_restart=memory.restarts)
        case NodeExcluded():
            return replace(memory, readmits=memory.readmits or event.until is None)
        case DrainSeen():
            return replace(memory, draining=memory.draining | set(event.nodes))
        case JobChanged():
            return _change(memory, event)
        case _:
            return memory


def _see(memory: JobMemory, event: JobSeen) -> JobMemory:
    memory = replace(memory, restarts=event.restarts)
    if event.nodes and event.state in _RUNS:
        if memory.ran_at_restart != event.restarts:
            memory = replace(memory, ran_on=(), ran_at_restart=event.restarts, ran_since=event.time)
        ran_on = tuple(dict.fromkeys([*memory.ran_on, *event.nodes]))
        memory = replace(memory, ran_on=ran_on, gone=frozenset(ran_on) - set(event.nodes))
    if event.state not in _WAITS:
        return replace(memory, waits_since=None, fallbacks=0)
    failed = event.state == JobState.HELD.value and reasons.names_failed_launch(event.why)
    return replace(
        memory,
        waits_since=event.time if memory.waits_since is None else memory.waits_since,
        may_hurry=memory.may_hurry and not (failed and memory.hurried_restart == event.restarts),
    )


def _change(memory: JobMemory, event: JobChanged) -> JobMemory:
    if event.what in ("partition", "qos"):
        memory = replace(memory, fallbacks=memory.fallbacks + 1, fallback_at=event.time)
    if event.error is not None:
        return replace(memory, refused=memory.refused | {(memory.restarts, event.what)})
    if event.what == "exclude":
        return replace(memory, avoids=memory.avoids | set((event.new or "").split(",")))
    return replace(memory, was_released=memory.was_released or event.what == "released")
