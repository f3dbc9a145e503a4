"""What an agent reports of its trainer: the outcome and its error, from values alone."""

import signal

from worker.agent_rules import Asked, End
from worker.contract.exit_report import ErrorDetail, Outcome, outcome_of

_KILLED_IN_TIME = frozenset({signal.SIGTERM, signal.SIGUSR2, signal.SIGKILL})
_OWN_WORD_STANDS = frozenset({Outcome.DONE, Outcome.VERDICT, Outcome.FENCED, Outcome.REFUSED, Outcome.OUT_OF_MEMORY})
_ENDED_AS = {"stop": Outcome.LEFT, "preempted": Outcome.LEFT, "fenced": Outcome.FENCED}


def outcome_of_trainer(
    returncode: int, end: End | None, is_asked_to_leave: bool, killed_for_memory: bool = False
) -> Outcome:
    """How a trainer's start ended; ``returncode`` as in subprocess, minus N for signal N.

    ``killed_for_memory``: the kernel counted such a kill in the group meanwhile, and it explains this end.
    A trainer that its agent was ending answers our SIGTERM with "left" or a traceback: that is not its own word.
    """
    own = outcome_of(returncode)
    if end is not None:
        return own if own in _OWN_WORD_STANDS else _ENDED_AS.get(end.what, Outcome.ENDED)
    if killed_for_memory and own is Outcome.CRASHED:
        return Outcome.OUT_OF_MEMORY
    if is_asked_to_leave and -returncode in _KILLED_IN_TIME:
        return Outcome.LEFT
    return own


def tells_of_a_kill(returncode: int, known: ErrorDetail | None) -> bool:
    """Whether the trainer, or a data worker of it as torch tells it, was killed by SIGKILL."""
    return returncode == -signal.SIGKILL or (known is not None and "killed by signal: Killed" in known.message)


def error_of_trainer(
    outcome: Outcome, returncode: int, known: ErrorDetail | None, end: End | None, what: str, log_tail: str
) -> ErrorDetail | None:
    """The report's error: what the trainer ``known`` of it, else what its agent can tell.

    ``what`` says why a trainer left; the tail of its log stands in for a traceback that it could not leave.
    """
    if outcome is Outcome.LEFT:
        left = known or ErrorDetail(type="Left", message=f"asked to leave: {what}")
        return left.model_copy(update={"what": what})
    if end is not None and outcome in (Outcome.ENDED, Outcome.FENCED):
        return ErrorDetail(
            type="Ended", message=end.reason, what=end.what, traceback=known.traceback if known else log_tail
        )
    if known is not None or outcome in (Outcome.DONE, Outcome.VERDICT):
        return known
    if outcome is Outcome.OUT_OF_MEMORY and returncode < 0:
        message = "killed by the kernel: the main memory of the job's control group ran out (memory.events)"
        return ErrorDetail(type="OutOfMemory", message=message, traceback=log_tail)
    if returncode < 0:
        name = signal.strsignal(-returncode) or "unknown"
        return ErrorDetail(type="Signal", message=f"killed by signal {-returncode} ({name})", traceback=log_tail)
    last = log_tail.rstrip().rpartition("\n")[2].strip()
    message = f"exit code {returncode}{f'; the last line of its log: {last}' if last else ''}"
    return ErrorDetail(type="ExitCode", message=message, traceback=log_tail)


def left_because(trainers_word: str | None, end: End | None, asked: Asked, is_stopped: bool) -> str:
    """Why a trainer left: stop, time_limit or preempted.

    A stop by directive reaches the trainer as SIGUSR2, so that it may take it for the time limit; its agent knows.
    """
    if end is not None:
        return end.what
    if is_stopped and not asked.time_limit and not asked.preempted:
        return "stop"
    if trainers_word is not None:
        return trainers_word
    if asked.preempted:
        return "preempted"
    return "time_limit" if asked.time_limit else "stop"
