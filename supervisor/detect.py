"""The detector over a loss log that is there already, whoever wrote it: what would have been rolled back, and when."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from supervisor.loss_log import Row, read_loss_log
from worker.contract.loss_history import ACTED
from worker.contract.recovery_config import SpikeConfig
from worker.contract.words import count
from worker.spikes import Detector


@dataclass(frozen=True)
class FoundVerdict:
    """What would cause a rollback; a streak that nobody answers is told once."""

    index: int
    """Among all rows of the log, from 0."""
    step: int
    kind: str
    onset_step: int


@dataclass(frozen=True)
class Examined:
    """One log and what the detector says about it."""

    file: Path
    num_rows: int
    rows: list[Row]
    verdicts: list[FoundVerdict]

    def as_json(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return {"file": str(self.file), "rows": self.num_rows, "verdicts": [asdict(one) for one in self.verdicts]}


def examine_log(path: Path, rules: SpikeConfig) -> Examined:
    """Run the detector over one log; UnusableFileError where it is none."""
    num_rows, rows = read_loss_log(path)
    return Examined(path, num_rows, rows, find_verdicts(rows, rules))


def lines_about(examined: Examined) -> list[str]:
    """What was found, for a person."""
    steps = f"{count(len(examined.rows), 'training step')}, {examined.rows[0].step} to {examined.rows[-1].step}"
    if not examined.verdicts:
        return [f"{examined.file}: {steps}: nothing that calls for a rollback"]
    told = [
        f"  {one.kind} at step {one.step}, since step {one.onset_step} (row {one.index})" for one in examined.verdicts
    ]
    head = f"{examined.file}: {steps}: {len(told)} that {'call' if len(told) > 1 else 'calls'} for a rollback"
    return [head, told[0], *([f"  {ONE_LOG}:"] if told[1:] else []), *told[1:]]


ONE_LOG = "a run under higgsfield would have gone back there; what follows is the same log, in which nobody did"


def find_verdicts(rows: list[Row], rules: SpikeConfig) -> list[FoundVerdict]:
    """What a supervisor would have acted on, had it watched; a step that goes back begins another run."""
    detector = Detector(rules)
    found: list[FoundVerdict] = []
    for row in rows:
        said = detector.judge_logged(row.step, row.loss, row.grad_norm, row.others, scaler_skipped=row.scaler_skipped)
        if said.verdict not in ACTED:
            continue
        onset = row.step if said.onset_step is None else said.onset_step
        if not found or onset != found[-1].onset_step or row.step <= found[-1].step:
            found.append(FoundVerdict(row.index, row.step, said.verdict, onset))
    return found
