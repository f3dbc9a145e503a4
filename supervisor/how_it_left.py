"""How a start of the worker ended, in one sentence for a person.  Pure."""

from typing import Final

from supervisor.journal import Plan
from worker.contract.exit_report import ErrorDetail, ExitReport, Outcome

_ASKED: Final = {
    "stop": "it was asked to stop",
    "time_limit": "its time limit was near",
    "preempted": "SIGTERM asked it to (a preemption, a requeue or a scancel)",
}
_LONGEST: Final = 240
"""Characters of an error; all of it is in the exit report and in logs/train.log."""


def how_it_left(report: ExitReport) -> str:
    """What became of a start, as its most telling rank reports it."""
    said, where = _said(report.error), f"rank {report.rank} on {report.host}"
    match report.outcome:
        case Outcome.DONE:
            return "the worker has made the last step"
        case Outcome.VERDICT:
            return "the worker stopped at its verdict"
        case Outcome.LEFT:
            what = report.error.what if report.error is not None else None
            return f"the worker left in order and {_saved(report)}: {_ASKED.get(what or '', 'it was asked to')}"
        case Outcome.CRASHED if report.error is not None and report.error.type == "Signal":
            return f"the worker ended: {where} was {said}"
        case Outcome.CRASHED:
            return f"the worker crashed: {where}: {said}"
        case Outcome.ENDED:
            return f"the worker was ended by its agent: {where}: {said}"
        case Outcome.REFUSED:
            return f"the worker will not train: {said}"
        case Outcome.FENCED:
            return f"the worker left the run to a newer start: {said}"
        case Outcome.OUT_OF_MEMORY:
            return f"the worker ran out of memory: {where}: {said}"
        case _:
            return f"the worker ended: {report.outcome.value}"


def cause_of(event: Plan) -> str:
    """Why an attempt was begun: in a word, or two."""
    is_kill = event.cause == "crash" and "killed by signal" in event.reason
    return "killed" if is_kill else event.cause.replace("_", " ")


def _saved(report: ExitReport) -> str:
    if report.saved_step is None:
        return "saved nothing"
    return (
        f"saved step {report.saved_step}" if report.saved_step == report.step else f"had saved step {report.saved_step}"
    )


def _said(error: ErrorDetail | None) -> str:
    """The error in one line: without the name of a class of ours, which tells a person nothing."""
    if error is None:
        return "no reason given"
    own = ("Signal", "Ended", "ExitCode", "Left", "OutOfMemory", "RefusedError", "FencedError")
    text = " ".join((error.message if error.type in own else f"{error.type}: {error.message}").split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
