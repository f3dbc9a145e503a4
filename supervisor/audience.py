"""Who is told how a run goes on.  Whoever only listens can neither end a run nor silence the others."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from supervisor.journal import Event
from supervisor.notify import NotSentError
from supervisor.observation import Observation
from supervisor.report.screen import Lines, Screen
from supervisor.run_state import RunState
from worker.contract.files import UnusableFileError


class Listener(Protocol):
    """Somebody who follows one run."""

    def event(self, event: Event) -> None:
        """After each line of the journal."""
        ...

    def progress(self, run: RunState, seen: Observation) -> None:
        """After each pass."""
        ...

    def close(self, run: RunState) -> None:
        """When this supervisor leaves the run, over or not."""
        ...


@dataclass
class Audience:
    """The screen, and listeners whose failures are said once and change nothing."""

    screen: Screen | Lines
    listeners: tuple[Listener, ...] = ()
    _said: set[str] = field(default_factory=set)

    def event(self, event: Event) -> None:
        """Tell an event of the journal."""
        self.screen.event(event)
        self._tell(lambda listener: listener.event(event))

    def progress(self, run: RunState, seen: Observation) -> None:
        """Tell where training is."""
        self.screen.progress(run, seen)
        self._tell(lambda listener: listener.progress(run, seen))

    def trouble(self, message: str) -> None:
        """Say what is being tried again."""
        self.screen.trouble(message)

    def close(self, run: RunState) -> None:
        """Let everybody finish what they do."""
        self._tell(lambda listener: listener.close(run))

    def _tell(self, call: Callable[[Listener], None]) -> None:
        for listener in self.listeners:
            try:
                call(listener)
            except Exception as error:  # noqa: BLE001 - a full disk, a dead address or a fault of ours: the run goes on
                said = _said(listener, error)
                if said not in self._said:
                    self._said.add(said)
                    self.screen.trouble(said)


def _said(listener: Listener, error: Exception) -> str:
    """What went wrong, in words where it may happen to anybody; a fault of ours has its names."""
    match error:
        case NotSentError() | UnusableFileError():
            return str(error)
        case OSError():
            return f"{error.filename or type(listener).__name__}: {error.strerror or error}; the run goes on"
        case _:
            return f"{type(listener).__name__}: {type(error).__name__}: {error}"
