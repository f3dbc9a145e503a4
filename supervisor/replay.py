"""The bad steps of a run once more, with one change at a time: planned here, trained by a program here or by a job.

Everything that a replay writes lies in a folder of its own, which is removed when it is over: a temporary one, or for
a job one beside the run, on the disk that all nodes see. In the run's own folder nothing is touched.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from slurm.job import JobRequest
from slurm.scheduler import choose
from supervisor.asked import told_by_job, told_here
from supervisor.job_request import worker_request
from supervisor.journal import RunCreated, read_journal
from supervisor.replay_plan import Planned, checkpoints_of, plan_replay
from supervisor.runs import RunError
from worker.contract import config as contract_config
from worker.contract.config import Config
from worker.contract.directive import publish_directive
from worker.contract.files import publish_message
from worker.contract.loss_history import read_history
from worker.contract.replay import PLAN, WITHOUT_ROWS, Change, Tried
from worker.contract.run_dir import RunDir


def planned(run_dir: RunDir, *, is_alone: bool) -> Planned:
    """What a replay of this run would try; RunError where there is nothing to replay, or nothing to begin from."""
    config = contract_config.read(run_dir.config)
    records, events = read_history(run_dir.history), read_journal(run_dir.journal)
    return plan_replay(run_dir.path, config, records, events, checkpoints_of(run_dir), is_alone)


def replay_here(run_dir: RunDir, plan: Planned, environment: Mapping[str, str]) -> Iterator[Tried]:
    """What each change leads to, told by a program on this machine, which ends with this one."""
    with tempfile.TemporaryDirectory(prefix="higgsfield-replay-") as name:
        furnish(Path(name), run_dir, plan)
        yield from told_here("worker.replay", [name], environment, Tried)


def replay_by_job(run_dir: RunDir, plan: Planned) -> Iterator[Tried]:
    """What each change leads to, told by a job with the run's cluster section; it ends with this generator.

    Where the job fails its folder stays, with what it printed.
    """
    config = contract_config.read(run_dir.config)
    folder = run_dir.path.with_name(f".replay-{run_dir.path.name}-{secrets.token_hex(4)}")
    folder.mkdir(mode=0o700)
    try:
        furnish(folder, run_dir, plan)
        job = replay_request(config, run_dir, _run_id(run_dir), folder)
        yield from told_by_job(job, choose(config.cluster.kind, job.folder), Tried)
    except RunError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)


def replay_request(config: Config, run_dir: RunDir, run_id: str, folder: Path) -> JobRequest:
    """The run's own job, all its ranks, with the replay in place of the training; its last argument is its file."""
    name = f"hx-{run_id[:8]}-{secrets.token_hex(4)}"
    worker = worker_request(config, run_dir, name, attempt=1)
    return replace(
        worker,
        entry="worker.replay:job_main",
        args=(str(folder), str(folder / "told.jsonl")),
        folder=folder / "jobs",
        beside=(),
        comment=None,
        requeue=False,
    )


def _run_id(run_dir: RunDir) -> str:
    return next(one.run_id for one in read_journal(run_dir.journal) if isinstance(one, RunCreated))


def furnish(folder: Path, run_dir: RunDir, plan: Planned) -> None:
    """The plan, and for each trial a run that begins from the checkpoint, which is linked and not copied."""
    for trial in plan.replay.trials:
        if trial.why_not is None:
            _furnish(RunDir(folder / trial.change), trial.change, run_dir, plan)
    _furnish(RunDir(folder / WITHOUT_ROWS), "smallest-batch", run_dir, plan)
    publish_message(folder / PLAN, plan.replay)


def _furnish(own: RunDir, change: Change, run_dir: RunDir, plan: Planned) -> None:
    own.checkpoints.mkdir(parents=True)
    contract_config.write(own.config, plan.configs[change])
    publish_directive(own.directive, plan.directives[change])
    if plan.replay.checkpoint is not None:
        own.checkpoint(plan.replay.begin_step).symlink_to(plan.replay.checkpoint)
    _link_tokens(run_dir.tokens, own.tokens)


def _link_tokens(there: Path, here: Path) -> None:
    """Tokens that were made once are read where they are; others would be made in the trial's own folder."""
    if there.is_dir():
        here.mkdir()
        for name in os.listdir(there):  # noqa: PTH208
            (here / name).symlink_to(there / name)
