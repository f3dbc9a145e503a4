"""Where ``report --output`` and ``detect --html`` may write: over an earlier page of ours, and over nothing else."""

import os
from pathlib import Path

import pytest

from supervisor import cli
from supervisor.runs import open_or_create
from tests.supervisor_room.stage import Stage, config
from worker.contract.exit_report import Outcome
from worker.contract.files import UnusableFileError
from worker.contract.loss_history import last_record, read_history, recent_records
from worker.contract.run_dir import RunDir

LOG = "step,loss\n1,2.0\n2,2.1\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return open_or_create(config(tmp_path))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "log.csv"
    file.write_text(LOG)
    return file


def test_an_earlier_page_is_replaced_and_a_link_followed(tmp_path: Path, run_dir: RunDir, log: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    for argv in (["report", str(run_dir.path), "--output"], ["detect", str(log), "--html"]) * 2:
        assert cli.main([*argv, str(link)]) == cli.OK
        assert link.is_symlink()
    assert "Loss logs, examined" in page.read_text()
    assert cli.main(["report", str(run_dir.path)]) == cli.OK
    assert cli.main(["report", str(run_dir.path), "--output", str(run_dir.report)]) == cli.OK


def test_nothing_else_is_touched(
    tmp_path: Path, run_dir: RunDir, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    journal = run_dir.journal.read_bytes()
    (tmp_path / "link").symlink_to(run_dir.journal)
    refused = {
        log: "is no page of higgsfield",
        run_dir.journal: "only report.html",
        tmp_path / "link": "only report.html",
        run_dir.path / "new.html": "only report.html",
        run_dir.checkpoints / "new.html": "only report.html",
        tmp_path / "pipe": "no regular file",
        tmp_path: "is a folder",
        tmp_path / "none" / "x.html": "there is no folder",
        log / "x.html": "Not a directory",
        tmp_path / ("x" * 300): "File name too long",
        tmp_path / ("x" * 250): "File name too long",
        Path("/dev/null"): "no regular file",
    }
    for path, why in refused.items():
        for argv in (["report", str(run_dir.path), "--output"], ["detect", str(log), "--html"]):
            assert cli.main([*argv, str(path)]) == cli.WRONG_INPUT
            said = capsys.readouterr().err
            assert said.startswith(f"{path}: ")
            assert why in said
            assert said.count("\n") == 1
    assert (log.read_text(), run_dir.journal.read_bytes()) == (LOG, journal)


def test_a_folder_in_the_place_of_the_history_or_the_report_is_one_line(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir.history.mkdir()
    for read in (read_history, last_record, recent_records):
        with pytest.raises(UnusableFileError, match="is a folder"):
            read(run_dir.history)
    for verb in ("report", "log", "status"):
        assert cli.main([verb, str(run_dir.path)]) == cli.WRONG_INPUT
        assert capsys.readouterr().err.count("\n") == 1
    run_dir.history.rmdir()
    run_dir.report.mkdir()
    assert cli.main(["report", str(run_dir.path)]) == cli.WRONG_INPUT


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        (["--seed", "99999999999999999999999"], "--seed: "),
        (["--seed", "-1"], "--seed: "),
        (["--max-tokens", "99999999999"], "--max-tokens: "),
        (["--top-k", "99999999999"], "--top-k: "),
    ],
)
def test_a_number_of_infer_that_is_too_large(
    run_dir: RunDir, rest: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["infer", str(run_dir.path), "--prompt", "x", "--here", *rest]) == cli.WRONG_INPUT
    printed = capsys.readouterr().err
    assert printed.startswith(said)
    assert printed.count("\n") == 1


def test_an_empty_since_is_refused_and_names_do_not_paint_the_terminal(
    tmp_path: Path, run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv in (["log", str(run_dir.path), "--since", ""], ["log", "x", "--dir", "a\x1b[31m\nb"], ["log", "x" * 300]):
        assert cli.main(argv) == cli.WRONG_INPUT
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        assert printed.rstrip("\n").isprintable()
    assert cli.main(["status", "--dir", str(tmp_path / "a\x1b[31m\nb")]) == cli.OK
    assert capsys.readouterr().out.rstrip("\n").isprintable()


def test_the_paths_that_verbs_print_paint_no_terminal_either(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.train(100)
    stage.leave(Outcome.DONE)
    stage.settle()
    moved = stage.run_dir.path.rename(tmp_path / "b\x1b[2J")
    for verb in ("resume", "stop", "log", "diagnose", "status"):
        assert cli.main([verb, str(moved)]) == cli.OK
        assert "\x1b" not in capsys.readouterr().out
