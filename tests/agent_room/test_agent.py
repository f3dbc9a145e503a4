"""Real agents with real trainer processes: starts, ends, relaunches, and what is reported."""

import os
import signal
import sys

from agent_rooms import ROOT, Room, is_alive

from tests.waiting import eventually
from worker.contract.claim import read_claim
from worker.contract.exit_report import Outcome

RUNS = "while True: time.sleep(0.05)\n"


def test_a_verdict_is_answered_by_a_relaunch_in_the_same_process(room: Room) -> None:
    room.trainer(1, "leave(20, segment=1, step=5)")
    room.trainer(2, "leave(0, segment=2, step=9, saved_step=9)")
    room.direct(1)
    agent = room.agent()
    first = room.report(1)
    assert (first.outcome, first.segment, first.step, first.exit_code) == (Outcome.VERDICT, 1, 5, 20)
    assert agent.poll() is None
    room.direct(2, cause="spike")
    assert agent.wait(60) == 0
    second = room.report(2)
    assert (second.outcome, second.saved_step, second.job_id, second.error) == (Outcome.DONE, 9, "7", None)
    starts = room.notes("started")
    assert [start["same_allocation"] for start in starts] == [False, True]
    assert {start["ppid"] for start in starts} == {agent.pid}
    claim = read_claim(room.run_dir.claim(2))
    assert claim is not None
    assert (claim.job_id, claim.restart, claim.pid) == ("7", 0, agent.pid)


def test_without_an_answer_the_agent_leaves_when_its_patience_is_over(room: Room) -> None:
    room.trainer(1, "leave(20)")
    room.direct(1)
    agent = room.agent()
    room.is_waited_in(1)
    room.advance(200)
    assert agent.poll() is None
    room.advance(101)
    assert agent.wait(60) == 0
    assert len(room.notes("started")) == 1


def test_the_first_start_waits_for_its_directive(room: Room) -> None:
    room.trainer(1, "leave(0)")
    agent = room.agent()
    eventually(lambda: room.said("no directive yet"))
    room.run_dir.directive.write_text('{"format": 99}')
    eventually(lambda: room.said("cannot see the run"))
    room.direct(1)
    assert agent.wait(60) == 0
    assert room.report().outcome is Outcome.DONE


def test_no_relaunch_beyond_the_limit_and_the_new_attempt_stays_unclaimed(room: Room) -> None:
    room.configure(relaunches_in_allocation=0)
    room.trainer(1, "leave(20)")
    room.direct(1)
    agent = room.agent()
    room.report(1)
    room.direct(2)
    assert agent.wait(60) == 0
    assert read_claim(room.run_dir.claim(2)) is None


def test_a_crash_is_reported_with_the_trainers_own_traceback(room: Room) -> None:
    room.trainer(1, "leave(1, step=3, error={'type': 'ValueError', 'message': 'bad', 'traceback': 'line 1'})")
    room.direct(1)
    agent = room.agent()
    report = room.report()
    assert report.error is not None
    assert (report.outcome, report.step, report.exit_code) == (Outcome.CRASHED, 3, 1)
    assert (report.error.type, report.error.traceback) == ("ValueError", "line 1")
    room.is_waited_in(1)
    room.advance(301)
    assert agent.wait(60) == 1


def test_a_crash_that_left_no_word_is_reported_with_the_tail_of_this_starts_log(room: Room) -> None:
    room.run_dir.train_log.parent.mkdir()
    room.run_dir.train_log.write_text("of an older start\n")
    room.trainer(1, "def explode(): raise KeyError('gone')\nexplode()")
    room.direct(1)
    room.agent()
    report = room.report()
    assert report.outcome is Outcome.CRASHED
    assert report.error is not None
    assert "KeyError: 'gone'" in report.error.traceback
    assert "in explode" in report.error.traceback
    assert "older" not in report.error.traceback
    assert room.run_dir.train_log.read_text().startswith("of an older start\n")


def test_a_killed_trainer_is_a_crash_with_its_signal(room: Room) -> None:
    room.trainer(1, RUNS)
    room.direct(1)
    room.agent()
    os.kill(room.noted("started")["pid"], signal.SIGKILL)
    report = room.report()
    assert (report.outcome, report.signal, report.exit_code) == (Outcome.CRASHED, signal.SIGKILL, None)


def test_an_agent_that_fails_itself_reports_it(room: Room) -> None:
    room.run_dir.train_log.parent.touch()  # a file where the folder of the logs should be
    room.direct(1)
    assert room.agent().wait(60) == 1
    report = room.report()
    assert report.outcome is Outcome.CRASHED
    assert report.error is not None
    assert report.error.type == "FileExistsError"
    assert "logs" in report.error.message


def test_a_killed_agent_leaves_no_trainer(room: Room) -> None:
    room.trainer(1, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nnote('ready')\n" + RUNS)
    room.direct(1)
    agent = room.agent()
    trainer = room.noted("ready")["pid"]
    agent.kill()
    eventually(lambda: not is_alive(trainer))


def test_an_agent_whose_parent_dies_ends_its_trainer_and_leaves(room: Room) -> None:
    room.trainer(1, RUNS)
    room.direct(1)
    parent_code = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    parent = room.start([sys.executable, "-c", parent_code, *room.agent_argv()])
    started = room.noted("started")
    parent.kill()
    report = room.report()
    assert report.outcome is Outcome.ENDED
    assert report.error is not None
    assert report.error.what == "parent_died"
    eventually(lambda: not is_alive(started["pid"]) and not is_alive(started["ppid"]))


def test_what_a_trainer_started_ends_with_it(room: Room) -> None:
    room.trainer(
        1, "worker = os.fork()\nif worker == 0:\n    time.sleep(1e6)\nnote('forked', worker=worker)\nleave(20)"
    )
    room.direct(1)
    room.agent()
    room.report()
    worker = room.noted("forked")["worker"]
    eventually(lambda: not is_alive(worker))


def test_a_trainer_finds_its_place_in_the_world_and_our_packages(room: Room) -> None:
    room.trainer(
        1,
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONSAFEPATH")
        import worker.start
        note("environment", values=[os.environ[name] for name in names], master="MASTER_ADDR" in os.environ,
             port="MASTER_PORT" in os.environ, package=worker.start.__file__)
        leave(0)
        """,
        rank=1,
    )
    room.trainer(1, RUNS)
    room.direct(1)
    room.agent(world=2)
    agent = room.agent(rank=1, world=2, local_rank=1)
    note = room.noted("environment")
    assert note["values"] == ["1", "2", "1", "3", "PASSIVE", "1"]
    assert (note["master"], note["port"]) == (True, True)
    assert note["package"] == str(ROOT / "worker" / "start.py")
    assert agent.wait(60) == 0
    assert room.run_dir.train_log.with_name("train-rank-1.log").exists()


def test_main_takes_slurms_facts_as_a_dict_and_never_returns(room: Room) -> None:
    room.direct(1, stop="now")
    start = {"job_id": "7", "name": "n", "restart": 0, "rank": 0, "world": 1, "local_rank": 0, "requeue": None}
    code = f"from worker.agent import main; main({str(room.run_dir.path)!r}, {start!r}); print('returned')"
    agent = room.start([sys.executable, "-c", code])
    assert agent.wait(60) == 0
    assert room.said("the directive says stop")
    assert not room.said("returned")


def test_what_a_killed_trainer_left_unfinished_is_gone_when_its_agent_is(room: Room) -> None:
    room.trainer(
        1,
        """
        for path in (run_dir / ".staging" / "a1-r0-checkpoint-8", run_dir / ".staging" / "a2-r0-checkpoint-9"):
            path.mkdir(parents=True)
        (folder / ".tmp-rank-0.pulse.json-0a").touch()
        (folder / ".tmp-rank-1.pulse.json-0b").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    room.direct(1)
    agent = room.agent()
    room.report()
    room.direct(1, stop="now")
    assert agent.wait(60) == 1
    assert [path.name for path in (room.run_dir.staging).iterdir()] == ["a2-r0-checkpoint-9"]  # a successor's
    assert [path.name for path in room.run_dir.restart(1, 0).glob(".tmp-*")] == [".tmp-rank-1.pulse.json-0b"]
