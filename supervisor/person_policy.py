"""What a person's rollback leads to: the word counts, whatever the policy thinks of it.  Pure."""

from supervisor.attempts import Rules, begin, last_step, plan_attempt, run_scale
from supervisor.batches import as_skips, left_out, positions_of, trained_on
from supervisor.decision import Decision, Refuse
from supervisor.journal import AttemptDecided, Rollback, RollbackRequested
from supervisor.observation import Observation
from supervisor.requests import refusal
from supervisor.run_state import RunState
from supervisor.spike_policy import ramp_from


def roll_back_as_asked(run: RunState, seen: Observation, rules: Rules, asked: RollbackRequested) -> Decision:
    """To the step that was asked for; refused where its checkpoint is gone meanwhile."""
    start = next((m for m in seen.manifests if m.step == asked.to), None)
    if start is None and asked.to > 0:
        return Refuse(refusal("rollback", asked, asked.to, seen.steps))
    scale = asked.lr_scale if asked.lr_scale is not None else run_scale(run)
    plan = plan_attempt(run, seen, "rollback", start, scale, asked.reason, asked.to)
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
