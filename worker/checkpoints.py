"""Checkpoints, whole: staged where no reader looks, the manifest last, everything durable, then one rename.

A kill at any instant leaves the previous checkpoint newest and usable.  Retention goes by step and by health, never
by time, and never takes what somebody may still want to go back to.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

from worker.contract.config import CheckpointConfig
from worker.contract.files import Message, sync_folder
from worker.contract.loss_history import Record
from worker.contract.manifest import MANIFEST, FileEntry, Health, Manifest, complete_checkpoints, health
from worker.contract.run_dir import RunDir, checkpoint_name

PROOF = "proof.json"
EMA = "ema.safetensors"
DETECTOR = "detector.json"

_CHUNK_BYTES = 8 << 20


class Proof(Message):
    """proof.json: what a resume must find again, beside the fields of the manifest."""

    rng_digests: tuple[str, ...]
    """Of every rank's random states."""
    next_samples: tuple[int, ...]
    """The first samples of the next global batch."""
    ema_digest: str | None
    platform: dict[str, str | int]
    """What a loss must be computed on to come out the same to the bit."""


def clear_staging(run: RunDir, attempt: int, restart: int) -> None:
    """Remove what other starts left unpublished."""
    own = f"a{attempt}-r{restart}-"
    if run.staging.exists():
        for entry in run.staging.iterdir():
            if not entry.name.startswith(own):
                shutil.rmtree(entry, ignore_errors=True)


def make_durable(folder: Path) -> None:
    """Have every file and folder below ``folder`` on disk, with the modes of the person's umask.

    safetensors leaves its files unreadable to the group, whatever the umask says.
    """
    umask = os.umask(0o077)
    os.umask(umask)
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(parent, name), os.O_RDONLY)
            try:
                os.fchmod(descriptor, 0o666 & ~umask)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(parent))


def digest_of(path: Path) -> str:
    """The xxh3 128-bit digest of a file, in hex."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return str(hasher.hexdigest())


def file_entries(folder: Path) -> dict[str, FileEntry]:
    """Size and digest of every file below ``folder``, by relative path, the manifest left out."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(folder).as_posix(): FileEntry(bytes=path.stat().st_size, xxh128=digest_of(path))
        for path in files
    }


def publish_folder(staged: Path, place: Path, aside: Callable[[], Path]) -> None:
    """Put a durable folder in its place with one rename; what is in the way moves to ``aside()`` first."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        away = aside()
        away.parent.mkdir(parents=True, exist_ok=True)
        place.rename(away)
    staged.rename(place)
    sync_folder(place.parent)


def bad_checkpoint_place(run: RunDir, attempt: int, step: int) -> Path:
    """A free name in quarantine for a checkpoint folder that is in the way of a publication."""
    name = f"a{attempt}-bad-{checkpoint_name(step)}"
    place, copies = run.quarantine / name, 1
    while place.exists():
        copies += 1
        place = run.quarantine / f"{name}.{copies}"
    return place


def kept_steps(
    rules: CheckpointConfig,
    manifests: Iterable[Manifest],
    branch: Iterable[Record],
    wanted: Collection[int],
) -> set[int]:
    """The steps whose checkpoints stay: the newest, the newest healthy, every n-th, and the ``wanted``.

    The oldest one that may still prove healthy stays too: where ``healthy_after`` is longer than the ``keep`` newest
    reach back, each would be gone before its time came, and the newest healthy one would never move on.
    ``branch`` may leave out ``ok`` records other than the last: they say nothing about health.
    """
    records = list(branch)
    graded = {one.step: health(one, records, rules.healthy_after) for one in manifests}
    steps = sorted(graded)
    healthy = [step for step in steps if graded[step] is Health.HEALTHY]
    untested = [step for step in steps if graded[step] is Health.UNTESTED and step > max(healthy, default=-1)]
    nth = [step for step in steps if rules.keep_every and step % rules.keep_every == 0]
    return {*steps[-rules.keep :], *healthy[-rules.keep_healthy :], *untested[:1], *nth, *graded.keys() & set(wanted)}


def retire(
    run: RunDir,
    attempt: int,
    restart: int,
    rules: CheckpointConfig,
    branch: Iterable[Record],
    wanted: Collection[int],
) -> list[int]:
    """Remove the complete checkpoints that ``kept_steps`` does not name; their steps.

    Each leaves checkpoints/ with one rename before it is taken apart, so that no reader sees a part of it.
    """
    manifests = complete_checkpoints(run)
    kept = kept_steps(rules, manifests, branch, wanted)
    gone = [manifest.step for manifest in manifests if manifest.step not in kept]
    for step in gone:
        doomed = run.staging / f"a{attempt}-r{restart}-retired-{checkpoint_name(step)}"
        with suppress(FileNotFoundError):
            run.checkpoint(step).rename(doomed)
            shutil.rmtree(doomed)
    return gone
