"""Text from a run's weights: asked of a program on this machine, or of a job with the run's cluster section."""

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from slurm.commands import python_environment
from slurm.job import JobRequest
from slurm.scheduler import Scheduler
from supervisor.job_request import worker_request
from supervisor.runs import RunError
from worker.contract.config import Config
from worker.contract.files import encode
from worker.contract.inference import Piece, Question
from worker.contract.run_dir import RunDir

_LOOK_S = 0.2
_ASK_EVERY = 10
"""Looks at the file for each question to the scheduler."""
_GONE_AFTER_S = 10.0
"""A job that is over may have written its last line on a disk that shows it late."""


def answer_here(run_dir: RunDir, question: Question, environment: dict[str, str]) -> Iterator[Piece]:
    """The answer of a program on this machine, which ends with this one."""
    argv = [sys.executable, "-m", "worker.infer", str(run_dir.path), encode(question.model_dump())]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=python_environment(environment)) as program:
        assert program.stdout is not None
        try:
            for line in program.stdout:
                yield Piece.model_validate_json(line)
        finally:
            program.terminate()
    if program.returncode > 0:
        raise RunError(f"the program that generates ended with exit code {program.returncode}")


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
    out = Path(job.args[-1])
    job_id = scheduler.submit(job)
    try:
        yield from _follow(out, job, job_id, scheduler, clock, sleep)
    finally:
        scheduler.cancel(job_id)
        out.unlink(missing_ok=True)


def _follow(
    out: Path, job: JobRequest, job_id: str, scheduler: Scheduler,
    clock: Callable[[], float], sleep: Callable[[float], None],
) -> Iterator[Piece]:  # fmt: skip
    offset, said, over_since, looks = 0, "", None, 0
    while True:
        lines, offset = _new_lines(out, offset)
        for line in lines:
            piece = Piece.model_validate_json(line)
            yield piece
            if piece.is_last or piece.error is not None:
                return
        if looks % _ASK_EVERY == 0 and not lines:
            status = scheduler.look([job_id]).get(job_id)
            now = f"job {job_id} is {status.state.value} {status.why}".rstrip() if status else f"job {job_id} is gone"
            if now != said:
                yield Piece(note=now)
            said = now
            if status is None or status.state.is_over:
                over_since = clock() if over_since is None else over_since
                if clock() - over_since > _GONE_AFTER_S:
                    raise RunError(f"{now}, and it left no answer; its output is in {job.folder}/{job_id}_0_log.err")
        looks += 1
        sleep(_LOOK_S)


def _new_lines(path: Path, offset: int) -> tuple[list[bytes], int]:
    """The whole lines from byte ``offset`` on, and where the next one begins; none where there is no file yet."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            whole, newline, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return [], offset
    return whole.splitlines(), offset + len(whole) + len(newline)
