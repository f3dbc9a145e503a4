"""One rank's trainer dies, in every way and on either rank: the other ends too, and both report what happened."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_rooms import Room

from tests.waiting import eventually
from worker.contract.exit_report import Outcome

DIES = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "segfault": "import ctypes; ctypes.string_at(0)",
    "raised": "raise RuntimeError('boom')",
}
SIGNALS = {"killed": signal.SIGKILL, "segfault": signal.SIGSEGV}
WAITS = "note('ready')\nwhile True: time.sleep(0.05)\n"


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    yield room
    room.close()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", DIES)
def test_the_death_of_one_rank_ends_the_other(room: Room, how: str, rank: int) -> None:
    room.trainer(1, f"while not (room / 'ready').exists(): time.sleep(0.02)\n{DIES[how]}", rank)
    room.trainer(1, WAITS, 1 - rank)
    room.direct(1)
    for each in (0, 1):
        room.agent(rank=each, world=2)
    room.noted("ready", rank=1 - rank)
    (room.path / "ready").touch()
    dead = room.report(rank=rank)
    assert dead.error is not None
    assert dead.outcome is Outcome.CRASHED
    assert (dead.signal, dead.exit_code) == (SIGNALS.get(how), {"raised": 1}.get(how))
    if how == "raised":
        assert "RuntimeError: boom" in dead.error.traceback
    eventually(lambda: room.said(f"the trainers of ranks [{rank}] ended, its own has 10 s"))
    room.advance(11)
    eventually(lambda: room.said("ends its trainer"))
    room.advance(6)  # this trainer has no stacks to give
    other = room.report(rank=1 - rank)
    assert other.error is not None
    assert (other.outcome, other.error.what) == (Outcome.ENDED, "rank_died")
