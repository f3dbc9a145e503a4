"""MANIFEST.json: what makes a checkpoint exist, and whether it is fit to go back to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from worker.contract.directive import SkippedBatches
from worker.contract.files import Message, UnusableFileError, read_message
from worker.contract.loss_history import ACTED, Record
from worker.contract.run_dir import RunDir

MANIFEST = "MANIFEST.json"


class FileEntry(Message):
    """One file of a checkpoint: its size and its xxh3 128-bit digest in hex."""

    bytes: int
    xxh128: str


class FrozenBase(Message):
    """The frozen weights that a checkpoint's adapters belong to; the xxh3 128-bit digest of their values, in hex."""

    name: str
    revision: str | None
    digest: str


class Manifest(Message):
    """Written last, after all files of the checkpoint are durable. ``epoch`` counts fractions of an epoch.

    Of an adopted checkpoint, null is what nobody knows.
    """

    format: Literal[1] = 1
    step: int
    attempt: int
    segment: int
    time: float
    epoch: float
    batches_into_epoch: int | None
    samples_seen: int | None
    world_size: int | None
    batch_size: int | None
    gradient_accumulation: int | None
    max_steps: int
    seed: int | None
    config_digest: str | None
    data_digest: str | None
    lr_scale: float
    skip_batches: tuple[SkippedBatches, ...] = ()
    weights_finite: bool | None
    probe_loss: float | None
    probe_samples: int = 4
    optimizer_steps: int | None
    versions: dict[str, str]
    files: dict[str, FileEntry]
    base: FrozenBase | None = None
    adopted: bool = False
    asked: bool = False
    """Whether a file SAVE asked for it."""

    @property
    def global_batch(self) -> int | None:
        """Sequences of an optimizer step, on all ranks; None where it is not known."""
        if self.batch_size is None or self.gradient_accumulation is None or self.world_size is None:
            return None
        return self.batch_size * self.gradient_accumulation * self.world_size


class UnusableCheckpointError(Exception):
    """A checkpoint folder that may not be resumed from; the message says why."""


def complete_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint; UnusableCheckpointError where a part is missing, cut or unreadable."""
    try:
        manifest = read_message(folder / MANIFEST, Manifest)
    except UnusableFileError as error:
        raise UnusableCheckpointError(f"its manifest is unusable ({error.why})") from None
    if manifest is None:
        raise UnusableCheckpointError("it has no manifest")
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise UnusableCheckpointError(f"{name} is missing") from None
        except OSError as error:
            raise UnusableCheckpointError(f"{name} cannot be read ({error})") from None
        if size != entry.bytes:
            raise UnusableCheckpointError(f"{name} has {size} bytes instead of {entry.bytes}")
    return manifest


def complete_checkpoints(run_dir: RunDir) -> list[Manifest]:
    """Manifests of the run's complete checkpoints, ascending by step; incomplete folders are left out."""
    found = []
    for step in run_dir.checkpoint_steps():
        try:
            manifest = complete_manifest(run_dir.checkpoint(step))
        except UnusableCheckpointError:
            continue
        if manifest.step == step:
            found.append(manifest)
    return found


class Health(StrEnum):
    """Whether a checkpoint may be gone back to."""

    HEALTHY = "healthy"
    """The branch went on well past it."""
    UNTESTED = "untested"
    """Nothing speaks against it, and nothing yet for it."""
    SUSPECT = "suspect"
    """Its weights are not finite, or a verdict's onset lies at or before it."""


def health(manifest: Manifest, branch: Iterable[Record], healthy_after: int) -> Health:
    """The health of a checkpoint, from the surviving records (the branch just judged among them)."""
    step = manifest.step
    reached, is_clean, own = step, True, "ok"
    for record in branch:
        reached = max(reached, record.step)
        if record.step == step:
            own = record.verdict
        if record.verdict in ACTED and not (record.observed and record.step < step):  # else training went on past it
            onset = record.onset_step if record.onset_step is not None else record.step
            if onset <= step:
                return Health.SUSPECT
            is_clean = is_clean and onset > step + healthy_after
    if manifest.weights_finite is False:
        return Health.SUSPECT
    if own in ("pending", "suspect") or not is_clean or reached < step + healthy_after:
        return Health.UNTESTED
    return Health.HEALTHY


@dataclass(frozen=True)
class Target:
    """Where a rollback goes: a checkpoint's step, or 0 and ``health`` None for a start from scratch."""

    step: int
    health: Health | None


def rollback_target(
    manifests: Sequence[Manifest], branch: Sequence[Record], onset_step: int, healthy_after: int
) -> Target:
    """The newest healthy checkpoint before the onset, else the newest untested one, else scratch."""
    before = sorted((m for m in manifests if m.step < onset_step), key=lambda m: m.step, reverse=True)
    graded = [(m.step, health(m, branch, healthy_after)) for m in before]
    for wanted in (Health.HEALTHY, Health.UNTESTED):
        for step, grade in graded:
            if grade is wanted:
                return Target(step, wanted)
    return Target(0, None)
