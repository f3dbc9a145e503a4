"""What a run leaves behind: its history, its folders, and how it ends."""

import json
import math
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from supervisor.config import shipped_configs
from tests.trainer_room.rig import Rig, copies_begin_the_history, evaluations, same_end, weights
from worker.contract.claim import Claim
from worker.contract.files import publish_message
from worker.contract.loss_history import last_record
from worker.contract.manifest import complete_manifest
from worker.contract.yaml_file import read_yaml
from worker.start import Start

pytestmark = pytest.mark.training


def test_a_late_checkpoint_holds_no_longer_log_of_the_trainer_than_an_early_one(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(training={"max_steps": 130}, checkpoint={"every_steps": 110, "keep": 2})
    rig.finish()
    for step, kept in ((110, range(11, 111)), (130, range(31, 131))):
        state = json.loads((rig.run.checkpoint(step) / "trainer_state.json").read_text())
        assert [line["step"] for line in state["log_history"]] == list(kept)


def test_a_history_is_complete_and_is_what_the_trainer_logged(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(training={"gradient_accumulation": 2})
    rig.finish()
    records = rig.history()
    assert [record.step for record in records] == list(range(1, 13))
    state = json.loads((rig.run.checkpoint(12) / "trainer_state.json").read_text())
    for record, logged in zip(records, state["log_history"], strict=False):
        assert record.loss == pytest.approx(logged["loss"], rel=1e-5)
        assert record.grad_norm == pytest.approx(logged["grad_norm"], rel=1e-6)
        assert record.lr == logged["learning_rate"]
    assert [(record.data.epoch, record.data.batch) for record in records if record.data] == [
        (step // 3, step % 3) for step in range(12)
    ]
    assert [record.save_s is not None for record in records] == [record.step in (5, 9) for record in records]
    assert all(record.tokens_per_s and record.step_s and record.data_wait_s is not None for record in records)
    assert re.search(r"step 12/12 loss \S+ .*tokens/s \S+ step_s \S+ data_wait_s ", rig.processes[0].said())
    for step in (4, 8, 12):
        folder = rig.run.checkpoint(step)
        complete_manifest(folder)
        assert {path.name for path in folder.iterdir()} >= {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
    copies_begin_the_history(rig)


def test_the_finished_model_is_a_plain_folder_readable_as_the_umask_says(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.finish()
    umask = os.umask(0o022)
    os.umask(umask)
    for folder in (rig.run.final, rig.run.final / "ema"):
        AutoModelForCausalLM.from_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder).decode([72, 105]) == "Hi"
        assert stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o666 & ~umask
    assert weights(rig.run.final) != weights(rig.run.final / "ema")


def test_the_cold_start_that_an_agent_makes_trains_too(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(training={"max_steps": 2})
    rig.direct()
    rig.claim(1)
    start = Start(attempt=1, restart=0, job_id="17", name="hf-test", rank=0, world=1, local_rank=0)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = [sys.executable, "-m", "worker.train", str(rig.run.path), start.model_dump_json()]
    done = subprocess.run(command, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert len(rig.history()) == 2


def test_an_update_whose_gradient_is_not_finite_is_skipped(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.finish(nan_gradient=[5, 0])
    records = rig.history()
    assert [record.verdict for record in records] == ["ok"] * 4 + ["skipped"] + ["ok"] * 7
    skipped = records[4]
    assert (skipped.grad_norm, skipped.nonfinite, skipped.nonfinite_ranks) == (None, {"grad_norm": "nan"}, (0,))
    assert complete_manifest(rig.run.checkpoint(12)).weights_finite
    assert complete_manifest(rig.run.checkpoint(12)).optimizer_steps == 11
    assert all(math.isfinite(record.loss or math.nan) for record in records)
    json.loads((rig.run.checkpoint(8) / "trainer_state.json").read_text(), parse_constant=_refuse)


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def test_two_ranks_skip_together_and_name_the_one_that_was_not_finite(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.finish(world=2, nan_gradient=[5, 1])
    skipped = rig.history()[4]
    assert (skipped.verdict, skipped.nonfinite_ranks) == ("skipped", (1,))
    assert complete_manifest(rig.run.checkpoint(12)).weights_finite


@pytest.mark.parametrize("is_late", [False, True])
def test_a_spike_stops_every_rank_at_the_same_step_and_saves_nothing(
    make_rig: Callable[..., Rig], is_late: bool
) -> None:
    rig = make_rig(spike={"warmup": 4, "patience": 2}, checkpoint={"every_steps": 3})
    rig.finish(20, world=2, spike_at=6, is_late=is_late)
    last = rig.history()[-1]
    assert (last.verdict, last.step, last.onset_step) == ("spike", 7, 6)
    assert last == last_record(rig.run.history)
    for rank in (0, 1):
        error = rig.error(rank=rank)
        assert error.error is not None
        assert (error.error.what, error.step) == ("spike", 8 if is_late else 7)
    assert max(rig.run.checkpoint_steps()) == 6
    assert complete_manifest(rig.run.checkpoint(6)).step == 6


@pytest.mark.parametrize(("rank", "world", "onset"), [(0, 1, 6), (1, 2, 8)])
def test_a_watched_number_of_any_rank_stops_all_of_them(
    make_rig: Callable[..., Rig], rank: int, world: int, onset: int
) -> None:
    rig = make_rig(spike={"warmup": 4, "patience": 2, "metrics": {"reward": "fall"}})
    rig.finish(20, world=world, reward_falls=[6, rank])
    last = rig.history()[-1]
    assert (last.verdict, last.step, last.onset_step) == ("spike", 8, onset)
    assert ("reward is 0" in str(last.warnings)) == (rank == 0)
    assert [rig.error(rank=each).step for each in range(world)] == [8] * world


def test_reading_one_step_late_changes_no_record(make_rig: Callable[..., Rig]) -> None:
    at_once, late = make_rig("at_once"), make_rig("late")
    at_once.finish()
    late.finish(is_late=True)
    assert late.losses() == at_once.losses()
    assert weights(late.run.final) == weights(at_once.run.final)


def test_stop_and_save_files_and_the_directive_are_obeyed(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(checkpoint={"every_steps": 100})
    rig.start(pause_at=[2, 5])
    rig.pauses(2)
    rig.run.save_file.touch()
    rig.goes_on(2)
    rig.pauses(5)
    assert rig.run.checkpoint_steps() == [3]
    assert not rig.run.save_file.exists()
    rig.run.stop_file.touch()
    rig.goes_on(5)
    rig.ends(21)
    assert rig.run.checkpoint_steps() == [3, 6]
    assert _what(rig, restart=0) == ("stop", 6)
    rig.run.stop_file.unlink()

    rig.start(restart=1, pause_at=[7])
    rig.pauses(7)
    rig.direct(stop="now")
    rig.goes_on(7)
    rig.ends(21)
    assert _what(rig, restart=1) == ("stop", None)
    assert rig.history()[-1].step == 8


def _what(rig: Rig, restart: int) -> tuple[str | None, int | None]:
    error = rig.error(restart=restart)
    assert error.error is not None
    return error.error.what, error.saved_step


@pytest.mark.parametrize("by", ["claim", "directive"])
def test_a_run_that_is_somebody_elses_by_now_gets_nothing_more(make_rig: Callable[..., Rig], by: str) -> None:
    rig = make_rig(checkpoint={"every_steps": 6})
    rig.start(world=2, pause_at=[5])
    rig.pauses(5)
    if by == "claim":
        other = Claim(job_id="18", name="hf-test", restart=0, host="there", pid=1, started_ticks=1, time=1.0)
        publish_message(rig.run.claim(1), other)
    else:
        rig.direct(attempt=2)
    before = rig.run.history.read_bytes()
    rig.goes_on(5)
    rig.ends(22)
    assert rig.run.history.read_bytes() == before
    assert rig.run.checkpoint_steps() == []


def test_retention_goes_by_step_and_health(make_rig: Callable[..., Rig]) -> None:
    rules = {"every_steps": 1, "keep": 2, "keep_healthy": 1, "keep_every": 5, "healthy_after": 3}
    rig = make_rig(checkpoint=rules, training={"precision": "bf16"})
    rig.direct(pinned=(2,))
    rig.finish()
    assert rig.run.checkpoint_steps() == [2, 5, 9, 10, 11, 12]


def test_best_follows_the_evaluation_loss(make_rig: Callable[..., Rig], text: Path) -> None:
    rig = make_rig(data={"eval": str(text)}, training={"eval_every": 4, "log_every": 50})
    rig.finish()
    evaluated = {record.step: record.eval_loss for record in rig.history() if record.eval_loss is not None}
    assert sorted(evaluated) == [4, 8, 12]
    best = json.loads((rig.run.best / "best.json").read_text())
    assert best["step"] == 12
    assert best["eval_loss"] == min(evaluated.values())
    assert weights(rig.run.best) == weights(rig.run.final)


def test_best_stays_where_the_evaluation_loss_rises_again_also_after_kills(
    make_rig: Callable[..., Rig], text: Path
) -> None:
    sections = {"data": {"eval": str(text)}, "training": {"eval_every": 2}, "spike": {"patience": 9}}
    whole, cut = make_rig("whole", **sections, checkpoint={"every_steps": 2}), make_rig("cut", **sections)
    whole.finish(spike_at=7)
    losses = evaluations(whole, "eval_loss")
    assert sorted(losses) == [2, 4, 6, 8, 10, 12]
    assert min(losses, key=losses.__getitem__) == 6

    for restart, step in enumerate((7, 11)):
        cut.start(restart=restart, spike_at=7, die_at=[step, "end", signal.SIGKILL, 0])
        cut.ends(-signal.SIGKILL)
    cut.finish(restart=2)
    same_end(whole, cut)
    assert [one.start.checkpoint for one in cut.history() if one.start] == [None, "checkpoint-4", "checkpoint-8"]
    for rig in (whole, cut):
        assert json.loads((rig.run.best / "best.json").read_text()) == {"step": 6, "eval_loss": losses[6]}
        assert weights(rig.run.best) == weights(whole.run.checkpoint(6))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"training": {"extra": {"save_steps": 3}}},
            "training.extra.save_steps: set checkpoint.every_",
        ),
        ({"training": {"extra": {"no_such_field": 3}}}, "no_such_field"),
        ({"data": {"train": "/nowhere/at/all"}}, "/nowhere/at/all"),
        ({"model": {"config": {"model_type": "no-such"}}}, "no-such"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    make_rig: Callable[..., Rig], sections: dict[str, dict[str, object]], said: str
) -> None:
    rig = make_rig(**sections)
    rig.finish(23)
    error = rig.error().error
    assert error is not None
    assert said in error.message
    assert "\n" not in error.message
    assert not rig.run.history.exists()


def test_tasks_without_a_world_are_refused(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.finish(23, environment={"SLURM_NTASKS": "2"})
    error = rig.error().error
    assert error is not None
    assert error.what == "world"


def test_sigusr1_writes_the_stacks(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    process = rig.start(pause_at=[1])
    rig.pauses(1)
    process.send(signal.SIGUSR1)
    rig.goes_on(1)
    rig.ends(0)
    assert "on_step_end" in rig.run.stacks(1, 0, 0).read_text()


DEMO: dict[str, Any] = read_yaml(shipped_configs() / "demo.yaml")
EXPLOSIVE = {name: DEMO[name] for name in ("model", "data", "training", "ema", "checkpoint")}


def test_where_the_plain_trainer_ends_in_nan_ours_stops_with_a_verdict(make_rig: Callable[..., Rig]) -> None:
    plain, ours = make_rig("plain", **EXPLOSIVE), make_rig("ours", **EXPLOSIVE)
    plain.finish(is_plain=True)
    assert json.loads((plain.run.path / "plain.json").read_text())["weights_finite"] is False
    ours.finish(20)
    last = ours.history()[-1]
    assert last.is_acted
    assert last.onset_step is not None
    assert last.onset_step > 20
    assert all(complete_manifest(ours.run.checkpoint(step)).weights_finite for step in ours.run.checkpoint_steps())
    assert max(ours.run.checkpoint_steps()) <= last.step
