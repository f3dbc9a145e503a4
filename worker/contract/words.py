"""Numbers of things as a person reads them."""


def count(number: int, noun: str, many: str = "") -> str:
    """``1 step``, ``1,200 steps``; ``many`` where the plural is another than with an s."""
    return f"{number:,} {noun if number == 1 else many or f'{noun}s'}"
