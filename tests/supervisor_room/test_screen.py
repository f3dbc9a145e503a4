"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.job import JobState
from supervisor.journal import StopRequested
from supervisor.observation import Observation
from supervisor.report import screen
from supervisor.report.screen import Screen, printing_cannot_fail
from supervisor.run_state import RunState
from tests.supervisor_room.stage import Stage
from worker.contract.loss_history import record

RUN = RunState(state="training", attempt=1)
SEEN = Observation(
    now=0.0, branch=(record(segment=1, attempt=1, restart=0, step=7, epoch=0.1, time=0.0, loss=2.5, lr=1e-5),)
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_step_on_one_line_that_an_event_clears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.time, "monotonic", lambda: 1000.0)
    out = Terminal()
    shown = Screen(out, "tiny", 50)
    shown.progress(RUN, SEEN)
    assert out.getvalue() == "\r\x1b[Ktiny: step 7/50  loss 2.5000  rate 1e-05"
    shown.event(StopRequested(by="bob", reason="bob asked for a stop"))
    assert out.getvalue().partition("\r\x1b[K")[2].partition("\r\x1b[K")[2].endswith("bob asked for a stop\n")
    before = out.getvalue()
    shown.progress(RunState(state="gave_up", attempt=1), Observation(now=0.0))
    assert out.getvalue() == before, "what a run that is over waits for is nothing"


def test_elsewhere_a_line_now_and_then_and_none_of_an_abandoned_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen.time, "monotonic", lambda: 1000.0)
    out = io.StringIO()
    shown = Screen(out, "tiny", 50)
    shown.progress(RunState(state="starting", attempt=2), SEEN)
    assert out.getvalue() == ""
    shown.progress(RUN, SEEN)
    shown.progress(RUN, SEEN)
    assert out.getvalue() == f"{'':21}step 7/50  loss 2.5000  rate 1e-05\n"


def test_while_a_disk_is_full_lines_are_left_out_and_the_next_one_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as stdout, open(tmp_path / "log", "wb") as log:
        monkeypatch.setattr(sys, "stdout", stdout)
        with printing_cannot_fail():
            shown = Screen(sys.stdout, "tiny", 50)
            shown.trouble("is not written")
            os.dup2(log.fileno(), stdout.fileno())  # there is space again
            shown.trouble("is written")
        assert sys.stdout is stdout
    assert (tmp_path / "log").read_text().split("\n") == [f"{'':21}is written", ""]


def higgsfield(stdout: int | None, *argv: str, code: str = "sys.exit(main())") -> tuple[int, str]:
    """Exit code and stderr of the command; ``stdout`` None: a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; from supervisor.cli import *; {code}", *argv],
            stdout=writer if stdout is None else stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)
    return done.returncode, done.stderr


def test_who_supervises_goes_on_and_tells_by_its_exit_code_whatever_becomes_of_what_it_prints(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.claim()
    stage.train(10)
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    assert stage.state == "stopped"
    run = str(stage.run_dir.path)
    goes_on = """
from supervisor.verbs import going
def supervise(run_dir, out, **_):
    for _ in range(3):
        print("a line", file=out, flush=True)
    return going.read_state(run_dir)
going.supervise = supervise
sys.exit(main())"""
    with open("/dev/full", "wb") as full:
        for stdout in (None, full.fileno()):
            assert higgsfield(stdout, "resume", run, code=goes_on) == (4, "")
        (stage.run_dir.path / "logs").mkdir(exist_ok=True)
        stage.run_dir.supervisor_log.symlink_to("/dev/full")
        in_job = "; ".join([
            "import supervisor.cli as cli",
            "cli.supervise_in_job = lambda folder, start: print('a line', flush=True)",
            f"code = cli.job_main({run!r}, {{}})",
            "sys.exit(7 if code == OK else code)",
        ])  # fmt: skip
        assert higgsfield(full.fileno(), code=in_job)[0] == 7


def test_who_only_looks_ends_where_nobody_reads_on_and_says_where_the_disk_is_full(tmp_path: Path) -> None:
    assert higgsfield(None, "status", "--dir", str(tmp_path)) == (0, "")
    with open("/dev/full", "wb") as full:
        code, said = higgsfield(full.fileno(), "status", "--dir", str(tmp_path))
    assert (code, said.count("\n"), "No space left" in said) == (2, 1, True)
