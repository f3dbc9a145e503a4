"""A save: the Trainer writes its own files, ours go beside them, and the whole appears with one rename."""

import inspect
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from worker import world
from worker.attached import Attached, versions
from worker.beginning import next_samples
from worker.checkpoints import (
    DETECTOR,
    EMA,
    PROOF,
    Proof,
    bad_checkpoint_place,
    copy_history,
    digesting_torch_save,
    file_entries,
    make_durable,
    move_into,
    publish_folder,
    retire,
    sync_folders,
)
from worker.contract.config import config_digest
from worker.contract.directive import scale_at
from worker.contract.files import encode, publish_message
from worker.contract.manifest import MANIFEST, FileEntry, Manifest
from worker.contract.run_dir import checkpoint_name, checkpoint_step
from worker.fits import optimizer_facts
from worker.guard import innermost
from worker.probe import probe_loss, weights_are_finite
from worker.randomness import random_digest
from worker.resume import platform_of
from worker.wrap import replaced


def save_checkpoint(attached: Attached, original: Any, model: Any, trial: Any) -> None:
    """In place of the Trainer's ``_save_checkpoint``: the same files, whole, with ours, and with our retention.

    Every rank calls it at the same step and returns when the checkpoint is published. FencedError, and nothing
    published, where the run is somebody else's by then.
    """
    began = time.monotonic()
    trainer, context = attached.trainer, attached.context
    step = trainer.state.global_step
    attached.heart.beat("saving", step)
    staged = context.run.staged(context.start.attempt, context.start.restart, step)
    probe = probe_loss(trainer)
    are_finite = weights_are_finite(attached.model)
    rng_digests = tuple(world.of_all_ranks(random_digest()))
    own = staged / f"rank-{world.rank()}"  # a folder a rank, so that each knows which files are its own
    with (
        digesting_torch_save() as digests,
        replaced(trainer, "_get_output_dir", lambda trial: str(own)),
        own_names(attached.model),
    ):
        original(model, trial)
    digests |= _write_ours(attached, own / checkpoint_name(step), rng_digests)
    entries = _settle(own, staged, checkpoint_name(step), digests)
    files = {name: entry for of_rank in world.of_all_ranks(entries) for name, entry in of_rank.items()}
    world.from_rank_zero(lambda: _publish(attached, staged, lambda: _manifest(attached, probe, are_finite, files)))
    attached.saved_step = step
    if attached.segment is not None:
        attached.segment.note(save_s=time.monotonic() - began)
    attached.heart.beat("training", step)


def own_names(model: Any) -> AbstractContextManager[None]:
    """Within, the model is saved under the names that it has in memory, which are what a resume loads by.

    transformers would give mixtures of experts, among others, the names that they have on the hub.
    """
    if "save_original_format" not in inspect.signature(getattr(model, "save_pretrained", own_names)).parameters:
        return nullcontext()
    return replaced(model, "save_pretrained", partial(model.save_pretrained, save_original_format=False))


def _settle(own: Path, staged: Path, name: str, digests: Mapping[Path, str]) -> dict[str, FileEntry]:
    """Make this rank's files durable and put them beside those of the others; their sizes and digests."""
    make_durable(own)  # by who wrote them: a fsync on one host does not flush what another wrote
    entries = file_entries(own / name, digests)
    move_into(own / name, staged / name)
    shutil.rmtree(own, ignore_errors=True)
    return entries


def _write_ours(attached: Attached, folder: Path, rng_digests: tuple[str, ...]) -> dict[Path, str]:
    """Average, detector, proof, and the history byte for byte: rank 0's, to whom the others bring their parts.

    The digests that were made on the way.
    """
    segment = attached.segment
    ema_digest = attached.average.save(folder / EMA if segment else None) if attached.average else None
    if segment is None:
        return {}
    (folder / DETECTOR).write_text(encode(attached.detector.state()) + "\n", encoding="utf-8")
    proof = Proof(
        rng_digests=rng_digests,
        next_samples=next_samples(attached, attached.trainer.state.global_step),
        ema_digest=ema_digest,
        optimizer_facts=optimizer_facts(innermost(attached.optimizer)),
        platform=platform_of(attached.trainer.args.device),
    )
    publish_message(folder / PROOF, proof)
    history = folder / attached.context.run.history.name
    return {history: copy_history(attached.context.run.history, segment.history_bytes, history)}


def _manifest(attached: Attached, probe: float | None, are_finite: bool, files: dict[str, FileEntry]) -> Manifest:
    assert attached.segment is not None
    trainer, context = attached.trainer, attached.context
    step = trainer.state.global_step
    return Manifest(
        step=step,
        attempt=context.start.attempt,
        segment=attached.segment.number,
        time=time.time(),
        epoch=float(trainer.state.epoch or 0.0),
        batches_into_epoch=attached.order.batches_behind(step),
        samples_seen=step * attached.order.global_batch,
        world_size=world.world_size(),
        batch_size=trainer.args.train_batch_size,
        gradient_accumulation=trainer.args.gradient_accumulation_steps,
        max_steps=trainer.state.max_steps,
        seed=trainer.args.seed,
        config_digest=config_digest(context.config),
        data_digest=context.data_digest,
        lr_scale=scale_at(context.directive, step),
        skip_batches=context.directive.skip_batches,
        weights_finite=are_finite,
        probe_loss=probe,
        optimizer_steps=attached.optimizer_steps,
        versions=versions(),
        files=files,
        base=attached.base,
    )


def _publish(attached: Attached, staged: Path, manifest: Callable[[], Manifest]) -> None:
    """Write the manifest, rename the checkpoint into its place while the claim stands, let the old ones go."""
    assert attached.segment is not None
    assert attached.files is not None
    run, start, step = attached.context.run, attached.context.start, attached.trainer.state.global_step
    folder = staged / checkpoint_name(step)
    sync_folders(folder)
    publish_message(folder / MANIFEST, manifest())
    attached.files.check()
    publish_folder(folder, run.checkpoint(step), lambda: bad_checkpoint_place(run, start.attempt, step))
    staged.rmdir()
    directive = attached.files.directive
    named = checkpoint_step(directive.resume_from) if directive.resume_from else None
    wanted = {*directive.pinned, *([] if named is None else [named])}
    retire(run, start.attempt, start.restart, attached.context.config.checkpoint, attached.segment.branch(), wanted)
