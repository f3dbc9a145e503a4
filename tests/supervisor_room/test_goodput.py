"""The simulation of goodput goes through the real policy, and adds up where the answer is known."""

import random

import pytest

from benchmarks.goodput import FAULTS, STEP_S, Costs, Scenario, Supervised, scripted

COSTS = Costs(save_s=20.0, load_s=60.0)
QUIET = Scenario("nothing happens", {})


def test_without_faults_time_goes_into_starting_saving_and_training_alone() -> None:
    run = Supervised(QUIET, COSTS, nodes=1, steps=600, every=30, draw=random.Random(0))
    start_s = COSTS.moved_start_s + COSTS.imports_s + COSTS.load_s
    assert run.to_the_end() == pytest.approx(600 * STEP_S + 20 * COSTS.save_s + start_s)
    alone_s = scripted(QUIET, COSTS, 1, 600, 30, random.Random(0), requeues=True)
    assert alone_s == pytest.approx(600 * STEP_S + 20 * COSTS.save_s + COSTS.imports_s + COSTS.load_s)


@pytest.mark.parametrize(
    ("kind", "events"),
    [
        ("gpu", {"Continued", "WorkerLeft"}),
        ("node", {"StartMoved"}),
        ("software", {"Continued", "WorkerLeft"}),
        ("hang", {"Continued", "WorkerLeft"}),
        ("spike", {"RolledBack", "VerdictSeen"}),
        ("preemption", {"StartMoved"}),
    ],
)
def test_each_fault_is_answered_by_the_policy_and_the_run_is_finished(kind: str, events: set[str]) -> None:
    often = Scenario(kind, {kind: lambda nodes: 0.2})
    run = Supervised(often, COSTS, nodes=1, steps=2000, every=30, draw=random.Random(1))
    assert run.to_the_end() > 2000 * STEP_S
    assert (run.run.state, run.run.final_step) == ("finished", 2000)
    assert events <= {name for name, count in run.counts.items() if count}


def test_a_spike_takes_no_other_one_further_back() -> None:
    run = Supervised(QUIET, COSTS, nodes=1, steps=2000, every=30, draw=random.Random(0))
    run.start_again()
    for last_sound in (656, 1003):  # the first verdict lies between its healthy checkpoint and the next boundary
        run.train_to(last_sound)
        run.strike("spike")
        assert last_sound - 2 * run.every <= run.step < last_sound
    assert run.counts["RolledBack"] == 2


def test_a_maintenance_costs_its_own_time_and_no_step() -> None:
    weekly = Scenario("weekly", {}, is_maintained=True)
    run = Supervised(weekly, COSTS, nodes=1, steps=15_000, every=60, draw=random.Random(0))
    took_s = run.to_the_end()
    plain_s = Supervised(QUIET, COSTS, nodes=1, steps=15_000, every=60, draw=random.Random(0)).to_the_end()
    one_s = COSTS.maintenance_s + COSTS.save_s + COSTS.load_s + COSTS.moved_start_s + COSTS.imports_s
    assert took_s - plain_s == pytest.approx(one_s, abs=2 * STEP_S)


def test_published_rates_are_those_of_their_source() -> None:
    assert sum(rate(2048) for rate in FAULTS.values()) == pytest.approx(1 / 3.0)  # 16,384 GPUs, eight to a node
