"""What it costs to verify a checkpoint's digests in a pass of its own, before the Trainer's loaders read it.

``python -m benchmarks.verify`` writes weights and an optimizer state of ``--megabytes`` in all, and prints the median
seconds of ``--repeats`` loads without and with the pass before: from the disk (its pages dropped from the cache first)
and from the page cache. The two take turns, so that a machine that is busy elsewhere is so for both.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.heading import heading
from worker.checkpoints import digest_of

WEIGHTS, MOMENTS = "model.safetensors", "optimizer.pt"


def write_files(folder: Path, megabytes: int) -> None:
    """A third of it weights, the rest two moments, as AdamW has them."""
    numbers = {str(one): torch.rand(megabytes * 1_000_000 // 96) for one in range(8)}
    save_file(numbers, folder / WEIGHTS)
    torch.save({name: {"exp_avg": one, "exp_avg_sq": one.clone()} for name, one in numbers.items()}, folder / MOMENTS)


def load(folder: Path, verifies: bool) -> float:
    """Seconds of one load."""
    began = time.perf_counter()
    if verifies:
        for name in (WEIGHTS, MOMENTS):
            digest_of(folder / name)
    weights = load_file(folder / WEIGHTS)
    torch.load(folder / MOMENTS, weights_only=True)
    sum(float(one.sum()) for one in weights.values())  # they are mapped: only now are they read
    return time.perf_counter() - began


def drop_from_cache(folder: Path) -> None:
    for name in (WEIGHTS, MOMENTS):
        descriptor = os.open(folder / name, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    told = parser.parse_args()
    seconds: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=told.folder) as name:
        folder = Path(name)
        write_files(folder, told.megabytes)
        for again in range(told.repeats + 1):
            for source in ("disk", "page cache"):
                for verifies in (False, True) if again % 2 else (True, False):
                    if source == "disk":
                        drop_from_cache(folder)
                    found = load(folder, verifies)
                    if again:  # the first round warms up
                        seconds.setdefault((source, verifies), []).append(found)
    print("\n".join(heading("verify")))
    print(f"figures    {told.megabytes} MB, seconds (median of {told.repeats})\n")
    print("from          load   verify, then load   ratio")
    for source in ("disk", "page cache"):
        plain, checked = (statistics.median(seconds[source, verifies]) for verifies in (False, True))
        print(f"{source:<12} {plain:5.2f}   {checked:17.2f}   {checked / plain:5.2f}")


if __name__ == "__main__":
    main()
