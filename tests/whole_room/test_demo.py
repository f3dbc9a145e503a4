"""The demo as a person runs it: nothing is injected, it explodes, is brought back, and finishes."""

from __future__ import annotations

import csv
import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM

from supervisor.config import load_config, shipped_configs
from supervisor.journal import Finished, RolledBack, SegmentStarted, SupervisorStarted, VerdictSeen
from tests.whole_room.house import House, environment, steps
from worker.contract.loss_history import Record, surviving
from worker.contract.manifest import complete_checkpoints

pytestmark = pytest.mark.training
PEAK, WARMUP, MAX_STEPS = 3.0, 240, 260


@dataclass
class Demo(House):
    """The demo after its end."""

    done: subprocess.CompletedProcess[str] | None = None

    @property
    def rolled_back(self) -> RolledBack:
        return self.those(RolledBack)[0]

    def segment(self, number: int) -> list[Record]:
        return [record for record in self.records if record.segment == number]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    demo = Demo(tmp_path_factory.mktemp("demo"), environment(OMP_NUM_THREADS="2"), name="demo")
    with demo:
        demo.done = demo.higgsfield("run", str(shipped_configs() / "demo.yaml"))
        yield demo


def test_the_demo_still_is_what_this_file_says() -> None:
    training = load_config(shipped_configs() / "demo.yaml").training
    assert training.optimizer.learning_rate == PEAK
    assert (training.schedule.warmup, training.max_steps) == (WARMUP, MAX_STEPS)


def test_it_finishes_and_says_where_everything_is(demo: Demo) -> None:
    assert demo.done is not None
    assert demo.done.returncode == 0
    [warned] = demo.done.stderr.splitlines()
    assert "training.optimizer.learning_rate: 3 may well make the loss spike" in warned
    log, _, files = demo.done.stdout.rpartition("\nEverything is in ")
    assert "ROLLED BACK" in log.partition("\nThe rollback log of demo ")[2]
    folder, *names = files.split()
    assert folder == str(demo.run.path)
    assert all((demo.run.path / name).exists() for name in names)
    assert {"final", "loss_history.json", "loss_history.csv", "rollback_log.jsonl"} <= set(names)


def test_it_spiked_and_went_back_to_half_the_rate(demo: Demo) -> None:
    assert demo.rolled_back.kind == "spike"
    assert demo.rolled_back.lr_scale == 0.5
    assert demo.rolled_back.where == "same_allocation"
    assert 0 < demo.rolled_back.to_step < demo.rolled_back.onset_step
    assert demo.rolled_back.from_step == demo.segment(1)[-1].step


def test_each_verdict_has_one_answer(demo: Demo) -> None:
    acted = [(record.step, record.verdict) for record in demo.records if record.is_acted]
    assert [(event.step, event.kind) for event in demo.those(VerdictSeen)] == acted
    assert [(event.verdict_step, event.kind) for event in demo.those(RolledBack)] == acted
    assert [event.segment for event in demo.those(SegmentStarted)] == list(range(1, len(acted) + 2))
    assert [event.final_step for event in demo.those(Finished)] == [MAX_STEPS]
    assert len(demo.those(SupervisorStarted)) == 1


def test_the_curve_that_survived_is_whole_and_the_abandoned_one_is_still_there(demo: Demo) -> None:
    survived = surviving(demo.records)
    assert steps(survived) == list(range(1, MAX_STEPS + 1))
    assert len(demo.records) == MAX_STEPS + sum(event.cost.steps_repeated for event in demo.those(RolledBack))
    last = survived[-1].loss
    assert last is not None
    assert last < 4.0  # bytes at random are 5.5, and where it left the rails it was 4.5
    assert all(record.loss is not None and math.isfinite(record.loss) for record in survived)


def test_the_first_step_after_the_rollback_has_exactly_half_the_rate(demo: Demo) -> None:
    first, again = demo.segment(1), demo.segment(2)[0]
    assert again.step == demo.rolled_back.to_step + 1
    assert again.lr == PEAK * ((again.step - 1) / WARMUP) * 0.5
    before = first[again.step - 1]
    assert before.step == again.step
    assert before.lr is not None
    assert again.lr == before.lr * 0.5
    assert before.loss == again.loss  # the same weights and the same samples
    assert again.start is not None
    assert again.start.lr == again.start.lr_expected == again.lr


def test_the_table_holds_the_curve_that_survived(demo: Demo) -> None:
    with open(demo.run.history_csv, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    survived = surviving(demo.records)
    assert [(int(row["segment"]), int(row["step"])) for row in rows] == [(r.segment, r.step) for r in survived]
    assert [float(row["loss"]) for row in rows] == [record.loss for record in survived]


def test_what_lies_past_the_target_is_in_quarantine(demo: Demo) -> None:
    quarantined = {path.name for path in demo.run.quarantine.iterdir()}
    newest = max(int(name.split("-")[1]) for name in demo.those(RolledBack)[-1].quarantine)
    assert quarantined == {f"a{demo.those(RolledBack)[-1].attempt - 1}-checkpoint-{newest}"}
    target = demo.rolled_back.to_step
    assert all(manifest.attempt > 1 for manifest in complete_checkpoints(demo.run) if manifest.step > target)


def test_the_finished_model_is_a_plain_folder_of_transformers(demo: Demo) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo.run.final)
    assert sum(parameter.numel() for parameter in model.parameters()) > 800_000
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_no_process_is_left(demo: Demo) -> None:
    demo.until(lambda: not demo.processes())
