"""Methods replaced on one instance, for as long as it lives or for a moment."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def wrap(instance: object, name: str, around: Callable[..., Any]) -> None:
    """Make ``instance.name(...)`` call ``around(original, ...)``; the class and other instances stay as they are."""
    setattr(instance, name, functools.partial(around, getattr(instance, name)))


@contextmanager
def replaced(instance: object, name: str, value: object) -> Iterator[None]:
    """``instance.name`` is ``value`` within."""
    had_own = name in vars(instance)
    before = getattr(instance, name)
    setattr(instance, name, value)
    try:
        yield
    finally:
        if had_own:
            setattr(instance, name, before)
        else:
            delattr(instance, name)
