"""What an agent decides, from values alone: start a trainer, wait or leave; let it run, ask it or end it."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from worker.contract.claim import Claim
from worker.contract.directive import Directive
from worker.contract.exit_report import WAITS_FOR_A_DIRECTIVE, ExitReport, Outcome
from worker.contract.files import Message
from worker.contract.pulse import Hang
from worker.contract.run_dir import checkpoint_step
from worker.contract.words import count

PEER_GRACE_S = 10.0
PREEMPTED_GRACE_S = 60.0

What = Literal["stop", "time_limit", "preempted", "hang", "rank_died", "fenced", "parent_died"]
"""Why a trainer left or was ended, in the words of ``error.what``."""

_GONE = "the run's folder is gone from its place: it was moved or removed"
_EXITS_ZERO = frozenset({Outcome.DONE, Outcome.LEFT, Outcome.VERDICT, Outcome.FENCED})


class Task(Message):
    """The scheduler's facts about one start of one agent."""

    job_id: str
    name: str
    restart: int = Field(ge=0)
    rank: int = Field(ge=0)
    world: int = Field(ge=1)
    local_rank: int = Field(ge=0)
    requeue: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Asked:
    """What came from outside, by signal or by the parent's death."""

    preempted: bool = False
    time_limit: bool = False
    orphaned: bool = False


@dataclass(frozen=True)
class Seen:
    """The run's files at one look.

    ``claim`` is that of the directive's attempt; ``held`` is the newest attempt whose claim was once seen to be this
    start's, ``held_claim`` its claim now; ``ended_as`` is how the directive's attempt ended under whichever restart,
    None where it did not.
    """

    directive: Directive | None = None
    claim: Claim | None = None
    held: int | None = None
    held_claim: Claim | None = None
    ended_as: Outcome | None = None
    is_restarted: bool = False
    is_twin: bool = False
    """The claim is that of another process with the very same job, restart and rank."""
    reported: frozenset[int] = frozenset()
    """Ranks whose exit report of this start and the held attempt is there."""
    is_let_go: bool = False
    """Whether the scheduler ends this start of the held attempt already, so that no agent need stay."""
    hanging: frozenset[int] = frozenset()
    """Ranks whose agent says that they hang in this start of the held attempt."""
    is_gone: bool = False
    """Whether the run's folder is: it was moved or removed under way."""


@dataclass(frozen=True)
class Past:
    """What this agent did so far: its last trainer, and its relaunches without a new healthy checkpoint.

    A directive that resumes from a later step than ``since_step`` shows such a checkpoint: the count begins anew.
    """

    attempt: int | None = None
    outcome: Outcome | None = None
    relaunches: int = 0
    since_step: int = 0


@dataclass(frozen=True)
class Fenced:
    """The run is another start's: leave, touch nothing."""

    reason: str


@dataclass(frozen=True)
class Wait:
    """Nothing to do until a file changes."""

    reason: str


@dataclass(frozen=True)
class TakeClaim:
    """Claim this attempt, then look again."""

    attempt: int


@dataclass(frozen=True)
class StartTrainer:
    """Start the trainer under this directive."""

    directive: Directive


@dataclass(frozen=True)
class Leave:
    """End this agent; ``outcome`` None where nothing was ever started or decided."""

    outcome: Outcome | None
    reason: str
    what: What | None = None


@dataclass(frozen=True)
class Stay:
    """Preempted: ask for the requeue, start nothing, stay until killed."""


Move = Fenced | Wait | TakeClaim | StartTrainer | Leave | Stay


def is_foreign(claim: Claim | None, task: Task) -> bool:
    """Whether the claim belongs to another job, or to a newer restart of this one."""
    return claim is not None and (claim.job_id != task.job_id or claim.restart > task.restart)


def is_own(claim: Claim | None, task: Task) -> bool:
    """Whether the claim is exactly this start's."""
    return claim is not None and (claim.job_id, claim.restart) == (task.job_id, task.restart)


def start_rule(task: Task, seen: Seen, past: Past, asked: Asked, max_relaunches: int) -> Move:
    """What an agent without a running trainer does next."""
    if asked.orphaned:
        return Leave(past.outcome or Outcome.ENDED, "the parent process died", "parent_died")
    if seen.is_gone:
        return Fenced(_GONE)
    for claim in (seen.claim, seen.held_claim):
        if claim is not None and is_foreign(claim, task):
            return Fenced(f"job {claim.job_id}, restart {claim.restart}, holds the run")
    if seen.is_twin:
        return Fenced("another process of this very start holds the run")
    if _is_for_another_job(seen):
        return Fenced("the newest attempt is for another job than this one")
    leaving = _leaving(seen, past, asked)
    if leaving is not None:
        return leaving
    if seen.directive is None:
        return Wait("no directive yet")
    return _start(task, seen, seen.directive, past, max_relaunches)


def _is_for_another_job(seen: Seen) -> bool:
    """Whether the directive's attempt has a job of its own, and this start held an earlier one.

    On a node that Slurm has given up an agent lives on, and would be the first to claim it.
    """
    directive, held = seen.directive, seen.held
    return directive is not None and directive.new_job and held is not None and held < directive.attempt


def _leaving(seen: Seen, past: Past, asked: Asked) -> Leave | Stay | None:
    """Why no trainer starts any more, None where one may."""
    directive = seen.directive
    if past.outcome is Outcome.DONE:
        return Leave(past.outcome, "the run is done")
    if directive is not None and directive.stop is not None:
        return Leave(past.outcome or Outcome.LEFT, "the directive says stop", "stop")
    if asked.preempted and seen.is_let_go:
        return Leave(past.outcome or Outcome.LEFT, "preempted, and its job is ending", "preempted")
    if asked.preempted:
        return Stay()
    if asked.time_limit:
        return Leave(past.outcome or Outcome.LEFT, "the time limit is near", "time_limit")
    if past.outcome is Outcome.LEFT:
        return Leave(past.outcome, "the trainer was asked to leave")
    is_newer = directive is not None and directive.attempt > (past.attempt or 0)
    if past.outcome is Outcome.FENCED and not is_newer:
        return Leave(past.outcome, "the trainer found another writer")
    return None


def _start(task: Task, seen: Seen, directive: Directive, past: Past, max_relaunches: int) -> Move:
    attempt = directive.attempt
    if past.attempt is not None and attempt <= past.attempt:
        return Wait(f"attempt {past.attempt} is over, waiting for a newer directive")
    if relaunched(past, directive).relaunches > max_relaunches:
        return Leave(
            past.outcome, f"{count(max_relaunches, 'relaunch', 'relaunches')} without a new healthy checkpoint"
        )
    if not is_own(seen.claim, task):
        return TakeClaim(attempt) if task.rank == 0 else Wait(f"waiting for rank 0's claim of attempt {attempt}")
    if seen.ended_as is Outcome.DONE:
        return Leave(Outcome.DONE, f"attempt {attempt} is done")
    if seen.ended_as is not None:
        return Wait(f"attempt {attempt} ended as {seen.ended_as}, waiting for a newer directive")
    if directive.on_requeue == "wait" and seen.is_restarted:
        return Wait(f"attempt {attempt} was interrupted, waiting for a newer directive")
    return StartTrainer(directive)


def relaunched(past: Past, directive: Directive) -> Past:
    """The past after a start under ``directive``, its outcome still open; a person's rollback begins the count anew."""
    step = checkpoint_step(directive.resume_from or "") or 0
    if past.attempt is None:
        return Past(directive.attempt, since_step=step)
    if step > past.since_step or directive.cause == "rollback":
        return Past(directive.attempt, relaunches=1, since_step=step)
    return Past(directive.attempt, relaunches=past.relaunches + 1, since_step=past.since_step)


def ended_as(reports: Sequence[ExitReport], has_acted_verdict: bool) -> Outcome | None:
    """How an attempt ended, by its exit reports and the history's last record; None where it may go on.

    Rank 0 publishes ``final/``, so only its word makes an attempt done.
    """
    if any(report.rank == 0 and report.outcome is Outcome.DONE for report in reports):
        return Outcome.DONE
    for report in reports:
        if report.outcome in WAITS_FOR_A_DIRECTIVE:
            return report.outcome
    return Outcome.VERDICT if has_acted_verdict else None


def agent_exit_code(outcome: Outcome | None) -> int:
    """What the agent's own process exits with."""
    return 0 if outcome in _EXITS_ZERO else 1


@dataclass(frozen=True)
class Running:
    """What is known of a trainer that runs: signals sent to it, and for how long something has been waited for."""

    attempt: int
    sent: frozenset[signal.Signals] = frozenset()
    preempted_for_s: float | None = None
    peer_ended_for_s: float | None = None
    hang: Hang | None = None
    """None while there is progress."""


@dataclass(frozen=True)
class Continue:
    """Let the trainer run."""


@dataclass(frozen=True)
class Send:
    """Forward one signal to the trainer."""

    number: signal.Signals


@dataclass(frozen=True)
class End:
    """End the trainer."""

    what: What
    reason: str


def trainer_rule(task: Task, seen: Seen, running: Running, asked: Asked) -> Continue | Send | End:
    """What an agent does with its running trainer."""
    return _end(task, seen, running, asked) or _send(task, seen, running, asked) or Continue()


def _end(task: Task, seen: Seen, running: Running, asked: Asked) -> End | None:
    directive = seen.directive
    if asked.orphaned:
        return End("parent_died", "the agent's parent process died")
    newer = directive if directive is not None and directive.attempt > running.attempt else None
    if seen.is_gone:
        return End("fenced", _GONE)
    if not is_own(seen.held_claim, task):
        return End("fenced", f"the claim of attempt {running.attempt} is not this start's any more")
    if newer is not None:
        return End("hang" if newer.cause == "hang" else "fenced", f"attempt {newer.attempt}: {newer.reason}")
    if directive is not None and directive.stop == "now":
        return End("stop", "the directive says stop now")
    if running.peer_ended_for_s is not None and running.peer_ended_for_s >= PEER_GRACE_S:
        return End("rank_died", f"the trainers of ranks {sorted(seen.reported - {task.rank})} ended")
    if running.preempted_for_s is not None and running.preempted_for_s >= PREEMPTED_GRACE_S:
        return End("preempted", f"not gone {PREEMPTED_GRACE_S:.0f} s after SIGTERM")
    hang = running.hang
    if hang is not None:
        where = f"{hang.phase} after step {hang.step}"
        return End("hang", f"no progress for {hang.quiet_s:.0f} s while {where}; {hang.limit_s:.0f} s are allowed")
    return None


def _send(task: Task, seen: Seen, running: Running, asked: Asked) -> Send | None:
    if seen.hanging - {task.rank} and signal.SIGUSR1 not in running.sent:
        return Send(signal.SIGUSR1)  # where it stands now: the end of the one that hangs may break its collective
    if asked.preempted and signal.SIGTERM not in running.sent:
        return Send(signal.SIGTERM)
    is_to_save = asked.time_limit or (seen.directive is not None and seen.directive.stop == "save")
    if is_to_save and signal.SIGUSR2 not in running.sent:
        return Send(signal.SIGUSR2)
    return None
