"""What is submitted for a run: the worker's job and the supervisor's own, from the configuration."""

import math
from collections.abc import Collection
from typing import Final

from slurm.job import JobRequest, RequestError, Resources
from slurm.parsing import duration_s
from worker.contract.cluster_config import ClusterConfig
from worker.contract.config import HIDDEN, PRIVATE, Config
from worker.contract.run_dir import RunDir

_WARNING_S: Final = 120
_OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def worker_request(
    config: Config,
    run_dir: RunDir,
    name: str,
    attempt: int,
    exclude: Collection[str] = (),
    warning: int | None = None,
) -> JobRequest:
    """The job that trains: one agent a task. RequestError where a value cannot stand in a batch script.

    ``warning``: seconds ahead of the time limit, where they are known better than before the first save.
    """
    return JobRequest(
        name=name,
        entry="worker.agent:main",
        args=(str(run_dir.path),),
        folder=run_dir.jobs,
        resources=_worker_resources(config.cluster),
        exclude_nodes=tuple(sorted(exclude)),
        beside=("supervisor.cli:beside_main", str(run_dir.path)) if config.supervisor.place == "embedded" else (),
        comment=f"a{attempt:04d}",
        signal=f"USR2@{warning or warning_s(config.cluster.time_limit)}",
    )


def warning_s(time_limit: str, save_s: float | None = None) -> int:
    """How many seconds before its time limit a worker is told to save.

    Twice ``save_s``, the longest save and step of late, plus a minute; two minutes while that is not known; never more
    than a third of the limit.
    """
    wanted_s = _WARNING_S if save_s is None else 2 * math.ceil(save_s) + 60
    limit_s = duration_s(time_limit)
    return wanted_s if limit_s is None else max(1, min(wanted_s, int(limit_s / 3)))


def supervisor_request(config: Config, run_dir: RunDir, name: str) -> JobRequest:
    """The supervisor as a job of its own, in the batch step: a process that srun started cannot always submit.

    It runs outside of the container, so that ``cluster.python`` counts only where there is none.
    """
    own, cluster = config.supervisor, config.cluster
    return JobRequest(
        name=name,
        entry="supervisor.cli:job_main",
        args=(str(run_dir.path),),
        folder=run_dir.jobs,
        resources=Resources(
            cpus_per_task=1,
            time_limit=own.time_limit,
            partition=own.partition,
            account=own.account,
            qos=own.qos,
            setup=cluster.setup,
            python=None if cluster.container else cluster.python,
            sbatch=_mail(cluster, "END,FAIL"),
        ),
        use_srun=False,
        signal=f"B:USR2@{warning_s(own.time_limit or 'UNLIMITED')}",
    )


def _worker_resources(cluster: ClusterConfig) -> Resources:
    if HIDDEN in cluster.environment.values():
        raise RequestError(f"cluster.environment: its values are in the run's {PRIVATE}, for its owner alone")
    return Resources(
        nodes=cluster.nodes,
        tasks_per_node=cluster.tasks_on_each_node,
        cpus_per_task=cluster.cpus_per_task,
        gpus_per_node=cluster.gpus_per_node,
        time_limit=cluster.time_limit,
        partition=cluster.partition,
        account=cluster.account,
        qos=cluster.qos,
        constraint=cluster.constraint,
        gres=cluster.gres,
        mem=cluster.mem,
        reservation=cluster.reservation,
        nodelist=cluster.nodelist,
        exclude=cluster.exclude,
        setup=cluster.setup,
        environment=(_OFFLINE if cluster.offline else {}) | cluster.environment,
        python=cluster.python,
        srun=cluster.srun,
        container=cluster.container,
        sbatch=_mail(cluster, "END,FAIL,REQUEUE") | cluster.sbatch,
    )


def _mail(cluster: ClusterConfig, occasions: str) -> dict[str, str | int | bool]:
    """Slurm's own mail, which needs no network of ours."""
    return {"mail-user": cluster.mail_user, "mail-type": occasions} if cluster.mail_user is not None else {}
