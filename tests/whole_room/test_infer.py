"""`higgsfield infer`, on this machine and as a job."""

from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState
from supervisor.infer import answer_of_job, inference_request
from supervisor.runs import RunError, open_or_create
from tests.fakes import FakeScheduler
from tests.recipe_room.test_infer import MODEL, save
from tests.whole_room.house import House, environment
from worker.contract.config import Config
from worker.contract.inference import Piece, Question
from worker.contract.run_dir import RunDir

CLUSTER: dict[str, Any] = {
    "kind": "local",
    "nodes": 2,
    "gpus_per_node": 2,
    "time_limit": "00:10:00",
    "partition": "gpu",
}


def config(**cluster: Any) -> Config:
    fields = {"run": {"name": "tiny"}, "model": MODEL, "data": {"train": "stdlib", "tokenizer": "bytes"}}
    return Config.model_validate(fields | {"cluster": CLUSTER | cluster})


@pytest.fixture
def house(tmp_path: Path) -> House:
    """A finished run."""
    house = House(tmp_path, environment())
    wanted = config(nodes=1, gpus_per_node=0, partition=None)
    run = wanted.run.model_copy(update={"dir": str(house.folder / "runs")})
    save(open_or_create(wanted.model_copy(update={"run": run})).final)
    return house


@pytest.mark.training
def test_a_job_and_this_machine_say_the_same(house: House) -> None:
    options = ("infer", "tiny", "--prompt", "say it", "--temperature", "0", "--max-tokens", "12")
    here = house.higgsfield(*options, "--here")
    assert (here.returncode, here.stderr) == (0, f"{house.run.final}\n")
    assert here.stdout.strip()
    job = house.higgsfield(*options)
    assert (job.returncode, job.stdout) == (0, here.stdout)
    assert str(house.run.final) in job.stderr
    assert list(house.run.jobs.glob("hx-*")) == []
    assert house.processes("worker.infer") == []


def test_what_is_wrong_is_one_line_and_exit_code_2(house: House) -> None:
    for options, expected in (
        (["--top-p", "2"], "--top-p: Input should be less than or equal to 1\n"),
        (["--weights", "best", "--here"], "has no best weights: it was never evaluated\n"),
    ):
        done = house.higgsfield("infer", "tiny", "--prompt", "x", *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.endswith(expected)
        assert len(done.stderr.splitlines()) == 1


def test_the_job_has_the_run_s_cluster_section_and_one_task(tmp_path: Path) -> None:
    job = inference_request(config(), RunDir(tmp_path), "abcdef0123", Question(prompt="one\ntwo"))
    assert job.name.startswith("hx-abcdef01-")
    assert (job.resources.nodes, job.resources.tasks_per_node, job.requeue) == (1, 1, False)
    assert (job.resources.partition, job.resources.gpus_per_node) == ("gpu", 2)
    assert Question.model_validate_json(job.args[1]).prompt == "one\ntwo"


def test_a_job_that_ends_without_an_answer_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    scheduler, now = FakeScheduler(), [0.0]
    job = inference_request(config(), RunDir(tmp_path), "ab", Question(prompt="x"))

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 5:
            scheduler.set_state("1", JobState.FAILED)

    notes: list[Piece] = []
    with pytest.raises(RunError, match=r"^job 1 is FAILED, and it left no answer; its output is in "):
        notes.extend(answer_of_job(job, scheduler, lambda: now[0], sleep))


def test_the_answer_is_followed_as_it_is_written_and_the_job_cancelled_with_it(tmp_path: Path) -> None:
    scheduler = FakeScheduler()
    job = inference_request(config(), RunDir(tmp_path), "ab", Question(prompt="x"))
    out = Path(job.args[-1])
    out.parent.mkdir()
    parts = ['{"text": "a', ' b"}\n', '{"text": "c"}\n{"is_last": true}\n']

    def sleep(seconds: float) -> None:
        with open(out, "a", encoding="ascii") as file:
            file.write(parts.pop(0))

    pieces = list(answer_of_job(job, scheduler, sleep=sleep))
    assert [piece.text for piece in pieces if piece.text] == ["a b", "c"]
    assert pieces[0] == Piece(note="job 1 waits: other jobs come first (Priority)")
    assert scheduler.jobs["1"].state is JobState.CANCELLED
    assert not out.exists()
