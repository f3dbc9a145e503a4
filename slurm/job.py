"""What a job is, before it is submitted and while it lives: plain frozen values, no Slurm call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

_JOB_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPTION_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*")
_ENTRY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SIGNAL = re.compile(r"([BR]{1,2}:)?[A-Z]+[0-9]?@[0-9]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

OWN_OPTIONS = frozenset(
    {"array", "comment", "dependency", "error", "job-name", "no-kill", "no-requeue", "open-mode"}
    | {"output", "parsable", "requeue", "signal", "test-only", "wait", "wrap"}
)
"""sbatch options that the supervisor decides: another value would make a job that it cannot find or follow."""


class RequestError(ValueError):
    """The request itself cannot be submitted; the same request fails again. The message is one line for a person."""


class JobState(Enum):
    """Where a job stands, in our words. `is_over` lists what is over, so an unknown word never is."""

    PENDING = "PENDING"
    """Waits in the queue; also again, after a requeue."""

    CONFIGURING = "CONFIGURING"
    """Has its nodes, which still boot: minutes, and no hang."""

    RUNNING = "RUNNING"
    """Its processes run, or are about to."""

    SUSPENDED = "SUSPENDED"
    """Stopped by the scheduler or an operator; its owner cannot resume it, and it is no hang."""

    COMPLETING = "COMPLETING"
    """Ends: processes are being killed and nodes cleaned. What follows may be an end or a requeue."""

    REQUEUED = "REQUEUED"
    """Is being put back into the queue; PENDING comes next."""

    HELD = "HELD"
    """Pending, and nothing starts it before somebody releases it."""

    COMPLETED = "COMPLETED"
    """Over: every process exited with zero."""

    FAILED = "FAILED"
    """Over: a process exited with something else, or was killed."""

    CANCELLED = "CANCELLED"
    """Over: a person or a program cancelled it."""

    TIMEOUT = "TIMEOUT"
    """Over: reached its time limit."""

    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """Over: used more memory than it had asked for."""

    NODE_FAIL = "NODE_FAIL"
    """Over, unless the same id shows up as pending again: a node went away."""

    PREEMPTED = "PREEMPTED"
    """Over, unless the same id shows up as pending again: made room for another job."""

    BOOT_FAIL = "BOOT_FAIL"
    """Over: its nodes did not boot."""

    DEADLINE = "DEADLINE"
    """Over: could no longer finish by its deadline."""

    UNRECOGNISED = "UNRECOGNISED"
    """A word that we do not know: neither over nor healthy. The word itself is in `JobStatus.why`."""

    @property
    def is_over(self) -> bool:
        """Nothing of the job runs, and Slurm by itself will not start it again."""
        return self in _OVER


_OVER = frozenset(
    {
        JobState.COMPLETED,
        JobState.FAILED,
        JobState.CANCELLED,
        JobState.TIMEOUT,
        JobState.OUT_OF_MEMORY,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
    }
)


@dataclass(frozen=True)
class JobStatus:
    """One look at one job. Times are UTC seconds since the epoch; None is "not known", never zero."""

    job_id: str
    name: str
    state: JobState
    why: str = ""
    """The scheduler's reason, in its words; empty when it gives none."""
    nodes: tuple[str, ...] = ()
    restarts: int = 0
    starts_at: float | None = None
    """When it started, or for a pending job when it is expected to: an estimate, not a promise."""
    ends_at: float | None = None
    """When it ended, or when its time limit comes."""
    exit_code: int | None = None
    """Of a job that is over; 128 + n for a signal n, as a shell has it."""
    cluster: str | None = None
    source: str = ""
    """Who said so: squeue, scontrol, sacct or local."""
    limit_s: float | None = None
    """Its time limit as it is now; None where it has none, or none is known."""
    preempted_at: float | None = None
    """When a preemption of it began, whether it still runs in its grace time or not."""


@dataclass(frozen=True)
class Node:
    """One look at one node."""

    name: str
    state: str
    """Slurm's word, without the marks behind it: idle, allocated, draining, down, ..."""
    why: str = ""
    """The administrator's or Slurm's reason; empty when there is none."""
    is_silent: bool = False
    """It does not answer (the mark `*`): down soon, if not already, or back in a moment."""

    @property
    def is_down(self) -> bool:
        """Slurm has given it up: nothing that runs there counts any more."""
        return self.state in {"down", "error", "fail", "failing", "powered_down"}

    @property
    def is_draining(self) -> bool:
        """Nothing new starts there; what runs goes on."""
        return self.state in {"draining", "drained", "drng", "drain"}


@dataclass(frozen=True)
class Reservation:
    """Nodes that are kept free for somebody or for a maintenance, from one time to another."""

    name: str
    starts_at: float | None
    ends_at: float | None
    nodes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    @property
    def is_maintenance(self) -> bool:
        """Whether the nodes go away for a while, for everybody."""
        return "MAINT" in self.flags


@dataclass(frozen=True)
class Resources:
    """What a job asks the cluster for, and how it is started there. None leaves it to the cluster's default."""

    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int = 0
    time_limit: str | None = None
    """As Slurm writes it: minutes, HH:MM:SS, D-HH:MM:SS, UNLIMITED."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    mem: str | None = None
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    setup: tuple[str, ...] = ()
    """Shell lines of the person's own, run in bash before the job's programs (module load, conda activate)."""
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    """Path of the interpreter inside the job; None is the one that submits."""
    srun: tuple[str, ...] = ()
    container: str | None = None
    """Words put before the interpreter, such as `apptainer exec --nv image.sif`."""
    sbatch: Mapping[str, str | int | bool | None] = field(default_factory=dict)
    """Any further sbatch option: true is the bare flag, false and null leave it out."""

    def __post_init__(self) -> None:
        for name in self.environment:
            if not _VARIABLE_NAME.fullmatch(name):
                raise RequestError(f"environment: {name!r} cannot be the name of a variable")
        for option in self.sbatch:
            _check_option(option)
        for value in (self.python, self.container, *self.srun, *self._flags().values()):
            _refuse_control(value)

    def _flags(self) -> dict[str, object]:
        """The sbatch options that come from fields of the same name, without those left to the cluster."""
        given: dict[str, object] = {
            "cpus-per-task": self.cpus_per_task,
            "gpus-per-node": self.gpus_per_node or None,
            "time": self.time_limit,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "gres": self.gres,
            "mem": self.mem,
            "reservation": self.reservation,
            "nodelist": self.nodelist,
            **self.sbatch,
        }
        return {option: value for option, value in given.items() if value is not None and value is not False}


@dataclass(frozen=True)
class JobRequest:
    """A job to submit: an entry point as text, its arguments, and what it needs."""

    name: str
    """One per run, of [A-Za-z0-9_.-]: Slurm's singleton keeps two jobs of one name from running at once."""
    entry: str
    """`package.module:function`, called in the job as `function(*args, start)`; see `slurm.entry`."""
    args: tuple[str, ...]
    folder: Path
    """jobs/ of the run: submission file, pickles and logs. Made with mode 0700."""
    resources: Resources = field(default_factory=Resources)
    exclude_nodes: tuple[str, ...] = ()
    """Nodes to avoid, beside `resources.exclude`."""
    use_srun: bool = True
    """False starts one process in the batch step, which may itself submit jobs."""
    beside: tuple[str, ...] = ()
    """One more entry point and its arguments, for a process in the batch step, beside the tasks and after them."""
    comment: str | None = None
    requeue: bool = True
    signal: str = "USR2@120"
    """Slurm's --signal: what is sent how many seconds before the time limit."""

    def __post_init__(self) -> None:
        if not _JOB_NAME.fullmatch(self.name):
            raise RequestError(f"job name {self.name!r}: only letters, digits, '_', '.' and '-' can be found again")
        for entry in (self.entry, *self.beside[:1]):
            if not _ENTRY.fullmatch(entry):
                raise RequestError(f"entry {entry!r} is not package.module:function")
        if not _SIGNAL.fullmatch(self.signal):
            raise RequestError(f"signal {self.signal!r} is not like USR2@120")
        for value in (self.comment, *self.exclude_nodes, *self.beside):
            _refuse_control(value)
        _check_folder(self.folder)

    @property
    def environment_file(self) -> Path:
        """Where the values of its environment are: a batch text, or a command line, is seen by others."""
        return self.folder / f"{self.name}.env"

    def flags(self) -> dict[str, object]:
        """Every sbatch option of this job but those that name its log files."""
        exclude = ",".join(part for part in (self.resources.exclude, *self.exclude_nodes) if part)
        own = {
            "nodes": self.resources.nodes,
            "ntasks-per-node": self.resources.tasks_per_node,
            "exclude": exclude or None,
            "comment": self.comment,
            "dependency": "singleton",
            "job-name": self.name,
            "no-kill": not self.beside or None,  # what is beside the tasks may be on the node that is lost
            "requeue" if self.requeue else "no-requeue": True,
            "open-mode": "append",
            "signal": self.signal,
        }
        return {**{key: value for key, value in own.items() if value is not None}, **self.resources._flags()}


def _check_option(option: str) -> None:
    if not _OPTION_NAME.fullmatch(option):
        raise RequestError(f"sbatch: {option!r} is not the long name of an option")
    if option in OWN_OPTIONS:
        raise RequestError(f"sbatch: {option} is set by the supervisor; leave it out")


def _refuse_control(value: object) -> None:
    """A newline in a value would end its #SBATCH line and begin a line of shell."""
    if isinstance(value, str) and _CONTROL.search(value):
        raise RequestError(f"{value!r} has a newline or another control character; a batch script cannot carry it")


def _check_folder(folder: Path) -> None:
    """Slurm and submitit both expand % in the names of log files, and Slurm reads \\ as an escape."""
    text = str(folder)
    if not folder.is_absolute():
        raise RequestError(f"jobs folder {text!r} is not an absolute path")
    _refuse_control(text)
    if "%" in text or "\\" in text:
        raise RequestError(
            f"the path {text!r} has a '%' or a backslash, which Slurm expands in log file names; rename it"
        )
