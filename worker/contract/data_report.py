"""data.json: how much is trained on, and which rows are not."""

from typing import Literal

from worker.contract.files import Message
from worker.contract.words import count

Reason = Literal["broken", "empty", "special_characters", "no_trainable_token", "too_long", "cut"]


class LeftOut(Message):
    """Rows of one reason."""

    count: int
    rows: dict[str, list[int]]
    """By file, the numbers of the first thousand of them."""


class SetReport(Message):
    """One set of documents."""

    documents: int
    tokens: int
    samples: int
    left_out: dict[Reason, LeftOut]

    def said(self) -> str:
        """The counts, for a person."""
        gone = ", ".join(f"{one.count} {reason.replace('_', ' ')}" for reason, one in self.left_out.items())
        kept = f"{count(self.documents, 'document')}, {count(self.tokens, 'token')}, {count(self.samples, 'sample')}"
        return f"{kept}; rows that are not used, or not whole: {gone}" if gone else kept


class DataReport(Message):
    """What a run trains on and is evaluated on."""

    format: Literal[1] = 1
    data_digest: str
    train: SetReport
    eval: SetReport | None

    def said(self) -> list[str]:
        """A line for a person for each set."""
        sets = {"train": self.train, "eval": self.eval}
        return [f"data.{key}: {one.said()}" for key, one in sets.items() if one is not None]
