"""One trainer process, started and ended; and the agent whose trainer cannot be killed."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_rooms import HERE, Room

from worker import agent
from worker.agent_rules import StartTrainer
from worker.child import Child, log_tail, spawn
from worker.contract.exit_report import Outcome
from worker.stuck import process_state, take_stacks, what_proc_says


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    """A room for an agent in this very process."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    room = Room(tmp_path)
    yield room
    room.close()


def child(folder: Path, code: str) -> Child:
    return spawn([sys.executable, "-c", code], os.environ, folder / "a log")


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
    assert not stopped.dump_stacks(tmp_path / "stacks", clock=lambda: 0.0, sleep=patient())  # no time went by
    assert stopped.poll() == 5


def test_an_ended_trainer_is_not_asked_for_its_stacks(tmp_path: Path) -> None:
    ended = child(tmp_path, "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(5)); signal.pause()")
    assert ended.end(at_once=False, clock=lambda: 0.0, sleep=patient()) == -signal.SIGTERM


def test_a_trainer_that_went_by_itself_meanwhile_is_ended_all_the_same(tmp_path: Path) -> None:
    for at_once in (False, True):
        over = child(tmp_path, "exit(20)")
        sleep = patient()
        while over.poll() is None:
            sleep(0)
        take_stacks(over, tmp_path / "stacks", 10.0, clock=lambda: 0.0, sleep=sleep)
        assert not over.dump_stacks(tmp_path / "stacks", clock=lambda: 0.0, sleep=sleep)
        assert over.end(at_once, clock=lambda: 0.0, sleep=sleep) == 20


def test_what_proc_says_is_read_before_a_stopped_trainer_is_continued(tmp_path: Path) -> None:
    code = "import os, signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); os.kill(os.getpid(), signal.SIGSTOP)"
    stopped = child(tmp_path, code)  # continued, it ends without a word
    sleep = patient()
    while "(stopped)" not in Path(f"/proc/{stopped.pid}/status").read_text():
        sleep(0)
    take_stacks(stopped, tmp_path / "stacks", 0.0, clock=lambda: 0.0, sleep=sleep)
    assert "T (stopped)" in (tmp_path / "stacks").read_text()
    assert stopped.end(at_once=True, clock=lambda: 0.0, sleep=sleep) == 0


def test_stacks_are_waited_for_no_longer_than_they_take_to_write(tmp_path: Path) -> None:
    stacks = tmp_path / "stacks"
    asked = child(
        tmp_path,
        f"import faulthandler, signal; file = open({str(stacks)!r}, 'w'); faulthandler.register(signal.SIGUSR1, file)\n"
        "print('up', flush=True)\ndef waits_here(): signal.pause()\nwhile True: waits_here()",
    )
    sleep = patient()
    while not (tmp_path / "a log").read_text():
        sleep(0)
    assert asked.dump_stacks(stacks, clock=lambda: 0.0, sleep=sleep)  # no time went by
    assert "in waits_here" in stacks.read_text()
    assert process_state(asked.pid).startswith("S (sleeping)")
    assert what_proc_says(asked.pid).startswith(f"thread {asked.pid} python")
    asked.end(at_once=True, clock=lambda: 0.0, sleep=sleep)
    assert (process_state(asked.pid), what_proc_says(asked.pid)) == ("", "")


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
    log.unlink()
    assert log_tail(log, 7, 3) == ""


def test_a_trainer_may_get_the_schedulers_signal_before_its_agent_does(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = []
    poll = Child.poll

    def watched_poll(self: Child) -> int | None:
        code = poll(self)
        if code is not None:
            over.append(code)
        return code

    def sleep(seconds: float) -> None:
        if over:  # the agent knows that its trainer died, and only now its own signal comes
            one._note(signal.SIGTERM, None)
        patient()(seconds)

    monkeypatch.setattr(Child, "poll", watched_poll)
    room.trainer(1, "os.kill(os.getpid(), signal.SIGTERM)")
    room.direct(1)
    one = agent.Agent(room.run_dir, room.task(), room.trainer_module, time.monotonic, sleep)
    one.prepare()
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

    def survive(self: Child, at_once: bool, clock: object, sleep: object) -> None:
        started.append(self)

    def sleep(seconds: float) -> None:
        if room.notes("started"):
            room.direct(2)
        patient()(seconds)

    monkeypatch.setattr(Child, "end", survive)
    room.trainer(1, "while True: time.sleep(0.05)")
    room.direct(1)
    one = agent.Agent(room.run_dir, room.task(), room.trainer_module, time.monotonic, sleep)
    with pytest.raises(agent.UnkillableTrainerError, match=r"survived SIGKILL: it is [a-z]") as caught:
        one.run()
    one.fail(caught.value)
    [trainer] = started
    while trainer.poll() is None:
        time.sleep(0.01)
    report = room.report(1)
    assert report.outcome is Outcome.CRASHED
    assert report.error is not None
    assert report.error.type == "UnkillableTrainerError"
    assert report.error.points_at_node
    assert f"thread {trainer.pid} " in room.run_dir.stacks(1, 0, 0).read_text()
