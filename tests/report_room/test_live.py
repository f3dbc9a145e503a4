"""The live view: its picture in any size, and the real thing in a real terminal."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from supervisor.journal import JobSeen, RolledBack, SegmentStarted
from supervisor.live import Curves
from supervisor.report.curve import curve_lines, mark_line
from supervisor.report.frame import frame
from tests.report_room.snapshots import assert_told
from tests.report_room.stories import Slow, Story, long_records, one_spike, recorded
from tests.report_room.test_texts import WAITING, standing_row
from tests.supervisor_room.stage import Stage
from tests.waiting import eventually
from worker.contract.loss_history import Record, surviving
from worker.contract.run_dir import RunDir

HIGGSFIELD = str(Path(sys.executable).with_name("higgsfield"))


def split(records: list[Record]) -> tuple[list[Record], list[Record]]:
    kept = surviving(records)
    ids = {id(record) for record in kept}
    return kept, [record for record in records if id(record) not in ids]


def picture(story: Story, columns: int = 80, rows: int = 24, **row: object) -> list[str]:
    now = story.events[-1].time
    told = standing_row(name="demo", step=260, max_steps=400, since=now - 60, eta=now + 60) | row
    return frame(told, story.events, *split(story.records), columns, rows, now)


@pytest.mark.usefixtures("berlin")
def test_the_picture_of_a_run(tmp_path: Path) -> None:
    assert_told("frame-80x24", "\n".join(picture(recorded("demo"))) + "\n")
    waiting = picture(recorded("refused"), state="queued", job=WAITING, step=None, loss=None, eta=None)
    assert_told("frame-waiting", "\n".join(waiting) + "\n")


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (40, 12), (20, 5), (200, 60), (1, 1)])
def test_it_fits_every_terminal(columns: int, rows: int) -> None:
    for story in (recorded("demo"), Story(recorded("demo").events, long_records()), recorded("refused")):
        lines = picture(story, columns, rows)
        assert len(lines) == max(rows, 1)
        assert all(len(line) <= columns for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_figures_are_whole_or_not_there_whatever_their_size(columns: int) -> None:
    story = recorded("demo")
    wide = {"loss": -1234567.8, "lr": 1.2345e-05, "grad_norm": 987654.3, "tokens_per_s": 12345678.0, "step_s": 1234.5}
    records = [*story.records[:-1], story.records[-1].model_copy(update=wide)]
    row = {"name": "qwen-2.5-7b-sft", "state": "recovering", "step": 123456, "max_steps": 1234567}
    title, bar, figures, *rest = picture(Story(story.events, records), columns, 24, lr_scale=0.0625, eta=4e9, **row)
    assert title.startswith("qwen-2.5-7b-sft: recovering, step 123,456 of 1,234,567")
    assert "done " in bar
    whole = [
        "loss -1.235e+06",
        "rate 1.23e-05 (x 0.0625)",
        "grad norm 9.88e+05",
        "12,345,678 tokens/s",
        "1.23e+03 s/step",
    ]
    assert figures.split("  ") == whole[: len(figures.split("  "))]
    assert len(figures.split("  ")) > 1
    assert all(len(line) <= columns for line in (title, bar, figures, *rest))


def test_a_curve_without_unicode_has_none() -> None:
    lines = curve_lines([(n, 4 - n / 50) for n in range(100)], [(50, 1e9)], 60, 8, is_unicode=False)
    assert all(line.isascii() for line in lines)
    assert sum(line.count("*") for line in lines) > 40


def test_a_number_that_is_not_finite_leaves_a_gap_and_extremes_are_seen() -> None:
    lines = curve_lines([(1, 1.0), (2, None), (3, float("nan")), (4, 500.0), (5, 1.0)], [], 40, 10)
    assert lines[0].split()[0] == "500"
    assert lines[-1].split()[0] == "1"
    assert curve_lines([], [], 40, 3) == ["", "", ""]
    assert mark_line([(1, "V"), (5, "R"), (9, "X")], 1, 5, 20) == f"{'':10}V        R"


def test_a_spike_has_room_and_one_far_above_all_leaves_the_curve_readable() -> None:
    kept = [(float(step), 2.0) for step in range(1, 50)]
    top = curve_lines(kept, [(50.0, 8.0)], 40, 10)[0]
    assert float(top.split()[0]) >= 8.0
    far = curve_lines(kept, [(50.0, 1e9)], 40, 10)
    assert float(far[0].split()[0]) < 20
    assert "up to 17.49" in picture(recorded("demo"))[-1]


def test_the_last_events_keep_the_rollback_and_a_queue_is_no_interruption() -> None:
    story = recorded("demo")
    rolled = next(number for number, event in enumerate(story.events) if isinstance(event, RolledBack))
    trivial = [JobSeen(job_id="1", state="RUNNING", time=story.events[rolled].time + 1)] * 20
    lines = picture(Story([*story.events[: rolled + 1], *trivial], story.records))
    assert sum("ROLLED BACK" in line for line in lines) == 1
    assert sum(" is RUNNING" in line for line in lines[-4:]) == 2
    begun = next(event for event in story.events if isinstance(event, SegmentStarted))
    waited = [event.model_copy(update={"time": event.time - 9e4}) for event in story.events if event.time < begun.time]
    assert "interrupted" not in picture(Story([*waited, begun], story.records))[1]
    later = begun.model_copy(update={"time": begun.time + 9e4, "segment": 2})
    assert "if interrupted as so far" in picture(Story([*waited, begun, later], story.records), columns=120)[1]


def test_an_abandoned_branch_is_told_from_the_curve_that_counts(tmp_path: Path) -> None:
    stage = one_spike(tmp_path)
    curves = Curves(stage.run_dir)
    curves.look()
    curves.look()
    assert [record.step for record in curves.kept] == list(range(1, 101))
    assert sorted(record.step for record in curves.left) == list(range(31, 39))


# -- in a terminal -----------------------------------------------------------------------------------------------------


@dataclass
class Terminal:
    """A terminal of 80 by 24 in a tmux of its own, with a shell."""

    socket: str

    def tmux(self, *argv: str) -> str:
        done = subprocess.run(["tmux", "-L", self.socket, *argv], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def type(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "0", *keys)

    @property
    def shown(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "0")

    def shows(self, text: str) -> None:
        eventually(lambda: text in self.shown)

    @property
    def facts(self) -> str:
        """Whether the other screen and the cursor are on."""
        return self.tmux("display-message", "-p", "-t", "0", "#{alternate_on} #{cursor_flag}").strip()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        message = "needs the Debian package tmux"
        if os.environ.get("HIGGSFIELD_REQUIRE_VIEWS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    one = Terminal(f"higgsfield-{os.getpid()}-{secrets.token_hex(4)}")
    shell = "env -i PATH=$PATH HOME=$HOME LANG=C.UTF-8 TERM=screen PS1='ready> ' sh"
    one.tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", shell)
    yield one
    subprocess.run(["tmux", "-L", one.socket, "kill-server"], capture_output=True, timeout=60)  # its shell may be gone


def watched(run: RunDir) -> str:
    return f"{HIGGSFIELD} watch '{run.path}'"


def test_it_shows_a_run_that_nobody_supervises_and_leaves_the_terminal_clean(
    terminal: Terminal, tmp_path: Path
) -> None:
    stage = Stage(tmp_path / "with space")
    stage.settle()
    stage.start_job()
    stage.train(20)
    stage.settle()
    terminal.shows("ready>")
    terminal.type("echo be", "fore", "Enter")
    terminal.type(watched(stage.run_dir), "Enter")
    terminal.shows("step 20 of 100")
    assert terminal.facts == "1 0"
    stage.train(30)
    terminal.shows("step 30 of 100")
    terminal.tmux("resize-window", "-t", "0", "-x", "60", "-y", "16")
    eventually(lambda: terminal.shown.count("\n") <= 16 and "q quits" in terminal.shown)
    terminal.type("q")
    terminal.shows("before")
    assert terminal.facts == "0 1"
    assert "step 30" not in terminal.shown
    eventually(lambda: terminal.shown.rstrip().endswith("ready>"))
    terminal.type("echo after", "Enter")
    terminal.shows("ready> echo after\nafter")  # what is typed is shown again


@pytest.mark.parametrize("end", ["C-c", "TERM"])
def test_it_leaves_the_terminal_clean_however_it_ends(terminal: Terminal, tmp_path: Path, end: str) -> None:
    stage = one_spike(tmp_path)
    stage.run_dir.history.write_bytes(stage.run_dir.history.read_bytes()[:-400])  # torn: it is still shown
    terminal.shows("ready>")
    terminal.type(f"{watched(stage.run_dir)}; echo left with $?", "Enter")
    terminal.shows("FINISHED")
    if end == "TERM":
        command = f"{watched(stage.run_dir)}".replace("'", "")
        [pid] = [p for p in Path("/proc").glob("[0-9]*") if command in _command_line(p)]
        os.kill(int(pid.name), 15)
    else:
        terminal.type(end)
    terminal.shows("left with 1")
    assert terminal.facts == "0 1"


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def test_without_a_terminal_it_says_what_goes_anywhere(tmp_path: Path) -> None:
    stage = Slow(tmp_path)
    done = subprocess.run(
        [HIGGSFIELD, "watch", str(stage.run_dir.path)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "log" in done.stderr
