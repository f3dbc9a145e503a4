"""`run --all`: every run of a folder, until somebody says that it is enough."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from supervisor.fleet import supervise_all, supervise_all_once
from supervisor.report.figures import printable
from supervisor.verbs.exits import INTERRUPTED, OK

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def run_all(runs: Path, *, once: bool) -> int:
    """Supervise every run under a folder; after Ctrl-C or SIGTERM the workers go on, and every lease is free."""
    if once:
        supervise_all_once(runs, sys.stdout)
        return OK
    with _told_by_signals() as is_told:
        supervise_all(runs, sys.stdout, is_told)
    again = f"`higgsfield run --all {runs}` supervises them again"
    print(printable(f"the workers go on without a supervisor; {again}"), file=sys.stderr)
    return INTERRUPTED


@contextlib.contextmanager
def _told_by_signals() -> Iterator[Callable[[], bool]]:
    """Within, the first signal is a flag; the second one does what it always did, for somebody in a hurry."""
    told: list[int] = []

    def tell(number: int, frame: FrameType | None) -> None:
        told.append(number)
        put_back()

    before = {number: signal.signal(number, tell) for number in _SIGNALS}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    try:
        yield lambda: bool(told)
    finally:
        put_back()
