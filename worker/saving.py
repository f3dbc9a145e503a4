"""A save: the Trainer writes its own files, ours go beside them, and the whole appears with one rename."""

import inspect
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from worker import world
from worker.attached import Attached, versions
from worker.background import LargeParts, id_of
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
from worker.contract.directive import scale_at
from worker.contract.files import encode, make_folder, publish_message
from worker.contract.loss_history import Record
from worker.contract.manifest import MANIFEST, FileEntry, Manifest
from worker.contract.run_dir import checkpoint_name, checkpoint_step
from worker.ema import Ema
from worker.fits import missing_part, optimizer_facts
from worker.guard import innermost
from worker.leaving import RefusedError
from worker.probe import are_finite, own_weights, probe_loss, probe_samples
from worker.randomness import random_digest
from worker.resume import platform_of
from worker.staging import remove
from worker.wrap import replaced

_LOGGED = 100
"""So many of the newest lines of the Trainer's own log go into trainer_state.json, which would grow with each."""


@dataclass(frozen=True)
class _AsOf:
    """What rank 0 writes about a step beside the Trainer's files, as it was after that step."""

    manifest: Manifest
    """Without its files, and without whether the weights are finite."""
    proof: Proof
    """Without the average's digest."""
    detector: str
    history_bytes: int
    branch: list[Record]


@dataclass(frozen=True)
class _Staged:
    """One rank's files of a save, on their way."""

    attached: Attached
    as_of: _AsOf | None
    """None on other ranks than 0, and until it is taken down."""
    average: Ema | None
    step: int
    folder: Path
    """Of all ranks, in .staging/."""
    digests: dict[Path, str]
    """Those that were made while writing."""
    are_finite: bool = True
    """Whether the weights are, as far as they were looked at."""
    unseen: Sequence[torch.Tensor] = ()
    """Copies of those that were not."""

    @property
    def own(self) -> Path:
        """A folder a rank, so that each knows which files are its own."""
        return self.folder / f"rank-{world.rank()}"


def save_checkpoint(
    attached: Attached, original: Any, model: Any, trial: Any, *, may_be_beside: bool = False, is_asked: bool = False
) -> None:
    """In place of the Trainer's ``_save_checkpoint``: the same files, whole, with ours, and with our retention.

    Every rank calls it at the same step and returns when the checkpoint is published; FencedError, and nothing
    published, where the run is somebody else's by then. Where it ``may_be_beside`` the training, and there is memory
    for that, all return when rank 0 has a copy, and a thread of its own does the rest. ``is_asked``: by a file SAVE.
    """
    began, step, background = time.monotonic(), attached.trainer.state.global_step, attached.background
    attached.heart.beat("saving", step)
    is_beside = background is not None and world.from_rank_zero(lambda: _is_beside(attached, may_be_beside))
    start = attached.context.start
    folder = attached.context.run.staged(start.attempt, start.restart, step)
    make_folder(folder, within=attached.context.run.path)
    with digesting_torch_save() as digests, ExitStack() as stack:
        staged = _Staged(attached, None, attached.average, step, folder, digests)
        stack.enter_context(replaced(attached.trainer, "_get_output_dir", lambda trial: str(staged.own)))
        stack.enter_context(own_names(attached.model))
        state = attached.trainer.state
        stack.enter_context(replaced(state, "log_history", state.log_history[-_LOGGED:]))
        large = None
        if background is not None and attached.segment is not None:
            large = LargeParts(background.memory, digests, is_beside, _changed_by_updates_alone(attached.optimizer))
        if large is not None:
            stack.enter_context(large.noted())
        original(model, trial)
    _go_on(_taken_down(staged, large, is_asked), large, is_beside, began)
    if attached.segment is not None:
        attached.segment.note(save_s=time.monotonic() - began)
    attached.heart.beat("training", step)


def _changed_by_updates_alone(optimizer: torch.optim.Optimizer) -> frozenset[int]:
    """The main memory of an optimizer's state, where nothing but its ``step`` changes it: so it is of torch's own."""
    inner = innermost(optimizer)
    if not type(inner).__module__.startswith("torch.optim."):
        return frozenset()
    parts = [one for of_one in inner.state.values() for one in of_one.values()]
    return frozenset(id_of(one) for one in parts if type(one) is torch.Tensor and one.device.type == "cpu")


def _taken_down(staged: _Staged, large: LargeParts | None, is_asked: bool) -> _Staged:
    """Everything of now: weights and average, looked at where they were not copied, and what goes beside them.

    The probe is computed while the copies are made: neither changes anything.
    """
    average, weights, copies = staged.average, own_weights(staged.attached.model), list[torch.Tensor]()
    if large is not None:
        average = average and large.average_now(average)
        weights, copies = large.parted(weights)
    finite = all(world.of_all_ranks(are_finite(weights)))
    as_of = _as_of_now(staged.attached, is_asked)
    if large is not None:
        large.finish()
    return replace(staged, as_of=as_of, average=average, are_finite=finite, unseen=copies)


def _go_on(staged: _Staged, large: LargeParts | None, is_beside: bool, began: float) -> None:
    """Write and publish what the Trainer did not write: now, or beside the training."""
    attached, background = staged.attached, staged.attached.background
    if is_beside and background is not None and large is not None:
        of_others = _files_of_all({})
        background.start(lambda: _write_beside(staged, large, of_others, began))
        return
    files = _files_of_all(_write(staged))
    if is_beside:
        return
    world.from_rank_zero(lambda: _publish(staged, files))
    attached.saved_step = staged.step
    if background is not None and large is not None and not background.memory.is_ready:
        background.reserve(large.sizes)


def _is_beside(attached: Attached, may_be: bool) -> bool:
    """Whether this save is to be written beside the training, once the one before is done; rank 0 knows."""
    background = attached.background
    assert background is not None
    background.wait()
    shortage = background.shortage()
    if shortage is not None and attached.segment is not None:
        attached.segment.warn(f"checkpoint.background: {shortage}; until there are, saves are plain ones")
    return may_be and background.memory.is_ready


def _write_beside(staged: _Staged, large: LargeParts, of_others: dict[str, FileEntry], began: float) -> float:
    """Rank 0's thread: write the copies, publish; the seconds since ``began``."""
    attached, background = staged.attached, staged.attached.background
    assert background is not None
    try:
        background.memory.copy_waiting()
        large.write()
        _publish(staged, of_others | _write(staged))
    except Exception:  # a successor removes, under a zombie's hands, what that one has not published
        if attached.files is not None:
            attached.files.check()
        raise
    finally:
        background.memory.give_back()
    attached.saved_step = staged.step
    return time.monotonic() - began


def finish_saving(attached: Attached) -> None:
    """Return when no save is under way beside the training any more."""
    if attached.background is not None:
        if attached.background.is_at_work:
            attached.heart.beat("saving", attached.step)
        attached.background.wait()


def hear_of_saves(attached: Attached) -> None:
    """Note how long a save beside the training took that is done; raises what ended it otherwise."""
    took_s = attached.background.result() if attached.background is not None else None
    if took_s is not None and attached.segment is not None:
        attached.segment.note(write_s=took_s)


def _files_of_all(own: dict[str, FileEntry]) -> dict[str, FileEntry]:
    return {name: entry for of_rank in world.of_all_ranks(own) for name, entry in of_rank.items()}


def _write(staged: _Staged) -> dict[str, FileEntry]:
    """Write our files, make this rank's files durable; their sizes and digests."""
    name = checkpoint_name(staged.step)
    digests = staged.digests | _write_ours(staged.attached, staged.as_of, staged.average, staged.own / name)
    return _settle(staged.own, staged.folder, name, digests)


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


def _write_ours(attached: Attached, as_of: _AsOf | None, average: Ema | None, folder: Path) -> dict[Path, str]:
    """Average, detector, proof, and the history byte for byte: rank 0's, to whom the others bring their parts.

    The digests that were made on the way.
    """
    ema_digest = average.save(folder / EMA if as_of else None) if average else None
    if as_of is None:
        return {}
    (folder / DETECTOR).write_text(as_of.detector + "\n", encoding="utf-8")
    publish_message(folder / PROOF, as_of.proof.model_copy(update={"ema_digest": ema_digest}))
    history = folder / attached.context.run.history.name
    return {history: copy_history(attached.context.run.history, as_of.history_bytes, history)}


def _as_of_now(attached: Attached, is_asked: bool) -> _AsOf | None:
    """Everything that is of this very step; every rank calls it together, rank 0 gets it."""
    num_samples = probe_samples(attached.trainer)
    probe = probe_loss(attached.trainer, num_samples)
    rng_digests = tuple(world.of_all_ranks(random_digest()))
    if attached.segment is None:
        return None
    proof = Proof(
        rng_digests=rng_digests,
        next_samples=next_samples(attached, attached.trainer.state.global_step),
        ema_digest=None,
        optimizer_facts=optimizer_facts(innermost(attached.optimizer)),
        platform=platform_of(attached.trainer.args.device),
    )
    return _AsOf(
        manifest=_manifest(attached, attached.segment.number, probe, num_samples, is_asked),
        proof=proof,
        detector=encode(attached.detector.state()),
        history_bytes=attached.segment.history_bytes,
        branch=attached.segment.branch(),
    )


def _manifest(attached: Attached, segment: int, probe: float | None, num_samples: int, is_asked: bool) -> Manifest:
    """All but its files, and whether the weights are finite."""
    trainer, context = attached.trainer, attached.context
    step = trainer.state.global_step
    return Manifest(
        step=step,
        attempt=context.start.attempt,
        segment=segment,
        time=time.time(),
        epoch=float(trainer.state.epoch or 0.0),
        batches_into_epoch=attached.order.batches_behind(step),
        samples_seen=step * attached.order.global_batch,
        world_size=world.world_size(),
        batch_size=trainer.args.train_batch_size,
        gradient_accumulation=trainer.args.gradient_accumulation_steps,
        max_steps=trainer.state.max_steps,
        seed=trainer.args.seed,
        config_digest=context.config_digest,
        data_digest=context.data_digest,
        lr_scale=scale_at(context.directive, step),
        skip_batches=context.directive.skip_batches,
        weights_finite=None,
        probe_loss=probe,
        probe_samples=num_samples,
        optimizer_steps=attached.optimizer_steps,
        versions=versions(),
        files={},
        base=attached.base,
        asked=is_asked,
    )


def _publish(staged: _Staged, files: dict[str, FileEntry]) -> None:
    """Write the manifest, rename the checkpoint into its place while the claim stands, let the old ones go."""
    attached, as_of = staged.attached, staged.as_of
    assert as_of is not None
    assert attached.files is not None
    run, start, step = attached.context.run, attached.context.start, staged.step
    folder = staged.folder / checkpoint_name(step)
    if missing := missing_part(files):
        raise RefusedError(f"{checkpoint_name(step)} was saved without {missing}: no resume could begin from it")
    sync_folders(folder)
    finite = staged.are_finite and are_finite(staged.unseen)
    publish_message(folder / MANIFEST, as_of.manifest.model_copy(update={"files": files, "weights_finite": finite}))
    attached.files.check()
    publish_folder(folder, run.checkpoint(step), lambda: bad_checkpoint_place(run, start.attempt, step))
    remove(staged.folder)
    directive = attached.files.directive
    named = checkpoint_step(directive.resume_from) if directive.resume_from else None
    wanted = {*directive.pinned, *([] if named is None else [named])}
    retire(run, start.attempt, start.restart, attached.context.config.checkpoint, as_of.branch, wanted)
