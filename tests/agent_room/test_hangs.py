"""Agents and trainers that make no progress: real processes, stopped and stuck."""

import os
import signal
from pathlib import Path

import pytest
from agent_rooms import Room

from tests.waiting import eventually
from worker.contract.exit_report import ExitReport, Outcome

BEATS = """
TIMEOUT_S = 1.0
from worker.pulse import Heart

stacks = open(folder / f"rank-{start['rank']}.stacks.txt", "w")
faulthandler.register(signal.SIGUSR1, stacks)
heart = Heart(folder / f"rank-{start['rank']}.pulse.json", TIMEOUT_S)

def step():
    heart.beat("training", 7)
    time.sleep(0.02)

step()
note("ready")
while not (room / "stuck").exists(): step()

def in_a_collective():
    while True: time.sleep(0.05)

in_a_collective()
"""
STUCK = "note('ready')\nwhile True: time.sleep(0.05)\n"


def is_stopped(pid: int) -> bool:
    return "(stopped)" in Path(f"/proc/{pid}/status").read_text()


def hung(report: ExitReport) -> tuple[str, int, bool]:
    """Phase and step of a reported hang, and whether it was quiet for as long as was allowed."""
    assert report.outcome is Outcome.ENDED
    assert report.error is not None
    assert report.hang is not None
    assert report.error.what == "hang"
    return report.hang.phase, report.hang.step, report.hang.quiet_s >= report.hang.limit_s


def test_a_stopped_trainer_is_noticed_leaves_its_stacks_and_is_ended(room: Room) -> None:
    room.configure(hang_timeout_s=1.0)
    room.trainer(1, BEATS)
    room.trainer(2, "leave(0)")
    room.direct(1)
    agent = room.agent()
    trainer = room.noted("ready")["pid"]
    os.kill(trainer, signal.SIGSTOP)
    report = room.report()
    assert hung(report) == ("training", 7, True)
    assert report.hang is not None
    assert report.hang.process.startswith("T (stopped)")
    assert "in step" in room.run_dir.stacks(1, 0, 0).read_text()
    assert report.signal == signal.SIGKILL  # SIGTERM would ask all ranks to save and leave
    room.direct(2, cause="hang")
    assert agent.wait(60) == 0
    assert room.report(2).outcome is Outcome.DONE


def test_every_rank_that_waits_in_a_collective_leaves_its_stacks(room: Room) -> None:
    room.configure(hang_timeout_s=1.0)
    for rank in (0, 1):
        room.trainer(1, BEATS, rank)
        room.trainer(2, "leave(0)", rank)
    room.direct(1)
    agents = [room.agent(rank=rank, world=2) for rank in (0, 1)]
    for rank in (0, 1):
        room.noted("ready", rank=rank)
    (room.path / "stuck").touch()
    for rank in (0, 1):
        report = room.report(rank=rank)
        assert report.outcome is Outcome.ENDED
        assert report.error is not None
        assert report.error.what in ("hang", "rank_died")
        assert "in in_a_collective" in room.run_dir.stacks(1, 0, rank).read_text()
    room.direct(2, cause="hang")
    assert [agent.wait(60) for agent in agents] == [0, 0]


def test_a_rank_that_may_be_quiet_for_longer_leaves_its_stacks_before_its_collective_breaks(room: Room) -> None:
    room.configure(hang_timeout_s=1.0)
    room.trainer(1, BEATS)
    breaks = "while not (folder / 'rank-0.exit.json').exists(): time.sleep(0.02)\n    leave(1)"
    patient = BEATS.replace("TIMEOUT_S = 1.0", "TIMEOUT_S = 1000.0")
    room.trainer(1, patient.replace("while True: time.sleep(0.05)", breaks), rank=1)
    room.direct(1)
    for rank in (0, 1):
        room.agent(rank=rank, world=2)
    for rank in (0, 1):
        room.noted("ready", rank=rank)
    (room.path / "stuck").touch()
    assert room.report(rank=1).outcome is Outcome.CRASHED
    assert hung(room.report()) == ("training", 7, True)
    assert "in in_a_collective" in room.run_dir.stacks(1, 0, 1).read_text()


def test_a_trainer_that_cannot_answer_leaves_what_proc_says(room: Room) -> None:
    room.configure(hang_timeout_s=1.0)
    room.trainer(1, STUCK)  # it never gave a sign of life, and SIGUSR1 is ignored as while it imports
    room.direct(1)
    room.agent()
    trainer = room.noted("ready")["pid"]
    eventually(lambda: room.said("ends its trainer: no progress"))
    room.advance(6)
    assert hung(room.report()) == ("starting", 0, True)
    assert room.run_dir.stacks(1, 0, 0).read_text().startswith(f"thread {trainer} ")


@pytest.mark.parametrize("what", ["agent and trainer", "the clock"])
def test_a_job_that_is_suspended_as_a_whole_is_no_hang(room: Room, what: str) -> None:
    room.configure(hang_timeout_s=4.0)
    room.trainer(1, BEATS)
    room.direct(1)
    agent = room.agent()
    trainer = room.noted("ready")["pid"]
    if what == "the clock":
        room.advance(10_000)
    else:
        for pid in (agent.pid, trainer):
            os.kill(pid, signal.SIGSTOP)
        eventually(lambda: is_stopped(agent.pid) and is_stopped(trainer))
        room.advance(10_000)
        for pid in (agent.pid, trainer):
            os.kill(pid, signal.SIGCONT)
    before = room.run_dir.pulse(1, 0, 0).read_text()
    eventually(lambda: room.run_dir.pulse(1, 0, 0).read_text() != before)
    os.kill(agent.pid, signal.SIGUSR2)  # it looks, decides, and passes this on
    assert room.report().outcome is Outcome.LEFT
    assert not room.said("no progress")
