"""Where a start begins, and the proof that it does: choose, verify, restore, compare.

A bad checkpoint is passed over for the next older one, with its reason.  Nothing that was asked for by name is ever
silently replaced by a fresh start.
"""

import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch.optim import Optimizer

from worker.checkpoints import PROOF, Proof
from worker.contract.digest import digest_of
from worker.contract.exit_report import tells_of_disk
from worker.contract.files import UnusableFileError, read_message
from worker.contract.loss_history import PassedOver
from worker.contract.manifest import MANIFEST, Manifest, UnusableCheckpointError, complete_manifest
from worker.contract.run_dir import RunDir, checkpoint_name, checkpoint_step
from worker.fits import missing_part
from worker.guard import innermost
from worker.leaving import ProofError, RefusedError

PROBE_TOLERANCE = 5e-3
"""Relative difference of the probe loss that other kernels may make; on the same ones it must be equal to the bit."""

_AGAIN_AFTER_S = (1.0, 5.0, 20.0)
Part = TypeVar("Part")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chosen:
    """The checkpoint that a start begins from, verified."""

    folder: Path
    manifest: Manifest
    proof: Proof | None
    digest: str
    passed_over: tuple[PassedOver, ...]


def choose(run: RunDir, attempt: int, resume_from: str | None, sizes_only: bool) -> Chosen | None:
    """The newest checkpoint of this very attempt, else ``resume_from``; None is a start from scratch.

    Passes over what is unusable for the next older one, never for a newer one. RefusedError where none is left of
    what was named.
    """
    steps = run.checkpoint_steps()
    newest, unusable = _newest_of_attempt(run, attempt, steps)
    named = newest if newest is not None else _named_step(resume_from)
    if named is None:
        return None
    passed_over = [_passed_over(step, why) for step, why in unusable if step > named]
    for step in reversed([step for step in steps if step <= named]):
        folder = run.checkpoint(step)
        try:
            manifest, proof, digest = _patiently(partial(_verified, folder, sizes_only))
        except (UnusableCheckpointError, UnusableFileError) as error:
            passed_over.append(_passed_over(step, str(error)))
            continue
        return Chosen(folder, manifest, proof, digest, tuple(passed_over))
    raise RefusedError(
        f"{checkpoint_name(named)} was to be resumed from, and neither it nor an older one is usable"
        + "".join(f"; {one.checkpoint}: {one.reason}" for one in passed_over),
        what="checkpoint",
        expected=checkpoint_name(named),
    )


def _named_step(resume_from: str | None) -> int | None:
    if resume_from is None:
        return None
    step = checkpoint_step(resume_from)
    if step is None:
        raise RefusedError(f"directive.json: resume_from: {resume_from!r} is no checkpoint's name", what="checkpoint")
    return step


def _newest_of_attempt(run: RunDir, attempt: int, steps: Sequence[int]) -> tuple[int | None, list[tuple[int, str]]]:
    """The newest complete checkpoint of this attempt, and the unusable ones that were looked at."""
    unusable = []
    for step in reversed(steps):
        try:
            manifest = _patiently(partial(complete_manifest, run.checkpoint(step)))
        except UnusableCheckpointError as error:
            unusable.append((step, str(error)))
            continue
        if manifest.attempt == attempt:
            return step, unusable
    return None, unusable


def _patiently(read: Callable[[], Part]) -> Part:
    """What ``read`` returns; again, after a while, where the disk did not answer: that costs no checkpoint."""
    for pause_s in _AGAIN_AFTER_S:
        try:
            return read()
        except (UnusableCheckpointError, UnusableFileError) as error:
            if not tells_of_disk(str(error)):
                raise
            _log.warning("%s; read again in %.0f s", error, pause_s)
        time.sleep(pause_s)
    return read()


def _verified(folder: Path, sizes_only: bool) -> tuple[Manifest, Proof | None, str]:
    manifest = verified_manifest(folder, sizes_only)
    return manifest, read_message(folder / PROOF, Proof), _digest_of(folder, MANIFEST)


def _passed_over(step: int, reason: str) -> PassedOver:
    return PassedOver(checkpoint=checkpoint_name(step), reason=reason)


def verified_manifest(folder: Path, sizes_only: bool = False) -> Manifest:
    """The manifest of a checkpoint that can be resumed from; UnusableCheckpointError where it cannot."""
    manifest = complete_manifest(folder)
    if manifest.step != checkpoint_step(folder.name):
        raise UnusableCheckpointError(f"its manifest is that of step {manifest.step}")
    if missing := missing_part(manifest.files):
        raise UnusableCheckpointError(f"{missing} is missing: the Trainer would begin with a fresh one")
    if not sizes_only:
        for name, entry in manifest.files.items():
            if _digest_of(folder, name) != entry.xxh128:
                raise UnusableCheckpointError(f"the content of {name} is not what was written")
    return manifest


def _digest_of(folder: Path, name: str) -> str:
    try:
        return digest_of(folder / name)
    except OSError as error:
        raise UnusableCheckpointError(f"{name} cannot be read ({error})") from None


@dataclass(frozen=True)
class Settings:
    """What may not change between a checkpoint and its resume; None is not known of one that was adopted."""

    max_steps: int
    seed: int | None
    global_batch: int | None
    data_digest: str | None


def settings_of(manifest: Manifest) -> Settings:
    """What a checkpoint was trained under."""
    return Settings(
        max_steps=manifest.max_steps,
        seed=manifest.seed,
        global_batch=manifest.global_batch,
        data_digest=manifest.data_digest,
    )


_WHY_SAME = {
    "global_batch": "batch size x gradient accumulation x ranks must stay, or steps are not the same steps",
    "seed": "the order of the data would change",
    "data_digest": "the samples, or the tokenizer, are not the same",
    "max_steps": "the whole schedule would move",
}
"""By what is compared; the steps of a number of epochs follow from the others."""


def refuse_changes(before: Settings, now: Settings) -> None:
    """RefusedError, by name, where a resume would not go on with the same training."""
    for name, why in _WHY_SAME.items():
        expected, found = getattr(before, name), getattr(now, name)
        if expected is not None and expected != found:
            raise RefusedError(
                f"{name} is {found} and was {expected} when the checkpoint was made: {why}",
                what=name,
                expected=expected,
                found=found,
            )


def optimizer_steps(optimizer: Optimizer, done: int) -> int:
    """Updates that the optimizer's state says it has seen; ``done`` where it keeps no count (SGD)."""
    inner = innermost(optimizer)
    kept = [*inner.state.values(), *inner.param_groups]  # pytorch_optimizer counts in the groups
    return max((int(one["step"]) for one in kept if "step" in one), default=done)


def platform_of(device: torch.device) -> dict[str, str | int]:
    """What decides which kernels compute a loss."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def prove(what: str, expected: object, found: object) -> None:
    """ProofError where what was restored is not what the checkpoint says."""
    if expected != found:
        raise ProofError(
            f"{what} is {found} after the resume, not {expected}", what=what, expected=expected, found=found
        )


def prove_probe(expected: float | None, found: float | None, is_same_platform: bool) -> None:
    """ProofError where the model's loss on the fixed batch is another one; None is a loss that is not finite."""
    if is_same_platform or expected is None or found is None:
        return prove("probe loss", expected, found)
    if not math.isclose(expected, found, rel_tol=PROBE_TOLERANCE):
        prove(f"probe loss (tolerance {PROBE_TOLERANCE} on other kernels)", expected, found)
    return None
