"""What is known of a run's model, data and machine before it begins, asked of files and of ``worker.check``."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from slurm.commands import python_environment
from slurm.hardware import Hardware
from slurm.scheduler import LocalScheduler, Scheduler, SchedulerError
from supervisor.devices import Device, device_here, device_in, device_of
from supervisor.memory import bits_of_base, num_parameters
from supervisor.recipe_facts import Facts
from worker.contract.check_report import CheckReport, Found
from worker.contract.config import Config, format_config

_NOBODY_IS_ASKED: Final = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_LOOK_S: Final = 600.0
"""Minutes at most: the program stops reading by itself long before."""
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_UNITS: Final = {"K": 2**10, "": 2**20, "M": 2**20, "G": 2**30, "T": 2**40}


def look_closer(config: Config) -> CheckReport:
    """What a program with torch says of model and data; that it could not be asked, where it could not."""
    argv = [sys.executable, "-m", "worker.check"]
    environment = python_environment({"OMP_NUM_THREADS": "1", **os.environ, **_NOBODY_IS_ASKED})
    try:
        done = subprocess.run(
            argv, input=format_config(config), capture_output=True, text=True, env=environment, timeout=_LOOK_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return _not_looked(str(error))
    try:
        return CheckReport.model_validate_json(done.stdout.splitlines()[-1] if done.stdout else "")
    except ValidationError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return _not_looked(last[0])


def _not_looked(why: str) -> CheckReport:
    message = f"model and data: the program that looks at them ended: {why:.300}"
    return CheckReport(found=(Found(level="not checked", key="data.train", message=message),))


def known_facts(config: Config, report: CheckReport, scheduler: Scheduler) -> Facts:
    """The facts about ``config``, with what ``report`` says of model and data, and ``scheduler`` of its nodes."""
    is_local = isinstance(scheduler, LocalScheduler)
    is_elsewhere = is_local and is_for_another_machine(config)
    kinds = _kinds_of_nodes(config, scheduler)
    parameters = report.model.parameters if report.model else num_parameters(config)
    trained = report.model.trained if report.model else parameters if config.model.lora is None else None
    return Facts(
        config=config,
        parameters=parameters,
        trained=trained,
        base_bits=bits_of_base(config),
        samples=report.data.train.samples if report.data.train else None,
        activations=report.model.activations if report.model else None,
        device=device_of(config.cluster) or (device_here() if is_local else _the_only(kinds)),
        main_memory=memory_of(config.cluster.mem) or (None if is_elsewhere else _memory(is_local, kinds)),
        free_disk=None if is_elsewhere else _free(Path(config.run.dir)),
        features=frozenset.intersection(*(kind.features for kind in kinds)) if kinds else frozenset(),
    )


def is_for_another_machine(config: Config) -> bool:
    """Whether a run without Slurm could only be meant for a machine that is not this one."""
    return config.cluster.kind == "auto" and (
        config.cluster.nodes > 1 or (config.cluster.gpus > 0 and not device_here())
    )


def _kinds_of_nodes(config: Config, scheduler: Scheduler) -> list[Hardware]:
    """The kinds of nodes that the job may get, as far as partition, constraint and GPUs say."""
    try:
        kinds = scheduler.hardware(config.cluster.partition)
    except SchedulerError:
        return []
    wanted = config.cluster.constraint.lower() if config.cluster.constraint else None
    return [
        kind for kind in kinds
        if (not config.cluster.gpus or "gpu" in kind.gres) and (wanted is None or wanted in kind.features)
    ]  # fmt: skip


def _the_only(kinds: Sequence[Hardware]) -> Device | None:
    """The GPU of nodes that all have the same; sites name it among the resources, or the features."""
    found = {device_in(" ".join([kind.gres, *sorted(kind.features)])) for kind in kinds}
    return found.pop() if len(found) == 1 else None


def _memory(is_local: bool, kinds: Sequence[Hardware]) -> int | None:
    """Bytes of a node: this one, or the smallest that the job may get.

    None where nobody told Slurm, which then has a node of one megabyte.
    """
    if is_local:
        return _memory_here()
    known = [kind.memory_bytes for kind in kinds if kind.memory_bytes is not None and kind.memory_bytes > 2**20]
    return min(known, default=None)


def memory_of(text: str | None) -> int | None:
    """Bytes of Slurm's ``--mem``; None for all of a node's (0), for what is open, and for what is none."""
    found = _MEMORY.fullmatch(text or "")
    return int(found[1]) * _UNITS[found[2].upper()] or None if found else None


def _memory_here() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _free(folder: Path) -> int | None:
    """Bytes that are free where ``folder`` is, or would be made."""
    for place in (folder, *folder.absolute().parents):
        try:
            usage = shutil.disk_usage(place)
        except OSError:
            continue
        return usage.free if usage.total else None  # /proc and its like are no disks
    return None
