"""How a start of the worker ended, rank by rank: exit codes, outcomes and errors."""

import errno
import os
import re
from enum import StrEnum
from typing import Literal

from worker.contract.files import Message
from worker.contract.pulse import Hang


class Outcome(StrEnum):
    """How one rank's start ended; ``vanished`` is the supervisor's word for no report at all."""

    DONE = "done"
    """max_steps reached, ``final/`` published."""
    VERDICT = "verdict"
    """Stopped on an acted verdict; nothing of it was saved."""
    LEFT = "left"
    """Asked to leave; ``error.what`` is ``stop``, ``time_limit`` or ``preempted``."""
    FENCED = "fenced"
    """A newer directive, another writer or another job holds the run."""
    REFUSED = "refused"
    """Will not train: the same start would fail again."""
    OUT_OF_MEMORY = "out_of_memory"
    """Memory ran out, on evidence."""
    CRASHED = "crashed"
    """Raised, or a signal that nobody here asked for."""
    ENDED = "ended"
    """Ended by its agent: another rank died, or it hung; ``error.what`` says which."""
    VANISHED = "vanished"
    """The job is over and left no report."""


_OUTCOME_OF_EXIT_CODE = {
    0: Outcome.DONE,
    20: Outcome.VERDICT,
    21: Outcome.LEFT,
    22: Outcome.FENCED,
    23: Outcome.REFUSED,
    24: Outcome.OUT_OF_MEMORY,
}
EXIT_CODE_OF_OUTCOME = {outcome: code for code, outcome in _OUTCOME_OF_EXIT_CODE.items()}

WAITS_FOR_A_DIRECTIVE = frozenset(
    {Outcome.VERDICT, Outcome.REFUSED, Outcome.CRASHED, Outcome.ENDED, Outcome.OUT_OF_MEMORY}
)
"""Outcomes after which the attempt is over and only a newer directive starts a trainer again."""

STAY_S = 600.0
"""How long a job that is put back into the queue waits to be killed: one that leaves before counts as completed."""

TRACEBACK_LINES = 100
NO_WORLD_ERROR = "NoWorldError"
"""``error.type`` of a crash because not all ranks came: in this allocation they never will."""
PROOF_ERROR = "ProofError"
"""``error.type`` of a refusal that concerns the checkpoint alone: another one may do."""


def outcome_of(exit_code: int) -> Outcome:
    """The outcome that a trainer's exit code means; every code that is not ours is a crash."""
    return _OUTCOME_OF_EXIT_CODE.get(exit_code, Outcome.CRASHED)


_BROKEN = re.compile(
    r"uncorrectable ECC|ECC error|unspecified launch failure|no CUDA-capable device|CUDA driver version is insufficient"
    r"|driver/library version mismatch|fallen off the bus|CUDA unknown error|system not yet initialized"
    r"|device\(s\) is/are busy or unavailable|Input/output error|Stale file handle"
    r"|survived SIGKILL",
    re.IGNORECASE,
)
"""What devices, drivers and disks say, and no program of a person's own."""

_ERRORS_OF_DISKS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EIO, errno.EREMOTEIO, errno.EROFS, errno.ETIMEDOUT),
    *(errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.ENOLCK),
)
_DISK = re.compile(
    "|".join(re.escape(text) for each in _ERRORS_OF_DISKS for text in (f"[Errno {each}]", os.strerror(each))),
    re.IGNORECASE,
)


def tells_of_disk(text: str) -> bool:
    """Whether it has the words of a disk that is full, over its quota or away."""
    return _DISK.search(text) is not None


class ErrorDetail(Message):
    """What went wrong: ``what``, ``expected`` and ``found`` where a proof failed or a request was met."""

    type: str
    message: str
    traceback: str = ""
    what: str | None = None
    expected: str | None = None
    found: str | None = None

    @property
    def points_at_node(self) -> bool:
        """Whether it is the error of a device, a driver or a disk."""
        return _BROKEN.search(f"{self.type}: {self.message}") is not None

    @property
    def points_at_disk(self) -> bool:
        """Whether a disk that is full, over its quota or away was met: the same start may go well later."""
        return tells_of_disk(self.message)


class ExitReport(Message):
    """rank-N.exit.json, written by the rank's agent, always."""

    format: Literal[1] = 1
    attempt: int
    restart: int
    segment: int | None = None
    rank: int
    job_id: str
    host: str
    outcome: Outcome
    exit_code: int | None = None
    signal: int | None = None
    step: int | None = None
    saved_step: int | None = None
    started: float
    ended: float
    error: ErrorDetail | None = None
    hang: Hang | None = None


class TrainerError(Message):
    """rank-N.error.json: what the trainer knows of its own end; its agent takes it over."""

    segment: int | None = None
    step: int | None = None
    saved_step: int | None = None
    error: ErrorDetail | None = None


class Rendezvous(Message):
    """Where rank 0's trainer listens for the others."""

    address: str
    port: int
