"""A run's configuration from its file: what it extends, what ``--set`` changes, and what is wrong with it."""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import supervisor
from supervisor.config_findings import ConfigError, Finding, Place, Problem, problems_of, show
from supervisor.config_paths import located, missing_paths
from supervisor.config_rules import contradictions
from worker.contract.config import Config, RunConfig, Targets
from worker.contract.recovery_config import SpikeConfig
from worker.contract.section import Section
from worker.contract.yaml_file import YamlError, parse_yaml, read_yaml

__all__ = ["ConfigError", "Finding", "load_config", "shipped_configs"]

OVERRIDE = "--set"
_EXTENDS = "extends"


def load_config(path: Path, overrides: Sequence[str] = (), else_max_steps: int | None = None) -> Config:
    """The resolved configuration of ``path`` with ``KEY=VALUE`` overrides; its paths are absolute and exist.

    ``else_max_steps``: the number of steps where neither steps nor epochs are given.
    A name alone that is not here is looked for among the shipped ones: ``demo.yaml`` works without a checkout.
    ConfigError, with everything that was found wrong, where there is no such configuration.
    """
    merged = _merged(path, overrides)
    try:
        config = Config.model_validate(merged.values)
    except ValidationError as error:
        raise merged.error(problems_of(error, merged.values)) from None
    if config.training.max_steps is None and config.training.epochs is None:
        training = config.training.model_copy(update={"max_steps": else_max_steps})
        config = config.model_copy(update={"training": training})
    problems = [*contradictions(config), *missing_paths(config)]
    if problems:
        raise merged.error(problems)
    return located(config)


def writer_of_keys(path: Path, overrides: Sequence[str] = ()) -> Callable[[str], str]:
    """Says who wrote a dotted key, or the section that it is in: a file or ``--set``; ``path`` where nobody did."""
    merged = _merged(path, overrides)
    return lambda key: merged.writer(tuple(key.split(".")))


def _merged(path: Path, overrides: Sequence[str]) -> "_Merged":
    shipped = shipped_configs() / path
    path = shipped if path.name == str(path) and not path.exists() and shipped.is_file() else path
    merged = _Merged(str(path))
    for file, values in _layers(path, ()).values():
        merged.add(values, str(file))
    for override in overrides:
        merged.override(*_parse_override(override))
    return merged


def load_spike(overrides: Sequence[str] = ()) -> SpikeConfig:
    """The settings of ``spike:`` with ``spike.KEY=VALUE`` overrides; ConfigError where they cannot be used."""
    merged = _Merged(OVERRIDE)
    for place, value in map(_parse_override, overrides):
        if place[0] != "spike" or len(place) == 1:
            raise ConfigError(
                Finding(OVERRIDE, ".".join(place), "is no setting of the detector", "set spike.KEY=VALUE")
            )
        merged.override(place, value)
    try:
        return _SpikeAlone.model_validate(merged.values).spike
    except ValidationError as error:
        raise merged.error(problems_of(error, merged.values)) from None


class Told(Section):
    """A configuration of which only is wanted who is told, and of which run."""

    run: RunConfig
    notify: Targets = ()


def load_targets(path: Path) -> Told:
    """Who is told by the configuration of ``path``; nothing else in it is looked at. ConfigError as ``load_config``."""
    merged = _Merged(str(path))
    for file, values in _layers(path, ()).values():
        merged.add({key: values[key] for key in Told.model_fields if key in values}, str(file))
    try:
        return Told.model_validate(merged.values)
    except ValidationError as error:
        raise merged.error(problems_of(error, merged.values)) from None


class _SpikeAlone(Section):
    """A configuration of which only the detector is wanted."""

    spike: SpikeConfig = SpikeConfig()


def shipped_configs() -> Path:
    """The folder of the configurations that come with the package, in a checkout or installed."""
    package = Path(supervisor.__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


@dataclass
class _Merged:
    """Values laid over each other, and who wrote each key."""

    main: str
    """The file that was asked for."""
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Place, str] = field(default_factory=dict)

    def add(self, values: Mapping[str, Any], origin: str) -> None:
        """Lay ``values`` over what is there: groups of keys are joined, everything else is replaced."""
        self._join(self.values, values, origin, ())

    def _join(self, below: dict[str, Any], above: Mapping[str, Any], origin: str, at: Place) -> None:
        for key, value in above.items():
            place = (*at, key)
            if not isinstance(value, dict):
                below[key], self.origins[place] = value, origin
                continue
            if not isinstance(below.get(key), dict):
                below[key], self.origins[place] = {}, origin
            self._join(below[key], value, origin, place)

    def override(self, place: Place, value: object) -> None:
        """Set one key, whatever stood there."""
        here = self.values
        for number, name in enumerate(place[:-1], 1):
            if not isinstance(here.get(name), dict):
                here[name], self.origins[place[:number]] = {}, OVERRIDE
            here = here[name]
        here[place[-1]] = value
        self.origins = {key: by for key, by in self.origins.items() if key[: len(place)] != place}
        self.origins[place] = OVERRIDE

    def error(self, problems: Sequence[Problem]) -> ConfigError:
        """``problems`` with the file that each was written in."""
        return ConfigError(
            *(Finding(self._origin(one), ".".join(one.place), one.message, one.mend) for one in problems)
        )

    def _origin(self, problem: Problem) -> str:
        return self.main if problem.is_missing else self.writer(problem.place)

    def writer(self, place: Place) -> str:
        """Who wrote the key at ``place``, or the nearest section that it is in; the main file where nobody did."""
        ways = (place[:length] for length in range(len(place), 0, -1))
        return next((self.origins[way] for way in ways if way in self.origins), self.main)


def _layers(path: Path, trail: tuple[Path, ...]) -> dict[Path, tuple[Path, dict[str, Any]]]:
    """The files that ``path`` builds on, each once and before what builds on it, and ``path`` last."""
    values = _read(path)
    layers: dict[Path, tuple[Path, dict[str, Any]]] = {}
    here = (*trail, path.resolve())
    for name in _names(path, values.pop(_EXTENDS, [])):
        base = _find(path, name)
        if base.resolve() in here:
            raise _unusable(path, _EXTENDS, f"{name!r} extends this file in turn", "break the circle")
        for identity, layer in _layers(base, here).items():
            layers.setdefault(identity, layer)
    return {**layers, here[-1]: (path, values)}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = read_yaml(path)
    except YamlError as error:
        raise _unusable(path, "", str(error), _mend_of_yaml(str(error))) from None
    if values is None:
        raise _unusable(path, "", "it is empty", f"begin with extends: base.yaml; examples are in {shipped_configs()}")
    if not isinstance(values, dict):
        raise _unusable(path, "", f"it holds {show(values)} instead of keys", "write run:, model:, data: and training:")
    return values


def _mend_of_yaml(said: str) -> str:
    if "cannot be read" in said:
        return "check the path and its permissions"
    return "indent with spaces" if r"'\t'" in said else "correct that line" if "line " in said else "save it as UTF-8"


def _names(path: Path, extends: object) -> list[str]:
    names = [extends] if isinstance(extends, str) else extends
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise _unusable(path, _EXTENDS, f"{show(extends)} names no file", "write a name, or a list of names")
    return names


def _find(path: Path, name: str) -> Path:
    for folder in (path.parent, shipped_configs()):
        found = folder / os.path.expanduser(name)  # noqa: PTH111 (pathlib raises at an unknown user)
        if found.is_file():
            return found
    there = sorted({one.name for folder in (path.parent, shipped_configs()) for one in folder.glob("*.yaml")})
    near = difflib.get_close_matches(name, there, n=1)
    mend = f"did you mean {near[0]}?" if near else f"there are: {', '.join(there)}"
    raise _unusable(path, _EXTENDS, f"{name!r} is neither beside this file nor among the shipped ones", mend)


def _unusable(path: Path, key: str, message: str, mend: str) -> ConfigError:
    return ConfigError(Finding(str(path), key, message, mend))


def _parse_override(text: str) -> tuple[Place, Any]:
    key, equals, value = text.partition("=")
    place = tuple(key.strip().split("."))
    if not equals or not all(place):
        raise ConfigError(Finding(OVERRIDE, "", f"{text!r} sets no key", "write it as a.b.c=VALUE"))
    try:
        return place, parse_yaml(value)
    except YamlError as error:
        raise ConfigError(Finding(OVERRIDE, key, str(error), "put the value in quotes")) from None
