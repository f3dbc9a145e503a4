"""What ``worker.check`` finds in model and data: its one answer, as JSON."""

from typing import Literal

from worker.contract.data_report import Reason
from worker.contract.files import Message


class Found(Message):
    """One thing that is wrong, odd, or could not be looked at."""

    level: Literal["error", "warning", "note", "not checked"]
    key: str
    """Dotted."""
    message: str
    evidence: str = ""
    mend: str = ""


class Lengths(Message):
    """How long documents are, in tokens."""

    median: int
    p90: int
    longest: int
    above_max: int
    """Documents longer than ``data.max_tokens``."""


class LookedAt(Message):
    """One set of documents."""

    documents: int
    tokens: int
    samples: int | None
    """None: not all of it was read."""
    left_out: dict[Reason, int]
    lengths: Lengths | None
    duplicates: int
    """Documents whose text came before in the same set."""
    is_whole: bool
    """False: there is more than was read in the time."""


class DataLook(Message):
    """The data of a configuration, as far as it was read."""

    train: LookedAt | None = None
    eval: LookedAt | None = None
    overlap: int | None = None
    """Documents of ``eval`` that are in ``train`` too."""


class ModelLook(Message):
    """The model of a configuration; its weights are not looked at."""

    parameters: int
    trained: int
    activations: int | None
    """Bytes on a device that a forward pass leaves for the backward pass."""


class CheckReport(Message):
    """All of it."""

    found: tuple[Found, ...] = ()
    data: DataLook = DataLook()
    model: ModelLook | None = None
