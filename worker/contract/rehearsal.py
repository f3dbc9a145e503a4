"""A rehearsal: the faults that are thrown into a run, and what is written in its rehearsal/ about them."""

import os
import socket
import time
from typing import Literal

from pydantic import Field

from worker.contract.files import Message, publish_message, read_message
from worker.contract.run_dir import RunDir

FaultKind = Literal["spike", "preempt", "kill", "hang", "torn-save", "supervisor"]
FROM_OUTSIDE: frozenset[FaultKind] = frozenset({"preempt", "supervisor"})
"""Done by the command that rehearses; the others by the trainer to itself, at exactly their step."""


class Fault(Message):
    """One fault, which comes once, when ``step`` steps are finished; torn-save with the first save from there on."""

    kind: FaultKind
    step: int = Field(ge=1)

    @property
    def name(self) -> str:
        """As it is asked for: ``kill@80``."""
        return f"{self.kind}@{self.step}"


class Inflicted(Message):
    """That a fault came: written durably before it does its harm, so that no fault comes twice."""

    kind: FaultKind
    at_step: int
    time: float
    means: str
    """What was done, to whom; for a person."""
    error: str | None = None
    """Why it could not be done."""


class MemoryFound(Message):
    """What a rank's device needed, and the largest micro-batch that was seen to fit."""

    rank: int
    host: str
    device: str
    peak_bytes: int
    """The most that training held: allocated on a GPU, resident on a CPU."""
    total_bytes: int
    batch_size: int
    """As configured: sequences a device and micro-step."""
    largest_batch: int | None = None
    """None = nothing was tried."""
    trying: int | None = None
    """The batch that is being tried; what is left of a try that ended the process."""
    limit: str = ""
    """Why no larger one was tried, for a person."""


def inflicted(run: RunDir, fault: Fault) -> Inflicted | None:
    """What is known of a fault that came; None while it did not. UnusableFileError where it cannot be read."""
    return read_message(run.fault(fault.name), Inflicted)


def note_fault(run: RunDir, fault: Fault, at_step: int, means: str, error: str | None = None) -> None:
    """Write down that a fault comes now."""
    run.rehearsal.mkdir(exist_ok=True)
    found = Inflicted(kind=fault.kind, at_step=at_step, time=time.time(), means=means, error=error)
    publish_message(run.fault(fault.name), found)


def this_process() -> str:
    """``pid 123 on node7``."""
    return f"pid {os.getpid()} on {socket.gethostname()}"
