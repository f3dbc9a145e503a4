"""What the configuration's cluster keys become in the job."""

import sys
from pathlib import Path

import pytest

from slurm.job import RequestError
from slurm.scheduler import sbatch_text
from supervisor.config import load_config
from supervisor.job_request import supervisor_request, warning_s, worker_request
from worker.contract.cluster_config import ClusterConfig
from worker.contract.config import Config
from worker.contract.run_dir import RunDir

RUN = RunDir(Path("/runs/small"))


def configured(*overrides: str) -> Config:
    return load_config(Path("small.yaml"), overrides)


def test_the_worker_s_job_is_found_by_its_name_and_says_its_attempt(folder: Path) -> None:
    job = worker_request(configured(), RUN, "hf-0badcafe", 3, {"n2", "n1"})
    assert (job.name, job.comment, job.entry, job.args) == (
        "hf-0badcafe",
        "a0003",
        "worker.agent:main",
        ("/runs/small",),
    )
    assert (job.folder, job.use_srun, job.exclude_nodes) == (Path("/runs/small/jobs"), True, ("n1", "n2"))


def test_every_cluster_key_reaches_the_worker_s_job(folder: Path) -> None:
    """Each key changes the request, none is read and dropped; but what is done while it waits."""
    changes = {
        "nodes": "2",
        "tasks_per_node": "3",
        "gpus_per_node": "4",
        "cpus_per_task": "5",
        "time_limit": "'30'",
        "environment": "{A: b}",
        "setup": "[module load x]",
        "srun": "[--mpi=none]",
        "sbatch": "{exclusive: true}",
        "offline": "true",
    }
    plain = worker_request(configured("cluster.kind=slurm"), RUN, "hf-0", 1)
    for key in ClusterConfig.model_fields.keys() - {"kind", "min_time", "fallback"}:
        changed = configured("cluster.kind=slurm", f"cluster.{key}={changes.get(key, 'x')}")
        assert worker_request(changed, RUN, "hf-0", 1) != plain, key


def test_ranks_follow_the_gpus_unless_they_are_given(folder: Path) -> None:
    for overrides, tasks in (((), 1), (("cluster.gpus_per_node=4",), 4), (("cluster.tasks_per_node=2",), 2)):
        assert worker_request(configured(*overrides), RUN, "hf-0", 1).resources.tasks_per_node == tasks


def test_a_container_stands_before_the_interpreter(folder: Path) -> None:
    given = configured(
        "cluster.container=apptainer exec image.sif", "cluster.srun=[--mpi=none]", "cluster.python=/in/python"
    )
    worker = worker_request(given, RUN, "hf-0", 1).resources
    assert (worker.container, worker.srun, worker.python) == ("apptainer exec image.sif", ("--mpi=none",), "/in/python")
    assert supervisor_request(given, RUN, "hs-0").resources.python is None


def test_the_supervisor_s_job_is_small_and_outside_of_srun(folder: Path) -> None:
    given = configured(
        "cluster.gpus_per_node=8", "cluster.partition=gpu", "cluster.cpus_per_task=9", "supervisor.qos=low"
    )
    job = supervisor_request(given, RUN, "hs-0")
    assert (job.entry, job.args, job.use_srun) == ("supervisor.cli:job_main", ("/runs/small",), False)
    assert (job.resources.gpus_per_node, job.resources.cpus_per_task, job.resources.tasks_per_node) == (0, 1, 1)
    assert (job.resources.partition, job.resources.qos) == (None, "low")


def test_a_run_folder_that_slurm_would_expand_is_refused(folder: Path) -> None:
    with pytest.raises(RequestError):
        worker_request(configured(), RunDir(Path("/runs/100%")), "hf-0", 1)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("1-00:00:00", 120), ("00:06:00", 120), ("3", 60), ("00:01:00", 20), ("00:00:01", 1), ("UNLIMITED", 120)],
)
def test_the_warning_before_the_time_limit_is_a_third_of_it_at_most(limit: str, seconds: int) -> None:
    assert warning_s(limit) == seconds


def test_an_embedded_supervisor_is_started_beside_the_tasks_and_outlives_them(folder: Path) -> None:
    given = configured("supervisor.place=embedded", "cluster.container=apptainer exec image.sif")
    worker = worker_request(given, RUN, "hf-0", 1)
    assert worker.beside == ("supervisor.cli:beside_main", "/runs/small")
    text = sbatch_text(worker)
    assert f"until {sys.executable} -m slurm.entry supervisor.cli:beside_main hf-0 /runs/small; do" in text
    assert text.index("trap 'touch") < text.index("srun ")
    assert "#SBATCH --no-kill" not in text  # its node may be the one that is lost
    assert "#SBATCH --no-kill" in sbatch_text(worker_request(configured(), RUN, "hf-0", 1))
