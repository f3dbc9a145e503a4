"""What a person must know of finished weights: numbers at the end of the curve that nobody acted on.  Pure."""

from collections.abc import Sequence

from worker.contract.loss_history import ACTED, Record
from worker.contract.manifest import Health, Manifest, health, rollback_target


def ruin(branch: Sequence[Record], manifests: Sequence[Manifest], healthy_after: int, run: str) -> str:
    """Why ``final/`` is not to be trusted and where to go back to; empty where nothing speaks against it.

    ``branch`` is the surviving curve, at least its records that are not ``ok`` and the last one; ``run`` names the run.
    """
    unanswered = [one for one in branch if one.verdict in ACTED and one.observed and not one.adopted]
    last = manifests[-1] if manifests else None
    num_nonfinite = _nonfinite_at_the_end(branch)
    if last is not None and last.weights_finite is False:
        what = "its last weights are not finite: final/ is ruined"
    elif num_nonfinite:
        steps = "step was" if num_nonfinite == 1 else f"{num_nonfinite} steps were"
        what = f"its last {steps} not finite: final/ is not to be trusted"
    elif unanswered and last is not None and health(last, branch, healthy_after) is Health.SUSPECT:
        what = f"nobody acted on the {unanswered[-1].verdict} at its end: final/ is not to be trusted"
    elif unanswered:
        return f"nobody acted on the {unanswered[-1].verdict} at step {unanswered[-1].step}"
    else:
        return ""
    return f"{what}; {_way_back(branch, manifests, healthy_after, run)}"


def _nonfinite_at_the_end(branch: Sequence[Record]) -> int:
    """How many steps without a gap before the last one, it among them, were not finite and counted as such."""
    streak: list[Record] = []
    for one in reversed(branch):
        if one.verdict not in ("nonfinite", "skipped") or (streak and one.step != streak[-1].step - 1):
            break
        streak.append(one)
    return len(streak) if any(one.verdict == "nonfinite" for one in streak) else 0


def _way_back(branch: Sequence[Record], manifests: Sequence[Manifest], healthy_after: int, run: str) -> str:
    bad = [one for one in branch if one.verdict in ACTED]
    last_step = branch[-1].step if branch else 0
    onset = bad[-1].onset_step if bad and bad[-1].onset_step is not None else last_step
    target = rollback_target(manifests, branch, onset, healthy_after)
    back = f"`higgsfield rollback {run} --to {target.step}` goes back"
    return back if target.step else "no checkpoint lies before that"
