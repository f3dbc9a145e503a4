"""The zygote: what it forks is what a cold start would have started, and whatever happens to it, a run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from agent_rooms import HERE, ROOT, Room, children, is_alive

from tests.waiting import eventually
from worker import trainers, zygote
from worker.child import Child, spawn
from worker.contract.exit_report import Outcome
from worker.zygote import Zygote, ZygoteGoneError

RUNS = "note('ready')\nwhile True: time.sleep(0.05)\n"

MODULE = """
import contextlib, json, os, random, signal, sys

def main():
    body = sys.argv.pop()
    exec(body, globals())

if __name__ == "__main__":
    main()
"""

TELL = """
numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD]
links = {}
for name in os.listdir("/proc/self/fd"):
    with contextlib.suppress(FileNotFoundError):
        links[name] = os.readlink("/proc/self/fd/" + name)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps({
    "argv": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd(),
    "umask": status["Umask"], "blocked": status["SigBlk"], "ignored": status["SigIgn"],
    "signals": {number.name: str(signal.getsignal(number)).split(" at ")[0] for number in numbers},
    "files": {name: links.get(name) for name in "012"}, "sockets": sum("socket" in link for link in links.values()),
    "leads": os.getpgrp() == os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "path": sys.path,
    "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
}))
"""


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path, zygote=True)
    yield room
    room.close()


@pytest.fixture
def module(tmp_path: Path) -> str:
    (tmp_path / "a_trainer.py").write_text(MODULE)
    return "a_trainer"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTHONSAFEPATH": "1", "NAME": "caf\udce9"}


@pytest.fixture
def warm(tmp_path: Path, module: str, environment: dict[str, str]) -> Iterator[Zygote]:
    """A zygote whose agent is this process, after its imports."""
    made = Zygote(module, environment, tmp_path / "zygote.log")
    eventually(made.is_ready)
    yield made
    made.close()


def wait(child: Child) -> int:
    return eventually(lambda: (code,) if (code := child.poll()) is not None else None)[0]


def test_a_forked_trainer_finds_what_a_cold_one_finds(
    tmp_path: Path, module: str, environment: dict[str, str], warm: Zygote
) -> None:
    log, arguments = tmp_path / "a log", ["one", "two words", "", TELL]
    given = {**environment, "NAME": "other", "RANK": "3"}
    del given["PATH"]
    cold = spawn([sys.executable, "-m", module, *arguments], given, log)
    assert wait(cold) == 0
    forked = warm.fork(arguments, given, log)
    assert wait(forked) == 0
    one, other = (json.loads(line) for line in log.read_text().splitlines())
    assert one["parent"] == os.getpid()
    assert (one["leads"], one["sockets"], one["environment"]["NAME"]) == (True, 0, "other")
    assert other == one
    assert forked.log_begin == len(log.read_text().splitlines()[0]) + 1


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("pass", 0),
        ("exit(20)", 20),
        ("os._exit(21)", 21),
        ("raise ValueError('oh')", 1),
        ("exit('no')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGUSR2)", -signal.SIGUSR2),
        ("os.abort()", -signal.SIGABRT),
    ],
)
def test_it_ends_as_a_cold_one_would(warm: Zygote, tmp_path: Path, module: str, body: str, code: int) -> None:
    environment, log = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}, tmp_path / "log"
    forked = warm.fork([body], environment, log)
    cold = spawn([sys.executable, "-m", module, body], environment, log)
    assert (wait(forked), wait(cold)) == (code, code)
    assert forked.poll() == code


def test_a_traceback_names_the_trainers_own_lines(warm: Zygote, tmp_path: Path) -> None:
    assert wait(warm.fork(["raise ValueError('oh')"], os.environ, tmp_path / "log")) == 1
    said = (tmp_path / "log").read_text()
    assert "a_trainer.py" in said
    assert said.endswith("ValueError: oh\n")


def test_no_two_trainers_draw_the_same_random_numbers(warm: Zygote, tmp_path: Path) -> None:
    for _ in range(2):
        assert wait(warm.fork(["print(random.random())"], os.environ, tmp_path / "log")) == 0
    assert len(set((tmp_path / "log").read_text().split())) == 2


def test_signals_are_for_agents_and_trainers(warm: Zygote, tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(warm.pid, number)
    child = warm.fork(["import time; print('up', flush=True); time.sleep(1e6)"], os.environ, tmp_path / "log")
    eventually(lambda: (tmp_path / "log").read_text())
    child.send(signal.SIGTERM)
    assert wait(child) == -signal.SIGTERM


def test_a_stopped_trainer_is_continued_and_answers(warm: Zygote, tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGUSR1, lambda *_: exit(5)); os.kill(os.getpid(), signal.SIGSTOP)"
    child = warm.fork([body], os.environ, tmp_path / "log")
    eventually(lambda: "(stopped)" in Path(f"/proc/{child.pid}/status").read_text())
    assert child.poll() is None
    assert not child.dump_stacks(tmp_path / "stacks", clock=lambda: 0.0, sleep=time.sleep)
    assert child.poll() == 5


def test_what_a_forked_trainer_started_ends_with_it(warm: Zygote, tmp_path: Path) -> None:
    body = "import time; worker = os.fork(); worker or time.sleep(1e6); print(worker, flush=True); os._exit(0)"
    assert wait(warm.fork([body], os.environ, tmp_path / "log")) == 0
    eventually(lambda: not is_alive(int((tmp_path / "log").read_text())))


def test_a_dead_zygote_harms_no_trainer_and_says_so_when_it_is_asked(warm: Zygote, tmp_path: Path) -> None:
    child = warm.fork(["import time; time.sleep(1e6)"], os.environ, tmp_path / "log")
    os.kill(warm.pid, signal.SIGKILL)
    with pytest.raises(ZygoteGoneError, match="signal 9"):
        warm.fork(["pass"], os.environ, tmp_path / "log")
    assert child.poll() is None
    child.send(signal.SIGKILL)
    assert wait(child) == -signal.SIGKILL


def test_a_zygote_that_does_not_answer_is_given_up_and_no_late_trainer_runs(
    warm: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zygote, "_FORK_TIMEOUT_S", 0.1)
    os.kill(warm.pid, signal.SIGSTOP)
    with pytest.raises(ZygoteGoneError, match="timed out"):
        warm.fork([f"open({str(tmp_path / 'ran')!r}, 'w')"], os.environ, tmp_path / "log")
    assert not is_alive(warm.pid)
    assert not (tmp_path / "ran").exists()


def test_an_answer_that_comes_at_the_last_moment_counts(
    warm: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = iter([TimeoutError("timed out")])
    read = warm._read

    def late_read() -> object:
        for error in reads:
            eventually(lambda: len(children(os.getpid())) > 1)  # the trainer is this process's child, and answers
            time.sleep(0.2)
            raise error
        return read()

    monkeypatch.setattr(warm, "_read", late_read)
    child = warm.fork(["signal.pause()"], os.environ, tmp_path / "log")
    assert child.poll() is None
    child.send(signal.SIGTERM)
    assert wait(child) == -signal.SIGTERM


def test_a_log_that_is_gone_is_told_at_once(warm: Zygote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = warm._ask

    def ask_too_late(request: dict[str, object]) -> int:
        Path(str(request["log"])).unlink()
        return ask(request)

    monkeypatch.setattr(warm, "_ask", ask_too_late)
    with pytest.raises(ZygoteGoneError, match="FileNotFoundError"):
        warm.fork(["pass"], os.environ, tmp_path / "log")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('no such thing')", "no such thing"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started a thread"),
    ],
    ids=["failing", "starting a thread"],
)
def test_imports_that_no_fork_survives_end_the_zygote(
    tmp_path: Path, environment: dict[str, str], source: str, said: str
) -> None:
    (tmp_path / "bad_trainer.py").write_text(source)
    bad = Zygote("bad_trainer", environment, tmp_path / "log")
    with pytest.raises(ZygoteGoneError, match="exit code 1"):
        eventually(bad.is_ready)
    assert said in (tmp_path / "log").read_text()


def test_after_its_zygote_was_killed_an_agent_starts_the_next_trainer_cold(room: Room) -> None:
    room.trainer(1, "while not (room / 'go').exists(): time.sleep(0.02)\nleave(20)")
    room.trainer(2, "note('command', text=open('/proc/self/cmdline').read()); leave(20)")
    room.trainer(3, "leave(0)")
    room.direct(1)
    agent = room.agent()
    room.noted("started")
    os.kill(room.zygote_of(agent), signal.SIGKILL)
    (room.path / "go").touch()
    assert room.report(1).outcome is Outcome.VERDICT
    room.direct(2)
    assert room.report(2).outcome is Outcome.VERDICT
    assert "fake_trainer" in room.noted("command")["text"]
    assert room.said("its zygote is gone, trainers start without it: it was killed by signal 9")
    room.direct(3)
    assert agent.wait(60) == 0
    assert [note["ppid"] for note in room.notes("started")] == [agent.pid] * 3


def test_a_zygote_that_cannot_import_leaves_the_word_to_a_cold_start(room: Room) -> None:
    room.trainer_module = "no_such_trainer"
    room.direct(1)
    agent = room.agent()
    report = room.report()
    assert (report.outcome, report.exit_code) == (Outcome.CRASHED, 1)
    assert report.error is not None
    assert "no_such_trainer" in report.error.traceback
    assert room.said("its zygote is gone")
    agent.kill()


def test_a_zygote_that_never_gets_ready_is_given_up(room: Room) -> None:
    module = "import sys, time\nif 'worker.zygote' in sys.orig_argv: time.sleep(1e6)\nfrom fake_trainer import main\n"
    (room.path / "slow_trainer.py").write_text(module + "if __name__ == '__main__': main()\n")
    (room.path / "fake_trainer.py").symlink_to(HERE / "fake_trainer.py")
    room.trainer_module, room.trainer_path = "slow_trainer", room.path
    room.trainer(1, "leave(0)")
    room.direct(1)
    agent = room.agent()
    room.zygote_of(agent)
    assert room.notes("started") == []
    room.advance(301)
    assert agent.wait(60) == 0
    assert room.said("not ready after 300 s")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_while_the_imports_go_on_an_agent_can_be_asked_to_leave(room: Room, number: signal.Signals) -> None:
    (room.path / "slow_trainer.py").write_text("import time; time.sleep(1e6)")
    room.trainer_module, room.trainer_path = "slow_trainer", room.path
    room.direct(1)
    agent = room.agent()
    zygote_pid = room.zygote_of(agent)
    agent.send_signal(number)
    report = room.report()
    what = "preempted" if number is signal.SIGTERM else "time_limit"
    assert report.outcome is Outcome.LEFT
    assert report.error is not None
    assert report.error.what == what
    if number is signal.SIGTERM:  # stays until it is killed
        agent.kill()
    agent.wait(60)
    eventually(lambda: not is_alive(zygote_pid))


def test_a_killed_agent_leaves_neither_zygote_nor_trainer(room: Room) -> None:
    room.trainer(1, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + RUNS)
    room.direct(1)
    agent = room.agent()
    trainer, its_zygote = room.noted("ready")["pid"], room.zygote_of(agent)
    agent.kill()
    eventually(lambda: not is_alive(trainer) and not is_alive(its_zygote))


def test_no_zygote_where_the_agent_has_nothing_to_start(room: Room) -> None:
    room.direct(1, stop="now")
    assert room.agent().wait(60) == 0
    assert not room.run_dir.train_log.exists()


def test_sigterm_to_every_process_at_once_is_a_preemption(room: Room) -> None:
    room.trainer(1, "signal.signal(signal.SIGTERM, left('preempted'))\n" + RUNS)
    room.direct(1)
    agent = room.agent()
    trainer, its_zygote = room.noted("ready")["pid"], room.zygote_of(agent)
    for pid in (its_zygote, trainer, agent.pid):
        os.kill(pid, signal.SIGTERM)
    report = room.report()
    assert (report.outcome, report.saved_step) == (Outcome.LEFT, 7)
    assert report.error is not None
    assert report.error.what == "preempted"
    assert agent.poll() is None
    assert is_alive(its_zygote)


def test_the_program_is_light(tmp_path: Path) -> None:
    """The agent imports it: it must not bring what it is there to import."""
    code = "import worker.trainers, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


class SlowZygote:
    """Ready at the third look."""

    looks = 0

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        """Begins to import."""

    def is_ready(self) -> bool:
        self.looks += 1
        return self.looks >= 3

    def fork(self, *args: object) -> None:
        """A trainer."""


def test_the_first_trainer_is_told_how_long_it_was_waited_for_and_the_next_one_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers, "Zygote", SlowZygote)
    now = 100.0
    made = trainers.Trainers("m", {}, tmp_path / "log", True, lambda said: None, lambda: now)
    while not made.are_ready():
        now += 4.0
    assert made.waited_s == 8.0
    made.start([])
    now += 100.0
    assert made.are_ready()
    assert made.waited_s == 0.0
