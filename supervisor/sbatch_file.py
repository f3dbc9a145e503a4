"""The #SBATCH options of a person's own batch script, as keys of ``cluster:``."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from slurm.job import OWN_OPTIONS
from supervisor.runs import RunError

_SHORT: Final = {
    "A": "account", "c": "cpus-per-task", "C": "constraint", "d": "dependency", "D": "chdir", "e": "error",
    "F": "nodefile", "G": "gpus", "J": "job-name", "L": "licenses", "N": "nodes", "n": "ntasks", "o": "output",
    "p": "partition",
    "q": "qos", "t": "time", "w": "nodelist", "x": "exclude", "a": "array", "i": "input", "M": "clusters",
}  # fmt: skip
_TEXT_KEYS: Final = {
    "partition": "partition", "account": "account", "qos": "qos", "constraint": "constraint", "gres": "gres",
    "mem": "mem", "reservation": "reservation", "nodelist": "nodelist", "exclude": "exclude", "time": "time_limit",
    "time-min": "min_time", "mail-user": "mail_user",
}  # fmt: skip
_COUNT_KEYS: Final = {"nodes": "nodes", "ntasks-per-node": "tasks_per_node", "cpus-per-task": "cpus_per_task"}
_LEFT_OUT: Final = (
    frozenset(
        {"job-name", "output", "error", "input", "dependency", "chdir", "array", "mail-type", "wrap", "ntasks", "gpus"}
    )
    | OWN_OPTIONS
)


def read_sbatch(path: Path) -> tuple[list[str], list[str]]:
    """Overrides of ``cluster:`` as ``--set`` takes them, and what of the script is left out and why."""
    given = _options(path)
    counts = {option: _count(path, option, given[option]) for option in given.keys() & {*_COUNT_KEYS, "ntasks"}}
    found: dict[str, object] = {_COUNT_KEYS[option]: counts[option] for option in counts if option in _COUNT_KEYS}
    found |= {key: given[option] for option, key in _TEXT_KEYS.items() if option in given}
    if "gpus-per-node" in given:
        found |= _gpus(given["gpus-per-node"])
    if "ntasks" in counts and "tasks_per_node" not in found:
        found["tasks_per_node"] = max(1, counts["ntasks"] // counts.get("nodes", 1))
    rest = given.keys() - {*_TEXT_KEYS, *_COUNT_KEYS, "gpus-per-node"}
    others = {option: given[option] for option in sorted(rest - _LEFT_OUT)}
    overrides = [f"cluster.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in found.items()]
    overrides += [f"cluster.sbatch.{option}={json.dumps(value or True)}" for option, value in others.items()]
    return overrides, [f"--{option} of {path} is left out: the run has its own" for option in sorted(rest & _LEFT_OUT)]


def _gpus(text: str) -> dict[str, object]:
    """``4``, or ``a100:4``, which is a generic resource."""
    kind, _, count = text.rpartition(":")
    return {"gpus_per_node": int(count), **({"gres": f"gpu:{text}"} if kind else {})} if count.isdigit() else {}


def _options(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise RunError(f"{path}: is no text") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        told = re.match(r"#SBATCH\s+(.*)", line)
        if told is not None:
            try:
                found |= dict(_pairs(shlex.split(told[1], comments=True)))
            except ValueError as error:
                raise RunError(f"{path}: line {number}: {error}") from None
    if not found:
        raise RunError(f"{path}: has no #SBATCH line")
    return found


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    """Options and their values: ``--name=value``, ``--name value``, ``-n value`` and ``-nvalue``; "" for a flag."""
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        elif word.startswith("-") and word[1:2] in _SHORT:
            name, value = _SHORT[word[1]], word[2:].removeprefix("=")
            equals = value
        else:
            raise ValueError(f"{word!r} is no option of sbatch that is known here")
        if not equals and rest and not rest[-1].startswith("-"):
            value = rest.pop()
        yield name, value


def _count(path: Path, option: str, text: str) -> int:
    if not text.isdigit():
        raise RunError(f"{path}: --{option} is {text!r}; give cluster.{_COUNT_KEYS.get(option, 'nodes')} one number")
    return int(text)
