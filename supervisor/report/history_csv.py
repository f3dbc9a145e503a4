"""loss_history.csv: the surviving curve as a table, for a spreadsheet."""

import csv
import io

from worker.contract.files import publish
from worker.contract.loss_history import read_history, surviving
from worker.contract.run_dir import RunDir

_COLUMNS = (
    "step",
    "epoch",
    "time",
    "loss",
    "grad_norm",
    "lr",
    "verdict",
    "eval_loss",
    "loss_scale",
    "tokens_per_s",
    "step_s",
    "peak_memory_bytes",
    "segment",
    "attempt",
)


def write_history_csv(run_dir: RunDir) -> None:
    """Publish the surviving records of a run, one a row; an unknown number is an empty cell."""
    text = io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(_COLUMNS)
    records = surviving(read_history(run_dir.history))
    evaluated = {record.evaluated_step: record.eval_loss for record in records if record.eval_loss is not None}
    for record in records:
        told = record.model_copy(update={"eval_loss": evaluated.get(record.step)})
        table.writerow([getattr(told, column) for column in _COLUMNS])
    publish(run_dir.history_csv, text.getvalue())
