"""Whether a run's steps go on, when the last one will be done, and an end of its worker that nobody has read yet."""

from collections.abc import Sequence
from typing import Final

from supervisor.how_it_left import how_it_left
from supervisor.news import most_telling
from supervisor.observer import newest_reports
from supervisor.run_state import RunState
from supervisor.signs import reports_in
from worker.contract.exit_report import ExitReport
from worker.contract.files import UnusableFileError, read_message
from worker.contract.loss_history import Record
from worker.contract.pulse import Pulse
from worker.contract.run_dir import RunDir

_LATE_S: Final = 60.0
_LATE_STEPS: Final = 10.0
"""How much longer than its last steps one may take, with a save or an evaluation, before it counts as late."""
_ALONE_LATE_S: Final = 15.0
"""And where nobody supervises, so that whatever stands still stays so."""


_NO_STEPS: Final = ("evaluating", "saving", "finishing")


def step_s(recent: Sequence[Record]) -> float | None:
    """Seconds a step over the last ones of a segment, with all between them; None where fewer than two are known."""
    steps = recent[-1].step - recent[0].step if recent else 0
    return (recent[-1].time - recent[0].time) / steps if steps > 0 else None


def still_since(run: RunState, recent: Sequence[Record], now: float, *, is_alone: bool) -> float | None:
    """When the last step was made, UTC seconds, where the next is late by far; None where it is not, or none is due."""
    if run.state != "training" or not recent:
        return None
    usual_s = step_s(recent) or recent[-1].step_s or 0.0
    late_s = max(_ALONE_LATE_S if is_alone else _LATE_S, _LATE_STEPS * usual_s)
    return recent[-1].time if now - recent[-1].time > late_s else None


def estimate(run: RunState, total: int | None, recent: Sequence[Record], now: float) -> float | None:
    """When the last step will be done at the pace of the last ones, UTC seconds; None where that is not known.

    A step that is late, or waits for an evaluation, moves it.
    """
    pace_s = step_s(recent)
    if run.state != "training" or total is None or pace_s is None:
        return None
    left = total - recent[-1].step
    if left <= 0:
        return None
    return max(recent[-1].time + pace_s, now) + pace_s * (left - 1)


def between_steps(run_dir: RunDir, run: RunState, now: float) -> str | None:
    """What the trainer does that is no step, as rank 0's pulse says; None where it makes steps, or gives no sign."""
    restarts = run_dir.restarts(run.attempt) if run.attempt else []
    if run.state != "training" or not restarts:
        return None
    try:
        pulse = read_message(run_dir.pulse(run.attempt, restarts[-1], 0), Pulse)
    except UnusableFileError:
        return None
    is_told = pulse is not None and pulse.phase in _NO_STEPS and now - pulse.time < _LATE_S
    return pulse.phase if pulse is not None and is_told else None


def whole_rounds(recent: Sequence[Record], every: int | None) -> Sequence[Record]:
    """The last ones with as many evaluations among them as belong there, where one is made ``every`` so many steps."""
    rounds = (len(recent) - 1) // every if every else 0
    return recent[-rounds * every - 1 :] if every and rounds else recent


def unread_end(run_dir: RunDir, run: RunState) -> ExitReport | None:
    """The exit report of the present attempt that is in no journal yet; None where there is none."""
    if run.is_over or run.left is not None or not run.attempt:
        return None
    starts = [run_dir.restart(run.attempt, restart) for restart in run_dir.restarts(run.attempt)]
    return most_telling(newest_reports({start: reports_in(start) for start in starts}).values())


def unread_text(run_dir: RunDir, run: RunState) -> str | None:
    """How the present attempt ended, for a person, as long as no supervisor has read it."""
    report = unread_end(run_dir, run)
    return None if report is None else how_it_left(report)
