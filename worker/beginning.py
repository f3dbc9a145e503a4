"""Before the first step: restore what the Trainer does not, set the rates, and prove that all of it is there."""

import json
import logging
from collections.abc import Collection, Sequence
from functools import partial

from worker import world
from worker.attached import Attached, versions
from worker.checkpoints import DETECTOR, EMA
from worker.contract.directive import Directive, scale_at
from worker.contract.loss_history import LeftOutBatch, Probe
from worker.contract.loss_history import Start as SegmentStart
from worker.contract.run_dir import checkpoint_step
from worker.ema import Ema
from worker.guard import innermost
from worker.leaving import RefusedError
from worker.probe import probe_loss, weights_are_finite
from worker.randomness import random_digest
from worker.rates import hold_rates
from worker.resume import Chosen, platform_of, prove, prove_probe, refuse_changes, settings_of
from worker.sources import joined

NEXT_SAMPLES = 8
_log = logging.getLogger(__name__)


def begin(attached: Attached, peaks: Sequence[float]) -> SegmentStart:
    """Make the Trainer, just loaded, ready for its next step; RefusedError or ProofError where it is not.

    ``peaks`` are the configured rates of the optimizer's groups. Where the directive says so, the moments of a
    checkpoint from before the rollback stay behind.
    """
    trainer, context = attached.trainer, attached.context
    done = trainer.state.global_step
    scale = partial(applied_scale, context.directive, begin=done)
    rate_after = hold_rates(attached.optimizer, trainer.lr_scheduler, peaks, scale)
    if context.config.ema is not None:
        attached.average = Ema(attached.model, context.config.ema)
    if context.chosen is not None:
        _restore(attached, context.chosen)
    start = _stated(attached, rate_after(done))
    if context.chosen is not None:
        _prove(attached, context.chosen, start)
    prove("learning rate", start.lr_expected, start.lr)
    if context.directive.reset_moments and done <= _reset_step(context.directive):
        innermost(attached.optimizer).state.clear()
    return start


def applied_scale(directive: Directive, step: int, begin: int) -> float:
    """The directive's scale for the update that makes ``step``, in a start that begins after ``begin`` steps.

    It warms up again from the step that the rollback went to: an interruption on the way does not begin it anew.
    """
    scale = scale_at(directive, step)
    if directive.rewarm_steps is None:
        return scale
    return scale * min(1.0, (step - min(begin, _reset_step(directive))) / directive.rewarm_steps)


def _reset_step(directive: Directive) -> int:
    """The step whose moments are the last that were not dropped; 0 where none are."""
    if directive.reset_from is not None:
        return directive.reset_from
    return checkpoint_step(directive.resume_from or "") or 0


def _restore(attached: Attached, chosen: Chosen) -> None:
    """Give the detector and the average what they had."""
    detector = chosen.folder / DETECTOR
    if detector.exists():
        is_the_same = attached.detector.restore(json.loads(detector.read_text(encoding="utf-8")))
        if not is_the_same and attached.segment is not None:
            attached.segment.warn("the spike settings are not the checkpoint's: the detector begins anew")
    if attached.average is None:
        return
    average = chosen.folder / EMA
    if chosen.manifest.adopted and not average.exists():
        return  # it was made of the weights a moment ago, and begins there
    if not average.exists():
        raise RefusedError(f"{average} is missing: the average would begin from nothing", what="ema", expected=EMA)
    attached.average.load(average)


def _stated(attached: Attached, lr_expected: float) -> SegmentStart:
    trainer, chosen = attached.trainer, attached.context.chosen
    done = trainer.state.global_step
    return SegmentStart(
        checkpoint=chosen.folder.name if chosen else None,
        digest=chosen.digest if chosen else None,
        max_steps=trainer.state.max_steps,
        lr=float(attached.optimizer.param_groups[0]["lr"]),
        lr_expected=lr_expected,
        optimizer_steps=attached.optimizer_steps,
        rng_digests=_rng_digests(chosen),
        next_samples=next_samples(attached, done),
        ema_digest=attached.average.digest() if attached.average else None,
        probe=Probe(
            expected=chosen.manifest.probe_loss if chosen else None,
            found=probe_loss(trainer, chosen.manifest.probe_samples if chosen else None),
        ),
        passed_over=chosen.passed_over if chosen else (),
        versions=versions(),
        skip_batches=attached.context.directive.skip_batches,
        left_out=newly_left_out(attached) if attached.segment is not None else (),
    )


def newly_left_out(attached: Attached) -> tuple[LeftOutBatch, ...]:
    """The batches that this start leaves out and its checkpoint did not know of yet, with the text in them."""
    chosen, order, locate = attached.context.chosen, attached.order, attached.context.locate
    known = chosen.manifest.skip_batches if chosen else ()
    named = {(one.epoch, batch) for one in known for batch in range(one.first, one.first + one.count)}
    samples = {place: order.samples_in(*place) for place in order.left_out() if place not in named}
    if not samples:
        return ()
    if locate is None:
        return tuple(
            LeftOutBatch(epoch=epoch, batch=batch, samples=tuple(own)) for (epoch, batch), own in samples.items()
        )
    indices = [index for own in samples.values() for index in own]
    rows = dict(zip(indices, locate(indices), strict=True))
    return tuple(
        LeftOutBatch(epoch=epoch, batch=batch, rows=joined([row for index in own for row in rows[index]]))
        for (epoch, batch), own in samples.items()
    )


def _rng_digests(chosen: Chosen | None) -> tuple[str, ...]:
    """Of each rank: what the checkpoint holds (the Trainer restores it with the first batch), or what is now."""
    if chosen is not None and chosen.proof is not None:
        return chosen.proof.rng_digests
    return tuple(world.of_all_ranks(random_digest()))


def next_samples(attached: Attached, done: int) -> tuple[int, ...]:
    """The first samples that are trained on after ``done`` steps."""
    order = attached.order
    steps = range(done + 1, done + 2 + NEXT_SAMPLES // order.global_batch)
    return tuple(sample for step in steps for sample in order.samples_of(step))[:NEXT_SAMPLES]


def _prove(attached: Attached, chosen: Chosen, start: SegmentStart) -> None:
    trainer, manifest = attached.trainer, chosen.manifest
    refuse_changes(settings_of(manifest), attached.settings)
    if attached.context.is_altered:
        return
    prove("step", manifest.step, trainer.state.global_step)
    prove_scaler(getattr(trainer.accelerator, "scaler", None), manifest.files)
    if manifest.adopted:
        _prove_adopted(attached, start)
    else:
        _prove_ours(attached, chosen, start)


def _prove_ours(attached: Attached, chosen: Chosen, start: SegmentStart) -> None:
    trainer, manifest = attached.trainer, chosen.manifest
    prove("optimizer step count", manifest.optimizer_steps, start.optimizer_steps)
    same_platform = False
    if chosen.proof is not None:
        same_platform = chosen.proof.platform == platform_of(trainer.args.device)
        if attached.average is not None and chosen.proof.ema_digest is not None:
            prove("EMA", chosen.proof.ema_digest, start.ema_digest)
        if manifest.skip_batches == attached.context.directive.skip_batches:
            prove("next samples", chosen.proof.next_samples, start.next_samples)
    for found in world.of_all_ranks(start.probe.found):
        prove_probe(manifest.probe_loss, found, same_platform)
    if manifest.world_size != world.world_size() or not same_platform:
        _log.warning("resumed on other hardware or another number of ranks: the same samples, but not bitwise")


NOT_PROVEN = (
    "the loss of its weights (there is no probe), the random states of each rank, and which samples it has seen: the "
    "data go on in this run's own order"
)
"""What no resume from an adopted checkpoint can prove, for a person."""


def _prove_adopted(attached: Attached, start: SegmentStart) -> None:
    """What can be seen of a checkpoint that another program made, and a word about what cannot."""
    prove("weights are finite", True, all(world.of_all_ranks(weights_are_finite(attached.model))))
    prove("optimizer has a state", True, start.optimizer_steps > 0)
    if attached.segment is not None:
        attached.segment.warn(f"{start.checkpoint} was adopted; not proven: {NOT_PROVEN}")


def prove_scaler(scaler: object, files: Collection[str]) -> None:
    """ProofError where there is a loss scaler (fp16) and the checkpoint has no state of it: it would begin anew."""
    if scaler is not None:
        prove("scaler.pt in the checkpoint", True, "scaler.pt" in files)


def prove_random_states(chosen: Chosen | None) -> None:
    """ProofError where this rank's random states are not those of the checkpoint; other world sizes have none."""
    if chosen is None or chosen.proof is None or chosen.manifest.world_size != world.world_size():
        return
    prove("random states", chosen.proof.rng_digests[world.rank()], random_digest())
