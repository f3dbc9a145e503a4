"""The few stamps by which a run's folder shows that something has happened there, without a look at what."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from worker.contract.run_dir import RunDir

_REPORT: Final = ".exit.json"


class Signs:
    """What everything that cannot wait changes: the history, a person's words, and the folders of the attempt's starts.

    Two changes within one tick of the disk's clock look alike: a folder that changed is to be looked at once more.
    """

    def __init__(self, run_dir: RunDir, stat: Callable[[Path], os.stat_result]) -> None:
        self._run_dir = run_dir
        self._stat = stat
        self._paths: Sequence[Path] = ()
        self._stamps: list[tuple[int, int, int]] = []
        self.restarts: Sequence[int] = ()
        """Of the attempt, those that left a folder, in ascending order."""
        self.starts: dict[Path, frozenset[str]] = {}
        """By the folder of each, in the same order: the exit reports in it."""

    def take(self, attempt: int) -> None:
        """Remember how it is now, before a look at the same things."""
        run_dir = self._run_dir
        paths = [run_dir.history, run_dir.request, run_dir.stop_file, *([run_dir.attempt(attempt)] if attempt else [])]
        stamps = [self._stamp(path) for path in paths]  # before the attempt's folder is read
        self.restarts = run_dir.restarts(attempt) if attempt else ()
        starts = [run_dir.restart(attempt, restart) for restart in self.restarts]
        self._paths, self._stamps = [*paths, *starts], [*stamps, *map(self._stamp, starts)]
        self.starts = {start: reports_in(start) for start in starts}

    def changed(self) -> set[Path]:
        """What changed since the last time."""
        before, self._stamps = self._stamps, [self._stamp(path) for path in self._paths]
        if self._stamps == before:
            return set()
        return {path for path, was, now in zip(self._paths, before, self._stamps, strict=True) if was != now}

    def has_new_report(self, start: Path) -> bool:
        """Whether a rank has reported its end in that folder since then."""
        return reports_in(start) != self.starts[start]

    def _stamp(self, path: Path) -> tuple[int, int, int]:
        """What changes with every change, of the disk's clock and otherwise; of what is not there, why not."""
        try:
            found = self._stat(path)
        except OSError as error:
            return error.errno or 0, 0, 0
        return found.st_mtime_ns, found.st_size, found.st_ino


def reports_in(start: Path) -> frozenset[str]:
    """Names of the exit reports in the folder of a start; none where there is no such folder."""
    try:
        with os.scandir(start) as entries:
            return frozenset(one.name for one in entries if one.name.startswith("rank-") and one.name.endswith(_REPORT))
    except OSError:
        return frozenset()
