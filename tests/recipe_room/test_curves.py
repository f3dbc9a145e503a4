"""The default detector on real curves: nothing healthy is rolled back, every failure is found in time."""

import math
from pathlib import Path

import pytest

from benchmarks import curves
from benchmarks.detectors import Curve, labelled, onset_in_hindsight, recorded, robust, score, upper_bound

ROOT = Path(__file__).parents[2]
LABELLED = ROOT.parent / "shared/curves"
RECORDED = ROOT / "benchmarks/curves.jsonl.gz"

needs_labelled = pytest.mark.skipif(not LABELLED.is_dir(), reason=f"the labelled curves are not at {LABELLED}")


@needs_labelled
def test_the_labelled_curves() -> None:
    """Nothing before an onset is acted on, and so no transient: each lies before any onset of its curve."""
    found = score(robust, labelled(LABELLED))
    assert found.wrong == []
    assert found.missed == []
    assert len(found.delays) == 7
    assert sorted(found.delays)[3] <= 3


@needs_labelled
def test_the_excerpts_do_not_break_it() -> None:
    found = score(robust, labelled(LABELLED, ["window"]))
    assert found.wrong == []
    assert len(found.delays) >= 5


def test_the_recorded_runs() -> None:
    runs = recorded(RECORDED)
    failing = [run for run in runs if run.onsets]
    found = score(robust, runs)
    assert (found.wrong, found.missed, found.late) == ([], [], [])
    assert len(failing) == 30
    assert sum(len(run.rows) for run in runs if not run.onsets) >= 100_000


def test_a_recording_is_of_a_run_that_trains(tmp_path: Path) -> None:
    run = curves.Run("sgd", 60.0, seed=1, steps=60, warmup=40, batch=2)
    calm = curves.Run("adamw", 1e-2, seed=1, steps=60, batch=2, is_mixed=True, diverges=False)
    file = tmp_path / "curves.jsonl.gz"
    assert curves.record(file, [run, calm]) == 2
    exploded, fell = recorded(file)
    assert exploded.onsets
    assert (fell.rows[-1].loss or math.inf) < (fell.rows[0].loss or 0.0)
    assert not fell.onsets


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0] * 60, None),
        ([3.0] * 40 + [7.0] * 60, 40),
        ([3.0] * 40 + [7.0] * 5 + [3.0] * 60, None),
        ([3.0] * 40 + [4.0] * 60, 40),
        ([3.0] * 40 + [math.nan], 40),
    ],
)
def test_what_hindsight_calls_a_failure(losses: list[float], expected: int | None) -> None:
    assert onset_in_hindsight(losses)[0] == expected


def test_the_bound_that_a_count_allows() -> None:
    assert upper_bound(0, 100) == pytest.approx(0.0295, abs=1e-4)
    assert upper_bound(2, 10) == pytest.approx(0.5069, abs=1e-4)
    assert score(lambda rows: [5], [Curve("a", [], [6]), Curve("b", [], [3])]).wrong == ["a"]
