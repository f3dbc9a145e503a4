"""The next attempt of a run: from which checkpoint, at which rate, in which job.  Pure."""

from dataclasses import dataclass, field
from typing import Any, Final

from slurm.job import JobState
from supervisor.decision import Begin, Cancel, Decision, GiveUp, Wait
from supervisor.journal import AttemptDecided, Cost, Plan, Where
from supervisor.memory import memory_text
from supervisor.observation import Observation
from supervisor.report.figures import duration
from supervisor.run_state import MAY_COME_BACK, RunState
from worker.contract.cluster_config import ClusterConfig
from worker.contract.config import Config
from worker.contract.directive import Cause
from worker.contract.exit_report import NO_WORLD_ERROR, Outcome
from worker.contract.manifest import Manifest
from worker.contract.recovery_config import CheckpointConfig, RecoveryConfig
from worker.contract.run_dir import checkpoint_name
from worker.contract.words import count

_MOST_TOLD: Final = 3
"""Damaged checkpoints in one reason."""
_PAUSES_S: Final = (0.0, 5.0, 15.0, 60.0, 150.0)
"""From one attempt to the next where only time may help, by the number of those without progress; then the last."""
_QUEUED = (JobState.PENDING, JobState.HELD, JobState.CONFIGURING, JobState.REQUEUED)


@dataclass(frozen=True)
class Rules:
    """The parts of a run's configuration that decide."""

    recovery: RecoveryConfig
    checkpoint: CheckpointConfig
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    memory: str = ""
    """How much memory the configuration needs, for a person."""
    run: str = ""
    """The run's folder, for commands that a person is told."""


def rules_of(config: Config) -> Rules:
    """What of a configuration decides."""
    return Rules(
        config.recovery, config.checkpoint, config.cluster, memory_text(config), f"{config.run.dir}/{config.run.name}"
    )


def run_scale(run: RunState) -> float:
    """The rate scale of the present attempt."""
    return run.plan.lr_scale if run.plan is not None else 1.0


def continue_run(run: RunState, seen: Observation, rules: Rules, cause: Cause, reason: str) -> Decision:
    """Go on from the newest complete checkpoint, at the rate the cause calls for."""
    factor = (
        rules.recovery.preemption.lr_factor if cause in ("preempted", "drained", "node_failed", "time_limit") else 1.0
    )
    newest = seen.manifests[-1] if seen.manifests else None
    return begin(run, seen, rules, plan_attempt(run, seen, cause, newest, run_scale(run) * factor, reason))


def begin(run: RunState, seen: Observation, rules: Rules, plan: AttemptDecided) -> Decision:
    """Begin the planned attempt, after what must come before it: a budget that lasts, and an old job that is over."""
    limit = rules.recovery.max_attempts_without_progress
    if run.attempts_since_progress >= limit:
        reason = f"{count(limit, 'attempt')} without a new healthy checkpoint; the last: {plan.reason}"
        return GiveUp(reason, tried=run.tried, error=plan.reason)
    where = _where(run, seen, rules)
    if where == "new_job" and not job_is_over(run, seen, rules) and rules.recovery.mode == "act":
        return _part_from_job(run, seen, plan.reason)
    wait = why_not_begun(run, seen.now, rules.recovery) if plan.cause == "crash" else None
    return Begin(plan.model_copy(update={"where": where})) if wait is None else Wait(wait)


def why_not_begun(run: RunState, now: float, recovery: RecoveryConfig) -> str | None:
    """Why the attempt after a crash is not begun now; None = it is.

    An outage would spend all attempts within seconds where they crash before any step, or for the disk.
    """
    left = run.left
    if left is None or left.outcome not in (Outcome.CRASHED, Outcome.REFUSED):
        return None
    is_by_disk = left.error is not None and left.error.points_at_disk
    if not is_by_disk and (run.has_stepped or left.outcome is Outcome.REFUSED):
        return None
    number = run.attempts_since_progress - (0 if is_by_disk else 1)  # so that an outage does not cost the allocation
    pause_s = _PAUSES_S[min(max(0, number), len(_PAUSES_S) - 1)]
    pause_s = min(pause_s, recovery.directive_wait_s / 2)  # its agents wait in the allocation meanwhile
    if not 0.0 <= now - run.decided_at < pause_s:
        return None
    return f"tried again in {duration(run.decided_at + pause_s - now)}: {left.reason}"


def _where(run: RunState, seen: Observation, rules: Rules) -> Where:
    """The same job while it waits in the queue or its agents wait in it, and relaunching there is not exhausted."""
    if job_is_over(run, seen, rules) or run.job_id in run.cancelled_by_us:
        return "new_job"
    if seen.job is not None and seen.job.state in _QUEUED:
        return "requeued"
    if seen.job is not None and seen.job.state not in (JobState.RUNNING, JobState.SUSPENDED):
        return "new_job"
    if seen.job is not None and run.excluded(seen.now).keys() & set(seen.job.nodes):
        return "new_job"  # a node that was struck often is in this allocation
    if lost_nodes(run, seen):
        return "new_job"  # nobody could start the ranks there again
    if run.left is not None and run.left.error is not None and run.left.error.type == NO_WORLD_ERROR:
        return "new_job"  # an agent is gone, and nothing brings it back within its step
    return "same_allocation" if run.relaunches_in_job < rules.recovery.relaunches_in_allocation else "new_job"


def _part_from_job(run: RunState, seen: Observation, reason: str) -> Decision:
    assert run.job_id is not None  # job_is_over is true without one
    if run.job_id in run.cancelled_by_us:
        return Wait("the cancelled job is about to end")
    if seen.job is not None and seen.job.state is JobState.COMPLETING:
        return Wait("the job is about to end")
    is_told = run.verdict is not None or run.hang is not None or run.left is not None
    return Cancel(run.job_id, f"a fresh job is needed{'' if is_told else f': {reason}'}")


def job_is_over(run: RunState, seen: Observation, rules: Rules) -> bool:
    """Whether the run's job is over for good; silence of the scheduler never says so."""
    if not run.has_live_job:
        return True
    if seen.look_error is not None:
        return False
    if seen.job is None or seen.job.state in MAY_COME_BACK:
        return run.job is not None and seen.now - run.job.time >= rules.recovery.absent_grace_s
    return seen.job.state.is_over


def lost_nodes(run: RunState, seen: Observation) -> list[str]:
    """Nodes of the job's newest start that Slurm has given up, whether the job goes on without them or not.

    One that is silent counts once the job there is over or back in the queue: Slurm may show it as completing still.
    Not one that an administrator drained: it may be silent because it is put into order.
    One that was taken off the running job counts though it is back already: what ran there is not.
    """
    has_ended = seen.job is not None and (seen.job.state in _QUEUED or seen.job.state in MAY_COME_BACK)
    nodes = [seen.nodes[name] for name in run.memory.ran_on if name in seen.nodes]
    silent = {each.name for each in nodes if has_ended and each.is_silent} - run.memory.draining
    return sorted(run.memory.gone | silent | {each.name for each in nodes if each.is_down})


def plan_attempt(
    run: RunState,
    seen: Observation,
    cause: Cause,
    start: Manifest | None,
    scale: float,
    reason: str,
    until: int | None = None,
) -> AttemptDecided:
    """The next attempt from ``start`` (None = from scratch), with what that repeats and what it quarantines.

    ``until`` is the newest step that would have done (None = any): what is damaged in between is told in the reason.
    In a new job; batches left out, an accepted level, the way back to the full rate and moments that were dropped stay
    as they are.
    """
    step = start.step if start is not None else 0
    before = run.plan
    return AttemptDecided(
        attempt=run.attempt + 1,
        cause=cause,
        resume_from=checkpoint_name(step) if start is not None else None,
        resume_step=step,
        lr_scale=scale,
        lr_ramp=before.lr_ramp if before is not None else None,
        skip_batches=before.skip_batches if before is not None else (),
        accept_level=before.accept_level if before is not None else None,
        **(_reset_before(before, step) if before is not None else {}),
        quarantine=tuple(checkpoint_name(m.step) for m in seen.manifests if m.step > step),
        where="new_job",
        cost=Cost(steps_repeated=max(0, last_step(seen) - step)),
        reason=reason + _passed_over(seen, step, until),
    )


def _passed_over(seen: Observation, step: int, until: int | None) -> str:
    """What is to be said of damaged checkpoints after ``step``, the newest first; empty where there is none."""
    damaged = [each for each in sorted(seen.unusable, reverse=True) if step < each and (until is None or each <= until)]
    told = [f"; {checkpoint_name(each)} is passed over: {seen.unusable[each]}" for each in damaged[:_MOST_TOLD]]
    more = f"; and {len(damaged) - _MOST_TOLD} more" if len(damaged) > _MOST_TOLD else ""
    return "".join(told) + more


def fresh_moments(rules: Rules, step: int) -> dict[str, Any]:
    """What a rollback to ``step`` has to say of the optimizer's moments; nothing from scratch, where there are none."""
    spike = rules.recovery.spike
    if step == 0 or not (spike.reset_moments or spike.rewarm_steps):
        return {}
    return {"reset_moments": spike.reset_moments, "rewarm_steps": spike.rewarm_steps, "reset_from": step}


def _reset_before(before: Plan, step: int) -> dict[str, Any]:
    """The same, carried on: counted from where it was, or from ``step`` where that is further back."""
    if step == 0 or before.reset_from is None:
        return {}
    reset_from = min(step, before.reset_from)
    return {"reset_moments": before.reset_moments, "rewarm_steps": before.rewarm_steps, "reset_from": reset_from}


def last_step(seen: Observation) -> int:
    """The newest finished step, 0 before the first."""
    return seen.last.step if seen.last is not None else 0
