"""How long a rank may be quiet, and who counts it."""

import os
from pathlib import Path

import pytest

from worker.contract.files import read_message
from worker.contract.pulse import Phase, Pulse, Quiet, collective_timeout_s, hang_limit_s, state_in_words
from worker.pulse import Heart


@pytest.mark.parametrize(
    ("process", "told"),
    [
        ("T (stopped) in do_signal_stop", "stopped by a signal, in the kernel's do_signal_stop"),
        ("D (disk sleep)", "waiting for a disk or the network, and cannot be interrupted"),
        ("Y (new) in some_call", "Y (new), in the kernel's some_call"),
        ("", ""),
    ],
)
def test_a_state_of_the_kernel_is_told_in_words(process: str, told: str) -> None:
    assert state_in_words(process) == told


@pytest.mark.parametrize(
    ("phase", "longest_s", "limit_s"),
    [
        ("training", 0.0, 1800.0),
        ("training", 100.0, 1800.0),  # never below the configured one
        ("training", 300.0, 3000.0),
        ("training", 1e6, 7200.0),  # never for ever
        ("evaluating", 0.0, 1800.0),
        ("saving", 0.0, 3600.0),
        ("saving", 500.0, 5000.0),
        ("compiling", 0.0, 3600.0),
        ("starting", 0.0, 7200.0),
        ("finishing", 0.0, 3600.0),
    ],
)
def test_the_limit_of_each_phase(phase: Phase, longest_s: float, limit_s: float) -> None:
    assert hang_limit_s(phase, 1800.0, longest_s) == limit_s
    assert limit_s < collective_timeout_s(1800.0)


def test_a_collective_never_gives_up_before_the_hang_is_seen() -> None:
    for timeout_s in (0.5, 60.0, 1800.0, 86_400.0):
        for phase in ("starting", "compiling", "training", "evaluating", "saving", "finishing"):
            assert hang_limit_s(phase, timeout_s, 1e9) < collective_timeout_s(timeout_s)  # type: ignore[arg-type]


def test_a_heart_learns_how_long_things_take_and_says_so(tmp_path: Path) -> None:
    clock = [0.0]
    path = tmp_path / "rank-0.pulse.json"
    heart = Heart(path, 60.0, lambda: clock[0])

    def pulse() -> Pulse:
        found = read_message(path, Pulse)
        assert found is not None
        return found

    heart.beat("compiling", 0)
    assert (pulse().phase, pulse().limit_s) == ("compiling", 120.0)
    clock[0] += 50  # compiling takes long, and that says nothing about a step
    heart.beat("training", 1)
    assert pulse().limit_s == 60.0
    clock[0] += 9
    heart.beat("training", 2)
    assert (pulse().step, pulse().limit_s) == (2, 90.0)
    clock[0] += 1
    heart.beat("training", 3)
    assert pulse().step == 2  # said a moment ago
    heart.beat("saving", 3)
    assert (pulse().phase, pulse().limit_s) == ("saving", 120.0)
    clock[0] += 20
    heart.beat("training", 3)
    clock[0] += 1
    heart.beat("saving", 4)
    assert pulse().limit_s == 200.0


def test_a_sign_of_life_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a save is written beside the training, its fsync would wait for that save's bytes."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    Heart(tmp_path / "rank-0.pulse.json", 60.0).beat("training", 1)
    assert read_message(tmp_path / "rank-0.pulse.json", Pulse) is not None
    assert synced == []


def test_a_short_time_out_is_told_often_enough(tmp_path: Path) -> None:
    clock = [0.0]
    path = tmp_path / "rank-0.pulse.json"
    heart = Heart(path, 3.0, lambda: clock[0])
    for step in range(4):
        heart.beat("training", step)
        clock[0] += 0.5
    found = read_message(path, Pulse)
    assert found is not None
    assert found.step == 3


def test_only_time_in_which_the_reader_ran_counts() -> None:
    quiet = Quiet(longest_gap_s=5.0)
    assert [quiet.look("a", now) for now in (100.0, 101.0, 103.0)] == [0.0, 1.0, 3.0]
    assert quiet.look("a", 10_000.0) == 8.0  # the whole job was stopped meanwhile, or its node asleep
    assert quiet.look("a", 9_000.0) == 8.0  # a clock that is put back
    assert quiet.look("b", 9_001.0) == 0.0
