"""Claims: one winner among many real processes, and who may take over from whom."""

import multiprocessing
import os
import signal
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

from worker.contract.claim import Claim, FencedError, check_claim, read_claim, start_ticks, take_claim

FORK = multiprocessing.get_context("fork")


def claim(job_id: str = "7", restart: int = 0, pid: int = 100, **more: Any) -> Claim:
    fields = {"name": "hf-1", "host": "n1", "started_ticks": 5, "time": 1.0, **more}
    return Claim(job_id=job_id, restart=restart, pid=pid, **fields)


def race(path: Path, mine: Claim, start: Barrier, winners: Any) -> None:
    start.wait()
    try:
        take_claim(path, mine)
    except FencedError:
        return
    winners.put((mine.job_id, mine.pid))


@pytest.mark.parametrize("same_job", [False, True])
def test_one_wins_among_many_processes(tmp_path: Path, same_job: bool) -> None:
    """Also among processes of one job and restart: an agent that was started twice."""
    path = tmp_path / "attempts" / "0001" / "claim.json"
    for turn in range(5):
        start, winners = FORK.Barrier(12), FORK.Queue()
        claims = [claim("7" if same_job else str(n), pid=1000 + n) for n in range(12)]
        racers = [FORK.Process(target=race, args=(path, mine, start, winners)) for mine in claims]
        for racer in racers:
            racer.start()
        winner = winners.get()
        for racer in racers:
            racer.join()
            assert racer.exitcode == 0
        assert winners.empty(), f"turn {turn}"
        held = read_claim(path)
        assert held is not None
        assert (held.job_id, held.pid) == winner
        assert [one.name for one in path.parent.iterdir()] == ["claim.json"]
        path.unlink()


@pytest.mark.parametrize(
    ("second", "fenced"),
    [
        (claim(restart=1), False),
        (claim(restart=2, pid=7, host="n2"), False),
        (claim(restart=0), False),
        (claim(restart=0, pid=101), True),
        (claim(restart=0, host="n2"), True),
        (claim(restart=0, started_ticks=6), True),
        (claim("8", restart=0), True),
        (claim("8", restart=9), True),
    ],
)
def test_only_a_higher_restart_of_the_same_job_takes_over(tmp_path: Path, second: Claim, fenced: bool) -> None:
    path, first = tmp_path / "claim.json", claim()
    assert take_claim(path, first) is None
    if fenced:
        with pytest.raises(FencedError, match="holds this attempt"):
            take_claim(path, second)
        assert read_claim(path) == first
    else:
        assert take_claim(path, second) == first
        assert read_claim(path) == second


def test_a_zombie_of_a_lower_restart_is_fenced(tmp_path: Path) -> None:
    path = tmp_path / "claim.json"
    take_claim(path, claim(restart=2))
    with pytest.raises(FencedError, match="restart 2 of this job"):
        take_claim(path, claim(restart=1, host="n2"))


def test_a_claim_is_checked_against_its_start(tmp_path: Path) -> None:
    path = tmp_path / "claim.json"
    with pytest.raises(FencedError, match="is gone"):
        check_claim(path, "7", 0)
    take_claim(path, claim())
    check_claim(path, "7", 0)
    take_claim(path, claim(restart=1))
    for job_id, restart in (("7", 0), ("8", 1)):
        with pytest.raises(FencedError, match="job 7, restart 1"):
            check_claim(path, job_id, restart)


def test_ticks_name_a_process_for_as_long_as_it_lives() -> None:
    assert start_ticks(os.getpid()) == start_ticks(os.getpid()) is not None
    child = FORK.Process(target=signal.pause)
    child.start()
    pid = child.pid or 0
    assert (start_ticks(pid) or 0) >= (start_ticks(os.getpid()) or 0)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(pid) is None, "a zombie is over"
    child.join()
    assert start_ticks(pid) is None
