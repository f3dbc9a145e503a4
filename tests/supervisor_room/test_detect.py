"""``higgsfield detect``: logs of many tools, what the detector finds in them, and files that are none."""

import csv
import json
import math
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from supervisor import cli
from supervisor.detect import examine_log, lines_about
from supervisor.event_file import event_rows
from supervisor.loss_log import read_loss_log
from supervisor.report.detect_page import detect_page
from worker.contract.files import UnusableFileError
from worker.contract.loss_history import HistoryWriter, record
from worker.contract.recovery_config import SpikeConfig

NAN, INF = math.nan, math.inf
Line = dict[str, Any]


def training(losses: Sequence[float], first: int = 1) -> list[Line]:
    return [
        {"loss": loss, "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": 0.1, "step": step}
        for step, loss in enumerate(losses, first)
    ]


EXPLODES = training([2.0] * 60 + [9.0, 20.0, 90.0, 200.0])


def trainer_state(rows: list[Line]) -> str:
    return json.dumps({"global_step": 64, "log_history": rows, "best_model_checkpoint": "gone"})


def json_lines(rows: list[Line]) -> str:
    return "".join(
        json.dumps({"current_steps": row["step"], "loss": row["loss"], "eval_loss": None, "lr": 1e-4}) + "\n"
        for row in rows
    )


def table(rows: list[Line]) -> str:
    return "\n".join(["step,loss,lr", *(f"{row['step']},{row['loss']},{1e-4}" for row in rows)])


def megatron(rows: list[Line]) -> str:
    return "\n".join(
        f" [2026-01-01 10:00:00] iteration {row['step']:8d}/   5000 | consumed samples: 1024 | elapsed time per "
        f"iteration (ms): 512.3 | learning rate: 1.000000E-04 | lm loss: {row['loss']:.6E} | loss scale: 1.0 | "
        f"grad norm: {row['grad_norm']:.3f} | number of skipped iterations:   0 | "
        "number of nan iterations:   0 |\n noise"
        for row in rows
    )


@pytest.mark.parametrize(
    "write", [trainer_state, json.dumps, json_lines, table, megatron, lambda rows: table(rows).replace(",", "\t")]
)
def test_every_format_says_the_same(write: Callable[[list[Line]], str], tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(write(EXPLODES))
    examined = examine_log(file, SpikeConfig())
    assert examined.as_json() == {
        "file": str(file),
        "rows": 64,
        "verdicts": [{"index": 62, "step": 63, "kind": "spike", "onset_step": 61}],
    }


def test_our_own_history(tmp_path: Path) -> None:
    file = tmp_path / "loss_history.json"
    common: Line = {"segment": 1, "attempt": 1, "restart": 0, "epoch": 0.0, "time": 0.0, "grad_norm": 1.0}
    with HistoryWriter(file, lambda: None) as writer:
        for row in EXPLODES[:62]:
            writer.append(record(**common, step=row["step"], loss=row["loss"]))
        for step in (63, 64):
            writer.append(record(**{**common, "grad_norm": NAN}, step=step, loss=NAN, verdict="skipped"))
    torn = tmp_path / "torn.json"
    torn.write_bytes(file.read_bytes()[:-40])
    assert [one.kind for one in examine_log(file, SpikeConfig()).verdicts] == ["nonfinite"]
    assert examine_log(torn, SpikeConfig()).num_rows == 63


def test_an_event_file_of_the_real_writer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    for row in EXPLODES:
        step, norm = row["step"], NAN if row["step"] == 30 else 1.0
        packed = TensorProto(dtype=1, tensor_content=struct.pack("<f", norm))
        values = [
            Summary.Value(tag="train/loss", simple_value=row["loss"]),
            Summary.Value(
                tag="train/grad_norm", tensor=TensorProto(dtype=2, double_val=[norm]) if step % 2 else packed
            ),
            Summary.Value(tag="text", tensor=TensorProto(dtype=7, string_val=[b"a text"])),
        ]
        for value in values:
            writer.add_event(Event(wall_time=1.0, step=step, summary=Summary(value=[value])))
        writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag="eval/loss", simple_value=2.0)])))
    writer.close()
    (file,) = tmp_path.iterdir()
    _, rows = read_loss_log(file)
    assert [row.step for row in rows] == [row["step"] for row in EXPLODES]
    assert [row.loss for row in rows] == [row["loss"] for row in EXPLODES]
    assert [row.step for row in rows if row.grad_norm != 1.0] == [30]
    assert [one.step for one in examine_log(file, SpikeConfig()).verdicts] == [63]
    data = file.read_bytes()
    for cut in range(0, len(data), 97):
        assert len(event_rows(data[:cut])) <= len(event_rows(data))


@pytest.mark.parametrize("junk", [b"\xff" * 400, bytes(400), b"\x01" * 400, b"\x18" + bytes(11) + b"\x2a" * 60])
def test_bytes_that_are_no_events(junk: bytes) -> None:
    assert all("step" in row for row in event_rows(junk))


class TestRowsThatAreNoSteps:
    """CASES of public reports: the same numbers, whatever stands between them."""

    def verdicts(self, tmp_path: Path, rows: list[Line]) -> list[tuple[int, str]]:
        file = tmp_path / "log.json"
        file.write_text(trainer_state(rows))
        return [(one.index, one.kind) for one in examine_log(file, SpikeConfig()).verdicts]

    def test_evaluations_and_the_summary_are_counted_and_not_judged(self, tmp_path: Path) -> None:
        rows = [
            *EXPLODES[:61],
            {"eval_loss": 99.0, "step": 61},
            *EXPLODES[61:],
            {"train_runtime": 9, "train_loss": 50.0},
        ]
        assert self.verdicts(tmp_path, rows) == [(63, "spike")]

    def test_bare_tokens_and_text(self, tmp_path: Path) -> None:
        bad = [{"loss": NAN, "step": 61}, {"loss": "Infinity", "step": 62}]
        assert self.verdicts(tmp_path, [*EXPLODES[:60], *bad]) == [(61, "nonfinite")]

    def test_the_filter_at_work(self, tmp_path: Path) -> None:
        rows = [{"loss": 0.2051, "grad_norm": NAN, "step": 1}]
        rows += [{"loss": 0.0, "grad_norm": NAN, "learning_rate": 9.77e-06, "step": step} for step in range(2, 30)]
        assert self.verdicts(tmp_path, rows) == [(2, "nonfinite")]

    def test_a_loss_that_is_gone_is_not_finite(self, tmp_path: Path) -> None:
        rows = [*EXPLODES[:30], {"grad_norm": "nan", "step": 31}, {"step": 32, "learning_rate": 1e-4}]
        assert self.verdicts(tmp_path, rows) == [(31, "nonfinite")]

    def test_a_norm_that_is_none_beside_a_loss_that_falls_is_mixed_precision(self, tmp_path: Path) -> None:
        rows = [*EXPLODES[:30], *({"loss": 1.9, "grad_norm": INF, "step": step} for step in range(31, 60))]
        assert self.verdicts(tmp_path, rows) == []
        rows += [{"loss": 99.0, "grad_norm": NAN, "step": step} for step in range(60, 70)]
        assert self.verdicts(tmp_path, rows) == [(61, "spike")]

    def test_two_loggers_print_each_step_twice(self, tmp_path: Path) -> None:
        rows = [row for row in training([2.0] * 60 + [9.0, 9.0, 2.0]) for _ in range(2)]
        assert self.verdicts(tmp_path, rows) == []

    def test_a_run_that_resumes_begins_anew(self, tmp_path: Path) -> None:
        assert self.verdicts(tmp_path, [*training([2.0] * 60, 10_000), *training([9.0] * 60, 9_000)]) == []

    def test_other_numbers_that_are_watched(self, tmp_path: Path) -> None:
        file = tmp_path / "log.jsonl"
        rewards = [0.8, 0.9, 0.85, 0.8, 0.82] * 12 + [0.2] * 3
        rows = [{"loss": 0.0, "reward": reward, "step": step} for step, reward in enumerate(rewards)]
        file.write_text("\n".join(map(json.dumps, rows)))
        assert examine_log(file, SpikeConfig()).verdicts == []
        watching = SpikeConfig(metrics={"reward": "fall"})
        (found,) = examine_log(file, watching).verdicts
        assert (found.index, found.kind) == (62, "spike")
        file.write_text("\n".join(["step,loss,reward", *(f"{step},0.5,{one}" for step, one in enumerate(rewards))]))
        assert examine_log(file, watching).verdicts == [found]


def test_a_megatron_line_without_its_loss(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    gone = megatron(EXPLODES[:2]).replace("lm loss: 2.000000E+00 |", "").replace("grad norm: 1.000", "grad norm: nan")
    file.write_text(gone)
    assert [one.kind for one in examine_log(file, SpikeConfig()).verdicts] == ["nonfinite"]
    scaled = gone.replace("loss scale: 1.0", "loss scale: 65536.0").replace("grad norm: nan", "grad norm: inf")
    file.write_text(scaled.replace("skipped iterations:   0", "skipped iterations:   1"))
    assert examine_log(file, SpikeConfig()).verdicts == []


def test_the_command_goes_on_past_a_file_that_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad\n.json"
    good.write_text(trainer_state(EXPLODES))
    bad.write_text("{'loss': 1}")
    code = cli.main(["detect", str(bad), str(good), str(tmp_path), str(tmp_path / "none"), "--json"])
    out, err = capsys.readouterr()
    assert code == cli.WRONG_INPUT
    assert json.loads(out)["verdicts"] == [{"index": 62, "step": 63, "kind": "spike", "onset_step": 61}]
    assert len(err.splitlines()) == 3
    assert all(str(tmp_path) in line for line in err.splitlines())


def test_the_settings_are_those_of_spike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "log.json"
    file.write_text(trainer_state(EXPLODES))
    assert cli.main(["detect", str(file), "--set", "spike.patience=4"]) == cli.OK
    assert "spike at step 64, since step 61 (row 63)" in capsys.readouterr().out
    for wrong in ("patience=4", "spike.patiens=4", "spike.patience=0"):
        assert cli.main(["detect", str(file), "--set", wrong]) == cli.WRONG_INPUT
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\ufeff{",
        'step,loss\n1,"2.0\n2,2.0\n3,"2.0"\n',
        "{}",
        "[]",
        "[1, 2]",
        '{"log_history": 3}',
        "a,b\n1,2\n",
        '{"loss": 1}\n{"los\n{"loss": 2}',
        "[" * 9999,
    ],
)
def test_what_is_no_log_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "no.log"
    file.write_text(text)
    assert cli.main(["detect", str(file)]) == cli.WRONG_INPUT
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_an_empty_cell_is_a_loss_that_is_none_where_the_table_has_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    with file.open("w", newline="") as text:
        csv.writer(text).writerows([["step", "loss"], *([step, 2.0] for step in range(30)), [30, ""], [31, ""]])
    assert [one.kind for one in examine_log(file, SpikeConfig()).verdicts] == ["nonfinite"]
    file.write_text(file.read_text().replace("step,loss", "step,train_loss,val_loss"))
    assert examine_log(file, SpikeConfig()).verdicts == []


def test_the_page_draws_all_and_escapes_what_is_not_ours(tmp_path: Path) -> None:
    file, page = tmp_path / "<b>&log.json", tmp_path / "page.html"
    file.write_text(trainer_state([*EXPLODES, {"loss": INF, "step": 65}]))
    assert cli.main(["detect", str(file), "--html", str(page)]) == cli.OK
    html = page.read_text()
    assert "&lt;b&gt;&amp;log.json" in html
    assert "<b>" not in html
    assert html.count("<polyline") == 1
    assert "<td>spike</td><td>63</td><td>61</td><td>62</td>" in html
    assert "src=" not in html
    assert "http" not in html


def test_the_page_draws_any_numbers(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for number, losses in enumerate(([0.0] * 30, [-1.0, 1e308, -1e308], [NAN] * 9, [5e-324, 1e300], [2.0])):
        file = tmp_path / f"{number}.json"
        file.write_text(trainer_state(training(losses)))
    assert cli.main(["detect", *map(str, sorted(tmp_path.glob("*.json"))), "--html", str(page)]) == cli.OK
    assert "nan" not in page.read_text().replace("nan;", "")
    assert "inf" not in page.read_text()


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{\n "log_history": [\n  {"step": 1, "loss": 2.0},\n  {"step": 2, "lo', "line 4, column 15"),
        ('{"step": 1, "loss": 2.0', "line 1, column 24"),
    ],
)
def test_a_file_that_begins_like_json_and_is_broken_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, where: str
) -> None:
    (tmp_path / "log.json").write_text(text)
    assert cli.main(["detect", str(tmp_path / "log.json")]) == cli.WRONG_INPUT
    assert f"begins like JSON and is not valid: {where}" in capsys.readouterr().err


def test_what_follows_the_first_verdict_of_a_log_is_told_as_following_it(tmp_path: Path) -> None:
    twice = training([2.0] * 60 + [9.0, 20.0, 90.0, 200.0] + [2.0] * 100 + [9.0, 20.0, 90.0, 200.0])
    (tmp_path / "log.json").write_text(trainer_state(twice))
    head, first, between, *more = lines_about(examine_log(tmp_path / "log.json", SpikeConfig()))
    assert "that call for a rollback" in head
    assert "at step 6" in first
    assert "would have gone back there" in between
    assert "would have gone back there" in detect_page([examine_log(tmp_path / "log.json", SpikeConfig())])
    assert more
    (tmp_path / "log.json").write_text(trainer_state(EXPLODES))
    assert len(lines_about(examine_log(tmp_path / "log.json", SpikeConfig()))) == 2


def test_a_pipe_or_a_device_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert cli.main(["detect", str(tmp_path / "pipe"), "/dev/zero"]) == cli.WRONG_INPUT
    assert capsys.readouterr().err.count("is no regular file") == 2


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_another_encoding_is_named(encoding: str, tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text(table(EXPLODES), encoding=encoding)
    with pytest.raises(UnusableFileError, match="is not UTF-8"):
        read_loss_log(file)


def test_a_quote_that_is_not_closed_is_named_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text('step,loss,note\n1,2.0,a\n2,2.0,"b\n3,2.0,c\n4,2.0,d\n')
    with pytest.raises(UnusableFileError, match="from line 3 on"):
        read_loss_log(file)


def test_a_number_of_thousands_of_digits_is_not_finite(tmp_path: Path) -> None:
    file, digits = tmp_path / "log", "9" * 5000
    for text in (f'[{{"step": 1, "loss": {digits}}}]', f'{{"step": 1, "loss": {digits}}}\n{{"step": {digits}}}'):
        file.write_text(text)
        assert read_loss_log(file)[1][0].loss == INF
    file.write_text(megatron(EXPLODES[:1]).replace("iteration        1/", f"iteration {digits}/"))
    assert [row.step for row in read_loss_log(file)[1]] == [1]


def test_a_name_paints_neither_terminal_nor_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "a\x1b[31m\nb\udc80.csv", tmp_path / "page.html"
    file.write_text(table(EXPLODES))
    assert cli.main(["detect", str(file), "--html", str(page)]) == cli.OK
    assert all(line.isprintable() for line in capsys.readouterr().out.split("\n"))
    assert "a\\x1b[31m\\nb" in page.read_text()
