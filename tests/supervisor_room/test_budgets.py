"""What a run may spend: GPU hours and memory; and how much memory a configuration needs."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState
from supervisor.decision import AskToStop
from supervisor.journal import Continued, GaveUp
from supervisor.memory import bytes_a_parameter, memory_text, num_parameters
from supervisor.runs import standing
from tests.supervisor_room.stage import Stage, config
from worker.contract.exit_report import ErrorDetail, Outcome

STOP = ErrorDetail(type="Left", message="", what="stop")
KILLED = ErrorDetail(type="Signal", message="killed by signal 9 (Killed)")
TOO_MUCH = ErrorDetail(type="OutOfMemoryError", message="2 GiB")
LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def stage_with_gpus(tmp_path: Path, **cluster: Any) -> Stage:
    """Two nodes of four GPUs, half a GPU hour: four minutes less a quarter of one."""
    return Stage(tmp_path, recovery={"max_gpu_hours": 0.5}, cluster={"nodes": 1} | cluster)


@pytest.mark.parametrize("cluster", [{"gpus_per_node": 8}, {"gres": "gpu:a100:8"}, {"gres": "nvme:1,gpu:8"}])
def test_spent_gpu_hours_save_leave_and_give_up(tmp_path: Path, cluster: dict[str, Any]) -> None:
    stage = stage_with_gpus(tmp_path, **cluster)
    stage.settle()
    stage.now += 10_000  # nobody pays for a queue
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.now += 200
    stage.look()
    assert stage.directive.stop is None
    left = standing(stage.run_dir, in_detail=True)["budgets"]["gpu_hours_left"]
    assert left == 0.0  # by this machine's clock, which is far ahead of the stage's
    stage.now += 30
    assert isinstance(stage.look(), AskToStop)
    assert stage.directive.stop == "save"
    stage.save(25)
    stage.leave(Outcome.LEFT, error=STOP)
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
    stage.settle()
    assert stage.state == "gave_up"
    assert isinstance(stage.events[-1], GaveUp)
    assert "0.5 were allowed (recovery.max_gpu_hours)" in stage.events[-1].reason
    assert stage.submissions == 1


def test_a_worker_that_does_not_leave_is_not_waited_for(tmp_path: Path) -> None:
    stage = stage_with_gpus(tmp_path, gpus_per_node=8)
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.now += 230
    assert isinstance(stage.look(), AskToStop)
    stage.now += 601
    stage.settle()
    assert stage.state == "gave_up"
    assert stage.scheduler.jobs[stage.job_id].state is JobState.CANCELLED


def test_gpu_hours_add_up_over_jobs_and_supervisors_and_begin_anew_with_a_resume(tmp_path: Path) -> None:
    stage = stage_with_gpus(tmp_path, gpus_per_node=8)
    stage.settle()
    for _ in range(2):
        stage.start_job()
        stage.settle()
        stage.now += 80
        stage.scheduler.set_state(stage.job_id, JobState.TIMEOUT)
        stage.settle()
        stage.now += 5_000
        stage.start_supervisor()
    used = stage.watched.run.state.busy_until(stage.now)
    assert 160 <= used < 180
    stage.start_job()
    stage.settle()
    stage.now += 60
    stage.settle()
    assert stage.state == "gave_up"


def ooms(stage: Stage) -> list[str]:
    return [event.cause for event in stage.events if isinstance(event, Continued)]


def test_out_of_memory_twice_without_progress_gives_up_with_the_estimate(tmp_path: Path) -> None:
    stage = Stage(tmp_path, model={"config": LLAMA_7B})
    stage.settle()
    stage.start_job()
    stage.leave(Outcome.OUT_OF_MEMORY, error=TOO_MUCH)  # before any step
    stage.settle()
    assert ooms(stage) == ["first", "out_of_memory"]
    stage.claim()
    stage.train(5)
    stage.scheduler.set_state(stage.job_id, JobState.TIMEOUT)  # something else in between changes nothing
    stage.settle()
    stage.start_job()
    stage.leave(Outcome.OUT_OF_MEMORY, error=TOO_MUCH)
    stage.settle()
    assert stage.state == "gave_up"
    assert isinstance(stage.events[-1], GaveUp)
    assert "6.74e+09 parameters x 20 bytes" in stage.events[-1].tried[0]


def test_progress_in_between_makes_it_the_first_time_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    for until in (8, 28, 48):
        stage.train(until)
        stage.settle()
        stage.leave(Outcome.OUT_OF_MEMORY, error=TOO_MUCH)
        stage.settle()
        stage.claim()
    assert ooms(stage) == ["first", *["out_of_memory"] * 3]


def test_slurm_s_word_explains_a_kill(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.train(8)
    stage.leave(Outcome.CRASHED, error=KILLED, signal=9)
    stage.scheduler.set_state(stage.job_id, JobState.OUT_OF_MEMORY)
    stage.settle()
    assert ooms(stage) == ["first", "out_of_memory"]


@pytest.mark.parametrize(
    ("changes", "total"),
    [
        ({}, 20),
        ({"ema": None}, 16),
        ({"ema": {"device": "cpu"}}, 16),
        ({"model": {"dtype": "bfloat16"}, "ema": None}, 8),
        ({"training": {"optimizer": {"name": "sgd", "learning_rate": 1.0}}, "ema": None}, 12),
        ({"training": {"optimizer": {"name": "sgd", "momentum": 0.0, "learning_rate": 1.0}}, "ema": None}, 8),
    ],
)
def test_bytes_a_parameter(tmp_path: Path, changes: dict[str, Any], total: int) -> None:
    given = config(tmp_path)
    document = given.model_dump()
    for section, keys in changes.items():
        document[section] = keys if keys is None or document[section] is None else document[section] | keys
    assert sum(bytes_a_parameter(type(given).model_validate(document)).values()) == total


def test_the_number_of_parameters_from_a_configuration_and_from_files(tmp_path: Path) -> None:
    assert num_parameters(config(tmp_path, model={"config": LLAMA_7B})) == 6_738_415_616
    assert num_parameters(config(tmp_path, model={"config": {"model_type": "gpt2"}})) is None
    header = json.dumps(
        {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}
    ).encode()
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / name).write_bytes(struct.pack("<Q", len(header)) + header)
    from_files = config(tmp_path, model={"config": None, "path": str(tmp_path)})
    assert num_parameters(from_files) == 30
    assert memory_text(from_files).startswith("30 parameters x 20 bytes a parameter (weights 4, gradients 4, adamw 8,")
    (tmp_path / "model-2.safetensors").write_bytes(b"torn")
    assert num_parameters(from_files) is None
    assert memory_text(from_files).startswith("20 bytes a parameter (")


def test_a_real_model_has_as_many(tmp_path: Path) -> None:
    """As transformers counts the demo's model."""
    demo = LLAMA_7B | {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
    assert num_parameters(config(tmp_path, model={"config": demo | {"num_attention_heads": 4}})) == 857_216
