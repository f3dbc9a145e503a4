"""What is wrong with a configuration, one line each: where it was written, what it is, and how to mend it."""

import difflib
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from worker.contract.config import Config
from worker.contract.owned_fields import OWNED_FIELDS, SCHEDULES_WITHOUT_BASE_RATE
from worker.contract.yaml_file import YamlError, parse_yaml

Place = tuple[str, ...]
"""A key as the names on the way to it."""

_WANTED: dict[str, tuple[str, tuple[type, ...]]] = {
    "string_type": ("text", (str,)),
    "int_type": ("a whole number", (int,)),
    "int_from_float": ("a whole number", (int,)),
    "float_type": ("a number", (int, float)),
    "bool_type": ("true or false", (bool,)),
    "tuple_type": ("a list", (list,)),
    "dict_type": ("keys below it", (dict,)),
    "model_type": ("keys below it", (dict,)),
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("of at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("of at most", "le"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong; ``str()`` is one line."""

    file: str
    """Where the key was written: a file, or ``--set``."""
    key: str
    """Dotted; empty where it is the file as a whole."""
    message: str
    """The reason."""
    mend: str
    evidence: str = ""

    def __str__(self) -> str:
        where = ": ".join(part for part in (self.file, self.key, self.message) if part)
        where = f"{where} ({self.evidence})" if self.evidence else where
        return _on_one_line(f"{where}; {self.mend}" if self.mend else where)


class ConfigError(Exception):
    """A configuration that cannot be used; ``findings`` says why, a line each."""

    def __init__(self, *findings: Finding) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


@dataclass(frozen=True)
class Problem:
    """A finding before it is known who wrote the key."""

    place: Place
    message: str
    mend: str
    is_missing: bool = False
    """Nobody wrote the key: it is missed in the file that was asked for."""


def show(value: object) -> str:
    """A value as a message quotes it: as it stands in YAML, and short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return reprlib.repr(value)


def problems_of(error: ValidationError, values: dict[str, Any]) -> list[Problem]:
    """pydantic's errors about ``values`` in plain words, one for each place."""
    by_place: dict[tuple[str | int, ...], list[ErrorDetails]] = {}
    for one in error.errors(include_url=False):
        by_place.setdefault(_place(one, values), []).append(one)
    # A union reports each of its members: the list itself is no news where one of its elements is wrong.
    deepest = [
        place for place in by_place if not any(place == other[: len(place)] for other in by_place.keys() - {place})
    ]
    return [_problem(place, by_place[place]) for place in deepest]


def _place(error: ErrorDetails, values: Any) -> tuple[str | int, ...]:
    """Where an error is, without the names that pydantic gives to the members of a union."""
    found: list[str | int] = []
    here = values
    for part in error["loc"]:
        if _has(here, part):
            here = here[part]
            found.append(part)
        elif error["type"] == "missing" and isinstance(part, str):
            found.append(part)
    return tuple(found)


def _has(values: Any, part: str | int) -> bool:
    if isinstance(values, dict):
        return part in values
    return isinstance(values, list) and isinstance(part, int) and part < len(values)


def _problem(place: tuple[str | int, ...], errors: Sequence[ErrorDetails]) -> Problem:
    keys = tuple(str(part) for part in place)
    first = errors[0]
    kind, value = first["type"], first["input"]
    if kind == "extra_forbidden":
        return _unknown_key(keys)
    if kind == "missing" and first["loc"][-1] == place[-1]:
        mend = "write its keys" if _section(keys) else f"write it, or give --set {'.'.join(keys)}=VALUE"
        return Problem(keys, "it is missing", mend, is_missing=True)
    if kind in ("missing", "too_long"):
        return Problem(keys, "a wrong number of values", f"write {_length(keys)} of them")
    if kind == "literal_error":
        return _not_a_choice(keys, value, first["ctx"]["expected"])
    if kind in _BOUNDS:
        word, limit = _BOUNDS[kind]
        return Problem(keys, f"{show(value)} is out of range", f"write a number {word} {first['ctx'][limit]:.16g}")
    if kind == "finite_number":
        return Problem(keys, f"{value} is not finite", "write a finite number")
    if all(error["type"] in _WANTED for error in errors):
        return _wrong_type(keys, value, [error["type"] for error in errors])
    return Problem(keys, first["msg"], "correct the value")


def _wrong_type(keys: Place, value: object, kinds: Sequence[str]) -> Problem:
    words = " or ".join(dict.fromkeys(_WANTED[kind][0] for kind in kinds))
    types = tuple(one for kind in kinds for one in _WANTED[kind][1])
    wanted = f"{words} {'are' if words.endswith('it') else 'is'} wanted"
    if value is None:
        return Problem(keys, f"it is empty, {wanted}", "give it a value, or remove the line")
    return Problem(keys, f"{show(value)} is {_kind(value)}, {wanted}", _mend_of_type(value, types, words))


def _kind(value: object) -> str:
    names: list[tuple[type, str]] = [
        (bool, "a truth value"),
        (int, "a number"),
        (float, "a number"),
        (str, "text"),
        (list, "a list"),
        (dict, "a group of keys"),
    ]
    return next((name for kind, name in names if isinstance(value, kind)), "something else")


def _mend_of_type(value: object, types: tuple[type, ...], words: str) -> str:
    if isinstance(value, str) and _is_one_of(_unquoted(value), types):
        return "write it without quotes"
    if isinstance(value, float) and value.is_integer() and int in types:
        return f"write {int(value)}"
    if str in types and not isinstance(value, list | dict):
        return f'write "{show(value)}", in quotes'
    if list in types and isinstance(value, str):
        return f"write [{value}]"
    return f"write {words}"


def _unquoted(text: str) -> object:
    try:
        return parse_yaml(text)
    except YamlError:
        return None


def _is_one_of(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _not_a_choice(keys: Place, value: object, expected: str) -> Problem:
    if value in SCHEDULES_WITHOUT_BASE_RATE:
        said = f"{value} has no base rate that a rollback could scale: it goes by the losses"
        return Problem(keys, said, f"choose {expected}")
    choices = [part for part in expected.split("'") if part.isidentifier()]
    near = difflib.get_close_matches(str(value), choices, n=1)
    return Problem(keys, f"{show(value)} is none of {expected}", f"write {near[0]}" if near else "choose one of these")


def _unknown_key(keys: Place) -> Problem:
    *parents, name = keys
    section = _section(tuple(parents))
    known = list(section.model_fields) if section else []
    near = difflib.get_close_matches(name, known, n=1)
    elsewhere = [".".join(place) for place in all_places() if place[-1] == name]
    if near:
        mend = f"did you mean {near[0]}?"
    elif elsewhere:
        mend = f"did you mean {' or '.join(elsewhere)}?"
    elif name in OWNED_FIELDS:
        mend = OWNED_FIELDS[name]
    elif parents == ["training"]:
        mend = "a field of transformers.TrainingArguments goes below training.extra"
    else:
        mend = f"known {'here' if parents else 'at the top'} are {', '.join(known)}"
    return Problem(keys, "there is no such key", mend)


def all_places() -> Iterator[Place]:
    """Every key that a configuration may have, sections included."""
    return _places(Config, ())


def _places(section: type[BaseModel], at: Place) -> Iterator[Place]:
    for name, field in section.model_fields.items():
        yield (*at, name)
        below = _section_of(field)
        if below:
            yield from _places(below, (*at, name))


def _section(place: Place) -> type[BaseModel] | None:
    """The model of the section at ``place``, None where the keys are free."""
    section: type[BaseModel] | None = Config
    for name in place:
        section = _section_of(section.model_fields[name]) if section and name in section.model_fields else None
    return section


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _length(keys: Place) -> int:
    """How many values a list of a fixed length takes."""
    section = _section(keys[:-1])
    assert section is not None
    kinds: list[Any] = [section.model_fields[keys[-1]].annotation]
    while get_origin(kinds[0]) is not tuple:
        kinds = [*kinds[1:], *get_args(kinds[0])]
    return len(get_args(kinds[0]))


def _on_one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
