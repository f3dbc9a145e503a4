"""Checkpoints, whole: staged where no reader looks, the manifest last, everything durable, then one rename.

A kill at any instant leaves the previous checkpoint newest and usable.  Retention goes by step and by health, never
by time, and never takes what somebody may still want to go back to.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
import xxhash

from worker.contract.digest import digest_of
from worker.contract.files import Message, sync_folder
from worker.contract.loss_history import Record, copy_until
from worker.contract.manifest import MANIFEST, FileEntry, Health, Manifest, complete_checkpoints, health
from worker.contract.recovery_config import CheckpointConfig
from worker.contract.run_dir import RunDir, checkpoint_name
from worker.staging import remove
from worker.wrap import replaced

PROOF = "proof.json"
EMA = "ema.safetensors"
DETECTOR = "detector.json"

_torch_save = torch.save
"""Itself, whatever stands in its place while a checkpoint is saved."""


class Proof(Message):
    """proof.json: what a resume must find again, beside the fields of the manifest."""

    rng_digests: tuple[str, ...]
    """Of every rank's random states."""
    next_samples: tuple[int, ...]
    """The first samples of the next global batch."""
    ema_digest: str | None
    optimizer_facts: tuple[str, int] | None = None
    """Its class, and for how many parameters it keeps a state; null in checkpoints of older versions."""
    platform: dict[str, str | int]
    """What a loss must be computed on to come out the same to the bit."""


def own_umask() -> int:
    """This process's umask, read and not set for a moment: other threads make files meanwhile."""
    found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE)
    assert found, "Linux 4.7 and later tell it"
    return int(found[1], 8)


def make_durable(folder: Path) -> None:
    """Have every file and folder below ``folder`` on disk, with the modes of the person's umask.

    safetensors leaves its files unreadable to the group, whatever the umask says.
    """
    umask = own_umask()
    for parent, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(parent, name), os.O_RDONLY)
            try:
                os.fchmod(descriptor, 0o666 & ~umask)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_folder(Path(parent))


def copy_history(source: Path, end: int, place: Path) -> str:
    """Copy the history as it was when its records ended at ``end``, byte for byte; the digest of the copy."""
    with DigestingFile(place) as file:
        copy_until(source, end, file.write)
    return file.digest()


def file_entries(folder: Path, known: Mapping[Path, str] = MappingProxyType({})) -> dict[str, FileEntry]:
    """Size and digest of every file below ``folder``, by relative path, the manifest left out.

    ``known`` holds the digests that were made while writing; all other files are read once.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {
        path.relative_to(folder).as_posix(): FileEntry(
            bytes=path.stat().st_size, xxh128=known.get(path) or digest_of(path)
        )
        for path in files
    }


class DigestingFile:
    """A new file that is digested while it is written; for writers that only ever append."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by its context)
        self._hasher = xxhash.xxh3_128()

    def write(self, data: bytes) -> int:
        """Append ``data``, all of it."""
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        written = 0
        while written < len(view):
            written += self._file.write(view[written:])
        return written

    def flush(self) -> None:
        """Nothing is held back."""

    def digest(self) -> str:
        """The xxh3 128-bit digest of what was written so far, in hex."""
        return str(self._hasher.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def digested_save(obj: Any, path: Path, *args: Any, **kwargs: Any) -> str:
    """``torch.save`` to a new file, which is digested on its way; the digest."""
    with DigestingFile(path) as file:
        _torch_save(obj, file, *args, **kwargs)  # type: ignore[arg-type]
    return file.digest()


@contextmanager
def digesting_torch_save() -> Iterator[dict[Path, str]]:
    """Within, what ``torch.save`` writes to a path is digested on its way; the digests, by path.

    safetensors opens its files itself, in Rust: the rank that wrote them reads them once more, from memory.
    """
    save, digests = torch.save, dict[Path, str]()

    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, (str, os.PathLike)):
            return save(obj, f, *args, **kwargs)
        digests[Path(f)] = digested_save(obj, Path(f), *args, **kwargs)
        return None

    with replaced(torch, "save", saved):
        yield digests


def move_into(own: Path, common: Path) -> None:
    """Move every file below ``own`` to the same place below ``common``, where other ranks do the same."""
    common.mkdir(exist_ok=True)
    for path in sorted(path for path in own.rglob("*") if path.is_file()):
        place = common / path.relative_to(own)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)


def sync_folders(folder: Path) -> None:
    """Make the names in ``folder`` and in every folder below it durable."""
    for parent, _, _ in os.walk(folder):
        sync_folder(Path(parent))


def publish_folder(staged: Path, place: Path, aside: Callable[[], Path]) -> None:
    """Put a durable folder in its place with one rename; what is in the way moves to ``aside()`` first."""
    place.parent.mkdir(exist_ok=True)
    if place.exists():
        away = aside()
        away.parent.mkdir(exist_ok=True)
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
    manifests: Collection[Manifest],
    branch: Iterable[Record],
    wanted: Collection[int],
) -> set[int]:
    """The steps whose checkpoints stay: the newest, the newest healthy, every n-th, and the ``wanted``.

    The oldest one that may still prove healthy stays too: where ``healthy_after`` is longer than the ``keep`` newest
    reach back, each would be gone before its time came, and the newest healthy one would never move on.
    Where the last steps were odd, the newest healthy ones stay that a verdict on them would leave healthy.
    ``branch`` may leave out ``ok`` records other than the last: they say nothing about health.
    """
    records = list(branch)
    graded = {one.step: health(one, records, rules.healthy_after) for one in manifests}
    steps = sorted(graded)
    healthy = [step for step in steps if graded[step] is Health.HEALTHY]
    at_worst = [*records, *(one.model_copy(update={"verdict": "spike"}) for one in records[-1:] if one.onset_step)]
    still_healthy = [one.step for one in manifests if health(one, at_worst, rules.healthy_after) is Health.HEALTHY]
    untested = [step for step in steps if graded[step] is Health.UNTESTED and step > max(healthy, default=-1)]
    nth = [step for step in steps if rules.keep_every and step % rules.keep_every == 0]
    newest = {*steps[-rules.keep :], *healthy[-rules.keep_healthy :], *sorted(still_healthy)[-rules.keep_healthy :]}
    return {*newest, *untested[:1], *nth, *graded.keys() & set(wanted)}


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
        remove(run.checkpoint(step), doomed)
    return gone
