"""Exit codes, and the one way to complain."""

import sys
from typing import Final

from supervisor.report.figures import printable

OK: Final = 0
UNFORESEEN: Final = 1
WRONG_INPUT: Final = 2
GAVE_UP: Final = 3
STOPPED: Final = 4
HELD: Final = 5
INTERRUPTED: Final = 130

EXIT_CODE_OF_STATE: Final = {"finished": OK, "gave_up": GAVE_UP, "stopped": STOPPED}


def complain(text: str) -> None:
    """One line on stderr, whatever is in the names that it quotes."""
    print(printable(" ".join(text.split())), file=sys.stderr)
