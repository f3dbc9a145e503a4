"""Where a page goes that a person asked for: it replaces an earlier page of ours and nothing else."""

import os
import stat
from pathlib import Path
from typing import Final

from worker.contract.files import UnusableFileError, publish
from worker.contract.run_dir import RunDir

_MARK: Final = b'<meta name="generator" content="higgsfield">'
"""In the head of every page of ours."""
_HEAD_BYTES: Final = 1000


def page_place(path: Path) -> Path:
    """Where a page for ``path`` goes, links followed; UnusableFileError where it would replace what is no page of ours.

    In a run's folder its ``report.html`` alone is a page; everything else there belongs to the run.
    """
    place = Path(os.path.realpath(path))
    run = _run_around(place)
    if run is not None and place != run.report:
        raise UnusableFileError(path, "lies in a run's folder, where only report.html is a page; name another file")
    try:
        mode = place.stat().st_mode
    except FileNotFoundError:
        return _new_place(path, place)
    except OSError as error:
        raise _cannot_be_written(path, error) from None
    if stat.S_ISDIR(mode):
        raise UnusableFileError(path, "is a folder; name the file in it")
    if not stat.S_ISREG(mode):
        raise UnusableFileError(path, "is no regular file; name another")
    if run is None and not _is_page(path, place):
        raise UnusableFileError(
            path, "is there already and is no page of higgsfield; name another file or move it away"
        )
    return place


def publish_page(path: Path, page: str) -> None:
    """Put a page at ``path`` where ``page_place`` allows it; UnusableFileError else."""
    place = page_place(path)
    try:
        publish(place, page)
    except OSError as error:
        raise _cannot_be_written(path, error) from None


def _new_place(path: Path, place: Path) -> Path:
    if not place.parent.is_dir():
        raise UnusableFileError(path, f"there is no folder {place.parent}; make it first")
    return place


def _run_around(place: Path) -> RunDir | None:
    runs = (RunDir(folder) for folder in place.parents)
    return next((run for run in runs if run.config.is_file() and run.journal.is_file()), None)


def _is_page(path: Path, place: Path) -> bool:
    try:
        with place.open("rb") as file:
            return _MARK in file.read(_HEAD_BYTES)
    except OSError as error:
        raise _cannot_be_written(path, error) from None


def _cannot_be_written(path: Path, error: OSError) -> UnusableFileError:
    return UnusableFileError(path, f"cannot be written: {error.strerror}")
