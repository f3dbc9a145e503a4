"""What has to stand above a table, or nobody can read it."""

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version


def heading(script: str) -> list[str]:
    """The command, the date, the load average, the versions and the machine."""
    having = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "accelerate"))
    return [
        f"command    python -m benchmarks.{script} {shlex.join(sys.argv[1:])}".rstrip(),
        f"date       {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load average {os.getloadavg()[0]:.1f}",
        f"versions   Python {platform.python_version()}, {having}",
        f"machine    {platform.machine()}, {os.cpu_count()} cores",
    ]


def met(is_met: bool) -> str:
    """The last word of a row that has a wanted figure."""
    return "met" if is_met else "NOT met"
