"""`python -m slurm.local_cluster up|down|run`: a real Slurm in a folder.

`up [--nodes 3] [--accounting] [--folder DIR]`, `down [--folder DIR]`, `run [--nodes 3] [--accounting] -- COMMAND`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from slurm.local_cluster import cluster
from slurm.local_cluster.keeper import die_with_parent


class _Interrupted(Exception):
    """A signal came, whose number is the argument."""


def main(argv: list[str]) -> int:
    """The exit code: that of COMMAND, 0, or 1 with one line of what is wrong."""
    arguments = _parser().parse_args(argv)
    verb: Callable[[argparse.Namespace], int] = arguments.verb
    try:
        return verb(arguments)
    except cluster.ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    except _Interrupted as signal_number:
        return 128 + int(signal_number.args[0])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m slurm.local_cluster", description="A real Slurm in a folder.")
    verbs = parser.add_subparsers(required=True)
    default = Path(tempfile.gettempdir()) / f"higgsfield-slurm-{os.getuid()}"
    for name, verb in (("up", _up), ("down", _down), ("run", _run)):
        options = verbs.add_parser(name, help=(verb.__doc__ or "").splitlines()[0])
        options.set_defaults(verb=verb)
        if name != "down":
            options.add_argument("--nodes", type=int, default=3)
            accounting = "with slurmdbd and its database: sacct, limits, QOS"
            options.add_argument("--accounting", action="store_true", help=accounting)
        if name != "run":
            options.add_argument("--folder", type=Path, default=default)
    options.add_argument("command", nargs="+", metavar="COMMAND")
    return parser


def _up(arguments: argparse.Namespace) -> int:
    """Start a cluster that stays until `down`."""
    print(f"export SLURM_CONF={cluster.up(arguments.folder.absolute(), arguments.nodes, arguments.accounting)}")
    return 0


def _down(arguments: argparse.Namespace) -> int:
    """End the cluster of `up`, with every job in it."""
    cluster.down(arguments.folder.absolute())
    return 0


def _run(arguments: argparse.Namespace) -> int:
    """Run COMMAND with a cluster that lives as long as it does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    with cluster.running(arguments.nodes, arguments.accounting) as started:
        command = subprocess.Popen(arguments.command, env=started.environment, preexec_fn=die_with_parent)
        try:
            code = command.wait()
        except _Interrupted:
            command.terminate()
            raise
        return code if code >= 0 else 128 - code


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)  # Once is enough, and tearing down must not be interrupted.
    raise _Interrupted(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
