"""What can be known of a run before anything is spent: its jobs, its recipe, and a look at model and data."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm.commands import SchedulerError
from slurm.job import JobRequest, RequestError
from slurm.scheduler import LocalScheduler, Scheduler, choose, sbatch_text
from supervisor.config_findings import Finding
from supervisor.job_request import supervisor_request, worker_request
from supervisor.known_facts import is_for_another_machine, known_facts
from supervisor.notify import has_apprise
from supervisor.own_script import script_remarks
from supervisor.recipe_facts import Facts, Remark
from supervisor.recipe_rules import remarks
from worker.contract.check_report import CheckReport, Found
from worker.contract.config import Config
from worker.contract.run_dir import RunDir
from worker.contract.words import count

_SITE_KEYS = ("partition", "account", "qos", "constraint", "gres", "reservation", "nodelist", "exclude", "mail_user")
Writer = Callable[[str], str]
"""Of a dotted key: the file that it was written in."""
Look = Callable[[Config], CheckReport]


@dataclass(frozen=True)
class CheckResult:
    """What is wrong, what is odd, what was not looked at, and what would be submitted."""

    errors: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    sbatch: str
    """The worker's batch text; the name of the job gets the run's id, which a run has once it is made."""
    opinion: str | None = None
    """What the scheduler says of the worker's job, expected start included; None where it says no or nothing."""
    notes: tuple[Finding, ...] = ()
    not_checked: tuple[Finding, ...] = ()
    memory: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    time: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """The object that ``check --json`` prints."""
        kinds = {"errors": self.errors, "warnings": self.warnings, "notes": self.notes, "not_checked": self.not_checked}
        return {
            **{name: [asdict(finding) for finding in findings] for name, findings in kinds.items()},
            "sbatch": self.sbatch,
            "opinion": self.opinion,
            "memory": self.memory,
            "data": self.data,
            "time": self.time,
        }

    def as_text(self) -> str:
        """The same for a person: the batch text first, the findings last, where they are seen."""
        lines = [self.sbatch.rstrip(), ""] if self.sbatch else []
        lines += [f"scheduler: {self.opinion}"] if self.opinion else []
        lines += [line for name in ("train", "eval") if self.data for line in _set_lines(name, self.data[name])]
        lines += [_length_line(self.time)] if self.time else []
        lines += [_memory_line(self.memory)] if self.memory else []
        lines += [f"not checked: {_without_file(finding)}" for finding in self.not_checked]
        lines += [f"note: {_without_file(finding)}" for finding in self.notes]
        lines += [f"warning: {finding}" for finding in self.warnings]
        lines += [f"error: {finding}" for finding in self.errors]
        return "\n".join(lines if self.errors else [*lines, self._verdict()])

    def _verdict(self) -> str:
        """What is said where there is no error: no more than was looked at."""
        if self.not_checked:
            return "nothing is wrong as far as it was checked" + (", and what is odd is above" if self.warnings else "")
        return "nothing is wrong, and what is odd is above" if self.warnings else "the configuration is fine"


def _without_file(finding: Finding) -> str:
    return str(Finding("", finding.key, finding.message, finding.mend, finding.evidence))


def _memory_line(memory: dict[str, Any]) -> str:
    parts = ("weights", "gradients", "optimizer", "average", "activations")
    told = ", ".join(f"{name} {_binary(memory[name])}" for name in parts if memory[name])
    away = f"; {_binary(memory['main'])} in a node's main memory" if memory["main"] else ""
    size = f"{_many(memory['parameters'])} parameters, {_many(memory['trained'])} of them trained"
    return f"memory: {size}: {_binary(memory['device'])} a device ({told}){away}"


def _many(number: int) -> str:
    """``7.62 billion``, ``0.857 million``."""
    return f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"


def _binary(number_bytes: float) -> str:
    """In the units that a GPU's memory is told in."""
    gib = number_bytes / 2**30
    return f"{gib:.3g} GiB" if gib >= 0.1 else f"{1024 * gib:.3g} MiB"


def _length_line(time: dict[str, Any]) -> str:
    epochs = "" if time["epochs"] is None else f", {time['epochs']:.3g} epochs of {count(time['samples'], 'sample')}"
    return f"training: {count(time['steps'], 'step')}, {count(time['global_batch'], 'sample')} each{epochs}"


def _set_lines(name: str, looked: dict[str, Any] | None) -> Iterable[str]:
    if looked is None:
        return
    lengths, samples = looked["lengths"], looked["samples"]
    told = f"{count(looked['documents'], 'document')}, {count(looked['tokens'], 'token')}"
    told += f", {count(samples, 'sample')}" if samples is not None else ""
    if lengths:
        told += f"; median {lengths['median']:,} tokens, 90 % have at most {lengths['p90']:,}"
        told += f", longest {lengths['longest']:,}"
    gone = ", ".join(f"{number:,} {reason.replace('_', ' ')}" for reason, number in looked["left_out"].items())
    yield f"data.{name}: {told}{f'; not used, or not whole: {gone}' if gone else ''}"


def check(config: Config, file: str = "", writer: Writer | None = None, look: Look | None = None) -> CheckResult:
    """Everything about a loaded configuration. Submits nothing and leaves nothing.

    ``file`` is what its findings name, where ``writer`` does not say it of each key. ``look`` looks at model and data,
    which takes a while; None: they are not looked at.
    """
    found = _Findings(file, writer)
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
    opinion = None
    if isinstance(scheduler, LocalScheduler) and is_for_another_machine(config):
        found.take([Remark("not checked", ("cluster",), f"the job: {_NO_SLURM}")])
    else:
        opinion, refused = _ask(scheduler, worker, file, "cluster")
        if config.supervisor.place == "job" and not refused:
            refused = _ask(scheduler, own, file, "supervisor")[1]
        found.errors += refused
    found.take(
        [*_unused(config, scheduler), *_unheard(config), *_interpreter(config), *script_remarks(config, scheduler)]
    )
    report = look(config) if look is not None else CheckReport()
    facts = known_facts(config, report, scheduler)
    found.take(report.found)
    found.take(remarks(facts))
    return CheckResult(
        errors=tuple(found.errors),
        warnings=tuple(found.warnings),
        sbatch=text,
        opinion=opinion,
        notes=tuple(found.notes),
        not_checked=tuple(found.not_checked),
        memory=_memory(facts),
        data=report.data.model_dump(mode="json") if look is not None else None,
        time=_time(facts),
    )


def short_warnings(config: Config, file: str, writer: Writer, scheduler: Scheduler) -> list[Finding]:
    """What is wrong or odd about a configuration, without a look at model and data: at once, and refusing nothing."""
    found = _Findings(file, writer)
    found.take(script_remarks(config, scheduler))
    found.take(remarks(known_facts(config, CheckReport(), scheduler)))
    return found.errors + found.warnings


class _Findings:
    """What was found, by how bad it is."""

    def __init__(self, file: str, writer: Writer | None) -> None:
        self._writer = writer or (lambda key: file)
        self.errors: list[Finding] = []
        self.warnings: list[Finding] = []
        self.notes: list[Finding] = []
        self.not_checked: list[Finding] = []

    def take(self, found: Iterable[Found] | Iterable[Remark]) -> None:
        """Sort in what the worker or a rule says, with the file that wrote the key."""
        kinds = {"error": self.errors, "warning": self.warnings, "note": self.notes, "not checked": self.not_checked}
        for one in found:
            key = ".".join(one.place) if isinstance(one, Remark) else one.key
            kinds[one.level].append(Finding(self._writer(key), key, one.message, one.mend, one.evidence))


def _memory(facts: Facts) -> dict[str, Any] | None:
    """Bytes on each device and in main memory."""
    plan = facts.memory
    if plan is None:
        return None
    size = {"parameters": facts.parameters, "trained": facts.trained, "checkpoint": facts.checkpoint_bytes}
    return {**size, **asdict(plan), "device": plan.device}


def _time(facts: Facts) -> dict[str, Any] | None:
    """Steps, and how long they take; null where it is not known."""
    step_s, steps, samples = facts.step_s, facts.max_steps, facts.samples
    if steps is None:
        return None
    hours = None if step_s is None else steps * step_s / 3600
    gpu_hours = None if hours is None else hours * facts.config.cluster.gpus
    epochs = steps * facts.global_batch / samples if samples else None
    length = {"steps": steps, "global_batch": facts.global_batch, "samples": samples, "epochs": epochs}
    return {**length, "step_s": step_s, "hours": hours, "gpu_hours": gpu_hours}


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


_NO_SLURM = "sbatch is not found here, or has no configuration"


def _unused(config: Config, scheduler: Scheduler) -> Iterator[Remark]:
    """Keys that only Slurm understands, where the run would be on this machine."""
    if not isinstance(scheduler, LocalScheduler):
        return
    mend = "give the command on a machine of the cluster, or leave the key out"
    for key in _SITE_KEYS:
        if getattr(config.cluster, key) is None:
            continue
        if config.cluster.kind == "auto":
            yield Remark("not checked", ("cluster", key), _NO_SLURM)
        else:
            message = "there is no Slurm here, and the run would be on this machine"
            yield Remark("warning", ("cluster", key), message, f"cluster.kind is {config.cluster.kind}", mend)


def _interpreter(config: Config) -> Iterator[Remark]:
    """An interpreter that this machine lacks; what the nodes have is not known here, nor what a setup brings."""
    cluster = config.cluster
    if cluster.python is None or cluster.container is not None or shutil.which(cluster.python) is not None:
        return
    where = "brings cluster.setup" if cluster.setup else "have the nodes"
    yield Remark("not checked", ("cluster", "python"), f"there is no program {cluster.python!r} here; {where} it?")


def _unheard(config: Config) -> Iterator[Remark]:
    """Addresses of ``notify`` that nothing here can reach."""
    mute = [target for target in config.notify if not target.startswith("command:")]
    if mute and not has_apprise():
        message, evidence = "apprise, which knows such addresses, is not installed", f"{len(mute)} of them need it"
        mend = "pip install 'higgsfield-supervisor[notify]', or name a `command:`"
        yield Remark("warning", ("notify",), message, evidence, mend)
