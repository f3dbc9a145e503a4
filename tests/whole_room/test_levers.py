"""A person's levers on a run that really trains, supervised or not; and a supervisor that only looks on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from supervisor.batches import positions_of
from supervisor.evidence import first_verdicts, onset_of
from supervisor.journal import Finished, RolledBack, SegmentStarted, Submitted, VerdictSeen, WouldHaveDone
from tests.whole_room.house import KILL, House, environment, furnish, send
from worker.contract.directive import read_directive
from worker.contract.loss_history import ACTED, surviving

pytestmark = pytest.mark.training
STEPS = 600
CALM = {
    "training": {
        "max_steps": STEPS,
        "batch_size": 16,
        "precision": "fp32",
        "optimizer": {"name": "sgd", "learning_rate": 0.01},
    },
    "spike": {"ratio": 1000.0},
    "checkpoint": {"every_steps": 10, "healthy_after": 5, "keep": 20, "keep_quarantined": 0},
}


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    with furnish(tmp_path, environment(), **CALM) as house:
        yield house


def test_pin_and_rollback_with_and_without_a_supervisor(house: House) -> None:
    supervisor = house.start("run", "tiny.yaml")
    house.waits_for_step(12)
    pinned = house.higgsfield("pin", "tiny", "10")
    assert (pinned.returncode, pinned.stderr) == (0, "")
    wrong = house.higgsfield("rollback", "tiny", "--to", "11")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    back = house.higgsfield("rollback", "tiny", "--to", "10", "--lr-scale", "0.5", "--skip")
    assert (back.returncode, back.stderr) == (0, "")
    told = house.those(RolledBack)[0]
    assert (told.to_step, told.lr_scale, told.where) == (10, 0.5, "same_allocation")
    assert told.skip_batches[0].first == 10
    house.waits_for(SegmentStarted, 2)

    send(supervisor.pid, KILL)
    supervisor.wait()
    house.until(lambda: (house.run.checkpoint(20) / "MANIFEST.json").exists())
    alone = house.higgsfield("rollback", "tiny", "--to", "10")
    assert (alone.returncode, alone.stderr) == (0, "")
    assert "nobody supervises it from here on" in alone.stdout
    assert len(house.those(RolledBack)) == 2

    done = house.higgsfield("run", "tiny.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert [event.final_step for event in house.those(Finished)] == [STEPS]
    assert len(house.those(Submitted)) == 1, "all of it in one allocation"
    records = house.records
    branch = surviving(records)
    assert [record.step for record in branch] == list(range(1, STEPS + 1))
    gone = {one.batch for one in positions_of(told.skip_batches) if one.epoch == 0}
    trained = [record.data.batch for record in branch if record.data is not None and record.data.epoch == 0]
    assert trained[:10] == list(range(10))
    assert not gone & set(trained)
    rates = {record.attempt: record.lr for record in records if record.step == 11}
    assert rates == {1: rates[1], 2: pytest.approx(rates[1] / 2), 3: pytest.approx(rates[1] / 2)}
    directive = read_directive(house.run.directive)
    assert directive is not None
    assert directive.pinned == (10,)
    assert house.run.checkpoint_steps() == [10, *range(410, 610, 10)], "what is pinned outlives retention"


def test_a_supervisor_that_only_observes_lets_it_explode_and_says_what_it_would_have_done(tmp_path: Path) -> None:
    with furnish(tmp_path, environment(), recovery={"mode": "observe"}) as house:
        done = house.higgsfield("run", "tiny.yaml")
        assert done.returncode == 0, done.stderr
        records = house.records
        assert [record.step for record in records] == list(range(1, 49))
        observed = [record for record in records if record.observed]
        assert observed
        assert all(record.verdict in ACTED for record in observed)
        would = house.those(WouldHaveDone)
        assert [event.onset_step for event in house.those(VerdictSeen)] == list(map(onset_of, first_verdicts(observed)))
        assert would[0].cause in ("spike", "divergence")
        assert would[0].lr_scale == 0.25
        assert would[0].resume_step < house.those(VerdictSeen)[0].onset_step
        assert (house.those(RolledBack), len(house.those(Submitted)), len(house.those(SegmentStarted))) == ([], 1, 1)
        assert list(house.run.quarantine.iterdir()) == []
        assert "OBSERVED" in done.stdout
