"""A test of a whole run that a person interrupts leaves nothing that runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.waiting import eventually
from tests.whole_room.house import House, environment

pytestmark = pytest.mark.training
ROOT = Path(__file__).parents[2]
WAITS_FOR_EVER = """
from pathlib import Path
from tests.whole_room.house import environment, furnish

def test_it():
    with furnish(Path({folder!r}), environment()) as house:
        house.start("run", "tiny.yaml")
        house.waits_for_step(1)
        house.waits_for_step(10_000)
"""


def test_an_interrupted_test_leaves_no_process_of_its_run(tmp_path: Path) -> None:
    folder = tmp_path / "there"
    (tmp_path / "test_it.py").write_text(WAITS_FOR_EVER.format(folder=str(folder)))
    house = House(folder, environment())
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "--confcutdir", str(tmp_path)]
    argv = [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_it.py")]
    # A shell's background job ignores SIGINT and hands that down; a person's terminal does not.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    test = subprocess.Popen(argv, cwd=ROOT, env=environment(), process_group=0, preexec_fn=heeds)
    try:
        eventually(lambda: house.run.history.exists() and house.records, 300)
        assert len(house.processes()) > 2
        os.killpg(test.pid, signal.SIGINT)  # as a terminal does
        assert test.wait(60) == pytest.ExitCode.INTERRUPTED
        eventually(lambda: not house.processes())
    finally:
        test.kill()
        test.wait()
        house.__exit__()
