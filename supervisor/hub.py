"""What a run needs of the hub, fetched on this machine for nodes that have no way out."""

import os
import subprocess
import sys

from slurm.commands import python_environment
from supervisor.runs import RunError
from worker.contract.config import Config, format_config


def fetch_from_hub(config: Config) -> None:
    """Fetch what ``config`` names into the cache of the hub's library; RunError with what is not to be had."""
    argv = [sys.executable, "-m", "worker.fetch"]
    environment = python_environment(dict(os.environ))
    done = subprocess.run(
        argv, input=format_config(config), stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RunError(f"cluster.offline: {said[0]}; nothing was made")
