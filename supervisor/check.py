"""What can be known of a run before anything is spent: the batch text, and what the scheduler says to it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm.commands import SchedulerError
from slurm.job import JobRequest, RequestError
from slurm.scheduler import LocalScheduler, Scheduler, choose, sbatch_text
from supervisor.config_findings import Finding
from supervisor.job_request import supervisor_request, worker_request
from supervisor.notify import has_apprise
from worker.contract.config import Config
from worker.contract.run_dir import RunDir

_SITE_KEYS = ("partition", "account", "qos", "constraint", "gres", "reservation", "nodelist", "exclude", "mail_user")


@dataclass(frozen=True)
class CheckResult:
    """What is wrong, what is odd, and what would be submitted."""

    errors: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    sbatch: str
    """The worker's batch text; the name of the job gets the run's id, which a run has once it is made."""
    opinion: str | None = None
    """What the scheduler says of the worker's job, expected start included; None where it says no or nothing."""

    def as_json(self) -> dict[str, Any]:
        """The object that ``check --json`` prints."""
        return {
            "errors": [asdict(finding) for finding in self.errors],
            "warnings": [asdict(finding) for finding in self.warnings],
            "sbatch": self.sbatch,
            "memory": None,
            "data": None,
        }

    def as_text(self) -> str:
        """The same for a person: the batch text first, the findings last, where they are seen."""
        lines = [self.sbatch.rstrip(), ""] if self.sbatch else []
        lines += [f"scheduler: {self.opinion}"] if self.opinion else []
        lines += [f"warning: {finding}" for finding in self.warnings]
        lines += [f"error: {finding}" for finding in self.errors] or ["the configuration is fine"]
        return "\n".join(lines)


def check(config: Config, file: str = "") -> CheckResult:
    """Everything about the jobs of a loaded configuration; ``file`` is what its findings name. Submits nothing."""
    run_dir = RunDir(Path(config.run.dir) / config.run.name)
    try:
        worker = worker_request(config, run_dir, "hf-00000000", attempt=1)
        own = supervisor_request(config, run_dir, "hs-00000000")
        text = sbatch_text(worker)
    except RequestError as error:  # load_config has looked at everything but the folder
        return CheckResult((Finding(file, "run.dir", str(error), "choose another folder"),), (), "")
    try:
        scheduler = choose(config.cluster.kind)
    except SchedulerError as error:
        mend = "load Slurm's commands, or set cluster.kind to local"
        return CheckResult((Finding(file, "cluster.kind", str(error), mend),), (), text)
    opinion, refused = _ask(scheduler, worker, file, "cluster")
    if config.supervisor.place == "job" and not refused:
        refused = _ask(scheduler, own, file, "supervisor")[1]
    return CheckResult(tuple(refused), (*_unused(config, scheduler, file), *_unheard(config, file)), text, opinion)


def _ask(scheduler: Scheduler, job: JobRequest, file: str, key: str) -> tuple[str | None, list[Finding]]:
    """What the scheduler says of a job, and why it would refuse it."""
    try:
        return scheduler.test_only(job), []
    except SchedulerError as error:
        return None, [Finding(file, key, str(error), _mend(error, key))]
    except RequestError as error:
        return None, [Finding(file, key, str(error), f"change the keys of {key}")]


def _mend(error: SchedulerError, key: str) -> str:
    if not error.answered:
        return "ask again when `scontrol ping` answers"
    # Slurm says the same of nodes that there never are, and of those that are all down or drained for a while.
    later = ", or ask again if `sinfo` shows that nodes are away" if "not available" in str(error) else ""
    return f"change the keys of {key}{later}"


def _unused(config: Config, scheduler: Scheduler, file: str) -> list[Finding]:
    """Keys that only Slurm understands, where the run would be on this machine."""
    if not isinstance(scheduler, LocalScheduler):
        return []
    given = [key for key in _SITE_KEYS if getattr(config.cluster, key) is not None]
    message = "there is no Slurm here, and the run would be on this machine"
    mend = "give the command on a machine of the cluster, or leave the key out"
    return [Finding(file, f"cluster.{key}", message, mend) for key in given]


def _unheard(config: Config, file: str) -> list[Finding]:
    """Addresses of ``notify`` that nothing here can reach."""
    if has_apprise() or all(target.startswith("command:") for target in config.notify):
        return []
    mend = "pip install 'higgsfield-supervisor[notify]', or name a `command:`"
    return [Finding(file, "notify", "apprise, which knows such addresses, is not installed", mend)]
