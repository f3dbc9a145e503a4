"""A folder that a Trainer wrote without us becomes a run; what is not usable in it is said, and it stays as it is."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from supervisor import adopt as adoption
from supervisor.adopt import adopt
from supervisor.cli import main
from supervisor.decision import Begin
from supervisor.journal import Continued
from supervisor.runs import RunError, standing
from supervisor.sbatch_file import read_sbatch
from tests.supervisor_room.stage import Stage, config
from worker.contract import config as contract_config
from worker.contract.config import Config
from worker.contract.loss_history import read_history
from worker.contract.manifest import complete_checkpoints
from worker.contract.yaml_file import format_yaml

FILES = ("config.json", "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def write_theirs(
    folder: Path,
    *steps: int,
    until: int | None = None,
    loss: dict[int, float] | None = None,
    rate: Callable[[int], float | None] = lambda step: None,
) -> Path:
    """A Trainer's output folder: ``loss`` names what is not 2.0 in its log, ``rate`` the learning rate of a step."""
    losses, norms = loss or {}, {step: value for step, value in (loss or {}).items() if value != value}
    for step in steps:
        place = folder / f"checkpoint-{step}"
        place.mkdir(parents=True)
        for name in FILES:
            (place / name).write_text(f"{name} of {step}")
        rows = [
            {
                "step": n,
                "loss": losses.get(n, 2.0),
                "grad_norm": norms.get(n, 1.0),
                "learning_rate": rate(n),
                "epoch": n / 50,
            }
            for n in range(1, (until or step) + 1)
        ]
        state = {"global_step": step, "max_steps": 100, "epoch": step / 50, "log_history": rows}
        (place / "trainer_state.json").write_text(json.dumps(state))
    return folder


def ours(folder: Path, **sections: Any) -> Config:
    return config(folder / "runs", **{"training": {"max_steps": 100}} | sections)


def test_history_checkpoints_and_the_first_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = write_theirs(tmp_path / "out", 20, 40)
    adopted = adopt(theirs, ours(tmp_path))
    run = adopted.run_dir
    assert [(m.step, m.attempt, m.adopted, m.world_size, m.seed) for m in complete_checkpoints(run)] == [
        (20, 0, True, 1, None),
        (40, 0, True, 1, None),
    ]
    records = read_history(run.history)
    assert [one.step for one in records] == list(range(1, 41))
    assert {(one.attempt, one.segment, one.adopted, one.verdict) for one in records} == {(0, 0, True, "ok")}
    row = standing(run, in_detail=True)
    assert [(one["step"], one["health"]) for one in row["checkpoints"]] == [(20, "healthy"), (40, "untested")]
    stage = Stage(tmp_path / "runs", training={"max_steps": 100})
    stage.settle()
    (begun,) = [event for event in stage.events if isinstance(event, Continued)]
    assert (begun.cause, begun.resume_from, begun.lr_scale, begun.attempt) == ("adopted", "checkpoint-40", 1.0, 1)
    assert stage.directive.resume_from == "checkpoint-40"


def test_one_that_left_the_rails_is_gone_on_with_from_before(tmp_path: Path) -> None:
    blown = {step: 50.0 + step for step in range(55, 81)}
    theirs = write_theirs(tmp_path / "out", 40, 60, 80, loss=blown)
    adopted = adopt(theirs, ours(tmp_path))
    assert adopted.steps == (40,)
    assert adopted.notes[0].startswith("checkpoint-60 is left out: the loss was off the rails since step 55")
    stage = Stage(tmp_path / "runs", training={"max_steps": 100})
    stage.settle()
    (begun,) = [event for event in stage.events if isinstance(event, Continued)]
    assert begun.resume_from == "checkpoint-40"
    assert sorted(path.name for path in theirs.iterdir()) == ["checkpoint-40", "checkpoint-60", "checkpoint-80"]


@pytest.mark.parametrize("is_next", [False, True], ids=["its own", "the next one's"])
def test_a_rate_that_is_not_theirs_is_one_line_and_one_that_is_theirs_none(tmp_path: Path, *, is_next: bool) -> None:
    def cosine(step: int) -> float | None:
        done = step if is_next else step - 1
        return 1e-3 * 0.5 * (1 + math.cos(math.pi * done / 100)) if step % 4 == 0 else None

    theirs = write_theirs(tmp_path / "out", 40, 74, until=80, rate=cosine)
    known = {"learning_rate": 1e-3, "floor": 0.0, "name": "cosine"}

    def notes(number: int, **differs: Any) -> tuple[str, ...]:
        rate, *schedule = (known | differs).values()
        training = {
            "max_steps": 100,
            "optimizer": {"learning_rate": rate},
            "schedule": {"warmup": 0, **dict(zip(("floor", "name"), schedule, strict=True))},
        }
        return adopt(theirs, ours(tmp_path, run={"name": f"r{number}"}, training=training)).notes

    assert notes(1) == notes(2, learning_rate=1.02e-3) == ()
    (hot,) = notes(3, learning_rate=1e-2)
    logged = f"{cosine(72):.3g}"
    assert (
        f"logged at step 72 is {logged} there and would be 0.00194 here, which goes on with 0.00158 at step 75" in hot
    )
    (floored,) = notes(4, floor=0.1)
    assert f"{logged} there and would be 0.000274 here, which goes on with 0.000242 at step 75" in floored
    assert len(notes(5, name="linear")) == 1


@pytest.mark.parametrize("harm", ["optimizer.pt", "scheduler.pt", "model.safetensors", "trainer_state.json"])
def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path, harm: str) -> None:
    theirs = write_theirs(tmp_path / "out", 20, 40, 60)
    (theirs / "checkpoint-60" / harm).unlink()
    (theirs / "checkpoint-40" / harm).write_text("")
    adopted = adopt(theirs, ours(tmp_path))
    assert adopted.steps == (20,)
    assert [note.split(" is ")[0] for note in adopted.notes] == ["checkpoint-40", "checkpoint-60"]
    assert harm in adopted.notes[0]
    assert harm in adopted.notes[1]


def test_what_cannot_be_linked_is_copied_as_far_as_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = write_theirs(tmp_path / "out", 20, 40, 60)

    def refuse(*names: Any) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(adoption.os, "link", refuse)
    adopted = adopt(theirs, ours(tmp_path, checkpoint={"keep": 2, "every_steps": 10}))
    assert adopted.steps == (40, 60)
    assert (
        adopted.notes[-1] == "checkpoint-20 is left where it is: it cannot be linked here (Invalid cross-device link)"
    )
    assert (adopted.run_dir.checkpoint(60) / "optimizer.pt").read_text() == "optimizer.pt of 60"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ("empty", "it has no checkpoint-N"),
        ("steps", "training.max_steps: is 50"),
        ("there", "is there already; choose another run.name"),
        ("ours", "is a run of ours already"),
        ("pipe", "scheduler.pt is no regular file"),
        ("blown", "had left the rails before every checkpoint"),
    ],
)
def test_what_cannot_be_adopted_is_one_line_and_leaves_nothing(tmp_path: Path, harm: str, says: str) -> None:
    losses = dict.fromkeys(range(1, 41), float("nan")) if harm == "blown" else None
    theirs = write_theirs(tmp_path / "out", *(() if harm == "empty" else (40,)), loss=losses)
    theirs.mkdir(exist_ok=True)
    wanted = ours(tmp_path, **({"training": {"max_steps": 50}} if harm == "steps" else {}))
    if harm == "there":
        (tmp_path / "runs" / "r").mkdir(parents=True)
    if harm == "ours":
        (theirs / "config.yaml").touch()
        (theirs / "rollback_log.jsonl").touch()
    if harm == "pipe":
        (theirs / "checkpoint-40" / "scheduler.pt").unlink()
        os.mkfifo(theirs / "checkpoint-40" / "scheduler.pt")
    with pytest.raises(RunError, match=says):
        adopt(theirs, wanted)
    runs = tmp_path / "runs"
    assert harm == "there" or not runs.exists() or list(runs.iterdir()) == []


def test_a_persons_own_options_land_in_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(
        "#!/bin/bash\n#SBATCH -J mine -p gpu\n#SBATCH --account=proj --time=2-00:00:00\n##SBATCH --qos=no\n"
        "#SBATCH --nodes 2\n#SBATCH -n4 # four\n#SBATCH --gpus-per-node=a100:4\n#SBATCH --exclusive\n"
        '#SBATCH --output=out-%j.log\n#SBATCH --comment="a; touch /tmp/x"\nsrun python train.py\n'
    )
    theirs = write_theirs(tmp_path / "out", 40)
    (tmp_path / "text.txt").write_text("text " * 100)
    fields = ours(tmp_path, training={"max_steps": None}).model_dump(mode="json")
    wanted = {key: fields[key] for key in ("run", "training", "checkpoint", "model")} | {"cluster": {"qos": "high"}}
    wanted["data"] = {"train": str(tmp_path / "text.txt"), "tokenizer": "bytes"}
    (tmp_path / "c.yaml").write_text(format_yaml(wanted))
    argv = ["adopt", str(theirs), "--config", str(tmp_path / "c.yaml"), "--sbatch", str(script)]
    assert main([*argv, "--set", "cluster.time_limit='1:00:00'"]) == 0
    said = capsys.readouterr().out
    assert "not proven when it goes on: the loss of its weights" in said
    assert f"--job-name of {script} is left out" in said
    made = contract_config.read(tmp_path / "runs" / "r" / "config.yaml")
    assert made.training.max_steps == 100, "the folder's own, where the configuration says nothing"
    cluster = made.cluster
    assert (cluster.partition, cluster.account, cluster.qos, cluster.time_limit) == ("gpu", "proj", "high", "1:00:00")
    assert (cluster.nodes, cluster.tasks_per_node, cluster.gpus_per_node, cluster.gres) == (2, 2, 4, "gpu:a100:4")
    assert cluster.sbatch == {"exclusive": True}


@pytest.mark.parametrize(
    ("text", "says"), [("echo", "has no #SBATCH"), ("#SBATCH 'x", "line 1"), ("#SBATCH -N 1-4", "nodes")]
)
def test_a_script_that_says_nothing_usable_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "job").write_text(text + "\n")
    with pytest.raises(RunError, match=says):
        read_sbatch(tmp_path / "job")


def test_the_first_decision_is_a_beginning(tmp_path: Path) -> None:
    adopt(write_theirs(tmp_path / "out", 40), ours(tmp_path))
    assert isinstance(Stage(tmp_path / "runs", training={"max_steps": 100}).look(), Begin)
