"""What a spike, a divergence or numbers that are not finite are answered with: one rung of a ladder.  Pure.

Lower the rate; leave the batches out where it comes again at the same ones; go further back where it comes again
elsewhere; accept a level that stays; and a budget ends it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.attempts import Rules, begin, fresh_moments, plan_attempt, run_scale
from supervisor.batches import are_near, as_skips, in_words, left_out, positions_of, trained_on
from supervisor.decision import Decision, GiveUp
from supervisor.journal import AttemptDecided, Rollback, VerdictSeen
from supervisor.observation import Observation
from supervisor.report.figures import rate_text
from supervisor.run_state import RunState
from worker.contract.directive import Cause, Directive, LearningRateRamp, SkippedBatches, scale_at
from worker.contract.loss_history import BatchPosition
from worker.contract.manifest import Health, Manifest, Target, rollback_target
from worker.contract.run_dir import checkpoint_name
from worker.contract.words import count

SOON_AFTER_RESUME: Final = 50
"""Steps after a resume within which a spike may come from the restore itself."""
_ACCEPTED_AFTER: Final = 2
"""Rollbacks that must not have helped before a level is accepted."""
_SAME_LEVEL: Final = 1.25
"""Losses whose highest is at most this multiple of the lowest are one level."""
_SKIPPED_SHARE: Final = 100
"""At most one of so many batches of the run is left out."""


@dataclass(frozen=True)
class Answer:
    """Where to go back to, with what, and why that, for a person."""

    target: Target
    scale: float
    why: str
    lr_ramp: LearningRateRamp | None
    skip_batches: tuple[SkippedBatches, ...] = ()
    """In addition to those that are left out already."""
    taken_back: tuple[BatchPosition, ...] = ()
    """Of those that are left out already, what is trained on after all."""
    accept_level: float | None = None
    """None = as before."""
    is_bad_restore: bool = False
    """Whether the checkpoint that the attempt began from is blamed, as for a proof that failed."""


def answer_verdict(run: RunState, seen: Observation, rules: Rules, verdict: VerdictSeen) -> Decision:
    """Back to before the onset, as the ladder says; the budget of rollbacks ends it."""
    answer = _accept(run, seen, rules, verdict)
    limit = rules.recovery.spike.max_rollbacks
    if answer is None and run.rollbacks_since_progress >= limit:
        brought = f"{count(limit, 'rollback')} brought no new healthy checkpoint" if limit else "no rollback is allowed"
        reason = f"{brought} (recovery.spike.max_rollbacks)"
        return GiveUp(f"{reason}; the last: {verdict.reason}", tried=run.tried)
    if answer is None:
        answer = _restore_elsewhere(run, seen, verdict) or _lower_the_rate(run, seen, rules, verdict)
    return begin(run, seen, rules, _plan(run, seen, rules, verdict, answer))


def _plan(run: RunState, seen: Observation, rules: Rules, verdict: VerdictSeen, answer: Answer) -> AttemptDecided:
    start = _manifest(seen, answer.target)
    place = checkpoint_name(answer.target.step) if start is not None else "scratch"
    reason = f"{verdict.reason}; back to {place} at {rate_text(answer.scale)}: {answer.why}"
    plan = plan_attempt(run, seen, _cause(verdict, answer), start, answer.scale, reason, verdict.onset_step - 1)
    rollback = Rollback(
        kind=verdict.kind,
        verdict_step=verdict.step,
        onset_step=verdict.onset_step,
        batches=verdict.batches,
        from_step=verdict.step,
        to_step=plan.resume_step,
    )
    kept = [one for one in positions_of(plan.skip_batches) if one not in answer.taken_back]
    skipped = as_skips([*kept, *positions_of(answer.skip_batches)])
    level = answer.accept_level if answer.accept_level is not None else plan.accept_level
    changes = {"rollback": rollback, "lr_ramp": answer.lr_ramp, "skip_batches": skipped, "accept_level": level}
    is_same_rate = answer.is_bad_restore or answer.accept_level is not None
    return plan.model_copy(update=changes | ({} if is_same_rate else fresh_moments(rules, plan.resume_step)))


def _cause(verdict: VerdictSeen, answer: Answer) -> Cause:
    if answer.is_bad_restore:
        return "refused"
    if verdict.kind == "nonfinite":
        return "nonfinite"
    return "divergence" if verdict.kind == "divergence" else "spike"


def _manifest(seen: Observation, target: Target) -> Manifest | None:
    return next((m for m in seen.manifests if m.step == target.step), None)


# -- a level that stays ------------------------------------------------------------------------------------------------


def _accept(run: RunState, seen: Observation, rules: Rules, verdict: VerdictSeen) -> Answer | None:
    """Take a finite, flat level that came again after two rollbacks as the new one, at the same rate; None = no."""
    level = _flat_level(seen, verdict)
    before = [each.loss for each in run.last_verdicts[-_ACCEPTED_AFTER:]]
    if level is None or len(before) < _ACCEPTED_AFTER or not _are_one_level([*before, level]):
        return None
    if run.plan is not None and _are_one_level([run.plan.accept_level, level]):
        return None  # accepting it once more would change nothing
    why = f"the loss came to {level:.4g} again after {len(before)} rollbacks and stays there: accepted as its new level"
    ramp = run.plan.lr_ramp if run.plan is not None else None
    return Answer(_newest_target(seen, rules, verdict), run_scale(run), why, ramp, accept_level=level)


def _flat_level(seen: Observation, verdict: VerdictSeen) -> float | None:
    """The level that the loss went up to and stays at, None where it is not one."""
    if verdict.loss is None or verdict.level is None or verdict.loss <= verdict.level:
        return None
    losses = [each.loss for each in seen.branch if each.step >= verdict.onset_step and each.verdict != "ok"]
    return sorted(losses)[len(losses) // 2] if _are_one_level(losses) else None  # type: ignore[type-var]


def _are_one_level(losses: Sequence[float | None]) -> bool:
    known = [loss for loss in losses if loss is not None and loss > 0]
    return 0 < len(known) == len(losses) and max(known) <= _SAME_LEVEL * min(known)


# -- a restore that went wrong -----------------------------------------------------------------------------------------


def _restore_elsewhere(run: RunState, seen: Observation, verdict: VerdictSeen) -> Answer | None:
    """After a spike right after a resume that did not come out quite the same: the next older checkpoint; None = no.

    Not twice in a row, and not where it comes again at the same batches: then it is not the restore.
    """
    begun = run.segment_started
    start = begun.start if begun is not None else None
    if begun is None or start is None or start.checkpoint is None or begun.attempt != run.attempt:
        return None
    if (run.plan is not None and run.plan.cause == "refused") or is_at_same_batches(run, verdict):
        return None
    probe, is_soon = start.probe, verdict.onset_step < begun.step + SOON_AFTER_RESUME
    if not is_soon or None in (probe.expected, probe.found) or probe.expected == probe.found:
        return None
    older = [
        m
        for m in seen.manifests
        if m.step < begun.step - 1 and m.step < verdict.onset_step and m.weights_finite is not False
    ]
    if not older:
        return None
    why = (
        f"{start.checkpoint} seems to restore badly (its probe loss was {probe.expected:.6g} and came out as "
        f"{probe.found:.6g}, and the spike came within {SOON_AFTER_RESUME} steps): the next older one, at the same rate"
    )
    ramp = run.plan.lr_ramp if run.plan is not None else None
    return Answer(Target(older[-1].step, None), run_scale(run), why, ramp, is_bad_restore=True)


# -- a lower rate ------------------------------------------------------------------------------------------------------


def _lower_the_rate(run: RunState, seen: Observation, rules: Rules, verdict: VerdictSeen) -> Answer:
    target = _newest_target(seen, rules, verdict)
    why = _state(target)
    is_again = is_at_same_batches(run, verdict)
    goes_on = are_near(verdict.batches, tuple(positions_of(_skipped(run))))
    skip: tuple[SkippedBatches, ...] = ()
    taken_back: tuple[BatchPosition, ...] = ()
    scale = lowered_scale(run, rules, verdict)
    is_elsewhere = not (is_again or goes_on or rules.recovery.spike.skip == "always")
    if not is_elsewhere:
        taken_back = _to_take_back(run, rules, verdict)
        skip = as_skips(_to_skip(run, seen, rules, verdict, target.step, len(taken_back)))
        why += f"; {_about_skip(run, rules, skip, taken_back, is_again=is_again, goes_on=goes_on)}"
    changes_nothing = not skip and scale == run_scale(run)  # the same attempt once more would end at the same step
    if run.rolled_back_to is not None and (is_elsewhere or changes_nothing):
        target = _further_back(run, seen, rules, verdict, target, run.rolled_back_to)
        soon = "again soon, at other batches" if is_elsewhere else f"{why}, and the rate is as low as it goes"
        why = f"{soon}: {_state(target)}" if target.step < run.rolled_back_to else f"{why}; none further back is left"
    return Answer(target, scale, why, ramp_from(rules, scale, target.step), skip, taken_back)


def is_at_same_batches(run: RunState, verdict: VerdictSeen) -> bool:
    """Whether an earlier verdict, that no healthy checkpoint has passed, was at these batches too."""
    return any(are_near(verdict.batches, each.batches) for each in run.last_verdicts)


def _newest_target(seen: Observation, rules: Rules, verdict: VerdictSeen) -> Target:
    return rollback_target(seen.manifests, seen.branch, verdict.onset_step, rules.checkpoint.healthy_after)


def _state(target: Target) -> str:
    return f"the newest {target.health} one before the onset" if target.health else "there is none before the onset"


def _further_back(
    run: RunState, seen: Observation, rules: Rules, verdict: VerdictSeen, newest: Target, rolled_back_to: int
) -> Target:
    """Older than the last rollback's target; the newest before the onset where only that was ever found healthy."""
    older = [m for m in seen.manifests if m.step < rolled_back_to]
    further = rollback_target(older, seen.branch, verdict.onset_step, rules.checkpoint.healthy_after)
    was_healthy = newest.health is Health.HEALTHY or newest.step <= min(rolled_back_to, run.healthy_step)
    return newest if was_healthy and further.health is not Health.HEALTHY else further


def lowered_scale(run: RunState, rules: Rules, verdict: VerdictSeen) -> float:
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


def ramp_from(rules: Rules, scale: float, from_step: int) -> LearningRateRamp | None:
    """The way back to the full rate, begun anew; None = the rate stays low."""
    spike = rules.recovery.spike
    if spike.ramp_steps is None or spike.hold_steps is None:
        return None
    to = max(spike.ramp_to, scale)
    return LearningRateRamp(from_step=from_step, hold_steps=spike.hold_steps, ramp_steps=spike.ramp_steps, to=to)


# -- batches left out --------------------------------------------------------------------------------------------------


def _skipped(run: RunState) -> tuple[SkippedBatches, ...]:
    return run.plan.skip_batches if run.plan is not None else ()


def _to_take_back(run: RunState, rules: Rules, verdict: VerdictSeen) -> tuple[BatchPosition, ...]:
    """What makes room for the batches of a spike that goes on beside batches left out; () where they have room.

    Of those, the ones at which there never was a verdict: they were left out on suspicion, and it goes on without them.
    """
    blamed = {one for each in run.last_verdicts for one in each.batches}
    spare = [one for one in positions_of(_beside(run, verdict)) if one not in blamed]
    missing = len(verdict.batches) - _room_left(run)
    is_wanted = rules.recovery.spike.skip != "never" and 0 < missing <= len(spare)
    return tuple(spare[:missing]) if is_wanted else ()


def _beside(run: RunState, verdict: VerdictSeen) -> list[SkippedBatches]:
    """The ranges left out that the verdict's batches lie right beside."""
    return [one for one in _skipped(run) if are_near(tuple(positions_of([one])), verdict.batches)]


def _room_left(run: RunState) -> int:
    """How many batches more may be left out."""
    return _room(run) - sum(one.count for one in _skipped(run))


def _to_skip(
    run: RunState, seen: Observation, rules: Rules, verdict: VerdictSeen, target_step: int, taken_back: int
) -> tuple[BatchPosition, ...]:
    """The batches of the spike, those shortly before it, and as many as there is room for; () where it has none.

    A spike that goes on where batches were left out already shows that too few were: as many again beyond its end.
    """
    begun = _beside(run, verdict)
    first = verdict.onset_step if begun else verdict.onset_step - rules.recovery.spike.skip_before
    room = _room_left(run) + taken_back
    if rules.recovery.spike.skip == "never" or not 0 < len(verdict.batches) <= room:
        return ()
    lead = trained_on(seen.trail, max(target_step + 1, first), verdict.onset_step - 1)
    end = verdict.batches[-1]
    beyond = [
        BatchPosition(epoch=end.epoch, batch=end.batch + 1 + ahead) for ahead in range(sum(one.count for one in begun))
    ]
    return (*lead, *verdict.batches, *beyond)[-room:] if not beyond else (*verdict.batches, *beyond)[:room]


def _room(run: RunState) -> int:
    """How many of the run's batches may be left out in all."""
    start = run.segment_started.start if run.segment_started is not None else None
    return start.max_steps // _SKIPPED_SHARE if start is not None else 0


def _about_skip(
    run: RunState,
    rules: Rules,
    skip: Sequence[SkippedBatches],
    taken_back: Sequence[BatchPosition],
    *,
    is_again: bool,
    goes_on: bool,
) -> str:
    where = "recovery.spike.skip is always"
    if is_again or goes_on:
        beside = "its batches lie right beside those that are left out already"
        where = beside if goes_on else "again at the same batches"
    if skip:
        instead = f", instead of {in_words(as_skips(taken_back))}" if taken_back else ""
        return f"{where}, so {left_out(sum(one.count for one in skip))} ({in_words(skip)}{instead})"
    if rules.recovery.spike.skip == "never":
        return f"{where}, and recovery.spike.skip is never"
    none = "no more are" if _skipped(run) else "none is"
    return f"{where}; {none} left out, for that would be more than 1 % of the run's batches"
