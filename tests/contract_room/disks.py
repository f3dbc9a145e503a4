"""A disk that is really full, where the tests may mount one; else one that says it is."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(at: Path, size_kib: int = 64) -> Iterator[Path]:
    """A file system of ``size_kib`` KiB at ``at``; skips where none can be mounted (no root, or a container)."""
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(at)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here ({mounted.stderr.strip()})")
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


def fill(folder: Path) -> Path:
    """Take all space that is left; the file that holds it."""
    filler = folder / "filler"
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (4096, 1):
            try:
                while True:
                    os.write(descriptor, b"x" * size)
            except OSError:
                continue
    finally:
        os.close(descriptor)
    return filler
