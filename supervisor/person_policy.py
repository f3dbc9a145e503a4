"""What a person's rollback leads to: the word counts, whatever the policy thinks of it.  Pure."""

from supervisor.attempts import Rules, begin, last_step, plan_attempt, run_scale
from supervisor.batches import as_skips, left_out, positions_of, trained_on
from supervisor.decision import Decision
from supervisor.journal import AttemptDecided, Rollback, RollbackRequested
from supervisor.observation import Observation
from supervisor.run_state import RunState
from supervisor.spike_policy import ramp_from


def roll_back_as_asked(run: RunState, seen: Observation, rules: Rules, asked: RollbackRequested) -> Decision:
    """To the step that was asked for, or the newest checkpoint before it if that one is gone meanwhile."""
    start = next((m for m in reversed(seen.manifests) if m.step <= asked.to), None)
    scale = asked.lr_scale if asked.lr_scale is not None else run_scale(run)
    is_gone = asked.to > 0 and (start is None or start.step < asked.to)
    reason = asked.reason + (
        f"; checkpoint-{asked.to} is gone meanwhile, the next older one is taken" if is_gone else ""
    )
    plan = plan_attempt(run, seen, "rollback", start, scale, reason, asked.to)
    plan = plan.model_copy(update={"rollback": _rollback(seen, plan)})
    if asked.lr_scale is not None:
        plan = plan.model_copy(update={"lr_ramp": ramp_from(rules, scale, plan.resume_step)})
    return begin(run, seen, rules, _without(seen, plan) if asked.skip else plan)


def _rollback(seen: Observation, plan: AttemptDecided) -> Rollback:
    last = last_step(seen)
    to = plan.resume_step
    return Rollback(kind="requested", verdict_step=last, onset_step=to + 1, from_step=last, to_step=to)


def _without(seen: Observation, plan: AttemptDecided) -> AttemptDecided:
    """The plan that leaves out every batch that was trained on since its beginning."""
    since = trained_on(seen.trail, plan.resume_step + 1, last_step(seen))
    skipped = as_skips([*positions_of(plan.skip_batches), *since])
    reason = f"{plan.reason}: {left_out(len(since))}"
    return plan.model_copy(update={"skip_batches": skipped, "reason": reason})
