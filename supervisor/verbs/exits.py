"""Exit codes, and the one way to say something or to complain."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Final, TextIO

from supervisor.report.figures import printable
from supervisor.run_state import RunState

OK: Final = 0
UNFORESEEN: Final = 1
WRONG_INPUT: Final = 2
GAVE_UP: Final = 3
STOPPED: Final = 4
HELD: Final = 5
INTERRUPTED: Final = 130

EXIT_CODE_OF_STATE: Final = {"finished": OK, "gave_up": GAVE_UP, "stopped": STOPPED}


def exit_code_of(state: RunState | None) -> int:
    """What a supervisor's job exits with; None: the run goes on, and another job with it."""
    return OK if state is None else EXIT_CODE_OF_STATE[state.state]


def complain(text: str) -> None:
    """One line on stderr, whatever is in the names that it quotes."""
    print(printable(" ".join(text.split())), file=sys.stderr)


def say(text: str, out: TextIO | None = None) -> None:
    """One line on stdout, at once, whatever is in the names and paths that it quotes."""
    print(printable(text), file=out or sys.stdout, flush=True)


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Within, SIGTERM is answered as Ctrl-C is: what was begun is put in order."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
