"""Whether this machine is fit to supervise and train: packages, the disk of the runs, Slurm. Imports none of them."""

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from slurm.commands import SchedulerError, is_configured, query
from slurm.scheduler import SlurmScheduler

_DISTRIBUTION: Final = "higgsfield-supervisor"
_OLDEST_PYTHON: Final = (3, 11)
_MODULE_OF: Final = {"pyyaml": "yaml"}
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)")
_LEAST_FREE_BYTES: Final = 2**30
_ANSWER_WITHIN_S: Final = 30.0
_ANSWERS: Final = "the controller answers"
_SLURM_PROGRAMS: Final = ("sbatch", "squeue", "scontrol", "scancel")
_NETWORK: Final = re.compile(
    r"nfs|lustre|gpfs|beegfs|ceph|cifs|smb|afs|panfs|weka|orangefs|pvfs|gluster|9p|sshfs|virtiofs"
)


@dataclass(frozen=True)
class CheckedItem:
    """One thing that was looked at. ``mend`` says what to do where it is not ok."""

    name: str
    ok: bool
    message: str
    mend: str | None = None


def examine(folder: Path) -> list[CheckedItem]:
    """What this machine has and lacks, with ``folder`` as the place of the runs; leaves nothing behind."""
    there = _nearest(folder.absolute())
    return [_python(), _packages(), _transformers(), _names(), *_disk(there), *_slurm(there)]


def _python() -> CheckedItem:
    version = ".".join(map(str, sys.version_info[:3]))
    is_new = sys.version_info[:2] >= _OLDEST_PYTHON
    return CheckedItem(
        "python", is_new, f"{version} at {sys.executable}", None if is_new else "use Python 3.11 or newer"
    )


def _packages() -> CheckedItem:
    """What the distribution requires, by its own metadata."""
    required = importlib.metadata.requires(_DISTRIBUTION) or []
    needs = [match.groups() for line in required if "extra ==" not in line and (match := _REQUIREMENT.match(line))]
    lacking = [
        f"{name} {oldest} or newer ({_version(name) or 'missing'})" for name, oldest in needs if not _has(name, oldest)
    ]
    if lacking:
        return CheckedItem("packages", False, f"wanted: {', '.join(lacking)}", f"pip install --upgrade {_DISTRIBUTION}")
    return CheckedItem("packages", True, ", ".join(f"{name} {_version(name)}" for name, _ in needs))


def _has(name: str, oldest: str) -> bool:
    version = _version(name)
    is_there = importlib.util.find_spec(_MODULE_OF.get(name, name)) is not None
    return version is not None and is_there and _numbers(version) >= _numbers(oldest)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


def _transformers() -> CheckedItem:
    """A release that is not tested is refused by the worker."""
    from worker.contract.tested import TRANSFORMERS_RANGE, is_tested  # here: `_names` tells of a worker not ours

    version = _version("transformers")
    if version is None:
        return CheckedItem("transformers", False, "missing", f"pip install {_DISTRIBUTION}")
    if not is_tested(version):
        return CheckedItem(
            "transformers", False, f"{version} is not tested", f'pip install "transformers{TRANSFORMERS_RANGE}"'
        )
    return CheckedItem("transformers", True, f"{version}, tested ({TRANSFORMERS_RANGE})")


def _names() -> CheckedItem:
    """Our three packages are imported from one place, and nobody else's in their stead."""
    if _version("supervisor"):
        mend = "pip uninstall supervisor, or use an environment of its own"
        return CheckedItem("import names", False, "the PyPI package supervisor has the same import name", mend)
    specs = {name: importlib.util.find_spec(name) for name in ("supervisor", "worker", "slurm")}
    places = {name: Path(spec.origin).parent.parent for name, spec in specs.items() if spec and spec.origin}
    if len(places) < len(specs) or len(set(places.values())) > 1:
        seen = ", ".join(f"{name} from {places.get(name, 'nowhere')}" for name in specs)
        return CheckedItem("import names", False, seen, "rename your own module, or give the command in another folder")
    return CheckedItem("import names", True, f"supervisor, worker and slurm from {places['supervisor']}")


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest one above it that is there."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _disk(folder: Path) -> Iterator[CheckedItem]:
    yield _free_space(folder)
    kind = file_system_of(folder)
    is_network = kind is not None and _NETWORK.search(kind) is not None
    here = "a disk of this machine: a run on several nodes needs one that all of them see"
    where = "a network file system, which shows changes late" if is_network else here
    yield CheckedItem("file system", True, f"{folder} is on {kind or 'an unknown one'}, {where}")
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tmp-doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            yield CheckedItem("run folder", True, f"{folder} can be written")
            yield _locks(Path(file.name))
    except OSError as error:
        yield CheckedItem("run folder", False, f"{folder}: {error.strerror}", "choose another run.dir")


def _free_space(folder: Path) -> CheckedItem:
    free = shutil.disk_usage(folder).free
    is_enough = free >= _LEAST_FREE_BYTES
    mend = None if is_enough else "make room; a checkpoint takes 16 bytes a parameter"
    return CheckedItem("free space", is_enough, f"{free / 2**30:.1f} GiB at {folder}", mend)


def _locks(path: Path) -> CheckedItem:
    """Whether a second lock on a file is refused. A run is safe without locks, too: its lease decides."""
    with open(path, "rb") as one, open(path, "rb") as other:
        try:
            fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return CheckedItem("file locks", True, "they work")
        except OSError as error:
            return CheckedItem("file locks", True, f"none here ({error.strerror}); the lease does without")
    return CheckedItem("file locks", True, "they exclude nobody here; the lease does without")


def file_system_of(folder: Path) -> str | None:
    """The type of the file system that holds ``folder``, None where the system does not say."""
    real = folder.resolve()
    try:
        rows = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    mounts = [(Path(_unescaped(row.split(" ")[1])), row.split(" ")[2]) for row in rows]
    around = [(len(at.parts), number, kind) for number, (at, kind) in enumerate(mounts) if real.is_relative_to(at)]
    return max(around)[2] if around else None  # of two mounts at one place the later one is seen


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _slurm(folder: Path) -> Iterator[CheckedItem]:
    found = [name for name in _SLURM_PROGRAMS if shutil.which(name)]
    lacking = [name for name in _SLURM_PROGRAMS if name not in found]
    if not found:
        yield CheckedItem("slurm", True, "not installed: runs use this machine")
        return
    if lacking:
        yield CheckedItem("slurm", False, f"{', '.join(lacking)} not found", "load the whole of Slurm's commands")
        return
    controller = _controller()
    yield controller
    if controller.message == _ANSWERS:
        from supervisor.doctor_places import look_at_places  # here: it needs this module's items

        yield from look_at_places(SlurmScheduler(), folder)
    found_sacct = shutil.which("sacct") is not None
    message = (
        "sacct found: where accounting runs, it tells who cancelled a job" if found_sacct else "no sacct: not needed"
    )
    yield CheckedItem("accounting", True, message)


def _controller() -> CheckedItem:
    try:
        if not is_configured():
            return CheckedItem("slurm", True, "installed without a configuration: runs use this machine")
        query(["squeue", "--me", "--noheader"], timeout_s=_ANSWER_WITHIN_S)
    except SchedulerError as error:
        return CheckedItem("slurm", False, str(error), "look at `scontrol ping`, or set cluster.kind to local")
    return CheckedItem("slurm", True, _ANSWERS)
