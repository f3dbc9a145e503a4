"""A replay: bad steps of a run trained once more, from a checkpoint before them, each time with one thing changed.

The verb makes a folder with a small run of its own for each trial; the program trains them one after the other and
tells a line of JSON for each. The run itself is only read.
"""

from pathlib import Path
from typing import Final, Literal

from worker.contract.files import Message
from worker.contract.loss_history import Verdict
from worker.contract.told import Line

Change = Literal["again", "smallest-batch", "fp32", "adamw", "tenth-rate", "without-batches"]
PLAN: Final = "replay.json"
"""The plan's name in the folder of a replay; each trial's own run is the folder beside it with the change's name."""
WITHOUT_ROWS: Final = "without-rows"
"""The run that is trained without the rows which ``smallest-batch`` finds."""


class BadSteps(Message):
    """What went wrong, as the history has it."""

    kind: Verdict
    onset_step: int
    verdict_step: int
    num_records: int
    """Records of the history, in file order, up to the one of the verdict: the branch that it ended."""


class Trial(Message):
    """One change; ``why_not`` where it makes no sense here, and then nothing is trained."""

    change: Change
    what: str
    """For a person: what is changed."""
    end_step: int
    """The last step that is trained, if nothing ends it earlier."""
    why_not: str | None = None


class Replay(Message):
    """What is to be replayed, and how."""

    run: Path
    checkpoint: Path | None
    """The folder that every trial begins from; None: from scratch."""
    begin_step: int
    ratio: float
    """``spike.ratio``, beyond which a row stands out among the others of its batch."""
    bad: BadSteps
    trials: tuple[Trial, ...]


class Tried(Line):
    """What came of one change; a note says which is under way."""

    change: Change | None = None
    what: str = ""
    cured: bool | None = None
    """None: not applicable, or it could not be tried."""
    loss: float | None = None
    """At the step of the verdict, or at the last one before it; None where it is not finite, or not known."""
    said: str = ""
    """For a person: what came of it."""
