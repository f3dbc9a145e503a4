"""What a spike, a divergence or numbers that are not finite are answered with.  Pure."""

from supervisor.attempts import Rules, begin, run_scale
from supervisor.decision import Decision, GiveUp
from supervisor.journal import Rollback, VerdictSeen
from supervisor.observation import Observation
from supervisor.run_state import RunState
from worker.contract.directive import Cause, Directive, scale_at
from worker.contract.manifest import rollback_target
from worker.contract.run_dir import checkpoint_name


def answer_verdict(run: RunState, seen: Observation, rules: Rules, verdict: VerdictSeen) -> Decision:
    """Back to before the onset, at a lower rate; the budget of rollbacks ends it."""
    limit = rules.recovery.spike.max_rollbacks
    if run.rollbacks_since_progress >= limit:
        tried = f"rolled back {run.rollbacks_since_progress} times, down to {run_scale(run):g} of the rate"
        return GiveUp(f"{limit} rollbacks brought no new healthy checkpoint (recovery.spike.max_rollbacks)", (tried,))
    target = rollback_target(seen.manifests, seen.branch, verdict.onset_step, rules.checkpoint.healthy_after)
    manifest = next((m for m in seen.manifests if m.step == target.step), None)
    scale = _lowered(run, rules, verdict)
    state = (
        f"the newest {target.health} one before the onset" if target.health else "no checkpoint from before the onset"
    )
    place = checkpoint_name(target.step) if manifest else "scratch"
    reason = f"{verdict.reason}; back to {place} ({state}) at {scale:g} of the rate"
    rollback = Rollback(
        kind=verdict.kind,
        verdict_step=verdict.step,
        onset_step=verdict.onset_step,
        batches=verdict.batches,
        from_step=verdict.step,
        to_step=target.step if manifest else 0,
    )
    cause: Cause = (
        "nonfinite" if verdict.kind == "nonfinite" else "divergence" if verdict.kind == "divergence" else "spike"
    )
    return begin(run, seen, rules, cause, manifest, scale, reason, rollback)


def _lowered(run: RunState, rules: Rules, verdict: VerdictSeen) -> float:
    """The rate scale after a verdict: what was applied when it happened, times the factor, never below the floor."""
    spike = rules.recovery.spike
    factor = rules.recovery.nonfinite.lr_factor if verdict.kind == "nonfinite" else spike.lr_factor
    applied = _applied_scale(run, verdict.step)
    return min(applied, max(spike.min_lr_scale, applied * factor))


def _applied_scale(run: RunState, step: int) -> float:
    if run.plan is None:
        return 1.0
    plan = run.plan
    as_published = Directive(
        attempt=run.attempt, cause=plan.cause, reason="", time=0.0, lr_scale=plan.lr_scale, lr_ramp=plan.lr_ramp
    )
    return scale_at(as_published, step)
