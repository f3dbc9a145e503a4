"""One trainer process, started and ended; and the agent whose trainer cannot be killed."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_rooms import Room

from worker import agent
from worker.agent_rules import StartTrainer
from worker.child import Child, log_tail
from worker.contract import config
from worker.contract.exit_report import Outcome
from worker.start import Start


def child(folder: Path, code: str) -> Child:
    return Child([sys.executable, "-c", code], os.environ, folder / "a log")


def patient(times: int = 1_200) -> Callable[[float], None]:
    """A sleep that ends the test after so many calls, however frozen its clock."""
    left = iter(range(times))

    def sleep(seconds: float) -> None:
        assert next(left, None) is not None, "not within a minute"
        time.sleep(0.05)

    return sleep


def test_a_stopped_trainer_is_continued_so_that_it_can_answer(tmp_path: Path) -> None:
    stopped = child(
        tmp_path,
        "import os, signal; signal.signal(signal.SIGUSR1, lambda *_: exit(5)); os.kill(os.getpid(), signal.SIGSTOP)",
    )
    while "(stopped)" not in Path(f"/proc/{stopped.pid}/status").read_text():
        patient()(0)
    assert stopped.end(is_hanging=True, clock=lambda: 0.0, sleep=patient()) == 5  # on the first rung: no time went by


def test_only_a_hanging_trainer_is_asked_for_its_stacks(tmp_path: Path) -> None:
    ended = child(tmp_path, "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(5)); signal.pause()")
    assert ended.end(is_hanging=False, clock=lambda: 0.0, sleep=patient()) == -signal.SIGTERM


def test_the_return_code_stays_what_it_was(tmp_path: Path) -> None:
    over = child(tmp_path, "exit(20)")
    sleep = patient()
    while over.poll() is None:
        sleep(0)
    assert [over.poll(), over.poll()] == [20, 20]


def test_the_tail_of_a_log_begins_where_it_is_told_and_is_short(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"before\n" + b"".join(b"%d\n" % number for number in range(300)) + b"\xff end\n")
    assert log_tail(log, 7, 3).splitlines() == ["298", "299", "\ufffd end"]
    assert log_tail(log, log.stat().st_size, 3) == ""


def test_a_trainer_may_get_the_schedulers_signal_before_its_agent_does(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = []

    class Watched(Child):
        def poll(self) -> int | None:
            code = super().poll()
            if code is not None:
                over.append(code)
            return code

    def sleep(seconds: float) -> None:
        if over:  # the agent knows that its trainer died, and only now its own signal comes
            one._note(signal.SIGTERM, None)
        patient()(seconds)

    monkeypatch.setattr(agent, "Child", Watched)
    dying = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"]
    room.direct(1)
    one = agent.Agent(room.run_dir, room.task(), lambda run_dir, start: dying, time.monotonic, sleep)
    one.config = config.read(room.run_dir.config)
    move = one.next_move()
    assert isinstance(move, StartTrainer)
    one.train(move.directive)
    report = room.report(1)
    assert report.outcome is Outcome.LEFT
    assert report.error is not None
    assert report.error.what == "preempted"


def test_an_agent_whose_trainer_survives_sigkill_leaves_and_starts_no_other(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process of a test survives SIGKILL: the ladder is taken away instead, and the trainer ended here."""
    started = []

    class Immortal(Child):
        def end(self, is_hanging: bool, clock: Callable[[], float], sleep: Callable[[float], None]) -> int | None:
            started.append(self)
            return None

    monkeypatch.setattr(agent, "Child", Immortal)
    sleeper = [sys.executable, "-c", "import time; time.sleep(1e6)"]

    def argv(run_dir: Path, start: Start) -> list[str]:
        room.direct(2)
        return sleeper

    room.direct(1)
    one = agent.Agent(room.run_dir, room.task(), argv, time.monotonic, patient())
    with pytest.raises(TimeoutError, match="survived SIGKILL") as caught:
        one.run()
    one.fail(caught.value)
    [trainer] = started
    while trainer.poll() is None:
        time.sleep(0.01)
    report = room.report(1)
    assert report.outcome is Outcome.CRASHED
    assert report.error is not None
    assert report.error.type == "TimeoutError"
