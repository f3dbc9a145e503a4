"""Each key of spike, ema, checkpoint and recovery has an effect: change it alone, and a history ends otherwise."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm.job import JobState
from supervisor.config_findings import all_places
from tests.manifests import manifest
from tests.supervisor_room.stage import PREEMPTED, Stage, config
from tests.supervisor_room.world import World
from worker.checkpoints import kept_steps
from worker.contract.config import Config
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.loss_history import Record
from worker.contract.recovery_config import SpikeConfig
from worker.ema import Ema
from worker.spikes import Detector

Story = Callable[[Path, dict[str, Any]], Any]
MAX_STEPS = 3000
SEGFAULT = ErrorDetail(type="Signal", message="killed by signal 11")


def told(world: World) -> list[dict[str, Any]]:
    return [event.model_dump() for event in world.events]


def spikes(_: Path, sections: dict[str, Any]) -> Any:
    """Four spikes, three of them at the same batches."""
    world = World(MAX_STEPS, sections)
    for steps in (36, 8, 8, 40):
        world.train(steps)
        world.settle()
        world.spike("spike", 9.0)
        world.settle()
        if world.run.is_over:
            break
    return told(world)


def not_finite(_: Path, sections: dict[str, Any]) -> Any:
    world = World(MAX_STEPS, sections)
    world.train(36)
    world.settle()
    world.spike("nonfinite", math.nan)
    world.settle()
    return told(world)


def crashes(_: Path, sections: dict[str, Any]) -> Any:
    """A trainer that crashes a few steps further each time, long after its last healthy checkpoint."""
    world = World(MAX_STEPS, sections)
    world.train(36)
    for steps in range(3, 9):
        world.settle()
        if not world.trains:
            break
        world.train(steps)
        world.leave(Outcome.CRASHED, SEGFAULT, signal=11)
        world.settle()
        world.now += 3600 * 3
    return told(world)


def preemption(folder: Path, sections: dict[str, Any]) -> Any:
    """A preempted job that Slurm shows no more; the time at which the next one is submitted."""
    stage = Stage(folder, **sections)
    stage.settle()
    stage.start_job()
    stage.train(36)
    stage.settle()
    stage.leave(Outcome.LEFT, error=PREEMPTED)
    stage.scheduler.set_state(stage.job_id, JobState.PREEMPTED)
    begin = stage.now
    while stage.submissions < 2:
        stage.look()
        assert stage.now < begin + 1000
    return stage.now - begin, stage.directive.lr_scale


def many_jobs(folder: Path, sections: dict[str, Any]) -> Any:
    """Jobs that end at their first step; how many are submitted within an hour."""
    stage = Stage(folder, **sections)
    for _ in range(4):
        stage.settle()
        job_id = stage.watched.run.state.job_id
        if job_id is not None and stage.scheduler.jobs[job_id].state is JobState.PENDING:
            stage.start_job()
            stage.train(stage.step + 1)
            stage.settle()
            stage.scheduler.set_state(stage.job_id, JobState.TIMEOUT)
    stage.settle()
    return stage.submissions, stage.state


def long_run(folder: Path, sections: dict[str, Any]) -> Any:
    """An hour on one GPU."""
    stage = Stage(folder, cluster={"gpus_per_node": 1}, **sections)
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.now += 3600
    stage.look()
    return stage.directive.stop


def observed(folder: Path, sections: dict[str, Any]) -> Any:
    stage = Stage(folder, **sections)
    stage.settle()
    stage.start_job()
    stage.train(36, "spike", 34, 9.0)
    stage.settle()
    return stage.names


def quarantine(folder: Path, sections: dict[str, Any]) -> Any:
    """What is left of the checkpoints of an abandoned branch."""
    stage = Stage(folder, **sections)
    stage.settle()
    stage.start_job()
    stage.spike(66, onset=38)
    return sorted(path.name for path in stage.run_dir.quarantine.iterdir())


def retention(_: Path, sections: dict[str, Any]) -> Any:
    """The checkpoints that stay, of ten."""
    rules = config(Path(), **sections).checkpoint
    branch = [Record(segment=1, attempt=1, restart=0, step=103, epoch=0.0, time=0.0, loss=2.0, lr=1.0, verdict="ok")]
    return kept_steps(rules, [manifest(step) for step in range(10, 101, 10)], branch, ())


def losses() -> list[tuple[float, float]]:
    """Losses and gradient norms: noise, a spike, a lasting rise, two steps that are not finite."""
    flat = [2.0 + 0.01 * math.sin(3 * step) for step in range(200)]
    curve = [9.0, 9.0, *flat[:20], *flat[:60], 4.5, 4.5, 4.5, 4.5, 4.5, *flat[:60], *(2.9 for _ in range(60))]
    return [
        (loss, 1.0 if loss < 2.5 else math.nan if math.isnan(loss) else 30.0)
        for loss in [*curve, *flat[:60], *[math.nan] * 2, *flat[:60]]
    ]


def judgements(_: Path, sections: dict[str, Any]) -> Any:
    rules = SpikeConfig.model_validate(sections.get("spike", {}))
    detector = Detector(rules)
    said: list[Any] = []
    for step, (loss, norm) in enumerate(losses(), 1):
        detector.watch(step, {"kl": 0.1 + 0.001 * (step % 7) if step < 150 else 10.0})
        said += [detector.judge(step, loss, norm), detector.take_alarm()]
    return said


def average(_: Path, sections: dict[str, Any]) -> Any:
    """The average of a weight that grows by one a step, and how often it took the weight in."""
    rules = config(Path(), **sections).ema
    assert rules is not None
    weight = torch.nn.Linear(1, 1, bias=False)
    ema = Ema(weight, rules)
    with torch.no_grad():
        for step in range(1, 101):
            weight.weight.fill_(float(step))
            ema.update(weight, step)
        with ema.swapped_into(weight):
            return weight.weight.item(), ema.num_updates


HOLD = {"recovery.spike.hold_steps": 5}
RAMP = HOLD | {"recovery.spike.ramp_steps": 5}
# Key -> the history, another value, and what must be set with it.
TRIED: dict[str, tuple[Story, Any, dict[str, Any]]] = {
    "spike.rule": (judgements, "median_ratio", {}),
    "spike.window": (judgements, 20, {}),
    "spike.ratio": (judgements, 3.0, {}),
    "spike.warmup": (judgements, 150, {}),
    "spike.patience": (judgements, 5, {}),
    "spike.confirm": (judgements, 50, {}),
    "spike.nonfinite_patience": (judgements, 3, {}),
    "spike.metrics": (judgements, {"kl": "rise"}, {}),
    "ema.decay": (average, 0.5, {}),
    "ema.every": (average, 7, {}),
    "checkpoint.every_steps": (spikes, 7, {}),
    "checkpoint.healthy_after": (spikes, 17, {}),
    "checkpoint.keep": (retention, 4, {}),
    "checkpoint.keep_healthy": (retention, 5, {"checkpoint.keep": 1}),
    "checkpoint.keep_every": (retention, 30, {}),
    "checkpoint.keep_quarantined": (quarantine, 3, {}),
    "recovery.mode": (observed, "observe", {}),
    "recovery.spike.lr_factor": (spikes, 0.9, {}),
    "recovery.spike.max_rollbacks": (spikes, 1, {}),
    "recovery.spike.min_lr_scale": (spikes, 0.4, {}),
    "recovery.spike.hold_steps": (spikes, 7, RAMP),
    "recovery.spike.ramp_steps": (spikes, 7, RAMP),
    "recovery.spike.ramp_to": (spikes, 0.8, RAMP),
    "recovery.spike.reset_moments": (spikes, True, {}),
    "recovery.spike.rewarm_steps": (spikes, 4, {}),
    "recovery.spike.skip": (spikes, "never", {}),
    "recovery.spike.skip_before": (spikes, 0, {"recovery.spike.skip": "always"}),
    "recovery.nonfinite.lr_factor": (not_finite, 0.7, {}),
    "recovery.preemption.lr_factor": (preemption, 0.5, {}),
    "recovery.absent_grace_s": (preemption, 30.0, {}),
    "recovery.relaunches_in_allocation": (crashes, 0, {}),
    "recovery.max_attempts_without_progress": (crashes, 2, {}),
    "recovery.node_strikes": (crashes, 1, {}),
    "recovery.node_ban_h": (crashes, 1.0, {"recovery.node_strikes": 1}),
    "recovery.max_submissions_per_hour": (many_jobs, 2, {}),
    "recovery.max_gpu_hours": (long_run, 0.5, {}),
}
SHOWN_ELSEWHERE = {
    "checkpoint.background": "trainer_room/test_background.py",
    "ema.device": "trainer_room/test_parts.py, which looks where the average is",
    "recovery.directive_wait_s": "agent_room/test_agent.py",
    "recovery.hang_timeout_s": "agent_room/test_hangs.py and test_hang_histories.py",
}


def sections_of(changes: dict[str, Any]) -> dict[str, Any]:
    sections: dict[str, Any] = {"checkpoint": {"every_steps": 10, "healthy_after": 5}}
    for key, value in changes.items():
        *parents, name = key.split(".")
        here = sections
        for parent in parents:
            here = here.setdefault(parent, {})
        here[name] = value
    return sections


@pytest.mark.parametrize("key", TRIED)
def test_a_key_of_the_recovery_changes_a_history(tmp_path: Path, key: str) -> None:
    story, value, needed = TRIED[key]
    before = story(tmp_path / "before", sections_of(needed))
    after = story(tmp_path / "after", sections_of(needed | {key: value}))
    assert str(before) != str(after)  # NaN equals nothing but its own name


def test_no_key_is_left_out() -> None:
    keys = [".".join(place) for place in all_places()]
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    mine = {key for key in leaves if key.split(".")[0] in {"spike", "ema", "checkpoint", "recovery"}}
    assert mine == TRIED.keys() | SHOWN_ELSEWHERE.keys(), "say in TRIED which history another value changes"
    assert Config.model_fields.keys() >= {key.split(".")[0] for key in mine}
