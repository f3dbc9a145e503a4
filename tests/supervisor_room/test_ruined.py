"""A run that made its last step with verdicts that nobody acted on does not end as if all were well."""

from pathlib import Path

import pytest

from supervisor.report.accounting import account
from supervisor.report.log_text import closing_summary
from supervisor.ruined import ruin
from supervisor.runs import standing
from tests.manifests import manifest
from tests.supervisor_room.stage import Stage
from worker.contract.exit_report import Outcome
from worker.contract.loss_history import Record, read_history, record


def curve(last: int, bad: range, verdict: str, onset: int) -> list[Record]:
    """Steps 1 to ``last``, those of ``bad`` observed with a verdict."""
    fields = {"segment": 1, "attempt": 1, "restart": 0, "epoch": 0.0, "time": 1.0, "loss": 2.0, "lr": 1.0}
    seen = {"verdict": verdict, "observed": True, "onset_step": onset}
    return [record(step=step, **fields, **(seen if step in bad else {})) for step in range(1, last + 1)]


@pytest.mark.parametrize(
    ("branch", "is_finite", "told"),
    [
        (curve(60, range(0), "ok", 0), True, ""),
        (curve(60, range(0), "ok", 0), False, "its last weights are not finite: final/ is ruined"),
        (
            curve(60, range(51, 61), "nonfinite", 51),
            True,
            "its last 10 steps were not finite: final/ is not to be trust",
        ),
        (curve(60, range(60, 61), "spike", 58), True, "nobody acted on the spike at its end: final/ is not to be"),
        (curve(60, range(30, 31), "spike", 28), True, "nobody acted on the spike at step 30"),
    ],
)
def test_what_is_told_of_finished_weights(branch: list[Record], is_finite: bool, told: str) -> None:
    manifests = [manifest(20), manifest(40), manifest(60, weights_finite=is_finite)]
    said = ruin(branch, manifests, 10, "/runs/r")
    assert said.startswith(told)
    assert bool(said) == bool(told)
    is_bad_at_the_end = "final/" in told
    assert ("`higgsfield rollback /runs/r --to 40` goes back" in said) == is_bad_at_the_end


def test_status_log_and_the_message_say_it(tmp_path: Path) -> None:
    stage = Stage(tmp_path, recovery={"mode": "observe"})
    stage.settle()
    stage.start_job()
    stage.train(38, "spike", onset=36, loss=9.0, observed=True)
    stage.leave(Outcome.DONE)
    stage.settle()
    assert stage.state == "finished"
    clause = "nobody acted on the spike"
    assert stage.watched.rules.run == str(stage.run_dir.path), "what the commands name"
    assert clause in stage.events[-1].reason
    assert clause in standing(stage.run_dir, in_detail=False)["reason"]
    summary = closing_summary(stage.events, account(stage.events, read_history(stage.run_dir.history), stage.now, 1))
    assert any("Nobody acted on the spike" in line for line in summary)
    assert "Nothing interrupted it." not in summary
