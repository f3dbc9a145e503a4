"""rollback_log.jsonl: the supervisor's journal, append-only and its only memory.

Every event is a frozen, past-tense value.  An intent is on disk before its effect, and its outcome after it; state is
the fold of these lines (``supervisor.fold``), and nothing else is remembered.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from worker.contract.directive import Cause, LearningRateRamp, SkippedBatches
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.files import Message, UnusableFileError, append_line, encode, open_data, read_data
from worker.contract.loss_history import BatchPosition, Start
from worker.contract.pulse import Phase
from worker.contract.rehearsal import Fault
from worker.contract.replay import Change

Where = Literal["same_allocation", "requeued", "new_job"]
Cure = Change
"""Changes that ``diagnose --replay`` tries."""


class EventBase(Message):
    """What every line of the journal says. ``time`` is UTC seconds, ``reason`` is for a person."""

    time: float = 0.0
    attempt: int = 0
    term: int = 0
    reason: str = ""


class RunCreated(EventBase):
    event: Literal["RunCreated"] = "RunCreated"
    run_id: str
    config_digest: str
    config: dict[str, Any] | None = None
    """What it was made with, by dotted key and without secrets; None = not written down then."""
    versions: dict[str, str]
    rehearse: tuple[Fault, ...] | None = None
    """The faults of a rehearsal; None = the run is none."""


class SupervisorStarted(EventBase):
    event: Literal["SupervisorStarted"] = "SupervisorStarted"
    host: str
    pid: int
    job_id: str | None = None
    """The job that it runs in; None = in none."""
    free_since: float | None = None
    """The last sign of the supervisor before, UTC seconds; None = there was none, or the run was over."""
    changed: dict[str, tuple[Any, Any]] | None = None
    """As of ``ResumeRequested``, where somebody edited config.yaml of a run that is not over; None = nobody did."""


class Cost(Message):
    """What an answer costs."""

    steps_repeated: int


class Plan(EventBase):
    """The fields of a decided attempt, the same in its intent and in its outcome."""

    cause: Cause
    resume_from: str | None = None
    resume_step: int = 0
    lr_scale: float = 1.0
    lr_ramp: LearningRateRamp | None = None
    skip_batches: tuple[SkippedBatches, ...] = ()
    accept_level: float | None = None
    reset_moments: bool = False
    rewarm_steps: int | None = None
    reset_from: int | None = None
    quarantine: tuple[str, ...] = ()
    where: Where
    cost: Cost = Cost(steps_repeated=0)


class Rollback(Message):
    """What a rollback answers: the verdict, and the way back."""

    kind: str
    verdict_step: int
    onset_step: int
    batches: tuple[BatchPosition, ...] = ()
    from_step: int
    to_step: int


class Diagnosis(Message):
    """Why something went wrong, as far as it is known, and the one thing to try next."""

    symptom: str
    cause: str
    confidence: Literal["sure", "likely", "possible"]
    evidence: tuple[str, ...]
    next: str
    cure: Change | None = None
    """The change of a replay that shows whether this is it; None = no such change would."""


class AttemptDecided(Plan):
    """Intent: quarantine, then directive. ``rollback`` is kept for the outcome, which names it."""

    event: Literal["AttemptDecided"] = "AttemptDecided"
    rollback: Rollback | None = None


class WouldHaveDone(Plan):
    """In ``recovery.mode: observe`` instead of AttemptDecided; never an open intent."""

    event: Literal["WouldHaveDone"] = "WouldHaveDone"
    rollback: Rollback | None = None
    diagnosis: Diagnosis | None = None


class RolledBack(Plan):
    event: Literal["RolledBack"] = "RolledBack"
    kind: str
    verdict_step: int
    onset_step: int
    batches: tuple[BatchPosition, ...] = ()
    from_step: int
    to_step: int
    diagnosis: Diagnosis | None = None
    """What was believed then; None = nothing, or a person asked for it."""


class Continued(Plan):
    event: Literal["Continued"] = "Continued"


class SubmitIntended(EventBase):
    event: Literal["SubmitIntended"] = "SubmitIntended"
    name: str
    warning_s: int | None = None
    """How many seconds ahead of its time limit the worker is to be told; None = not learned yet."""


class Submitted(EventBase):
    event: Literal["Submitted"] = "Submitted"
    name: str
    job_id: str
    adopted: bool = False
    restarts: int = 0
    """Slurm's restart count that it counts from: above 0 where the same job was put back into the queue instead."""


class SubmitFailed(EventBase):
    event: Literal["SubmitFailed"] = "SubmitFailed"
    name: str
    error: str
    answered: bool = True
    """Whether the scheduler refused; false = it did not answer, and the job may be queued all the same."""


class CancelIntended(EventBase):
    event: Literal["CancelIntended"] = "CancelIntended"
    job_id: str


class Cancelled(EventBase):
    event: Literal["Cancelled"] = "Cancelled"
    job_id: str


class StartMoved(EventBase):
    event: Literal["StartMoved"] = "StartMoved"
    job_id: str


What = Literal["time_limit", "exclude", "partition", "qos", "released"]
"""What is changed about a job in the queue."""


class ChangeIntended(EventBase):
    event: Literal["ChangeIntended"] = "ChangeIntended"
    job_id: str
    what: What
    old: str | None = None
    new: str | None = None
    partition: str | None = None
    qos: str | None = None


class JobChanged(EventBase):
    """A job in the queue was changed, or the scheduler did not allow it."""

    event: Literal["JobChanged"] = "JobChanged"
    job_id: str
    what: What
    old: str | None = None
    new: str | None = None
    error: str | None = None
    """What the scheduler said; None = it is changed."""


class DrainSeen(EventBase):
    event: Literal["DrainSeen"] = "DrainSeen"
    job_id: str
    nodes: tuple[str, ...]


class JobSeen(EventBase):
    event: Literal["JobSeen"] = "JobSeen"
    job_id: str
    state: str
    why: str = ""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    starts_at: float | None = None
    ends_at: float | None = None


class SegmentStarted(EventBase):
    event: Literal["SegmentStarted"] = "SegmentStarted"
    segment: int
    restart: int
    step: int
    start: Start | None = None


class VerdictSeen(EventBase):
    event: Literal["VerdictSeen"] = "VerdictSeen"
    kind: str
    step: int
    onset_step: int
    loss: float | None = None
    level: float | None = None
    batches: tuple[BatchPosition, ...] = ()
    nonfinite_ranks: tuple[int, ...] = ()
    observed: bool = False
    """Whether the worker trains on all the same."""


class WorkerLeft(EventBase):
    event: Literal["WorkerLeft"] = "WorkerLeft"
    restart: int = 0
    outcome: Outcome
    step: int | None = None
    saved_step: int | None = None
    error: ErrorDetail | None = None


class Preempted(EventBase):
    event: Literal["Preempted"] = "Preempted"
    job_id: str
    restart: int


class HangSeen(EventBase):
    event: Literal["HangSeen"] = "HangSeen"
    phase: Phase
    quiet_s: float
    limit_s: float
    stacks: str
    """Folder of the stacks, relative to the run's."""


class NodeStruck(EventBase):
    """Evidence against a node: it spoilt the attempt, or seems to have."""

    event: Literal["NodeStruck"] = "NodeStruck"
    node: str
    evidence: str


class NodeExcluded(EventBase):
    event: Literal["NodeExcluded"] = "NodeExcluded"
    node: str
    until: float | None
    """UTC seconds; None = it is not excluded after all, because the request would not fit without it."""
    evidence: str


class ProgressMade(EventBase):
    event: Literal["ProgressMade"] = "ProgressMade"
    healthy_step: int


class LookFailed(EventBase):
    event: Literal["LookFailed"] = "LookFailed"
    error: str


class LookRecovered(EventBase):
    event: Literal["LookRecovered"] = "LookRecovered"
    quiet_s: float


class StopRequested(EventBase):
    event: Literal["StopRequested"] = "StopRequested"
    by: str


class RollbackRequested(EventBase):
    event: Literal["RollbackRequested"] = "RollbackRequested"
    by: str
    to: int
    lr_scale: float | None = None
    skip: bool = False
    asked_at: float = 0.0
    changed: dict[str, tuple[Any, Any]] | None = None
    """As of ``ResumeRequested``."""


class Pinned(EventBase):
    event: Literal["Pinned"] = "Pinned"
    by: str
    to: int


class RequestRefused(EventBase):
    event: Literal["RequestRefused"] = "RequestRefused"
    by: str
    verb: Literal["rollback", "pin"]
    to: int
    asked_at: float = 0.0


class SaveAnswered(EventBase):
    event: Literal["SaveAnswered"] = "SaveAnswered"
    step: int
    saved_at: float
    """When the checkpoint was made, by the worker's clock; UTC seconds."""


class ResumeRequested(EventBase):
    event: Literal["ResumeRequested"] = "ResumeRequested"
    by: str
    changed: dict[str, tuple[Any, Any]] | None = None
    """The keys of config.yaml that changed since an event told of them last, old and new; None = not known."""


class ConfigEdited(EventBase):
    """Somebody wrote config.yaml anew under a living supervisor; ``reason`` says what comes of it."""

    event: Literal["ConfigEdited"] = "ConfigEdited"
    changed: dict[str, tuple[Any, Any]] | None = None
    """As of ``ResumeRequested``; None = the file cannot be read."""


class Finished(EventBase):
    event: Literal["Finished"] = "Finished"
    final_step: int


class Stopped(EventBase):
    event: Literal["Stopped"] = "Stopped"
    saved_step: int | None = None
    by: str | None = None


class GaveUp(EventBase):
    event: Literal["GaveUp"] = "GaveUp"
    tried: tuple[str, ...] = ()
    error: str | None = None
    saved_step: int | None = None
    """Step of the newest checkpoint; None = there is none."""
    diagnosis: Diagnosis | None = None
    """What is believed of the verdict that it gave up over; None = nothing, or there was none."""


Event = (
    RunCreated
    | SupervisorStarted
    | AttemptDecided
    | WouldHaveDone
    | RolledBack
    | Continued
    | SubmitIntended
    | Submitted
    | SubmitFailed
    | CancelIntended
    | ChangeIntended
    | Cancelled
    | StartMoved
    | JobChanged
    | DrainSeen
    | JobSeen
    | SegmentStarted
    | VerdictSeen
    | WorkerLeft
    | Preempted
    | HangSeen
    | NodeStruck
    | NodeExcluded
    | ProgressMade
    | LookFailed
    | LookRecovered
    | StopRequested
    | RollbackRequested
    | Pinned
    | RequestRefused
    | SaveAnswered
    | ResumeRequested
    | ConfigEdited
    | Finished
    | Stopped
    | GaveUp
)

_EVENT: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def read_journal(path: Path) -> list[Event]:
    """All events in order, [] where there is no file; a torn last line is left out.

    UnusableFileError where a whole line is no event of ours, or where the beginning is gone: without it the run would
    be taken for a new one.
    """
    try:
        lines = read_data(path).split(b"\n")
    except FileNotFoundError:
        return []
    events = [_parse(path, number, line) for number, line in enumerate(lines[:-1], 1) if line]
    if not events or not isinstance(events[0], RunCreated):
        raise UnusableFileError(
            path, "does not begin with RunCreated; put it back from a copy, nothing else knows the run"
        )
    return events


def parse_event(fields: dict[str, object]) -> Event:
    """The event of a line's fields, as ``status --json`` hands them on."""
    return _EVENT.validate_json(encode(fields))


def _parse(path: Path, number: int, line: bytes) -> Event:
    try:
        return _EVENT.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        raise UnusableFileError(path, f"line {number}: {first['msg']}") from None


def mend_journal(path: Path) -> None:
    """Cut a torn last line off: a torn intent had no effect yet, a torn outcome is found out again."""
    if not _is_torn(path):
        return
    data = read_data(path)
    whole = data.rfind(b"\n") + 1
    if whole != len(data):
        with open(path, "r+b") as file:
            file.truncate(whole)


def _is_torn(path: Path) -> bool:
    try:
        file = open_data(path)
    except FileNotFoundError:
        return False
    with file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Journal:
    """Appends events; ``check`` raises before each append when the lease is somebody else's by now."""

    def __init__(self, path: Path, clock: Callable[[], float], check: Callable[[], None]) -> None:
        self.path = path
        self._clock = clock
        self._check = check

    def record(self, event: Event, attempt: int, term: int) -> Event:
        """Make ``event`` durable, stamped with time, attempt and term; the event as it was written."""
        self._check()
        if not self.path.exists():
            raise UnusableFileError(self.path, "is gone; put it back, nothing is done without it")
        mend_journal(self.path)  # nobody else writes here; who does so all the same must not spoil what comes
        stamped = event.model_copy(update={"time": self._clock(), "attempt": attempt, "term": term})
        append_line(self.path, _format(stamped))
        return stamped


def _format(event: Event) -> str:
    fields = event.model_dump(mode="json")
    first = ("event", "time", "attempt", "term", "reason")
    return encode({name: fields[name] for name in first} | fields)
