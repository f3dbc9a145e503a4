"""What is asked of a run's weights, and what comes back: a line of JSON for each piece of text."""

from typing import Final, Literal

from pydantic import Field

from worker.contract.files import Message
from worker.contract.told import Line

Weights = Literal["raw", "ema", "best"]
_MOST: Final = 2**31 - 1


class Question(Message):
    """What is to be generated, from which weights, and how it is drawn."""

    prompt: str
    weights: Weights | None = None
    """None: the average where its evaluation is no worse than that of the weights, else these."""
    is_chat: bool = False
    """The prompt is a user's message, to be written by the tokenizer's chat template."""
    max_tokens: int = Field(default=256, ge=1, le=_MOST)
    temperature: float = Field(default=0.8, ge=0)
    """0: always the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Draw from the likeliest tokens that have this share together."""
    top_k: int = Field(default=0, ge=0, le=_MOST)
    """Draw from this many of the likeliest tokens; 0: from all."""
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)


class Piece(Line):
    """One thing that comes back; a note says which weights these are."""

    text: str = ""
