"""Paths of a configuration, made absolute where the command is given, so that the worker finds them from anywhere."""

import glob
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from supervisor.config_findings import Place, Problem
from worker.contract.cluster_config import ClusterConfig
from worker.contract.config import Config
from worker.contract.data_names import is_hub_name

STDLIB = "stdlib"
BYTES = "bytes"


def located(config: Config) -> Config:
    """The same configuration with absolute paths; what is a word or a hub name stays as it is."""
    data, model, training = config.data, config.model, config.training
    names: dict[str, Any] = {"tokenizer": _absolute_folder(data.tokenizer)}
    names |= {"train": _absolute_entries(data.train), "eval": _absolute_entries(data.eval)}
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": _absolute(config.run.dir)}),
            "data": data.model_copy(update=names),
            "model": model.model_copy(update={"path": _absolute_folder(model.path)}),
            "training": training.model_copy(update={"entrypoint": _absolute_entrypoint(training.entrypoint)}),
        }
    )


def missing_paths(config: Config) -> Iterator[Problem]:
    """Files and folders that ``config`` names and that are not there. A hub name cannot be told from here."""
    yield from _unusable_run_dir(config.run.dir)
    yield from _missing_data("train", config.data.train)
    yield from _missing_data("eval", config.data.eval)
    yield from _missing_folder(("model", "path"), config.model.path)
    if config.training.entrypoint is not None:
        folder = Path(str(_absolute_entrypoint(config.training.entrypoint))).parent
        if not folder.is_dir():
            mend = f"name the folder of your script, seen from {Path.cwd()}"
            yield Problem(("training", "entrypoint"), f"there is no folder {str(folder)!r}", mend)
    if config.model.lora is not None and _here(config) and importlib.util.find_spec("peft") is None:
        mend = "pip install 'higgsfield-supervisor[lora]', or set it to null"
        yield Problem(("model", "lora"), "the package peft is not installed here", mend)
    if config.data.tokenizer != BYTES:
        yield from _missing_folder(("data", "tokenizer"), config.data.tokenizer)
    yield from _missing_python(config.cluster)


def _unusable_run_dir(name: str) -> Iterator[Problem]:
    """It may be made yet, but not where a file is in the way."""
    mend = "name the folder that holds the runs"
    if not name:
        yield Problem(("run", "dir"), "it is empty", mend)
        return
    path = Path(_absolute(name))
    # Not Path.exists: it raises where a folder on the way is closed to us.
    nearest = next(each for each in (path, *path.parents) if os.path.exists(each))  # noqa: PTH110
    if not nearest.is_dir():
        yield Problem(("run", "dir"), f"{str(nearest)!r} is a file", mend)


def _missing_python(cluster: ClusterConfig) -> Iterator[Problem]:
    """Only where the worker runs on this machine, and no line of the setup may bring the interpreter."""
    python = cluster.python
    if python is None or cluster.kind != "local" or cluster.container is not None or cluster.setup:
        return
    if shutil.which(python) is None:
        yield Problem(("cluster", "python"), f"there is no program {python!r}", "name an interpreter that is here")


def _here(config: Config) -> bool:
    """Whether the worker runs with the packages that this process sees."""
    return config.cluster.python is None and config.cluster.container is None


def _missing_data(key: str, entries: str | tuple[str, ...] | None) -> Iterator[Problem]:
    mend = f"name a file, a glob or a folder, seen from {Path.cwd()}, a hub name, or stdlib"
    named = (entries,) if isinstance(entries, str) else entries
    if named is not None and not (named and all(named)):
        yield Problem(("data", key), "it is empty", mend)
    for entry in filter(None, named or ()):
        if entry != STDLIB and not _matches(entry) and not is_hub_name(entry):
            yield Problem(("data", key), f"no file matches {entry!r}", mend)


def _missing_folder(place: Place, name: str | None) -> Iterator[Problem]:
    """Complain where ``name`` can only be a folder: hub names have one slash at most and no path's beginning."""
    if name is None or (name and Path(_absolute(name)).is_dir()):
        return
    if not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        yield Problem(place, f"there is no folder {name!r}", f"name one, seen from {Path.cwd()}, or a hub name")


def _matches(entry: str) -> bool:
    """Whether the worker would find a file behind ``entry``: a file, in a folder, or through a glob."""
    path = Path(_absolute(entry))
    if path.is_file():
        return True
    if path.is_dir():
        return any(_seen(Path(at), names) for at, names in _visible(path))
    return any(Path(name).is_file() for name in glob.iglob(_absolute_pattern(entry), recursive=True))  # noqa: PTH207


def _visible(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders below ``folder`` and their files, hidden ones left out as the worker does."""
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield at, [name for name in names if not name.startswith(".")]


def _seen(at: Path, names: list[str]) -> bool:
    return any((at / name).is_file() for name in names)


def _absolute_entrypoint(entrypoint: str | None) -> str | None:
    """The folder of the script written out: the one before it, or the one the command is given in."""
    if entrypoint is None:
        return None
    folder, _, script = entrypoint.rpartition("/")
    return f"{_absolute(folder or ('/' if entrypoint.startswith('/') else '.'))}/{script}"


def _absolute_entries(entries: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    if entries is None:
        return None
    if isinstance(entries, str):
        return _absolute_entry(entries)
    return tuple(_absolute_entry(entry) for entry in entries)


def _absolute_entry(entry: str) -> str:
    if entry == STDLIB:
        return entry
    path = _absolute(entry)
    if not Path(path).exists() and is_hub_name(entry) and not _matches(entry):
        return entry
    return path if Path(path).exists() else _absolute_pattern(entry)


def _absolute_pattern(entry: str) -> str:
    """A glob seen from here, whatever characters the way to here has, or to a home."""
    user, slash, below = entry.partition("/")
    home = glob.escape(os.path.expanduser(user)) if user.startswith("~") else user  # noqa: PTH111
    return os.path.join(glob.escape(str(Path.cwd())), f"{home}{slash}{below}")  # noqa: PTH118


def _absolute_folder(name: str | None) -> str | None:
    if name is None or name == BYTES:
        return name
    path = _absolute(name)
    return path if Path(path).is_dir() else name


def _absolute(name: str) -> str:
    # An unknown user's ~ stays as it is here, where pathlib would raise.
    return str(Path(os.path.expanduser(name)).absolute())  # noqa: PTH111
