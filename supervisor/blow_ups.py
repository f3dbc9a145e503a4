"""Symptoms of a verdict: each tests one incident, and says with its figures what speaks for it; nothing, for none.

Pure. What is usual is what the branch was like before the onset.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import isclose
from typing import Final

from supervisor.batches import as_skips, in_words
from supervisor.evidence import Incident, is_unlearned, median_of
from supervisor.rate_rules import rate_rule, rates_from_scratch, shares_of_warmup
from supervisor.recipe_facts import Facts
from supervisor.spike_policy import SOON_AFTER_RESUME
from worker.contract.loss_history import BatchPosition, Record
from worker.contract.recipe_config import STARTING_RATES
from worker.contract.words import count

Says = Sequence[str]

_CALM_NORM: Final = 3.0
_CALM_LOSS: Final = 1.3
"""Times what is usual: up to there a step is calm."""
_HUNDREDS: Final = 100.0
_FAR_NORM: Final = 10.0
"""A gradient norm in the hundreds, and so many times the usual, is a sign by itself."""
_ONE_LEVEL: Final = 1.5
"""Losses within this factor are one level."""
_AT_ONCE: Final = 2
"""Steps after a resume within which only the resume itself is new."""
_FIRST_STEPS: Final = 20
_SOME_STEPS: Final = _FIRST_STEPS // 2
"""So many a rate that is far too high does not get through."""
_LATE_STEPS: Final = 1_000
_LATE_SHARE: Final = 0.2
_SOON_AFTER_WARMUP: Final = (50, 0.05)
"""Steps, or a share of all."""
_OF_ADAM: Final = ("adamw", "adam")
_ROLLED_BACK: Final = frozenset({"spike", "divergence", "nonfinite", "rollback"})


# -- the data ----------------------------------------------------------------------------------------------------------


def at_the_same_batch(incident: Incident) -> Says:
    """An earlier verdict began at the same batch, or beside it: in another epoch of data that are not shuffled, or at
    another rate. Where it comes at the same step, that tells only of a rate that is usual, or went well for a while."""
    here = _onset_batch(incident)
    if here is None or _was_creeping(incident):
        return ()
    for other in reversed(incident.earlier):
        there = _onset_batch(other)
        if there is None or other.is_nonfinite != incident.is_nonfinite or abs(here.batch - there.batch) > 1:
            continue
        is_other_epoch = here.epoch != there.epoch
        if _is_same_rate(incident, other) if not is_other_epoch else incident.evidence.config.data.shuffle:
            continue  # the same steps once more at the same rate end the same, whatever the cause; or they are others
        is_other_step = incident.onset - here.batch != other.onset - there.batch
        if not is_other_step and len(_went_well(incident)) < _SOME_STEPS and not _has_usual_rate(incident):
            continue
        return (
            f"{_began(other, there)}, and again {_began(incident, here)}",
            "another epoch, the same batch" if is_other_epoch else "the rate was another one, the batch was not",
        )
    return ()


def nothing_learned(incident: Incident) -> Says:
    """Step after step without a loss, and with a gradient of exactly zero: no label of their batches is left."""
    if not incident.is_nonfinite or not all(map(is_unlearned, incident.streak)):
        return ()
    onset, last = incident.onset, incident.verdict.step
    return (f"no finite loss and a gradient norm of 0 from step {onset} to {last}: nothing was learned",)


def _went_well(incident: Incident) -> Sequence[Record]:
    """The steps before the onset at its rate or a higher one."""
    lr = incident.lr
    return [record for record in incident.before if lr is not None and record.lr is not None and record.lr >= lr]


def _has_usual_rate(incident: Incident) -> bool:
    """Whether the peak is known not to be above what the optimizer takes."""
    training = incident.evidence.config.training
    is_known = training.entrypoint is None and training.optimizer.name in STARTING_RATES and incident.peak is not None
    return is_known and not above_rate_of_optimizer(incident) and not above_rate_of_batch(incident)


def _onset_batch(incident: Incident) -> BatchPosition | None:
    return incident.streak[0].data


def _began(incident: Incident, batch: BatchPosition) -> str:
    return f"at step {incident.onset} (batch {batch.batch} of epoch {batch.epoch}, rate {_number(incident.lr)})"


def _is_same_rate(one: Incident, other: Incident) -> bool:
    return one.lr == other.lr or (
        one.lr is not None and other.lr is not None and isclose(one.lr, other.lr, rel_tol=0.01)
    )


def suddenly_infinite(incident: Incident) -> Says:
    """The loss itself is not finite, from one step to the next, after steps that were calm; not under fp16."""
    first = incident.streak[0]
    if not incident.is_nonfinite or "loss" not in first.nonfinite or len(incident.usual) < _SOME_STEPS:
        return ()
    if incident.evidence.config.training.precision == "fp16" or _was_creeping(incident):
        return ()
    last = incident.before[-1]
    batch = f", on batch {first.data.batch} of epoch {first.data.epoch}" if first.data is not None else ""
    return (
        f"the loss is {first.nonfinite['loss']} at step {first.step}{batch}; a step before it was {_number(last.loss)}",
        f"gradient norm {_number(last.grad_norm)} then, {_number(incident.usual_norm)} as a rule: nothing announced it",
    )


def jumped(incident: Incident) -> Says:
    """From one step to the next the loss is on another level and stays there, after calm steps, and the gradients grow
    little: so it is where the batches are of another kind; a rate that is too high goes on growing."""
    losses = [record.loss for record in incident.streak]
    known = [loss for loss in losses if loss is not None and loss > 0]
    usual, norm = incident.usual_loss, incident.usual_norm
    if incident.is_nonfinite or len(known) < len(losses) or usual is None or norm is None or _was_creeping(incident):
        return ()
    highest = max((record.grad_norm for record in incident.streak if record.grad_norm is not None), default=None)
    if highest is None or highest >= _FAR_NORM * norm or max(known) > _ONE_LEVEL * min(known):
        return ()
    batches = in_words(as_skips(incident.batches))
    return (
        f"loss {_number(known[0])} at step {incident.onset}, {_number(incident.before[-1].loss)} a step before, and no "
        f"higher than {_number(max(known))} since",
        f"gradient norm {_number(highest)} at most, {_number(norm)} as a rule",
        *((f"trained on batches {batches}",) if batches else ()),
    )


# -- a node ------------------------------------------------------------------------------------------------------------


def on_one_rank(incident: Incident) -> Says:
    """One rank of several alone had numbers that are not finite."""
    ranks = {rank for record in incident.streak for rank in record.nonfinite_ranks or ()}
    world = incident.evidence.config.cluster.world_size
    if not incident.is_nonfinite or len(ranks) != 1 or world < 2:
        return ()
    struck = [event for event in incident.evidence.events if event.event == "NodeStruck"]
    named = next((e.node for e in reversed(struck) if e.attempt == incident.verdict.attempt), None)
    host = f" (on {named})" if named else ""
    return (f"of {world} ranks only rank {ranks.pop()}{host} had numbers that are not finite",)


# -- the restore -------------------------------------------------------------------------------------------------------


def after_another_probe(incident: Incident) -> Says:
    """Soon after a resume whose probe did not come out the same."""
    start = incident.begun.start if incident.begun is not None else None
    if incident.begun is None or start is None or start.checkpoint is None:
        return ()
    probe, steps = start.probe, incident.onset - incident.begun.step
    if steps >= SOON_AFTER_RESUME or None in (probe.expected, probe.found) or probe.expected == probe.found:
        return ()
    found = f"its probe loss was {_number(probe.expected)} and came out as {_number(probe.found)}"
    return (f"{count(steps, 'step')} after the resume from {start.checkpoint}: {found}",)


def at_once_after_resume(incident: Incident) -> Says:
    """With the first steps after a resume that was no rollback: nothing else was new."""
    begun, place = incident.begun, incident.resumed_from
    if begun is None or place is None or incident.onset - begun.step > _AT_ONCE:
        return ()
    if incident.cause_of_attempt in _ROLLED_BACK:
        return ()
    before = [record for record in incident.before if record.step < begun.step]
    last = f"the loss before the interruption was {_number(median_of(r.loss for r in before[-5:]))}, then"
    why = f" ({incident.cause_of_attempt.replace('_', ' ')})" if incident.cause_of_attempt else ""
    return (
        f"step {incident.onset} is step {incident.onset - begun.step + 1} after the resume from {place}{why}",
        f"{last} {_number(incident.streak[0].loss)}",
        *_other_versions(incident),
    )


def _other_versions(incident: Incident) -> Says:
    """What software changed with the segment of the verdict."""
    starts = [record for record in incident.evidence.records if record.start is not None]
    before = [record for record in starts if incident.begun is not None and record.segment < incident.begun.segment]
    if not before or incident.begun is None or incident.begun.start is None or before[-1].start is None:
        return ()
    old, new = before[-1].start.versions, incident.begun.start.versions
    changed = [f"{name} {old[name]} became {new[name]}" for name in new if name in old and old[name] != new[name]]
    return (f"the software changed: {', '.join(changed)}",) if changed else ()


# -- the beginning -----------------------------------------------------------------------------------------------------


def before_any_update(incident: Incident) -> Says:
    """Not finite, or wildly high, before any update was applied: it is the weights or the input."""
    is_first = incident.resumed_from is None and not any(record.lr for record in incident.before)
    if not is_first or incident.failed.step > 2 or not incident.is_nonfinite:
        return ()
    return (f"step {incident.failed.step} from scratch: {_named(incident.failed)}, and no weight had moved yet",)


def within_first_steps(incident: Incident) -> Says:
    """Not finite within the first steps from scratch, after updates."""
    if incident.resumed_from is not None or incident.onset > _FIRST_STEPS or not incident.is_nonfinite:
        return ()
    if before_any_update(incident):
        return ()
    failed = incident.failed
    return (f"step {failed.step} from scratch, at rate {_number(failed.lr)}: {_named(failed)}", *_left_before(incident))


def after_short_warmup(incident: Incident) -> Says:
    """At the full rate, soon after a warmup that is shorter than is known to do."""
    warmup, total = incident.evidence.warmup_steps, incident.evidence.max_steps
    low, high = shares_of_warmup(incident.evidence.global_batch)
    if warmup is None or total is None or warmup >= low * total:
        return ()
    few, share = _SOON_AFTER_WARMUP
    if incident.onset > warmup + max(few, share * total):
        return ()
    return (
        f"the warmup is {warmup:g} of {total} steps ({warmup / total:.1%}; {low:.1%} to {high:.1%} are usual)",
        f"it began at step {incident.onset}, at rate {_number(incident.lr)}",
    )


# -- rate and gradient -------------------------------------------------------------------------------------------------


def above_rate_of_optimizer(incident: Incident) -> Says:
    """At a peak above what this optimizer takes: as after a change from AdamW, whose rate it kept."""
    config, peak = incident.evidence.config, incident.peak
    name = config.training.optimizer.name
    rates = rates_from_scratch(name)
    if rates is None or peak is None or config.training.entrypoint is not None:
        return ()
    if config.model.path is not None:
        return _above_known_rates(incident, peak) if name not in _OF_ADAM else ()
    if peak <= rates[1]:
        return ()
    much = f"{rates[1]:g} is already much for a model from scratch"
    return (f"{name} with a peak of {_number(peak)}, where {much}; {_number(incident.lr)} was applied",)


def above_rate_of_batch(incident: Incident) -> Says:
    """AdamW at a peak above what is known for the global batch, the size of the model, or adapters."""
    config, peak = incident.evidence.config, incident.peak
    if config.training.optimizer.name not in _OF_ADAM or config.model.path is None or peak is None:
        return ()
    return _above_known_rates(incident, peak)


def _above_known_rates(incident: Incident, peak: float) -> Says:
    """What ``check`` would have said of this peak, where it is too high."""
    config = incident.evidence.config
    optimizer = config.training.optimizer.model_copy(update={"learning_rate": peak})
    at_peak = config.model_copy(update={"training": config.training.model_copy(update={"optimizer": optimizer})})
    remarks = [one for one in rate_rule(Facts(at_peak)) if one.level == "warning" and "above" in one.message]
    name = config.training.optimizer.name
    return tuple(f"{name}: {one.message}: {one.evidence}; {_number(incident.lr)} was applied" for one in remarks)


def norm_left_first(incident: Incident) -> Says:
    """A gradient norm in the hundreds while the loss was still calm."""
    loss, norm = incident.usual_loss, incident.usual_norm
    if loss is None or norm is None:
        return ()
    limit = max(_HUNDREDS, _FAR_NORM * norm)
    odd = [r for r in incident.before[-_FIRST_STEPS:] if r.grad_norm is not None and r.grad_norm >= limit]
    calm = [r for r in odd if r.loss is not None and r.loss <= _CALM_LOSS * loss]
    if not calm:
        return ()
    first = calm[0]
    clip = incident.evidence.config.training.max_grad_norm
    return (
        f"gradient norm {_number(first.grad_norm)} at step {first.step}, {_number(norm)} as a rule; "
        f"the loss left its band {count(incident.onset - first.step, 'step')} later",
        "clipping is off" if clip is None else f"clipped to {clip:g}",
    )


def late_and_growing(incident: Incident) -> Says:
    """Not finite long after the beginning, while loss or gradients were growing, or by the gradient alone."""
    total = incident.evidence.max_steps
    is_late = incident.onset >= _LATE_STEPS or (total is not None and incident.onset >= _LATE_SHARE * total)
    is_gradient = "loss" not in incident.failed.nonfinite
    if not incident.is_nonfinite or not is_late or not (_was_creeping(incident) or is_gradient):
        return ()
    last = incident.before[-1:]
    grown = [
        f"a step before: gradient norm {_number(one.grad_norm)}, {_number(incident.usual_norm)} as a rule; "
        f"loss {_number(one.loss)}, {_number(incident.usual_loss)} as a rule"
        for one in last
    ]
    return (f"{_named(incident.failed)} at step {incident.failed.step}", *_left_before(incident), *grown)


def rose(incident: Incident) -> Says:
    """The loss left its band: whatever else, a lower rate makes the updates smaller."""
    if incident.is_nonfinite:
        return ()
    top = max((r.loss for r in incident.streak if r.loss is not None), default=None)
    level = incident.verdict.level if incident.verdict.level is not None else incident.usual_loss
    times = f", {top / level:.3g} x the level {_number(level)}" if top is not None and level else ""
    peak = incident.configured_rate
    share = f" ({incident.lr / peak:.0%} of the configured peak)" if incident.lr is not None and peak else ""
    crept = ("gradient norm or loss were growing before",) if _was_creeping(incident) else ()
    return (
        f"loss {_number(top)} between steps {incident.onset} and {incident.verdict.step}{times}",
        f"at rate {_number(incident.lr)}{share}, gradient norm {_peak_norm(incident)} within the streak, "
        f"{_number(incident.usual_norm)} as a rule",
        *crept,
    )


def not_finite(incident: Incident) -> Says:
    """Numbers that are not finite, and nothing that says more."""
    if not incident.is_nonfinite:
        return ()
    failed = incident.failed
    return (f"{_named(failed)} at step {failed.step}, at rate {_number(failed.lr)}", *_left_before(incident))


# -- what several of them ask ------------------------------------------------------------------------------------------


def _was_creeping(incident: Incident) -> bool:
    """Whether loss or gradient norm had left the usual within the last steps before the onset, or grew step by step."""
    last = incident.before[-3:]
    loss, norm = incident.usual_loss, incident.usual_norm
    high = any(norm is not None and r.grad_norm is not None and r.grad_norm > _CALM_NORM * norm for r in last)
    risen = any(loss is not None and r.loss is not None and r.loss > _CALM_LOSS * loss for r in last)
    norms = [r.grad_norm for r in incident.before[-4:] if r.grad_norm is not None]
    grows = len(norms) == 4 and all(later > earlier for earlier, later in pairwise(norms)) and norms[-1] > 2 * norms[0]
    return high or risen or grows


def _left_before(incident: Incident) -> Says:
    """Where the loss left its level before its numbers stopped being finite."""
    is_earlier = incident.onset < incident.failed.step
    return (f"the loss left its level before, from step {incident.onset}",) if is_earlier else ()


def _named(record: Record) -> str:
    """``loss inf, gradient norm nan``."""
    told = {"grad_norm": "gradient norm", "loss_scale": "loss scale", "lr": "rate"}
    named = [f"{told.get(name, name)} {value}" for name, value in record.nonfinite.items()]
    return ", ".join(named) or "a gradient that is not finite"


def _peak_norm(incident: Incident) -> str:
    return _number(max((r.grad_norm for r in incident.streak if r.grad_norm is not None), default=None))


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
