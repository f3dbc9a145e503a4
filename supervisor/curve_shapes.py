"""Symptoms of a run as a whole: each says with its figures what speaks for it; nothing, for none.  Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from supervisor.evidence import Evidence, is_nonfinite, is_scaler_skip, median_of
from supervisor.journal import GaveUp, HangSeen, WorkerLeft
from supervisor.report.evaluations import evaluations, evaluations_text
from worker.contract.exit_report import PROOF_ERROR, ErrorDetail, Outcome
from worker.contract.loss_history import Record
from worker.contract.words import count

Says = Sequence[str]

_ENDLESS_SKIPS: Final = 8
"""Steps that the scaler skips in a row; from 65,536 it finds its scale within a few."""
_FEW: Final = 20
_LONG: Final = 100
"""Records that make a curve."""
_STUCK: Final = 0.03
"""Less than this share below where it began is no progress."""
_FLAT: Final = 1.08
_LEAST_OF_SGD: Final = 1e-3
"""At AdamW's rates SGD moves nothing."""
_UNKNOWN_UNIFORM: Final = 10.4
"""ln(32,000), where the vocabulary's size is the model's."""
_REBOUND: Final = 1.15
"""Times the best level; at 1.25 it is a verdict."""
_OF_THE_FALL: Final = 0.01
"""Less than this share of what the loss has fallen since the beginning is how a loss near zero wavers."""
_NOT_MINIMISED: Final = 0.02
"""A loss that starts so near zero, as a policy gradient's does, says nothing of what is learned."""
_NEARLY_NEW: Final = 0.5
"""Of ln(vocabulary): a loss above that is one that still has all to learn."""
_LAST_EVALUATIONS: Final = 5
_WORSE: Final = 0.03
"""Share above the best evaluation."""
_SCATTERS: Final = 3
_WAITING: Final = 0.2
_SLOWER: Final = 0.7


# -- numbers that are not finite ---------------------------------------------------------------------------------------


def at_regular_distances(evidence: Evidence) -> Says:
    """Steps that are not finite come back with the data: the same batch, or the same distance, again and again."""
    odd = [one for one in evidence.records if is_nonfinite(one)]
    first_of_streaks = [one for at, one in enumerate(odd) if at == 0 or one.step != odd[at - 1].step + 1]
    at_one_place = () if evidence.config.data.shuffle else tuple(_same_place(first_of_streaks))
    return at_one_place or tuple(_same_distance(first_of_streaks))


def _same_place(odd: Sequence[Record]) -> Iterator[str]:
    epochs: dict[int, set[int]] = {}
    for one in odd:
        if one.data is not None:
            epochs.setdefault(one.data.batch, set()).add(one.data.epoch)
    for batch, seen in epochs.items():
        if len(seen) > 1:
            yield f"batch {batch} was not finite in epochs {_listed(sorted(seen))}"


def _same_distance(odd: Sequence[Record]) -> Iterator[str]:
    """Three equal gaps in a row; or once in each of four epochs of data that are shuffled."""
    steps = [one.step for one in odd]
    gaps = [later - earlier for earlier, later in pairwise(steps)]
    is_regular = len(gaps) >= 3 and min(gaps[-3:]) > 1 and max(gaps[-3:]) - min(gaps[-3:]) <= 1
    epochs = [one.data.epoch for one in odd if one.data is not None]
    is_once_each = len(epochs) >= 4 and epochs == list(range(epochs[0], epochs[0] + len(epochs)))
    if is_regular:
        yield f"not finite at steps {_listed(steps[-4:])}: {gaps[-1]} steps apart each time"
    elif is_once_each:
        yield f"not finite once in each of the epochs {epochs[0]} to {epochs[-1]}, at steps {_listed(steps[-4:])}"


def scale_only_falls(evidence: Evidence) -> Says:
    """The fp16 scaler skips step after step and its scale falls and falls: not finite at any scale, so truly."""
    branch = evidence.branch
    skips = 0
    while skips < len(branch) and is_scaler_skip(branch[-1 - skips]):
        skips += 1
    if skips < _ENDLESS_SKIPS:
        return ()
    first, last = branch[-skips], branch[-1]
    before = branch[-skips - 1].loss_scale if skips < len(branch) else None
    fell = f"from {before:g} to" if before is not None else "to"
    return (
        f"the last {skips} steps ({first.step} to {last.step}) were all skipped: nothing was learned in them",
        f"the loss scale fell {fell} {last.loss_scale:.3g}, and a lower one did not help",
    )


def scaler_at_work(evidence: Evidence) -> Says:
    """The fp16 scaler skipped single steps and went on: a false alarm."""
    skipped = [one for one in evidence.branch if is_scaler_skip(one)]
    if not skipped or scale_only_falls(evidence):
        return ()
    scales = [one.loss_scale for one in evidence.branch if one.loss_scale is not None]
    between = f"; its scale was between {min(scales):g} and {max(scales):g}" if scales else ""
    return (f"the fp16 scaler skipped {len(skipped)} of {count(len(evidence.branch), 'step')}, and went on{between}",)


# -- how starts ended --------------------------------------------------------------------------------------------------


def proof_failed(evidence: Evidence) -> Says:
    """A start refused a checkpoint, because what it holds did not come out again, and nothing was trained since."""
    return _came_out(left for left in evidence.refusals if left.attempt >= evidence.last_trained)


def proof_failed_before(evidence: Evidence) -> Says:
    """The same, and the run went on."""
    return _came_out(left for left in evidence.refusals if left.attempt < evidence.last_trained)


def _came_out(refusals: Iterable[WorkerLeft]) -> Says:
    return tuple(
        f"attempt {left.attempt}: {left.error.what} was {left.error.expected} and came out as {left.error.found}"
        for left in refusals
        if left.error is not None and not _is_of_settings(left.error)
    )


def settings_changed(evidence: Evidence) -> Says:
    """The last start refused what a person set, and nothing was trained since."""
    last = evidence.refusals[-1] if evidence.refusals else None
    if last is None or last.error is None or not _is_of_settings(last.error) or last.attempt < evidence.last_trained:
        return ()
    return (f"attempt {last.attempt}: {last.error.what} is {last.error.found} and was {last.error.expected}",)


def _is_of_settings(error: ErrorDetail) -> bool:
    """Whether what differs was set, and not read from the checkpoint."""
    return error.type != PROOF_ERROR and error.found is not None


def ended_badly(evidence: Evidence) -> Says:
    """The last start crashed, was refused, ran out of memory or hung, and nothing was trained since."""
    last = evidence.last_end
    if last is None or evidence.last_trained > last.attempt:
        return ()
    if isinstance(last, HangSeen):
        return (f"attempt {last.attempt}: {last.quiet_s:.0f} s without a sign in phase {last.phase}",)
    if last in evidence.refusals or last.outcome not in (
        Outcome.CRASHED,
        Outcome.REFUSED,
        Outcome.OUT_OF_MEMORY,
        Outcome.VANISHED,
    ):
        return ()
    kind = f"{last.error.type}: " if last.error is not None and last.outcome is not Outcome.REFUSED else ""
    error = f": {kind}{' '.join(last.error.message.split())[:300]}" if last.error is not None else ""
    step = f" after step {last.step}" if last.step else " before its first step"
    return (f"attempt {last.attempt} ended as {last.outcome.value.replace('_', ' ')}{step}{error}", *_gave_up(evidence))


def _gave_up(evidence: Evidence) -> Says:
    ended = [event for event in evidence.events if isinstance(event, GaveUp)]
    return (f"the run gave up: {ended[-1].reason}",) if ended else ()


# -- the shape of the curve --------------------------------------------------------------------------------------------


def no_finite_loss(evidence: Evidence) -> Says:
    """Of the last steps none has a loss that is finite, and none has a verdict: nothing can be said of the loss."""
    last = evidence.branch[-_FEW:]
    if not last or any(one.loss is not None or one.verdict not in ("ok", "pending") for one in last):
        return ()
    norms = [one.grad_norm for one in last if one.grad_norm]
    gradient = f"gradient norm {median_of(norms):.4g}" if norms else "and a gradient norm of 0: nothing was learned"
    return (f"no finite loss in the last {count(len(last), 'step')} (up to step {last[-1].step}), {gradient}",)


def stuck_high(evidence: Evidence) -> Says:
    """The loss is where it began."""
    losses = _losses(evidence)
    begun, now, whole = median_of(losses[:_FEW]), median_of(losses[-_FEW:]), _uniform_loss(evidence)
    rules = evidence.config.training.optimizer
    if (
        evidence.verdicts
        or len(losses) < _LONG
        or begun is None
        or now is None
        or not 0 < begun * (1 - _STUCK) <= now <= begun * _FLAT
    ):
        return ()
    is_hardly_trained = rules.name == "sgd" and (rules.learning_rate or 0.0) < _LEAST_OF_SGD
    if now < _NEARLY_NEW * (whole or _UNKNOWN_UNIFORM) and not is_hardly_trained:
        return ()
    guess = f"; guessing among all tokens is {whole:.3g}" if whole is not None else ""
    return (
        f"the loss was {begun:.4g} at first and is {now:.4g} after {len(losses)} steps{guess}",
        f"{rules.name} at {rules.learning_rate or 0:g}, weights in {evidence.config.model.dtype}",
        *((f"trained on {evidence.data.train.said()}",) if evidence.data is not None else ()),
    )


def rebound(evidence: Evidence) -> Says:
    """The loss had been lower for a while and rose again, by less than a verdict needs."""
    losses = _losses(evidence)
    if len(losses) < 3 * _LONG or evidence.verdicts or abs(median_of(losses[:_FEW]) or 0.0) < _NOT_MINIMISED:
        return ()
    span = max(_LONG, len(losses) // 10)  # a level of few noisy losses is low by chance
    levels = [median_of(losses[at : at + span]) or math.inf for at in range(0, len(losses) - span + 1, _FEW)]
    best, now = min(levels), levels[-1]
    fallen = (median_of(losses[:_FEW]) or 0.0) - best
    if best <= 0 or now < best * _REBOUND or now - best < _OF_THE_FALL * fallen:
        return ()
    at = [record for record in evidence.branch if record.loss is not None][levels.index(best) * _FEW].step
    return (
        f"the loss was {best:.4g} around step {at + span // 2} and is {now:.4g} now, {now / best - 1:.0%} higher",
        f"the schedule is {evidence.config.training.schedule.name}, the rate {evidence.branch[-1].lr or 0:.3g} now",
    )


def evaluates_worse(evidence: Evidence) -> Says:
    """The last evaluations are all well above the best one, while the training loss fell on."""
    found, branch = evaluations(evidence.branch), evidence.branch
    if found is None or found["best_eval_loss"] < _NOT_MINIMISED:
        return ()
    best, best_step = found["best_eval_loss"], found["best_step"]
    losses = [one.eval_loss for one in branch if one.eval_loss is not None]
    since = [one.eval_loss for one in branch if one.eval_loss is not None and one.evaluated_step >= best_step]
    middles = ((one + other) / 2 for one, other in zip(since, since[2:], strict=False))
    scatter = median_of(abs(loss - middle) for loss, middle in zip(since[1:], middles, strict=False)) or 0.0
    worse = min(losses[-_LAST_EVALUATIONS:]) - best
    if len(since) <= _LAST_EVALUATIONS or worse < max(
        _WORSE * best, _SCATTERS * scatter, _OF_THE_FALL * (losses[0] - best)
    ):
        return ()
    until = [one.loss for one in branch if one.loss is not None and one.step <= best_step]
    then, now = median_of(until[-_LONG:]), median_of(_losses(evidence)[-_LONG:])
    if then is None or now is None or now >= then:
        return ()
    return (
        f"evaluation loss {evaluations_text(found)}; {len(since) - 1} evaluations since then",
        f"the training loss was {then:.4g} then and is {now:.4g} now",
    )


def waits_for_data(evidence: Evidence) -> Says:
    """A large share of the steps' time is spent waiting for data."""
    recent = [one for one in evidence.branch[-5 * _LONG :] if one.data_wait_s is not None and one.step_s]
    if len(recent) < _FEW:
        return ()
    waited, whole = sum(one.data_wait_s or 0.0 for one in recent), sum(one.step_s or 0.0 for one in recent)
    if waited < _WAITING * whole:
        return ()
    config = evidence.config
    workers = f"; {count(config.data.workers, 'worker')}" if config.training.entrypoint is None else ""
    return (f"{waited / whole:.0%} of a step is waiting for data ({waited / len(recent):.2g} s{workers})",)


def slowed_down(evidence: Evidence) -> Says:
    """Fewer tokens a second than the run had before."""
    rates = [(one.step, one.tokens_per_s) for one in evidence.branch if one.tokens_per_s]
    if len(rates) < 2 * _LONG:
        return ()
    levels = [median_of(rate for _, rate in rates[at : at + _LONG]) or 0.0 for at in range(0, len(rates), _LONG)]
    full = levels[: len(rates) // _LONG]
    best, now = max(full), median_of(rate for _, rate in rates[-_LONG:]) or 0.0
    if now >= _SLOWER * best:
        return ()
    fastest = rates[full.index(best) * _LONG :][:_LONG]
    span = f"over steps {fastest[0][0]:,} to {fastest[-1][0]:,}"
    return (f"{now:,.0f} tokens a second over the last {_LONG} steps, {best:,.0f} {span}", *_places(evidence))


def _places(evidence: Evidence) -> Says:
    """Where the run is now, and where it was before, as far as the journal says."""
    nodes = [event.nodes for event in evidence.events if event.event == "JobSeen" and event.nodes]
    if len(nodes) < 2 or nodes[-1] == nodes[0]:
        return ()
    return (f"it runs on {', '.join(nodes[-1])}, and began on {', '.join(nodes[0])}",)


def _losses(evidence: Evidence) -> list[float]:
    return [record.loss for record in evidence.branch if record.loss is not None]


def _uniform_loss(evidence: Evidence) -> float | None:
    """The loss of a model that knows nothing; None where the size of the vocabulary is not known here."""
    vocabulary = (evidence.config.model.config or {}).get("vocab_size")
    return math.log(vocabulary) if isinstance(vocabulary, int) and vocabulary > 1 else None


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(f"{number}" for number in numbers[:6]) + (", ..." if len(numbers) > 6 else "")
