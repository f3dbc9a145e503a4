"""What a start leaves unfinished: removed by its own agent when it leaves, else by the next start."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from worker.contract.run_dir import RunDir

_log = logging.getLogger(__name__)

FORMER = "-former"
"""How the name ends under which weights wait in .staging/ until their successors are in their place."""


def clear_staging(run: RunDir, attempt: int, restart: int) -> None:
    """Remove what other starts left unpublished; weights that were to be replaced and never were go back."""
    own = _prefix(attempt, restart)
    _clear(run, lambda name: not name.startswith(own))


def clear_own_staging(run: RunDir, attempt: int, restart: int) -> None:
    """Remove what this start left unpublished, as the others' is removed."""
    own = _prefix(attempt, restart)
    _clear(run, lambda name: name.startswith(own))


def _prefix(attempt: int, restart: int) -> str:
    return f"a{attempt}-r{restart}-"


def _clear(run: RunDir, is_unwanted: Callable[[str], bool]) -> None:
    for entry in list(run.staging.iterdir()) if run.staging.exists() else ():
        if is_unwanted(entry.name):
            _put_back_or_remove(run, entry)


def _put_back_or_remove(run: RunDir, entry: Path) -> None:
    for place in (run.best, run.final):
        if entry.name.endswith(f"-{place.name}{FORMER}") and not place.exists():
            entry.rename(place)
    shutil.rmtree(entry, ignore_errors=True)


def remove(folder: Path, doomed: Path | None = None) -> None:
    """Remove a folder, which first gets the name ``doomed``, in .staging/, where it is one that readers look at.

    What is still in use (NFS) or cannot be removed stays in .staging/, with a warning, until that is cleared.
    """
    try:
        if doomed is not None:
            folder.rename(doomed)
        shutil.rmtree(doomed or folder)
    except FileNotFoundError:  # a successor clears it
        return
    except OSError as error:
        _log.warning("%s cannot be removed now, and is when this start ends: %s", folder, error)
        shutil.rmtree(doomed or folder, ignore_errors=True)


def clear_temporary_files(run: RunDir, attempt: int, restart: int, rank: int) -> None:
    """Remove what a rank's trainer was about to publish about itself when it was killed."""
    for path in run.restart(attempt, restart).glob(f".tmp-rank-{rank}.*"):
        path.unlink(missing_ok=True)
