"""The benchmarks run to their end on a tiny setting and print what is needed to read them."""

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from benchmarks import requeued
from slurm.local_cluster.configuration import missing_packages
from tests.conftest import need
from tests.trainer_room.rig import Launcher, Process
from tests.waiting import eventually

pytestmark = pytest.mark.training

NUMBER = r"[\d.,]+"
RATIO = rf" +{NUMBER} \({NUMBER} to {NUMBER}\)"


def figures(count: int) -> str:
    return rf"( +{NUMBER}){{{count}}}"


HEADED = [r"date       20.*load average", r"versions   Python .*torch"]
SCRIPTS = {
    "overhead": (
        "--tiny",
        [
            *HEADED,
            r"parameters +plain",
            rf"{NUMBER} .*0\.5 ms: .*met$",
            rf"{NUMBER} .*1%: .*met$",
            *[rf"{NUMBER} .*1\.2: .*met$"] * 2,
        ],
    ),
    "history": (
        "--steps 5 40 --appends 3 --repeats 1",
        [
            *HEADED,
            *(rf"{name}{figures(3)} .*met$" for name in ("append", "make durable", "follow", "last record")),
            r"43 records: .* bytes each",
            r"read whole in",
        ],
    ),
    "checkpoint": (
        "--steps 3 60 --repeats 2 --hidden 16 --layers 1",
        [
            *HEADED,
            "figures +median of 2, in seconds",
            *(rf"{name} +{step}{figures(4)}$" for step in (3, 60) for name in ("plain Trainer", "higgsfield")),
            rf"plain Trainer +60 / 3{RATIO}{RATIO}$",
            rf"higgsfield +60 / 3{RATIO}{RATIO}$",
            *(rf"a {what} at step 60 beside one at 3 +1.05 +{NUMBER} .*met$" for what in ("save", "resume")),
        ],
    ),
    "saves": (
        "--turns 1 --saves 2 --every 2 --hidden 32 --layers 1",
        [
            *HEADED,
            r"plain Trainer .* 1\.00",
            rf"higgsfield +{NUMBER}",
            rf"in background .* {NUMBER} +0\.2 x plain: .*met$",
        ],
    ),
    "relaunch": ("--relaunches 1", [*HEADED, rf"cold{figures(4)} +1$", rf"zygote{figures(4)} +1$", "trainer of cold"]),
    "recovery": (
        "--tiny",
        [
            *HEADED,
            *(rf"{name}, zygote{figures(5)} +1$" for name in ("spike", "killed trainer")),
            *(rf"{name}, zygote{figures(2)} .*met$" for name in ("spike", "killed trainer")),
            *(rf"{part}{figures(2)}$" for part in ("seen by the supervisor", "trainer: imports", "the first step")),
        ],
    ),
    "supervisor": (
        "--runs 1 3 --seconds 1 --settle 1",
        [
            *HEADED,
            rf"1 +resident memory +{NUMBER} MiB +60 MiB .*met$",
            rf"1 +CPU, of a core +{NUMBER} % +0\.2 % .*met$",
            r"1 +Slurm calls a minute .* 2 .*met$",
            rf"3 +resident memory +{NUMBER} MiB$",
            rf"3 +record to decision +{NUMBER} s +2 s .*met$",
        ],
    ),
    "goodput": (
        "--days 0.1 --seeds 1 --nodes 1 2048",
        [*HEADED, *[r"\| .* \| 1 \| .*%", r"\| .* \| 2048 \| .*%"] * 4, r"\| 1 \| .* min \|", r"\| 2048 \| .* min \|"],
    ),
    "detectors": ("--first 2", [*HEADED, "2 curves", r"\| higgsfield, `robust` \| 0 .* \d+\.\d \|$", r"\| Lightning"]),
    "stability": (
        "--tiny --seeds 1 --cause 'hot rate' --only 'clipping and NaN stop' --only higgsfield",
        [r"\| hot rate \| clipping and NaN stop \|", r"\| hot rate \| higgsfield \| 1 of 1 \| .* \| 0 \|$"],
    ),
    "curves": (
        "/dev/null --quick",
        [rf"{kind} +60 steps +{NUMBER} s$" for kind in ("rate_sgd_.*", "healthy_language_.*") for _ in range(2)],
    ),
    "verify": ("--megabytes 2 --repeats 1", [*HEADED, rf"disk{figures(3)}$", rf"page cache{figures(3)}$"]),
}


ON_SLURM = ("recovery",)


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=pytest.mark.slurm) if name in ON_SLURM else name for name in SCRIPTS]
)
def test_the_script_runs_to_its_end(script: str, launcher: Launcher, tmp_path: Path) -> None:
    need(missing_packages() if script in ON_SLURM else [])
    told, rows = SCRIPTS[script]
    log = tmp_path / "log"
    child = launcher.start([*shlex.split(told), json.dumps({"benchmark": script})], {}, log)
    process = Process(child, log)
    assert process.wait() == 0, process.said()
    lines = [line.strip() for line in process.said().splitlines()]
    if HEADED[0] in rows:
        assert f"command    python -m benchmarks.{script} {told}" in lines
    for row in rows:  # in this order
        place = next((number for number, line in enumerate(lines) if re.match(row, line)), None)
        assert place is not None, f"no line {row}:\n{process.said()}"
        lines = lines[place + 1 :]


def test_a_job_that_was_put_back_goes_on_from_its_newest_checkpoint(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    requeued.prepare(folder)

    def start() -> Process:
        log = tmp_path / "log"
        return Process(launcher.start([str(folder), json.dumps({"benchmark": "requeued"})], {}, log), log)

    def steps() -> list[int]:
        file = folder / "steps"
        return [int(line.split()[1]) for line in file.read_text().splitlines()] if file.exists() else []

    held = start()
    try:
        eventually(lambda: len(steps()) >= requeued.HELD_AFTER, 60.0)
    finally:
        held.send(signal.SIGKILL)
        held.wait()
    again = start()
    assert again.wait() == 0, again.said()
    assert steps() == [1, 2, 3, 4, 5, 6, 7, 6, 7]
