"""What a program of this room tells whoever asked it something: lines of JSON, each as soon as it is known."""

from worker.contract.files import Message


class Line(Message):
    """One line; the one that ends it has ``error`` or ``is_last``."""

    note: str | None = None
    """For a person, beside the answer."""
    error: str | None = None
    is_last: bool = False
