"""Runs that really fail: each fails as it is meant to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer_room.rig import Launcher
from tests.whole_room.failing_runs import POISONED_BATCH, fail
from worker.contract.loss_history import read_history, surviving

pytestmark = pytest.mark.training


# (how it ends, kinds of its verdicts, onset of the first)
FAILS = {
    "poisoned_row": ("gave_up", {"nonfinite"}, POISONED_BATCH + 1),
    "hot_rate": ("gave_up", {"spike"}, 11),
    "short_warmup": ("finished", {"spike"}, 15),
    "bad_restore": ("finished", {"spike"}, 17),
    "overflow": ("finished", set(), None),
}


@pytest.mark.parametrize("name", FAILS)
def test_it_fails_as_it_is_meant_to(launcher: Launcher, tmp_path: Path, name: str) -> None:
    run = fail(name, tmp_path / "runs", launcher)
    records = read_history(run.run_dir.history)
    verdicts = [record for record in records if record.is_acted]
    onset = verdicts[0].onset_step if verdicts else None
    assert (run.state, {record.verdict for record in verdicts}, onset) == FAILS[name]
    assert run.run_dir.checkpoint_steps()
    skipped = [record.step for record in surviving(records) if record.verdict == "skipped"]
    assert skipped == (list(range(25, 51)) if name == "overflow" else [])
