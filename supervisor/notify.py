"""A word to the person when it matters: at once, and then as a digest at most every ten minutes.

A target is an address of apprise (an extra), or a command that gets the message as JSON on its standard input.  Each
message is handed to a process of its own, so that a dead address costs the run nothing; what fails is said once.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from slurm import reasons
from slurm.job import JobState
from supervisor.config import Told
from supervisor.doctor import CheckedItem
from supervisor.journal import Event
from supervisor.observation import Observation
from supervisor.report.figures import duration, local_time, printable
from supervisor.report.texts import details_of, text_of, word_of
from supervisor.run_state import RunState
from worker.contract.config import Config
from worker.contract.run_dir import RunDir

_COMMAND: Final = "command:"
DIGEST_EVERY_S: Final = 600.0
SEND_WITHIN_S: Final = 60.0
LEAVE_WITHIN_S: Final = 15.0
"""How long a supervisor that leaves waits for its last message."""
LATE_S: Final = 3600.0
"""Waiting longer than this past the start that Slurm expected, or without an expected one, is worth a word."""
_WORTH: Final = frozenset({"RolledBack", "GaveUp", "Finished", "Stopped", "HangSeen", "WouldHaveDone"})


_NO_APPRISE, _NO_ADDRESS, _NOT_TAKEN = 83, 82, 81
_WHY: Final = {
    _NO_APPRISE: "needs apprise: pip install 'higgsfield-supervisor[notify]'",
    _NO_ADDRESS: "is no address that apprise knows",
    _NOT_TAKEN: "did not take a message",
}
"""By the exit code of the process that hands a message to apprise."""
_WHY_NOT: Final = {126: ": it may not be run", 127: ": there is no such program"}
"""By the exit code of a shell."""


class NotSentError(Exception):
    """A target that did not take a message; says which, and never its address, which may hold a password."""


@dataclass(frozen=True)
class Note:
    """One thing to tell; ``event`` is the journal's line, None for what is no event."""

    title: str
    text: str
    event: dict[str, Any] | None = None
    time: float | None = None
    """UTC seconds."""


def is_worth_a_word(event: Event) -> bool:
    """Rollbacks, hangs, and every way in which a run ends."""
    return event.event in _WORTH


def note_of(event: Event, folder: str) -> Note:
    """An event of the run in ``folder`` as a message."""
    details = [f"{label}: {text}" if label else text for label, text in details_of(event, None, folder)]
    text = "\n".join(printable(line) for line in [text_of(event), *details])
    return Note(printable(word_of(event).lower()), text, event.model_dump(mode="json"), event.time)


def message_of(name: str, folder: str, notes: Sequence[Note]) -> dict[str, Any]:
    """What is sent: one note as it is, several as a digest."""
    last = notes[-1].title
    title = f"{name}: {last}" if len(notes) == 1 else f"{name}: {len(notes)} events, the last: {last}"
    times = ["" if note.time is None else f"{local_time(note.time)}  " for note in notes]
    body = "\n\n".join(f"{time}{note.title.upper()}: {note.text}" for time, note in zip(times, notes, strict=True))
    events = [note.event for note in notes if note.event is not None]
    return {"run": name, "dir": folder, "title": title, "body": f"{body}\n\nhiggsfield log {folder}", "events": events}


class Notifier:
    """Listens to one run, and tells its targets."""

    def __init__(
        self,
        run_dir: RunDir,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._name = config.run.name
        self._targets = config.notify
        self._clock = clock
        self._pending: list[Note] = []
        self._sent_at = float("-inf")
        self._sending: list[Sending] = []
        self._waits: tuple[str, int] | None = None
        self._waits_since = self._late_at = 0.0

    def event(self, event: Event) -> None:
        """Keep what is worth a word."""
        if self._targets and is_worth_a_word(event):
            self._pending.append(note_of(event, str(self._run_dir.path)))

    def progress(self, run: RunState, seen: Observation) -> None:
        """Send what there is, unless something was sent a moment ago; NotSentError where a target failed before."""
        if not self._targets:
            return
        self._notice_waiting(run, seen)
        if self._clock() - self._sent_at >= DIGEST_EVERY_S:
            self._send()
        self._look_after(SEND_WITHIN_S)

    def close(self, run: RunState) -> None:
        """Send the rest, and wait for it a while."""
        self._send()
        until = time.monotonic() + LEAVE_WITHIN_S
        while any(each.process.poll() is None for each in self._sending) and time.monotonic() < until:
            time.sleep(0.05)
        self._look_after(0.0)

    def _notice_waiting(self, run: RunState, seen: Observation) -> None:
        """A job that waits longer than expected is told once for each time that it waits."""
        job = seen.job
        if job is None or job.state is not JobState.PENDING:
            self._waits = None
            return
        if self._waits != (job.job_id, job.restarts):
            self._waits = job.job_id, job.restarts
            self._waits_since = run.job.time if run.job is not None else seen.now
            self._late_at = max(self._waits_since, job.starts_at or 0.0) + LATE_S
        elif 0 < self._late_at < seen.now:
            self._late_at = 0.0
            why = ": ".join(each for each in (reasons.explain(job), job.why) if each)
            said = f"job {job.job_id} waits longer than expected, for {duration(seen.now - self._waits_since)} by now"
            self._pending.append(Note("still waiting", f"{said}{f' ({why})' if why else ''}", time=seen.now))

    def _send(self) -> None:
        if not self._pending:
            return
        message = message_of(self._name, str(self._run_dir.path), self._pending)
        self._pending = []
        self._sent_at = self._clock()
        for number, target in enumerate(self._targets, 1):
            self._sending.append(send(number, target, message))

    def _look_after(self, within_s: float) -> None:
        """Take note of what was sent, and end what takes too long."""
        failures = [text for each in self._sending if (text := each.failure(within_s)) is not None]
        self._sending = [each for each in self._sending if each.process.returncode is None]
        if failures:
            raise NotSentError("; ".join(failures))


# -- sending -----------------------------------------------------------------------------------------------------------


@dataclass
class Sending:
    """A message on its way to one target."""

    what: str
    process: subprocess.Popen[bytes]
    begun: float

    def failure(self, within_s: float) -> str | None:
        """Why it did not arrive, None while it may; one that takes longer than ``within_s`` is ended."""
        code = self.process.poll()
        if code is None and time.monotonic() - self.begun > within_s:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            return f"{self.what} took no message within {SEND_WITHIN_S:.0f} s"
        said = _WHY.get(code, f"did not take a message (exit code {code}{_WHY_NOT.get(code, '')})") if code else ""
        return f"{self.what} {said}" if code else None


def send(number: int, target: str, message: dict[str, Any]) -> Sending:
    """Start the process that hands ``message`` to the ``number``-th target."""
    if target.startswith(_COMMAND):
        argv, text = ["/bin/sh", "-c", target.removeprefix(_COMMAND)], json.dumps(message)
    else:  # the address goes the same way: command lines are seen by everybody
        argv, text = [sys.executable, "-P", "-m", "supervisor.notify"], json.dumps({"address": target, **message})
    with tempfile.TemporaryFile() as file:  # not a pipe: a target that reads nothing must not stop us
        file.write(f"{text}\n".encode())
        file.seek(0)
        process = subprocess.Popen(
            argv, stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    return Sending(describe(number, target), process, time.monotonic())


def describe(number: int, target: str) -> str:
    """A target without its secrets: its place in ``notify``, and its kind, with the program's name of a command."""
    kind, _, command = target.partition(":")
    program = next((word for word in command.split() if "=" not in word), "") if kind == "command" else ""
    named = re.fullmatch(r"(?:.*/)?([\w.+-]+)", program)
    return f"notify target {number} ({printable(kind)}{f' {named[1]}' if named else ''})"


def has_apprise() -> bool:
    """Whether the extra that knows addresses is installed."""
    return importlib.util.find_spec("apprise") is not None


def _try_targets(config: Told | Config) -> list[tuple[str, str | None]]:
    """Send a test to every target of a configuration: what it is, and why it failed, None where it did not."""
    text = "this is a test of higgsfield doctor --notify; nothing happened"
    message = message_of(config.run.name, f"{config.run.dir}/{config.run.name}", [Note("test", text)]) | {"body": text}
    begun = [send(number, target, message) for number, target in enumerate(config.notify, 1)]
    for each in begun:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.process.wait(SEND_WITHIN_S)
    return [(each.what, each.failure(0.0)) for each in begun]


def ask_targets(config: Told | Config) -> list[CheckedItem]:
    """Send a test to each target of ``notify``; their addresses are not shown."""
    if not config.notify:
        return [CheckedItem("notify", False, "the configuration names nobody", "give `notify` a list of addresses")]
    return [
        CheckedItem("notify", failure is None, failure or f"{what} took a test", failure and _mend(target))
        for target, (what, failure) in zip(config.notify, _try_targets(config), strict=True)
    ]


def _mend(target: str) -> str:
    if target.startswith(_COMMAND):
        return "give the command by hand, with any JSON on its standard input"
    return "look at the address" if has_apprise() else "pip install 'higgsfield-supervisor[notify]'"


def main() -> int:
    """Hand the message on standard input to its apprise address; 0 where it was taken."""
    message = json.load(sys.stdin)
    try:
        import apprise
    except ImportError:
        return _NO_APPRISE
    service = apprise.Apprise()
    if not service.add(message["address"]):
        return _NO_ADDRESS
    return 0 if service.notify(title=message["title"], body=message["body"]) else _NOT_TAKEN


if __name__ == "__main__":
    sys.exit(main())
