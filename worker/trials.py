"""What the steps of a trial say: did it come again, and is it cured?  Pure."""

import math
from collections.abc import Sequence

from worker.contract.loss_history import ACTED, Record
from worker.contract.replay import Replay, Trial, Tried

_NOT_FINITE = ("skipped", "nonfinite")


def judged(plan: Replay, trial: Trial, records: Sequence[Record]) -> Tried:
    """Whether the trouble stayed away with this change: no verdict, and no loss above the band in the end."""
    bad, last = first_bad(plan, records), records[-1]
    said = f"{bad.verdict} at step {bad.step}" if bad else f"nothing until step {last.step}"
    if bad is None and last.verdict != "ok":
        said = f"{last.verdict} since step {last.onset_step}, loss {figure(last.loss)} at step {last.step}"
    is_cured = bad is None and last.verdict == "ok"
    return Tried(change=trial.change, what=trial.what, cured=is_cured, loss=loss_at_verdict(plan, records), said=said)


def first_bad(plan: Replay, records: Sequence[Record]) -> Record | None:
    """The record of a verdict; where steps were not finite, already the first of these that is not."""
    kinds = {*ACTED, *(_NOT_FINITE if plan.bad.kind in _NOT_FINITE else ())}
    return next((one for one in records if one.verdict in kinds), None)


def loss_at_verdict(plan: Replay, records: Sequence[Record]) -> float | None:
    """The loss at the step of the run's verdict, or at the last step before it that there is."""
    until = [one for one in records if one.step <= plan.bad.verdict_step]
    return until[-1].loss if until else None


def came_again(plan: Replay, trial: Trial, records: Sequence[Record], recorded: Sequence[Record]) -> Tried:
    """Whether the same steps, unchanged, go wrong again, and with the same losses to the bit."""
    bad = first_bad(plan, records)
    before = {one.step: one.loss for one in recorded}
    other = next((one for one in records if one.step in before and one.loss != before[one.step]), None)
    if other is None:
        how = "every loss the same to the bit"
    else:
        was = f"{figure(other.loss)}, and was {figure(before[other.step])}"
        how = f"from step {other.step} on with other losses ({was})"
    said = f"comes again: {bad.verdict} at step {bad.step}, {how}" if bad else f"does not come again: {how}"
    return Tried(
        change=trial.change, what=trial.what, cured=bad is None, loss=loss_at_verdict(plan, records), said=said
    )


def figure(number: float | None) -> str:
    """A loss, for a person."""
    return "not finite" if number is None or not math.isfinite(number) else f"{number:.6g}"
