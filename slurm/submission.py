"""Hands a job to submitit: `python -m slurm.submission slurm|local`, a process that lives for one submission.

Imported elsewhere only for the batch text, because submitit costs 150 ms.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import shlex
import stat
import subprocess
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError, FailedSubmissionError
from submitit.local.local import LocalJob

from slurm import entry, local_record, processes
from slurm.commands import package_root
from slurm.job import JobRequest, RequestError
from slurm.parsing import ParseError, duration_s, submitted

SRUN = ("--kill-on-bad-exit=0", "--wait=0", "--no-kill")
"""So that no site's default ends the other tasks: our agents decide that."""
NO_LIMIT_MIN = 366 * 24 * 60
_SUBMITITS = frozenset({"job-name", "nodes", "ntasks-per-node"})


def preamble(job: JobRequest) -> list[str]:
    """Shell lines before the job's program: its environment, the person's set-up, and where our package is."""
    resources = job.resources
    lines = [_private_or_exit(job.folder)]
    lines += [f". {shlex.quote(str(job.environment_file))}"] if resources.environment else []
    lines += [*resources.setup, "export PYTHONSAFEPATH=1"]
    root = package_root()
    if root is not None:
        lines.append(f'export PYTHONPATH={shlex.quote(str(root))}"${{PYTHONPATH:+:$PYTHONPATH}}"')
    return lines


def _publish_environment(job: JobRequest) -> None:
    lines = [f"export {name}={shlex.quote(str(value))}\n" for name, value in job.resources.environment.items()]
    staged = job.environment_file.with_suffix(f".{os.getpid()}")
    with open(os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.writelines(lines)
    staged.replace(job.environment_file)


def _private_or_exit(folder: Path) -> str:
    """A shell line that ends the job before anything is unpickled from a folder that others may write into."""
    its = shlex.quote(str(folder))
    told = shlex.quote(f"{folder}: is not yours alone (mode 700), and what is in it is run as code")
    test = f'[ -O {its} ] && [ ! -L {its} ] && case "$(stat -c %a {its})" in *700) ;; *) false ;; esac'
    return f"{{ {test}; }} || {{ echo {told} >&2; exit 1; }}"


def interpreter(job: JobRequest) -> str:
    """The words that start Python in the job, quoted for a shell."""
    return shlex.join([*shlex.split(job.resources.container or ""), job.resources.python or sys.executable])


class BatchExecutor(submitit.SlurmExecutor):
    """submitit's Slurm executor, told to leave to us what it would decide."""

    cluster: str | None = None

    def __init__(self, job: JobRequest) -> None:
        # Without srun the interpreter takes the batch shell's place, so that it gets the signals of the batch step.
        super().__init__(job.folder, python=interpreter(job) if job.use_srun else f"exec {interpreter(job)}")
        cpus = job.resources.cpus_per_task
        # srun does not take the number over from sbatch, since 22.05.
        srun = (*SRUN, *([] if cpus is None else [f"--cpus-per-task={cpus}"]), *job.resources.srun)
        self.update_parameters(
            job_name=job.name,
            time=None,
            wckey=None,
            nodes=job.resources.nodes,
            ntasks_per_node=job.resources.tasks_per_node,
            # `sbatch --export=NONE` would have srun start its tasks without everything exported here.
            setup=["export SLURM_EXPORT_ENV=ALL", *preamble(job), _own_pickle(job), *_beside(job)],
            additional_parameters={key: value for key, value in job.flags().items() if key not in _SUBMITITS},
            srun_args=list(srun),
            use_srun=job.use_srun,
        )

    @classmethod
    def affinity(cls) -> int:
        """The text can be shown where there is no srun."""
        return 2

    def _get_job_id_from_submission_command(self, string: bytes | str) -> str:  # type: ignore[override]
        job_id, self.cluster = submitted(string if isinstance(string, str) else string.decode())
        return job_id


def _entry(job: JobRequest) -> tuple[Any, ...]:
    """The function that the job calls, and its arguments."""
    return entry.run, job.entry, job.args, job.name, not job.use_srun


def _pickle_by_name(job: JobRequest) -> Path:
    return job.folder / f"{job.name}.pkl"


def _publish_pickle(job: JobRequest) -> None:
    # An earlier job of this name may be about to copy it.
    staged = _pickle_by_name(job).with_suffix(f".{os.getpid()}")
    DelayedSubmission(*_entry(job)).dump(staged)
    staged.replace(_pickle_by_name(job))


def _own_pickle(job: JobRequest) -> str:
    """A shell line that gives the job its pickle where nobody has heard its id, and so nobody could rename it.

    Without it a job that was queued while sbatch failed would wait for a minute and fail.
    """
    ours = shlex.quote(str(_pickle_by_name(job)))
    its = shlex.quote(f"{job.folder}/") + '"${SLURM_JOB_ID}_submitted.pkl"'
    return f"[ -e {its} ] || cp {ours} {its}"


def _beside(job: JobRequest) -> list[str]:
    """Shell lines that start `job.beside`, outside of the container, and have the job wait for it after its tasks.

    Where it dies it is started again; three times at most once the tasks are over, which the file `tasks_over` says.
    """
    if not job.beside:
        return []
    python = sys.executable if job.resources.container else job.resources.python or sys.executable
    program = shlex.join([python, "-m", "slurm.entry", job.beside[0], job.name, *job.beside[1:]])
    return [
        f'tasks_over={shlex.quote(str(job.folder / entry.TASKS_OVER))}"-$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}}"',
        f'(left=3; until {program}; do sleep 10; [ ! -e "$tasks_over" ] || [ $((left -= 1)) -gt 0 ] || break; done) &',
        """trap 'touch "$tasks_over"; wait' EXIT""",
        "trap : TERM",
    ]


def sbatch_text(job: JobRequest) -> str:
    """The batch script that a submission of `job` hands to sbatch, to the letter."""
    executor = BatchExecutor(job)
    return str(executor._make_submission_file_text(executor._submitit_command_str, ""))


class StandInExecutor(submitit.LocalExecutor):
    """submitit's local executor with a controller of ours, in a session of its own, and a record that outlives us."""

    def __init__(self, job: JobRequest, kill_wait_s: float) -> None:
        if job.resources.nodes > 1:
            raise RequestError(f"the local stand-in is one node, and {job.resources.nodes} are asked for")
        script = "\n".join([*preamble(job), f'exec {interpreter(job)} "$@"'])
        super().__init__(job.folder, python=shlex.join(["bash", "-c", script, job.name]))
        self.job, self.kill_wait_s = job, kill_wait_s
        self.update_parameters(tasks_per_node=job.resources.tasks_per_node, timeout_min=NO_LIMIT_MIN)

    def _submit_command(self, command: str) -> LocalJob[Any]:
        # The record is on the disk before submitit renames its pickle, for which every task waits: a job without a
        # record never runs anything of ours, wherever we die.
        while True:
            process = self._start_controller(command)
            if not local_record.path(self.folder, str(process.pid)).exists():
                break
            process.kill()  # A number that a job of this run had before: ids are never used twice.
            process.wait()
        local_record.publish(self.folder, self._record(process.pid))
        tasks = list(range(self.job.resources.tasks_per_node))
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=tasks)

    def _start_controller(self, command: str) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(self.job.resources.tasks_per_node),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(60 * NO_LIMIT_MIN),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "CUDA_VISIBLE_DEVICES": _visible_gpus(self.job.resources.gpus_per_node),
        }
        argv = [sys.executable, "-m", "slurm.local_controller", str(self.folder)]
        with (self.folder / "local_controller.log").open("ab") as log:
            return subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _record(self, pid: int) -> local_record.Record:
        job = self.job
        signal_name, _, delay_s = job.signal.rpartition(":")[2].partition("@")
        return local_record.Record(
            job_id=str(pid),
            name=job.name,
            comment=job.comment,
            process=processes.identify(pid),
            order=local_record.next_order(self.folder),
            submitted=time.time(),
            limit_s=duration_s(job.resources.time_limit) if job.resources.time_limit else None,
            warn_signal=signal_name,
            warn_before_s=float(delay_s or 60),
            kill_wait_s=self.kill_wait_s,
        )


def _visible_gpus(count: int) -> str:
    """As many of the GPUs as were asked for, out of those that the person's shell allows."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join((allowed.split(",") if allowed else [str(n) for n in range(count)])[:count])


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone may enter; RequestError where it is not ours.

    The job runs what is pickled there: whoever could write into it could have our jobs do anything.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise RequestError(f"{folder}: is not your own folder, and what is in it is run as code; remove it")
    folder.chmod(0o700)
    foreign = next((path for path in folder.glob("*.pkl") if path.lstat().st_uid != os.geteuid()), None)
    if foreign is not None:
        raise RequestError(f"{foreign}: is somebody else's, and it is run as code; remove it")


def submit(kind: str, job: JobRequest, **settings: float) -> tuple[str, str | None]:
    """Submit once, here and now; the caller has made the environment what it should be."""
    make_private(job.folder)
    _publish_environment(job)
    if kind == "slurm":
        batch = BatchExecutor(job)
        _publish_pickle(job)
        return str(batch.submit(*_entry(job)).job_id), batch.cluster
    with Path(job.folder / "local.lock").open("w") as lock:
        # Orders submissions, for the emulated singleton. Freed by the system when we end.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return str(StandInExecutor(job, **settings).submit(*_entry(job)).job_id), None


def main() -> int:
    """Read (request, settings) from stdin, submit, and print the answer as the last line."""
    job, settings = pickle.load(sys.stdin.buffer)
    try:
        with redirect_stderr(io.StringIO()):  # submitit prints there what it also raises
            job_id, cluster = submit(sys.argv[1], job, **settings)
    except (FailedJobError, FailedSubmissionError, RequestError, ParseError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps({"job_id": job_id, "cluster": cluster}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
