"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

import io

import pytest

from supervisor.journal import StopRequested
from supervisor.observation import Observation
from supervisor.report import screen
from supervisor.report.screen import Screen
from supervisor.run_state import RunState
from worker.contract.loss_history import record

RUN = RunState(state="training", attempt=1)
SEEN = Observation(
    now=0.0, branch=(record(segment=1, attempt=1, restart=0, step=7, epoch=0.1, time=0.0, loss=2.5, lr=1e-5),)
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_step_on_one_line_that_an_event_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.time, "monotonic", lambda: 1000.0)
    out = Terminal()
    shown = Screen(out, "tiny", 50)
    shown.progress(RUN, SEEN)
    assert out.getvalue() == "\r\x1b[Ktiny: step 7/50  loss 2.5000  rate 1e-05"
    shown.event(StopRequested(by="bob", reason="bob asked for a stop"))
    assert out.getvalue().partition("\r\x1b[K")[2].partition("\r\x1b[K")[2].endswith("bob asked for a stop\n")
    before = out.getvalue()
    shown.progress(RunState(state="gave_up", attempt=1), Observation(now=0.0))
    assert out.getvalue() == before, "what a run that is over waits for is nothing"


def test_elsewhere_a_line_now_and_then_and_none_of_an_abandoned_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.time, "monotonic", lambda: 1000.0)
    out = io.StringIO()
    shown = Screen(out, "tiny", 50)
    shown.progress(RunState(state="starting", attempt=2), SEEN)
    assert out.getvalue() == ""
    shown.progress(RUN, SEEN)
    shown.progress(RUN, SEEN)
    assert out.getvalue() == f"{'':21}step 7/50  loss 2.5000  rate 1e-05\n"
