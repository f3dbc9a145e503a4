"""Text from a run's weights: asked of a program on this machine, or of a job with the run's cluster section."""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from slurm.job import JobRequest
from slurm.scheduler import Scheduler
from supervisor.asked import told_by_job, told_here
from supervisor.job_request import worker_request
from worker.contract.config import Config
from worker.contract.files import encode
from worker.contract.inference import Piece, Question
from worker.contract.run_dir import RunDir


def answer_here(run_dir: RunDir, question: Question, environment: dict[str, str]) -> Iterator[Piece]:
    """The answer of a program on this machine, which ends with this one."""
    return told_here("worker.infer", [str(run_dir.path), encode(question.model_dump())], environment, Piece)


def inference_request(config: Config, run_dir: RunDir, run_id: str, question: Question) -> JobRequest:
    """A job of one task on one node, with all else as the run's cluster section says; its last argument is its file."""
    name = f"hx-{run_id[:8]}-{secrets.token_hex(4)}"
    worker = worker_request(config, run_dir, name, attempt=1)
    return replace(
        worker,
        entry="worker.infer:job_main",
        args=(str(run_dir.path), encode(question.model_dump()), str(run_dir.jobs / f"{name}.jsonl")),
        resources=replace(worker.resources, nodes=1, tasks_per_node=1),
        beside=(),
        comment=None,
        requeue=False,
    )


def answer_of_job(
    job: JobRequest, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Piece]:  # fmt: skip
    """The answer of a job, from its submission on; the job ends with it, whatever ends it, and its file is removed."""
    return told_by_job(job, scheduler, Piece, clock, sleep)
