"""What of a history is replayed: which bad steps, from which checkpoint, with which changes."""

import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import supervisor.replay
from supervisor.journal import Continued, Event, RolledBack
from supervisor.replay import replay_request
from supervisor.replay_plan import Found, Planned, plan_replay
from supervisor.report.replay_text import Standing, advice, as_json, table, was_tried
from supervisor.runs import RunError
from supervisor.verbs import replaying
from tests.supervisor_room.stage import config
from worker.contract.directive import LearningRateRamp, SkippedBatches
from worker.contract.loss_history import BatchPosition, Record
from worker.contract.manifest import Manifest
from worker.contract.replay import Change, Tried
from worker.contract.run_dir import RunDir

SGD = {"optimizer": {"name": "sgd", "learning_rate": 1.0}}


def record(step: int, attempt: int = 1, verdict: str = "ok", onset: int | None = None, loss: float = 2.0) -> Record:
    told = {"segment": attempt, "attempt": attempt, "restart": 0, "step": step, "epoch": 0.0, "time": 1.0}
    place = BatchPosition(epoch=0, batch=step - 1)
    return Record.model_validate({**told, "loss": loss, "verdict": verdict, "onset_step": onset, "data": place})


def steps(first: int, last: int, attempt: int = 1) -> list[Record]:
    return [record(step, attempt) for step in range(first, last + 1)]


def found(step: int, segment: int = 1, place: str = "checkpoints", *, is_finite: bool = True) -> Found:
    fields: dict[str, Any] = dict.fromkeys(("epoch", "time", "lr_scale"), 1.0)
    fields |= dict.fromkeys(("batches_into_epoch", "samples_seen", "world_size", "batch_size", "max_steps", "seed"), 1)
    fields |= {"config_digest": "", "data_digest": "", "weights_finite": is_finite, "probe_loss": 1.0, "files": {}}
    fields |= {"gradient_accumulation": 1, "optimizer_steps": step, "versions": {}, "attempt": segment}
    manifest = Manifest(step=step, segment=segment, **fields)
    return Found(Path("/run", place, f"checkpoint-{step}"), manifest)


def began(attempt: int = 1, step: int = 0, **fields: Any) -> Continued:
    return Continued(
        time=1.0, attempt=attempt, reason="", cause="first", where="new_job", resume_step=step,
        resume_from=f"checkpoint-{step}" if step else None, **fields,
    )  # fmt: skip


def rolled_back(attempt: int, to_step: int, **fields: Any) -> RolledBack:
    plan = began(attempt, to_step, **fields).model_dump(exclude={"event"})
    told: dict[str, Any] = {"kind": "spike", "verdict_step": 44, "onset_step": 42, "from_step": 44, "to_step": to_step}
    return RolledBack(**{**plan, **told})


GOING_ON = Standing(Path("r"), is_finished=False, lr_scale=0.0625, learning_rate=1e-3)
SPIKED = [*steps(1, 43), record(44, verdict="spike", onset=42)]
"""Checkpoints every 10 steps, healthy after 5."""


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Planned]:
    def make(
        records: Sequence[Record], checkpoints: Sequence[Found], events: Sequence[Event] = (),
        is_alone: bool = False, **sections: Any,
    ) -> Planned:  # fmt: skip
        return plan_replay(Path("/run"), config(tmp_path, **sections), records, events, checkpoints, is_alone)

    return make


class TestWhichSteps:
    def test_those_of_the_newest_verdict(self, plan: Callable[..., Planned]) -> None:
        later = [*steps(31, 59, attempt=2), record(60, 2, verdict="divergence", onset=55)]
        planned = plan([*SPIKED, *later], [found(30), found(40, 2)], [began(), rolled_back(2, 30)])
        bad = planned.replay.bad
        assert (bad.kind, bad.onset_step, bad.verdict_step, bad.num_records) == ("divergence", 55, 60, 74)

    def test_an_older_one_where_the_newest_has_no_checkpoint_left(self, plan: Callable[..., Planned]) -> None:
        later = [*steps(31, 59, attempt=2), record(60, 2, verdict="spike", onset=55)]
        events = [began(), rolled_back(2, 30, lr_scale=0.5)]
        planned = plan([*SPIKED, *later], [found(20)], events)
        assert (planned.replay.bad.verdict_step, planned.replay.begin_step) == (44, 20)

    def test_steps_skipped_in_a_row_where_there_was_no_verdict(self, plan: Callable[..., Planned]) -> None:
        records = [*steps(1, 24), record(25, verdict="skipped"), record(26, verdict="skipped"), *steps(27, 30)]
        bad = plan(records, [found(20)]).replay.bad
        assert (bad.kind, bad.onset_step, bad.verdict_step, bad.num_records) == ("skipped", 25, 26, 26)

    def test_a_run_in_which_nothing_went_wrong_says_so(self, plan: Callable[..., Planned]) -> None:
        with pytest.raises(RunError, match="no step of this run was judged bad, so there is nothing to replay"):
            plan(steps(1, 50), [found(40)])


class TestFromWhere:
    def test_the_newest_healthy_one_before_the_onset_and_not_the_newest(self, plan: Callable[..., Planned]) -> None:
        planned = plan(SPIKED, [found(step) for step in (20, 30, 40)])
        assert planned.replay.begin_step == 30  # 40 was judged within five steps
        assert planned.directives["again"].resume_from == "checkpoint-30"

    def test_a_quarantined_one_counts(self, plan: Callable[..., Planned]) -> None:
        assert plan(SPIKED, [found(10), found(30, place="quarantine")]).replay.checkpoint == Path(
            "/run/quarantine/checkpoint-30"
        )

    def test_one_of_another_branch_or_with_ruined_weights_does_not(self, plan: Callable[..., Planned]) -> None:
        assert plan(SPIKED, [found(20), found(30, segment=2), found(25, is_finite=False)]).replay.begin_step == 20

    def test_one_from_before_the_rate_was_changed_does_not(self, plan: Callable[..., Planned]) -> None:
        again = [*steps(31, 59, attempt=2), record(60, 2, verdict="spike", onset=58)]
        events = [began(), rolled_back(2, 30, lr_scale=0.5)]
        planned = plan([*SPIKED, *again], [found(20), found(30)], events)
        assert planned.replay.begin_step == 30
        assert planned.directives["again"].lr_scale == 0.5

    def test_an_interruption_on_the_way_is_none(self, plan: Callable[..., Planned]) -> None:
        records = [*steps(1, 35), *steps(31, 43, attempt=2), record(44, 2, verdict="spike", onset=42)]
        assert plan(records, [found(20)], [began(), began(2, 30)]).replay.begin_step == 20

    def test_from_scratch_only_where_nothing_was_to_be_saved_before(self, plan: Callable[..., Planned]) -> None:
        early = plan([*steps(1, 8), record(9, verdict="spike", onset=7)], [])
        assert (early.replay.begin_step, early.replay.checkpoint) == (0, None)
        with pytest.raises(RunError, match=r"no checkpoint is left from before step 42.*checkpoint\.keep"):
            plan(SPIKED, [])


class TestWithWhat:
    def test_each_change_alone(self, plan: Callable[..., Planned]) -> None:
        ramp = LearningRateRamp(from_step=10, hold_steps=5, ramp_steps=10, to=1.0)
        gone = SkippedBatches(epoch=0, first=3, count=2)
        events = [began(lr_scale=0.5, lr_ramp=ramp, skip_batches=(gone,))]
        training = {"precision": "bf16", **SGD}
        planned = plan(SPIKED, [found(30)], events, training=training, recovery={"spike": {"skip_before": 4}})
        again = planned.directives["again"]
        assert (again.lr_scale, again.lr_ramp, again.skip_batches) == (0.5, ramp, (gone,))
        slow = planned.directives["tenth-rate"]
        assert (slow.lr_scale, slow.lr_ramp and slow.lr_ramp.to, slow.skip_batches) == (0.05, 0.1, (gone,))
        without = planned.directives["without-batches"]
        assert without.skip_batches == (gone, SkippedBatches(epoch=0, first=37, count=7))
        assert without.lr_scale == 0.5
        optimizers = {change: one.training.optimizer for change, one in planned.configs.items()}
        assert optimizers["adamw"].name == "adamw"
        assert optimizers["adamw"].learning_rate == pytest.approx(2e-3)  # as 2e-5 is to SGD's 1e-2
        precisions = {change: one.training.precision for change, one in planned.configs.items()}
        assert [change for change, one in precisions.items() if one == "fp32"] == ["fp32"]
        assert [change for change, one in optimizers.items() if one.name != "sgd"] == ["adamw"]

    def test_an_optimizer_whose_rates_are_like_adamws_keeps_its_own(self, plan: Callable[..., Planned]) -> None:
        training = {"optimizer": {"name": "lion", "learning_rate": 2e-4, "betas": [0.9, 0.99]}}
        optimizer = plan(SPIKED, [found(30)], training=training).configs["adamw"].training.optimizer
        assert (optimizer.learning_rate, optimizer.betas) == (2e-4, None)

    def test_a_spike_has_time_to_come_later_and_a_step_that_is_not_finite_none(
        self, plan: Callable[..., Planned]
    ) -> None:
        ends = {one.change: one.end_step for one in plan(SPIKED, [found(30)]).replay.trials}
        assert (ends["again"], ends["tenth-rate"]) == (44, 49)
        records = [*steps(1, 43), record(44, verdict="nonfinite", onset=43)]
        assert {one.end_step for one in plan(records, [found(30)]).replay.trials} == {44}

    @pytest.mark.parametrize(
        ("training", "change", "said"),
        [
            ({"precision": "fp32"}, "fp32", "it trains in fp32"),
            ({"entrypoint": "a:b"}, "fp32", "a script of your own says the precision"),
            ({}, "adamw", "it is AdamW"),
            ({"entrypoint": "a:b", **SGD}, "adamw", "a script of your own makes the optimizer"),
        ],
    )
    def test_a_change_that_changes_nothing_is_not_tried(
        self, plan: Callable[..., Planned], training: dict[str, Any], change: Change, said: str
    ) -> None:
        trials = {one.change: one.why_not for one in plan(SPIKED, [found(30)], training=training).replay.trials}
        assert trials[change] == said

    def test_one_rank_makes_the_global_batch_of_all(self, plan: Callable[..., Planned]) -> None:
        cluster = {"nodes": 2, "gpus_per_node": 4}
        training = {"gradient_accumulation": 3}
        alone = plan(SPIKED, [found(30)], is_alone=True, cluster=cluster, training=training)
        assert {one.training.gradient_accumulation for one in alone.configs.values()} == {24}
        as_job = plan(SPIKED, [found(30)], cluster=cluster, training=training)
        assert {one.training.gradient_accumulation for one in as_job.configs.values()} == {3}


def test_the_job_is_the_runs_own_in_a_folder_of_its_own(tmp_path: Path) -> None:
    cluster = {"kind": "local", "nodes": 2, "gpus_per_node": 2, "partition": "gpu"}
    job = replay_request(config(tmp_path, cluster=cluster), RunDir(tmp_path / "r"), "abcdef0123", tmp_path / "own")
    assert job.name.startswith("hx-abcdef01-")
    assert (job.resources.nodes, job.resources.tasks_per_node, job.resources.partition) == (2, 2, "gpu")
    assert (job.folder, job.args, job.requeue) == (
        tmp_path / "own" / "jobs", (str(tmp_path / "own"), str(tmp_path / "own" / "told.jsonl")), False
    )  # fmt: skip


@pytest.mark.parametrize(
    ("cures", "said"),
    [
        ({"again", "tenth-rate"}, "does not come again: neither data nor rate"),
        ({"fp32", "smallest-batch"}, "it is the precision"),
        ({"smallest-batch", "without-batches"}, "it is the data: of step 42 row 1"),
        ({"without-batches", "tenth-rate"}, "leave the batches out: `higgsfield rollback r --to 30 --skip`"),
        (
            {"tenth-rate", "adamw"},
            "it is the rate: go on with a lower one, `higgsfield rollback r --to 30 --lr-scale 0.03125`",
        ),
        ({"adamw"}, "it is the optimizer"),
        (set(), "none of these changes cures it"),
    ],
)
def test_the_advice_names_the_change_that_says_most(
    plan: Callable[..., Planned], cures: set[Change], said: str
) -> None:
    replay = plan(SPIKED, [found(30)]).replay
    told = [
        Tried(change=one.change, what=one.what, cured=one.change in cures, loss=2.0, said="of step 42 row 1")
        for one in replay.trials
    ]
    assert said in advice(replay, told, GOING_ON)


@pytest.mark.parametrize(
    ("cure", "said"),
    [
        (
            "tenth-rate",
            "train another (another run.name) with training.optimizer.learning_rate: 3.125e-05, half of the peak",
        ),
        ("without-batches", "train another run (another run.name)"),
        ("smallest-batch", "train another run (another run.name)"),
        ("again", "at what was restored"),
    ],
)
def test_a_finished_run_is_not_told_to_go_back(plan: Callable[..., Planned], cure: Change, said: str) -> None:
    told = advice(
        plan(SPIKED, [found(30)]).replay, [Tried(change=cure, cured=True)], replace(GOING_ON, is_finished=True)
    )
    assert said in told
    assert "rollback" not in told
    assert "go on" not in told


def test_where_nothing_could_be_tried_nothing_is_concluded(plan: Callable[..., Planned]) -> None:
    told = [Tried(change=one, said="data.train: is gone") for one in ("again", "fp32")]
    assert not was_tried(told)
    assert "nothing could be tried" in advice(plan(SPIKED, [found(30)]).replay, told, GOING_ON)


def test_the_table_tells_not_finite_from_not_tried(plan: Callable[..., Planned]) -> None:
    told = [
        Tried(change="again", what="as it was", cured=False, said="comes again"),
        Tried(change="fp32", what="fp32", said="it trains in fp32"),
        Tried(change="tenth-rate", what="a tenth of the rate", cured=True, loss=2.125, said="nothing until step 49"),
    ]
    assert table(told) == [
        "change               loss        cured  what came of it",
        "as it was            not finite  no     comes again",
        "fp32                 -           -      it trains in fp32",
        "a tenth of the rate  2.125       yes    nothing until step 49",
    ]
    assert [one["cured"] for one in as_json(told)] == [False, None, True]


def test_a_replay_here_that_is_ended_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*_: object) -> Iterator[Tried]:
        assert list(tmp_path.iterdir())
        signal.raise_signal(signal.SIGTERM)
        yield Tried()

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(supervisor.replay, "furnish", lambda *_: None)
    monkeypatch.setattr(supervisor.replay, "told_here", told)
    monkeypatch.setattr(replaying, "planned", Mock())
    monkeypatch.setattr(replaying, "about", lambda _: "")
    with pytest.raises(KeyboardInterrupt):
        replaying.replay(RunDir(tmp_path / "r"), is_here=True)
    assert not list(tmp_path.iterdir())
