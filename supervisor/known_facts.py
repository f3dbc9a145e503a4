"""What is known of a run's model, data and machine before it begins, asked of files and of ``worker.check``."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from slurm.commands import python_environment
from supervisor.devices import device_here, device_of
from supervisor.memory import bits_of_base, num_parameters
from supervisor.recipe_facts import Facts
from worker.contract.check_report import CheckReport, Found
from worker.contract.config import Config, format_config

_LOOK_S: Final = 600.0
"""Minutes at most: the program stops reading by itself long before."""
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)
_UNITS: Final = {"K": 2**10, "": 2**20, "M": 2**20, "G": 2**30, "T": 2**40}


def look_closer(config: Config) -> CheckReport:
    """What a program with torch says of model and data; that it could not be asked, where it could not."""
    argv = [sys.executable, "-m", "worker.check"]
    environment = python_environment({"OMP_NUM_THREADS": "1", **os.environ})
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


def known_facts(config: Config, report: CheckReport, *, is_local: bool) -> Facts:
    """The facts about ``config``, with what ``report`` says of model and data.

    ``is_local``: the run would be on this machine, so that its memory and GPUs count. A configuration that wants GPUs
    where there are none is meant for another machine: then not even the disk is its own.
    """
    gpu_here = device_here() if is_local else None
    is_elsewhere = is_local and config.cluster.gpus > 0 and gpu_here is None
    parameters = report.model.parameters if report.model else num_parameters(config)
    trained = report.model.trained if report.model else parameters if config.model.lora is None else None
    return Facts(
        config=config,
        parameters=parameters,
        trained=trained,
        base_bits=bits_of_base(config),
        samples=report.data.train.samples if report.data.train else None,
        activations=report.model.activations if report.model else None,
        device=device_of(config.cluster) or gpu_here,
        main_memory=memory_of(config.cluster.mem) or (_memory_here() if is_local and not is_elsewhere else None),
        free_disk=None if is_elsewhere else _free(Path(config.run.dir)),
    )


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
            return shutil.disk_usage(place).free
        except OSError:
            continue
    return None
