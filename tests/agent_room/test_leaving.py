"""Signals, stops, several ranks, restarts: real agents and real trainers, real kills."""

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from agent_rooms import Room, is_alive

from tests.waiting import eventually
from worker.agent_files import claim_attempt, publish_report
from worker.contract.claim import read_claim
from worker.contract.exit_report import ExitReport, Outcome

RUNS = "note('ready')\nwhile True: time.sleep(0.05)\n"
SAVES_ON_TERM = "signal.signal(signal.SIGTERM, left('preempted'))\n" + RUNS
SAVES_ON_USR2 = "signal.signal(signal.SIGUSR2, left('time_limit'))\n" + RUNS
NOTES_TERM = "signal.signal(signal.SIGTERM, lambda number, frame: note('term'))\n" + RUNS


def what(report: ExitReport) -> str | None:
    return report.error.what if report.error else None


def requeue_command(path: Path) -> list[str]:
    """A command that notes each of its runs, with the exit reports that were there."""
    code = (
        "import json, sys; from pathlib import Path; "
        "found = sorted(path.name for path in Path(sys.argv[1]).rglob('rank-*.exit.json')); "
        "open(sys.argv[2], 'a').write(json.dumps(found) + chr(10))"
    )
    return [sys.executable, "-c", code, str(path), str(path / "requeues")]


def requeues(path: Path) -> list[list[str]]:
    log = path / "requeues"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_a_preempted_agent_lets_the_trainer_save_asks_for_one_requeue_and_stays(room: Room) -> None:
    room.trainer(1, SAVES_ON_TERM)
    room.trainer(2, "leave(0)")
    room.direct(1)
    agent = room.agent(requeue=requeue_command(room.path))
    trainer = room.noted("ready")["pid"]
    os.kill(trainer, signal.SIGTERM)  # as Slurm does: every process of the step
    agent.terminate()
    report = room.report()
    assert (report.outcome, what(report), report.saved_step) == (Outcome.LEFT, "preempted", 7)
    eventually(lambda: requeues(room.path))
    agent.terminate()
    room.direct(2)
    room.advance(500)
    assert agent.poll() is None
    room.advance(101)
    assert agent.wait(60) == 0
    assert requeues(room.path) == [["rank-0.exit.json"]]
    assert len(room.notes("started")) == 1
    assert read_claim(room.run_dir.claim(2)) is None


def test_nobody_waits_to_be_killed_where_the_job_is_ending_already(room: Room) -> None:
    for rank in (0, 1):
        room.trainer(1, SAVES_ON_TERM, rank=rank)
    room.direct(1)
    ending = [sys.executable, "-c", "raise SystemExit(3)"]  # as slurm.requeue says it
    agents = [room.agent(rank=rank, world=2, requeue=ending) for rank in (0, 1)]
    for rank in (0, 1):
        room.noted("ready", rank=rank)
    for agent in agents:
        agent.terminate()
    assert [agent.wait(60) for agent in agents] == [0, 0]
    assert [what(room.report(rank=rank)) for rank in (0, 1)] == ["preempted", "preempted"]


def test_the_requeue_waits_until_every_rank_has_reported(room: Room) -> None:
    room.trainer(1, SAVES_ON_TERM)
    slow = """
    def save(number, frame):
        note("saving")
        while not (room / "go").exists(): time.sleep(0.02)
        left("preempted")(number, frame)

    signal.signal(signal.SIGTERM, save)
    note("ready")
    while True: time.sleep(0.05)
    """
    room.trainer(1, slow, rank=1)
    room.direct(1)
    agents = [room.agent(rank=rank, world=2, requeue=requeue_command(room.path)) for rank in (0, 1)]
    for rank in (0, 1):
        room.noted("ready", rank=rank)
    for agent in agents:
        agent.terminate()
    assert room.report(rank=0).outcome is Outcome.LEFT
    room.noted("saving")
    assert requeues(room.path) == []
    (room.path / "go").touch()
    assert room.report(rank=1).outcome is Outcome.LEFT
    eventually(lambda: requeues(room.path))
    assert requeues(room.path) == [["rank-0.exit.json", "rank-1.exit.json"]]


def test_the_requeue_does_not_wait_for_ever_and_a_trainer_that_ignores_sigterm_is_killed(room: Room) -> None:
    room.trainer(1, NOTES_TERM)
    room.direct(1)
    agent = room.agent(world=2, requeue=requeue_command(room.path))
    room.noted("ready")
    agent.terminate()
    room.noted("term")
    room.advance(61)
    eventually(lambda: len(room.notes("term")) == 2)
    room.advance(11)
    report = room.report()
    assert (report.outcome, what(report), report.signal) == (Outcome.LEFT, "preempted", signal.SIGKILL)
    eventually(lambda: requeues(room.path))


def test_a_failed_requeue_changes_nothing(room: Room) -> None:
    room.trainer(1, SAVES_ON_TERM)
    room.direct(1)
    agent = room.agent(requeue=["/no/such/program"])
    room.noted("ready")
    agent.terminate()
    eventually(lambda: room.said("the requeue failed"))
    room.direct(1, stop="now")
    assert agent.wait(60) == 0


def test_a_trainer_that_could_not_listen_yet_left_all_the_same(room: Room) -> None:
    room.trainer(1, RUNS)  # SIGTERM kills it, as it does one that still imports
    room.direct(1)
    agent = room.agent()
    room.noted("ready")
    agent.terminate()
    report = room.report()
    assert (report.outcome, what(report), report.signal) == (Outcome.LEFT, "preempted", signal.SIGTERM)
    assert report.saved_step is None


def test_a_preemption_that_only_the_trainer_heard_of_is_one(room: Room) -> None:
    room.trainer(1, "left('preempted')(0, 0)")
    room.direct(1)
    agent = room.agent(requeue=requeue_command(room.path))
    eventually(lambda: requeues(room.path))
    assert agent.poll() is None


def test_a_call_for_stacks_harms_neither_the_agent_nor_a_trainer_that_cannot_answer_yet(room: Room) -> None:
    room.trainer(1, SAVES_ON_USR2)
    room.direct(1)
    agent = room.agent()
    for pid in (room.noted("ready")["pid"], agent.pid):
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGUSR2)
    assert agent.wait(60) == 0
    assert what(room.report()) == "time_limit"


def test_near_the_time_limit_the_trainer_saves_and_the_agent_leaves(room: Room) -> None:
    room.trainer(1, SAVES_ON_USR2)
    room.direct(1)
    agent = room.agent()
    room.noted("ready")
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(60) == 0
    report = room.report()
    assert (report.outcome, what(report), report.saved_step) == (Outcome.LEFT, "time_limit", 7)


def test_near_the_time_limit_a_waiting_agent_leaves(room: Room) -> None:
    room.trainer(1, "leave(20)")
    room.direct(1)
    agent = room.agent()
    room.report()
    agent.send_signal(signal.SIGUSR2)
    assert agent.wait(60) == 0
    assert room.report().outcome is Outcome.VERDICT


def test_stop_save_lets_the_trainer_save(room: Room) -> None:
    room.trainer(1, SAVES_ON_USR2)
    room.direct(1)
    agent = room.agent()
    room.noted("ready")
    room.direct(1, stop="save")
    assert agent.wait(60) == 0
    report = room.report()
    assert (report.outcome, what(report), report.saved_step) == (Outcome.LEFT, "stop", 7)


def test_stop_now_ends_a_trainer_that_does_not_see_it(room: Room) -> None:
    room.trainer(1, NOTES_TERM)
    room.direct(1)
    agent = room.agent()
    room.noted("ready")
    room.direct(1, stop="now")
    room.noted("term")
    room.advance(11)
    assert agent.wait(60) == 0
    report = room.report()
    assert (report.outcome, what(report), report.signal) == (Outcome.LEFT, "stop", signal.SIGKILL)


def test_stop_ends_the_waiting(room: Room) -> None:
    room.trainer(1, "leave(20)")
    room.direct(1)
    agent = room.agent()
    room.report()
    room.direct(1, stop="now")
    assert agent.wait(60) == 0
    assert room.report().outcome is Outcome.VERDICT


def test_a_frozen_trainer_leaves_its_stacks_and_is_ended(room: Room) -> None:
    stuck = """
    stacks = open(folder / f"rank-{start['rank']}.stacks.txt", "w")
    faulthandler.register(signal.SIGUSR1, stacks)
    signal.signal(signal.SIGTERM, lambda number, frame: note("term", stacks=os.fstat(stacks.fileno()).st_size))

    def stuck():
        note("ready")
        os.kill(os.getpid(), signal.SIGSTOP)
        while True: time.sleep(0.05)

    stuck()
    """
    room.trainer(1, stuck)
    room.trainer(2, "leave(0)")
    room.direct(1)
    agent = room.agent()
    trainer = room.noted("ready")["pid"]
    eventually(lambda: "(stopped)" in Path(f"/proc/{trainer}/status").read_text())
    room.direct(2, cause="hang")
    eventually(lambda: room.said("ends its trainer: attempt 2"))
    room.advance(11)  # for the other ranks to notice
    eventually(lambda: "in stuck" in room.run_dir.stacks(1, 0, 0).read_text())
    report = room.report()
    assert room.notes("term") == []
    assert (report.outcome, what(report), report.signal) == (Outcome.ENDED, "hang", signal.SIGKILL)
    assert agent.wait(60) == 0
    assert room.report(2).outcome is Outcome.DONE


def test_a_newer_directive_ends_the_trainer_as_fenced_and_starts_the_next(room: Room) -> None:
    room.trainer(1, SAVES_ON_TERM)
    room.trainer(2, "leave(0)")
    room.direct(1)
    agent = room.agent()
    room.noted("ready")
    room.direct(2, cause="rollback")
    assert agent.wait(60) == 0
    assert (room.report(1).outcome, room.report(2).outcome) == (Outcome.FENCED, Outcome.DONE)


def test_when_one_rank_dies_the_other_is_ended_and_both_come_back(room: Room) -> None:
    room.trainer(1, NOTES_TERM, rank=0)
    room.trainer(1, RUNS, rank=1)
    for rank in (0, 1):
        room.trainer(2, "while not (room / 'go').exists(): time.sleep(0.02)\nleave(0)", rank)
    room.direct(1)
    agents = [room.agent(rank=rank, world=2) for rank in (0, 1)]
    room.noted("ready", rank=0)
    os.kill(room.noted("ready", rank=1)["pid"], signal.SIGKILL)
    dead = room.report(rank=1)
    assert (dead.outcome, dead.signal) == (Outcome.CRASHED, signal.SIGKILL)
    eventually(lambda: room.said("the trainers of ranks [1] ended"))
    room.advance(11)
    eventually(lambda: room.said("ends its trainer: the trainers of ranks"))
    room.advance(6)  # for its stacks
    room.noted("term")
    room.advance(11)
    other = room.report(rank=0)
    assert (other.outcome, what(other)) == (Outcome.ENDED, "rank_died")
    assert other.error is not None
    assert "[1]" in other.error.message
    room.direct(2, cause="crash")
    for rank in (0, 1):
        room.noted("started", attempt=2, rank=rank)
    (room.path / "go").touch()
    assert [agent.wait(60) for agent in agents] == [0, 0]
    assert [room.report(2, rank=rank).outcome for rank in (0, 1)] == [Outcome.DONE, Outcome.DONE]


def test_other_ranks_wait_for_the_claim_of_rank_0(room: Room) -> None:
    for rank in (0, 1):
        room.trainer(1, "while not (room / 'go').exists(): time.sleep(0.02)\nleave(0)", rank)
    room.direct(1)
    second = room.agent(rank=1, world=2)
    eventually(lambda: room.said("waiting for rank 0's claim"))
    assert room.notes("started") == []
    first = room.agent(rank=0, world=2)
    for rank in (0, 1):
        room.noted("started", rank=rank)
    (room.path / "go").touch()
    assert [first.wait(60), second.wait(60)] == [0, 0]


def test_a_newer_restart_takes_over_and_the_zombie_ends_as_fenced(room: Room) -> None:
    room.trainer(1, SAVES_ON_TERM)
    room.direct(1)
    zombie = room.agent()
    first = room.noted("ready", restart=0)["pid"]
    heir = room.agent(restart=1)
    assert zombie.wait(60) == 0
    assert not is_alive(first)
    assert room.report(1, restart=0).outcome is Outcome.FENCED
    room.noted("ready", restart=1)
    assert heir.poll() is None


def test_a_waiting_zombie_is_fenced_too_even_when_a_new_attempt_is_free(room: Room) -> None:
    room.trainer(1, "leave(20)")
    room.direct(1)
    zombie = room.agent()
    room.report()
    heir = room.agent(restart=1)
    assert zombie.wait(60) == 0
    eventually(lambda: room.said("ended as verdict, waiting for a newer directive"))
    room.trainer(2, "leave(0)")
    room.direct(2)
    assert heir.wait(60) == 0
    assert room.report(2, restart=1).outcome is Outcome.DONE
    assert len(room.notes("started", attempt=1)) == 1


@pytest.mark.parametrize("twin", [{"job_id": "8"}, {}], ids=["another job", "the same start"])
def test_whoever_else_comes_leaves_and_touches_nothing(room: Room, twin: dict[str, str]) -> None:
    room.trainer(1, SAVES_ON_TERM)
    room.direct(1)
    room.agent()
    room.noted("ready")
    before = sorted(room.run_dir.attempts.rglob("*"))
    assert room.agent(**twin).wait(60) == 0
    assert sorted(room.run_dir.attempts.rglob("*")) == before
    assert len(room.notes("started")) == 1


def test_a_start_that_the_scheduler_makes_twice_leaves_whatever_its_rank(room: Room) -> None:
    """A controller that was killed before it had written a start down makes it again, with the same restart count."""
    room.trainer(1, SAVES_ON_TERM, rank=1)
    room.direct(1)
    claim_attempt(room.run_dir, room.task(restart=1), 1)
    rank_1 = room.task(restart=1, rank=1, world=2)
    publish_report(room.run_dir, rank_1, 1, Outcome.LEFT, None, 0.0)
    assert room.agent(restart=1, rank=1, world=2).wait(60) == 0
    assert room.said("has been here before")
    assert room.notes("started") == []


def test_a_restart_goes_on_by_itself_or_waits_as_the_directive_says(room: Room) -> None:
    room.trainer(1, SAVES_ON_TERM)
    room.trainer(2, "leave(0)")
    room.direct(1, on_requeue="wait")
    first = room.agent()
    room.noted("ready")
    first.kill()
    second = room.agent(restart=1)
    eventually(lambda: room.said("attempt 1 was interrupted"))
    second.kill()
    room.direct(1, on_requeue="continue")
    third = room.agent(restart=2)
    room.noted("ready", restart=2)
    room.direct(2)
    assert third.wait(60) == 0
    assert {note["restart"] for note in room.notes("started")} == {0, 2}


@pytest.mark.parametrize("is_moved", [False, True])
def test_nobody_makes_a_run_s_folder_again_that_was_moved_or_removed(room: Room, is_moved: bool) -> None:
    room.trainer(1, RUNS)
    room.direct(1)
    agent = room.agent()
    trainer = room.noted("ready")["pid"]
    away = room.run_dir.path.rename(room.path / "elsewhere")
    if not is_moved:
        shutil.rmtree(away)
    assert agent.wait(60) == 0
    assert not is_alive(trainer)
    assert not room.run_dir.path.exists()
    assert room.said("leaves: the run's folder is gone from its place: it was moved or removed")


def test_an_agent_whose_words_cannot_be_written_goes_on(room: Room) -> None:
    (room.path / "agents.log").symlink_to("/dev/full")
    room.trainer(1, "leave(0)")
    room.direct(1)
    agent = room.agent()
    assert room.report().outcome is Outcome.DONE
    assert agent.wait(60) == 0
