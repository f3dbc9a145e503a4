"""Runs that really fail: each fails as it is meant to, and each is diagnosed as what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from supervisor.cli import main
from supervisor.journal import RolledBack
from tests.trainer_room.rig import Launcher
from tests.whole_room.failing_runs import POISONED_BATCH, fail
from worker.contract.loss_history import read_history, surviving

pytestmark = pytest.mark.training


# How it ends, the kinds of its verdicts, the onset of the first; its diagnosis, what was believed at each rollback, and
# the change that is to show it.
FAILS = {
    "poisoned_row": (
        ("gave_up", {"nonfinite"}, POISONED_BATCH + 1),
        ("at the same batch", ["infinite from one step to the next"], "without-batches"),
    ),
    "hot_rate": (
        ("gave_up", {"spike"}, 11),
        ("above the optimizer's rate", ["above the optimizer's rate"], "tenth-rate"),
    ),
    "short_warmup": (
        ("finished", {"spike"}, 15),
        ("soon after a short warmup", ["soon after a short warmup"], "tenth-rate"),
    ),
    "bad_restore": (("finished", {"spike"}, 17), ("at once after a resume", ["at once after a resume"], "again")),
    "overflow": (("finished", set(), None), ("the loss scale only falls", [], "fp32")),
}


@pytest.mark.parametrize("name", FAILS)
def test_it_fails_as_it_is_meant_to_and_is_diagnosed_as_what_it_is(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run = fail(name, tmp_path / "runs", launcher)
    records = read_history(run.run_dir.history)
    verdicts = [record for record in records if record.is_acted]
    onset = verdicts[0].onset_step if verdicts else None
    assert (run.state, {record.verdict for record in verdicts}, onset) == FAILS[name][0]
    assert run.run_dir.checkpoint_steps()
    skipped = [record.step for record in surviving(records) if record.verdict == "skipped"]
    assert skipped == (list(range(25, 51)) if name == "overflow" else [])

    before = everything(run.run_dir.path)
    assert main(["diagnose", str(run.run_dir.path), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["findings"]
    believed = [event.diagnosis and event.diagnosis.symptom for event in run.events if isinstance(event, RolledBack)]
    assert (found["symptom"], believed, found["cure"]) == FAILS[name][1]
    assert main(["diagnose", str(run.run_dir.path)]) == 0
    assert main(["log", str(run.run_dir.path)]) == 0
    told = capsys.readouterr().out
    assert told.count(found["cause"]) >= 2
    assert everything(run.run_dir.path) == before


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
