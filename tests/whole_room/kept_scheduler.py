"""The scheduler in memory, with a memory that outlives the process: what a cluster knows when a supervisor dies."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fakes import FakeScheduler

_KEPT = ("jobs", "requests", "calls", "cancellers", "_next_id")
CHANGING = ("submit", "cancel", "start_now", "change", "release", "requeue")
"""The calls that do something to a cluster."""
_CALLS = (*CHANGING, "find", "look", "test_only")


class KeptScheduler(FakeScheduler):
    """Every call begins with what is in the file and ends there; `boundary` is told of each, before and after it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file
        self.boundary: Callable[[str], None] = lambda what: None
        self.load()

    def load(self) -> None:
        """Know what the file knows."""
        if self.file.exists():
            vars(self).update(pickle.loads(self.file.read_bytes()))

    def save(self) -> None:
        """Let the next process know it too."""
        self.file.write_bytes(pickle.dumps({name: vars(self)[name] for name in _KEPT}))

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._kept(name, found) if name in _CALLS else found

    def _kept(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def kept(*args: Any, **kwargs: Any) -> Any:
            self.boundary(f"before {name}")
            answer = call(*args, **kwargs)
            self.save()
            self.boundary(f"after {name}")
            return answer

        return kept
