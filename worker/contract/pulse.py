"""A rank's sign of life: what its main thread does, and for how long the next sign may stay away."""

from typing import Any, Final, Literal

from worker.contract.files import Message

Phase = Literal["starting", "compiling", "training", "evaluating", "saving", "finishing"]

_TIMES_TIMEOUT: Final[dict[Phase, float]] = {
    "starting": 4.0,  # reads models and makes tokens, of which little is known beforehand
    "compiling": 2.0,
    "training": 1.0,
    "evaluating": 1.0,
    "saving": 2.0,
    "finishing": 2.0,
}
_TIMES_LONGEST: Final = 10.0
_MOST_TIMES_TIMEOUT: Final = 4.0
_LEAST_COLLECTIVE_S: Final = 1800.0
_STATES: Final = {
    "R": "running",
    "S": "asleep, waiting for something",
    "D": "waiting for a disk or the network, and cannot be interrupted",
    "T": "stopped by a signal",
    "t": "held by a debugger",
    "Z": "dead already",
}


def hang_limit_s(phase: Phase, timeout_s: float, longest_s: float = 0.0) -> float:
    """For how long a rank may do one thing of a phase: at least ``timeout_s``, at most four times as long.

    In between it is ten times the longest that such a thing took in this run, ``longest_s``.
    """
    longest = min(_TIMES_LONGEST * longest_s, _MOST_TIMES_TIMEOUT * timeout_s)
    return max(_TIMES_TIMEOUT[phase] * timeout_s, longest)


def collective_timeout_s(timeout_s: float) -> float:
    """When a collective gives up by itself: later than any limit above, so that a hang leaves its stacks first."""
    return max(_LEAST_COLLECTIVE_S, (_MOST_TIMES_TIMEOUT + 1.0) * timeout_s)


class Pulse(Message):
    """rank-N.pulse.json, by the trainer's main thread: at each phase change, and every 5 s between steps."""

    phase: Phase
    step: int
    time: float
    pid: int
    host: str
    limit_s: float
    """For how long the next pulse may stay away before this is a hang."""


class Hang(Message):
    """What a rank did when it was found to hang, as its pulse said and as the system saw it."""

    phase: Phase
    step: int
    quiet_s: float
    limit_s: float
    process: str = ""
    """The main thread's state, in the words of /proc."""


def state_in_words(process: str) -> str:
    """``D (disk sleep) in nfs_wait``, as /proc calls a state, for a person; "" stays so."""
    state, _, function = process.partition(" in ")
    words = _STATES.get(state[:1], state)
    return f"{words}, in the kernel's {function}" if function else words


class Quiet:
    """For how long a sign of life has stayed the same, in time during which its reader itself ran.

    What stops a whole job (``scontrol suspend``) stops the reader too, and is no hang.
    """

    def __init__(self, longest_gap_s: float) -> None:
        """``longest_gap_s``: what counts at most between two looks."""
        self._longest_gap_s = longest_gap_s
        self._sign: Any = None
        self._looked_at: float | None = None
        self.quiet_s = 0.0

    def look(self, sign: Any, now: float) -> float:
        """Take a look at ``now``, in seconds of the reader's own clock; how long ``sign`` has been the same."""
        gap_s = 0.0 if self._looked_at is None else min(max(0.0, now - self._looked_at), self._longest_gap_s)
        self.quiet_s = self.quiet_s + gap_s if sign == self._sign else 0.0
        self._sign, self._looked_at = sign, now
        return self.quiet_s
