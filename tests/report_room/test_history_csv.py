"""loss_history.csv: one row a surviving record."""

import csv
from pathlib import Path
from typing import Any

from supervisor.report.history_csv import write_history_csv
from worker.contract.loss_history import HistoryWriter, record
from worker.contract.run_dir import RunDir


def test_an_evaluation_stands_in_the_row_of_the_step_that_was_evaluated(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    evaluations: dict[int, dict[str, Any]] = {2: {"eval_loss": 3.5}, 5: {"eval_loss": 2.5, "eval_step": 4}}
    with HistoryWriter(run.history, lambda: None) as writer:
        for step in range(1, 6):
            place = {"segment": 1, "attempt": 1, "restart": 0, "step": step, "epoch": 0.1 * step, "time": float(step)}
            writer.append(record(**place, loss=4.0, **evaluations.get(step, {})))
    write_history_csv(run)
    with open(run.history_csv, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["eval_loss"] for row in rows] == ["", "3.5", "", "2.5", ""]
