"""The ways a trainer ends before its last step, as exceptions that know their outcome."""

import traceback
from typing import ClassVar

import torch

from worker.contract.exit_report import TRACEBACK_LINES, ErrorDetail, Outcome


class LeavingError(Exception):
    """Ends training on purpose; ``what``, ``expected`` and ``found`` go into the exit report."""

    outcome: ClassVar[Outcome]

    def __init__(self, message: str, *, what: str | None = None, expected: object = None, found: object = None) -> None:
        super().__init__(message)
        self.what = what
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)


class RefusedError(LeavingError):
    """Will not train: the same start would fail again."""

    outcome = Outcome.REFUSED


class ProofError(RefusedError):
    """What was restored is not what the checkpoint says; another checkpoint may do."""


class VerdictError(LeavingError):
    """Stopped on an acted verdict."""

    outcome = Outcome.VERDICT


class AskedToLeaveError(LeavingError):
    """Asked to leave; ``what`` is ``stop``, ``time_limit`` or ``preempted``."""

    outcome = Outcome.LEFT


class AlreadyTrainedError(Exception):
    """The checkpoint that was restored is the one after the last step: nothing is left but to publish."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a device or on the host."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def is_in_order(error: BaseException) -> bool:
    """Whether it is an end that was asked for, and no error."""
    return isinstance(error, AskedToLeaveError | VerdictError)


def detail_of(error: BaseException) -> ErrorDetail:
    """What the exit report says of an exception; of an end in order neither the class's name nor a traceback."""
    if isinstance(error, AskedToLeaveError | VerdictError):
        kind = "Left" if isinstance(error, AskedToLeaveError) else "Verdict"
        return ErrorDetail(type=kind, message=str(error), what=error.what)
    lines = "".join(traceback.format_exception(error)).splitlines()
    fields = {name: getattr(error, name, None) for name in ("what", "expected", "found")}
    return ErrorDetail(
        type=type(error).__name__,
        message=str(error),
        traceback="\n".join(lines[-TRACEBACK_LINES:]),
        **(fields if isinstance(error, LeavingError) else {}),
    )
