"""What can be told of a person's own training script without running any of it: whether it would be found."""

import ast
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final

from slurm.scheduler import LocalScheduler, Scheduler
from supervisor.known_facts import is_for_another_machine
from supervisor.recipe_facts import Remark
from worker.contract.config import Config

_KEY: Final = ("training", "entrypoint")
_FOUND_AS_IT_RUNS: Final = {"*", "__getattr__", "globals", "exec", "setattr"}
"""Where a file holds one of these words, only running it tells which names it has."""


def script_remarks(config: Config, scheduler: Scheduler) -> Iterator[Remark]:
    """What a worker would not find of ``training.entrypoint``; a warning where it may see more than is seen here."""
    if config.training.entrypoint is None:
        return
    place, _, function = config.training.entrypoint.rpartition(":")
    folder, _, module = place.rpartition("/")
    cluster = config.cluster
    is_same_python = not (cluster.python or cluster.container or cluster.setup)
    is_this_machine = isinstance(scheduler, LocalScheduler) and not is_for_another_machine(config)
    spec = _find(module, [*_python_path(config), folder])
    if spec is None:
        message = f"there is no module {module} in {folder or '/'}, nor is one installed"
        mend = _near(module, (path.stem for path in Path(folder or "/").glob("*.py")), "name the file of your script")
        yield _remark(message, mend, is_sure=is_same_python and is_this_machine)
    elif what := _what_is_wrong(module, function, folder, spec):
        yield _remark(*what, is_sure=is_same_python)


def _remark(message: str, mend: str, *, is_sure: bool) -> Remark:
    if is_sure:
        return Remark("error", _KEY, message, mend=mend)
    unseen = "seen from here; what the nodes, cluster.setup or a container bring is not known"
    return Remark("warning", _KEY, message, unseen, mend)


def _what_is_wrong(module: str, function: str, folder: str, spec: ModuleSpec) -> tuple[str, str] | None:
    """What is wrong with the module that was found, and the mend; None where nothing is, or only running it tells."""
    if spec.loader is None or spec.origin is None:
        return f"{module} is a folder without __init__.py, where no function is", f"write {module}.FILE:{function}"
    if not spec.origin.endswith(".py"):
        return None
    try:
        names = _names_in(Path(spec.origin))
    except OSError:
        return None
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else f": {error}"
        return f"{spec.origin} is no Python{where}", "mend the script"
    if function in names or names & _FOUND_AS_IT_RUNS:
        return None
    mend = _near(function, names, "name a function that is written there")
    if Path(folder) not in Path(spec.origin).parents:
        mend = "if that is not yours, give your file another name: what is installed is found first"
    return f"{spec.origin} has no function {function}", mend


def _near(name: str, known: Iterable[str], otherwise: str) -> str:
    near = get_close_matches(name, list(known), 1)
    return f"did you mean {near[0]}?" if near else otherwise


def _python_path(config: Config) -> list[str]:
    """Where a worker with this Python looks before the script's folder; not beside the program that runs here."""
    given = config.cluster.environment.get("PYTHONPATH", "")
    installed = sys.path if sys.flags.safe_path else sys.path[1:]
    return [*filter(None, given.split(os.pathsep)), *installed]


def _find(module: str, path: list[str]) -> ModuleSpec | None:
    """What an import of ``module`` would find, without one: importing what it is in would run that."""
    name, *rest = module.split(".")
    spec = next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, path))), None)
    for part in rest:
        name = f"{name}.{part}"
        spec = _find_in(name, spec.submodule_search_locations or ()) if spec else None
    return spec


def _find_in(name: str, folders: Iterable[str]) -> ModuleSpec | None:
    """The module ``name`` of a package that lies in ``folders``: a file, a package, or folders that are neither."""
    portions: list[str] = []
    for folder in folders:
        finder = pkgutil.get_importer(folder)
        spec = finder.find_spec(name) if finder else None
        if spec is not None and spec.loader is not None:
            return spec
        portions += (spec.submodule_search_locations or []) if spec else []
    without_file = ModuleSpec(name, None, is_package=True)
    without_file.submodule_search_locations = portions
    return without_file if portions else None


def _names_in(file: Path) -> set[str]:
    """Names that ``file`` binds at its top, and the words in it that may bind others; raises what parsing it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(file.read_bytes())
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & _FOUND_AS_IT_RUNS
    declared = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    return words | declared | set(_bound(tree))


def _bound(node: ast.AST) -> Iterator[str]:
    """Names that the statements in ``node`` bind, without those within functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif isinstance(child, ast.alias):
            yield (child.asname or child.name).partition(".")[0]
        else:
            yield from _bound(child)
