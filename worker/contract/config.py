"""The configuration as a whole: its sections, its text, its file.

``supervisor.config`` adds ``extends``, ``--set``, cross-checks and messages; the worker reads only the resolved
config.yaml of its run, in which every default is written out.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from worker.contract.cluster_config import ClusterConfig, SupervisorConfig
from worker.contract.files import UnusableFileError, publish
from worker.contract.recipe_config import DataConfig, EmaConfig, ModelConfig, TrainingConfig
from worker.contract.recovery_config import CheckpointConfig, RecoveryConfig, SpikeConfig
from worker.contract.section import Section
from worker.contract.yaml_file import YamlError, format_yaml, read_yaml

HIDDEN = "***"
"""What stands in config.yaml for a value that only the run's owner may read."""
PRIVATE = "private.yaml"


class RunConfig(Section):
    """Which run this is."""

    name: str
    """Name of the run and of its folder: letters, digits, ``_``, ``.`` and ``-``."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of everything random in the worker; numpy takes no larger one."""
    dir: str = "runs"
    """Folder that holds the run folders; relative to where the command is given."""


def _target(value: Any) -> Any:
    """``{command: PROGRAM}``, as YAML reads it, becomes the text that it looks like."""
    is_command = isinstance(value, dict) and value.keys() == {"command"} and isinstance(value["command"], str)
    return f"command: {value['command']}" if is_command else value


Targets = Annotated[tuple[Annotated[str, BeforeValidator(_target)], ...], Field(strict=False)]


class Config(Section):
    """A run's whole configuration."""

    run: RunConfig
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    spike: SpikeConfig = SpikeConfig()
    ema: EmaConfig | None = EmaConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    cluster: ClusterConfig = ClusterConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    notify: Targets = ()
    """Who is told of rollbacks, hangs, long waits and the end: addresses of apprise, or ``command: PROGRAM``."""


class _Secrets(Section):
    """The file for its owner's eyes."""

    notify: Targets = ()
    environment: dict[str, str] = Field(default_factory=dict)


def format_config(config: Config) -> str:
    """The resolved config as YAML, every default written out."""
    return format_yaml(config.model_dump(mode="json"))


def config_digest(config: Config) -> str:
    """16 hex digits that name a resolved config."""
    return hashlib.sha256(format_config(config).encode()).hexdigest()[:16]


def without_secrets(config: Config) -> Config:
    """The configuration without what may hold a password: targets of ``notify``, and values of the environment."""
    cluster = config.cluster.model_copy(update={"environment": dict.fromkeys(config.cluster.environment, HIDDEN)})
    return config.model_copy(update={"cluster": cluster, "notify": tuple(HIDDEN for _ in config.notify)})


def write(path: Path, config: Config) -> None:
    """Publish a resolved config.yaml, and what of it may hold a password beside it, for its owner alone."""
    if config.notify or config.cluster.environment:
        secrets = {"notify": list(config.notify), "environment": config.cluster.environment}
        publish(path.with_name(PRIVATE), format_yaml(secrets), mode=0o600)
    publish(path, format_config(without_secrets(config)))


def read(path: Path) -> Config:
    """The resolved config of a run; UnusableFileError where it cannot be read.

    To whoever may not read its owner's file beside it, what may hold a password is ``***``.
    """
    try:
        return _with_secrets(Config.model_validate(read_yaml(path)), path.with_name(PRIVATE))
    except YamlError as error:
        raise UnusableFileError(path, str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnusableFileError(path, f"{where}: {first['msg']}") from None


def _with_secrets(config: Config, path: Path) -> Config:
    if HIDDEN not in (*config.notify, *config.cluster.environment.values()):
        return config
    try:
        secrets = _Secrets.model_validate(read_yaml(path))
    except (OSError, UnusableFileError, YamlError, ValidationError):
        return config
    environment = {
        name: secrets.environment.get(name, HIDDEN) if value == HIDDEN else value
        for name, value in config.cluster.environment.items()
    }
    places = (*secrets.notify, *(HIDDEN for _ in config.notify))
    notify = tuple(known if told == HIDDEN else told for told, known in zip(config.notify, places, strict=False))
    cluster = config.cluster.model_copy(update={"environment": environment})
    return config.model_copy(update={"cluster": cluster, "notify": notify})
