"""The one door to Slurm: its programs and the local stand-in start here, with a time limit and a clean environment."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from slurm.job import JobRequest

TIMEOUT_S = 60.0
"""A dead controller is reported by Slurm's own programs after 9 to 18 s; longer means that they hang."""

_FOREIGN = re.compile(
    r"(SQUEUE|SACCT|SINFO|SCANCEL|SCONTROL|SALLOC|SBATCH|SRUN|SLURM|SLURMD|SUBMITIT)_|_TEST_CLUSTER_$"
)
_NEEDED = frozenset({"SLURM_CONF", "SLURM_JWT"})
_NO_ANSWER = re.compile(
    r"contact slurm controller|\bconnection\b|connect failure|timed out|zero bytes were transmitted|broken pipe"
    r"|unexpected message received|in standby|communication|transport endpoint|unreachable|munge|authentication"
    r"|configuration source",
    re.IGNORECASE,
)


class SchedulerError(RuntimeError):
    """A program of the scheduler failed or did not answer. It says nothing about any job."""

    def __init__(self, message: str, argv: Sequence[str] = (), stderr: str = "") -> None:
        super().__init__(message)
        self.argv = tuple(argv)
        self.stderr = stderr

    @property
    def answered(self) -> bool:
        """The scheduler itself said no; false where it could not be reached, and may have done what was asked."""
        return bool(self.argv) and not _NO_ANSWER.search(f"{self} {self.stderr}")


def package_root() -> Path | None:
    """The folder to put on PYTHONPATH so that a job finds this package, or None where it is installed."""
    root = Path(__file__).resolve().parent.parent
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    return None if root in installed else root


def python_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for `python -m slurm...`: our package is found, and a slurm.py in the working directory is not."""
    paths = [str(package_root() or ""), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}


def clean_environment(environ: Mapping[str, str], options: Collection[str] = ()) -> dict[str, str]:
    """`environ` without what a person's shell, or the job that we run in, would change about Slurm's programs.

    Of SBATCH_* only SBATCH_ACCOUNT stays, and not where `options` (long names of sbatch) says the account itself:
    what is submitted is what the batch text says.
    """
    kept = {name: value for name, value in environ.items() if name in _NEEDED or not _FOREIGN.match(name)}
    if "SBATCH_ACCOUNT" in environ and "account" not in options:
        kept["SBATCH_ACCOUNT"] = environ["SBATCH_ACCOUNT"]
    return kept


def query(argv: Sequence[str], *, timeout_s: float = TIMEOUT_S) -> str:
    """What one of Slurm's programs prints, with every time in it as seconds since the epoch."""
    return call(argv, {**clean_environment(os.environ), "SLURM_TIME_FORMAT": "%s"}, timeout_s=timeout_s)[0]


def call(
    argv: Sequence[str], environment: Mapping[str, str], *, stdin: bytes = b"", timeout_s: float = TIMEOUT_S
) -> tuple[str, str]:
    """Run a program to its end and hand back (stdout, stderr); raises SchedulerError if it fails or takes too long."""
    try:
        done = subprocess.run(
            argv, input=stdin, capture_output=True, env=dict(environment), timeout=timeout_s, start_new_session=True
        )
    except FileNotFoundError as error:
        raise SchedulerError(f"{argv[0]} is not installed here", argv) from error
    except subprocess.TimeoutExpired as error:
        raise SchedulerError(f"{argv[0]} timed out after {timeout_s:g} s", argv) from error
    stdout, stderr = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
    if done.returncode != 0:
        last = stderr.strip() or stdout.strip() or f"exit code {done.returncode}"
        said = " ".join(last.split())
        raise SchedulerError(said if said.startswith(f"{argv[0]}:") else f"{argv[0]}: {said}", argv, stderr)
    return stdout, stderr


def submit(kind: str, job: JobRequest, **settings: float) -> tuple[str, str | None]:
    """(job id, cluster) of a job that a short-lived process has submitted through submitit.

    A process of its own, for four reasons: submitit calls sbatch without a time limit and with our os.environ; a
    Ctrl-C in a terminal must not reach what is being started; the supervisor never pays for importing submitit; and a
    local job is then nobody's child, so that every supervisor looks at it in the same way.
    """
    environment = python_environment(clean_environment(os.environ, job.flags()))
    argv = [sys.executable, "-m", "slurm.submission", kind]
    try:
        stdout, _ = call(argv, environment, stdin=pickle.dumps((job, settings)))
    except SchedulerError as error:
        said = " ".join(error.stderr.split()) or str(error)
        raise SchedulerError(f"could not submit {job.name}: {said}", error.argv, error.stderr) from error
    answer = json.loads(stdout.splitlines()[-1])
    return answer["job_id"], answer["cluster"]


def is_configured() -> bool:
    """Is there an sbatch, and a configuration that it would use? The controller is not asked."""
    if shutil.which("sbatch") is None:
        return False
    conf = os.environ.get("SLURM_CONF")
    if conf:
        if not Path(conf).is_file():  # Slurm's programs would look for it for a minute each.
            raise SchedulerError(f"SLURM_CONF is {conf}, and there is no such file")
        return True
    try:
        query(["scontrol", "show", "hostnames", "localhost"])
    except SchedulerError as error:
        if "configuration source" in error.stderr:
            return False
        raise
    return True
