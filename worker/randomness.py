"""The random states of this process: named by a digest, and put back after something that may not leave a trace."""

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash


def random_states() -> dict[str, Any]:
    """The states that the Trainer saves, under its own names."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.random.get_rng_state()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Go on from what ``random_states`` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.random.set_rng_state(states["cuda"])


@contextmanager
def random_states_aside() -> Iterator[None]:
    """What is done within leaves no trace in the random states."""
    states = random_states()
    try:
        yield
    finally:
        restore_random_states(states)


def random_digest() -> str:
    """16 hex digits that name this process's random states."""
    hasher = xxhash.xxh3_64()
    for name, state in random_states().items():
        hasher.update(name.encode())
        hasher.update(state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state, protocol=4))
    return str(hasher.hexdigest())
