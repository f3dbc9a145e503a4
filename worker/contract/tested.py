"""The releases of transformers that this version is tested with; others, whose Trainer differs inside, are refused."""

TRANSFORMERS_FROM = (5, 23)
TRANSFORMERS_BELOW = (5, 25)
TRANSFORMERS_RANGE = f">={'.'.join(map(str, TRANSFORMERS_FROM))},<{'.'.join(map(str, TRANSFORMERS_BELOW))}"
"""As pip writes it, and as ``pyproject.toml`` must say."""


def is_tested(version: str) -> bool:
    """Whether ``version`` of transformers is one that the tests were run with, by its first two numbers."""
    parts = version.split(".")[:2]
    numbers = tuple(int(part) for part in parts if part.isdigit())
    return len(numbers) == 2 and TRANSFORMERS_FROM <= numbers < TRANSFORMERS_BELOW
