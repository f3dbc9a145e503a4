"""The process that a cluster's daemons cannot outlive: `python -m slurm.local_cluster.keeper FOLDER [--detached]`.

It starts munged, slurmctld and the slurmds as its children, is the subreaper of all that they start (a step daemon
leaves its slurmd, and a job its step), and kills the whole tree when it is told to by SIGTERM, or when its standard
input ends: the owner holds the other end of that pipe, so that the owner's death ends the cluster, whatever killed it.
The folder goes with a cluster that has an owner.

The owner may write `start NAME` and `signal NAME NUMBER`; the answer is `ok` or what was wrong.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from slurm import processes
from slurm.local_cluster.configuration import program

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.2
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill the calling process when its parent dies; for a child, before it executes anything."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Keeper:
    """The daemons of one cluster, by name: munged, slurmctld, n1, n2, ..."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids: dict[str, int] = {}
        self.told_to_end = False

    def note_end(self, *_: object) -> None:
        """A signal handler."""
        self.told_to_end = True

    def start(self, name: str) -> None:
        """Start a daemon, with its output in log/."""
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            daemon = subprocess.Popen(
                _argv(self.folder, name),
                env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        self.pids[name] = daemon.pid
        daemon.returncode = 0  # We reap by ourselves, whatever it is; Popen need not care.

    def obey(self, command: str) -> str:
        """Carry out one line of the owner's."""
        verb, name, *rest = command.split()
        try:
            if verb == "start":
                self.start(name)
            else:
                os.kill(self.pids[name], int(rest[0]))
        except (OSError, KeyError) as error:
            return repr(error)
        return "ok"

    def keep(self, detached: bool) -> None:
        """Until told to end, or until the owner is gone."""
        pending = b""
        while not self.told_to_end:
            _reap()
            readable, _, _ = select.select([] if detached else [0], [], [], _LOOK_S)
            if not readable:
                continue
            received = os.read(0, 4096)
            if not received:
                return
            *commands, pending = (pending + received).split(b"\n")
            for command in commands:
                os.write(1, f"{self.obey(command.decode())}\n".encode())


def _argv(folder: Path, name: str) -> list[str]:
    if name == "munged":
        files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        options = [f"--{option}={folder / file}" for option, file in files.items()]
        # Forced: it minds that a folder above it, such as /tmp, is writable for others.
        return [
            program("munged") or "munged",
            "--foreground",
            "--force",
            *options,
            f"--log-file={folder}/log/munged.log",
        ]
    if name == "slurmctld":
        return [program("slurmctld") or "slurmctld", "-D"]
    return [program("slurmd") or "slurmd", "-D", "-N", name]


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


def _kill_all() -> None:
    """Kill everything below us, and again what it has started meanwhile, until there is nothing."""
    while below := processes.descendants(os.getpid()):
        for pid in below:
            processes.signal_pid(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.01)


def main(argv: list[str]) -> None:
    """Start the daemons of the folder, keep them, and end them."""
    folder, detached = Path(argv[0]), "--detached" in argv
    keeper = Keeper(folder)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, keeper.note_end)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        keeper.start("munged")
        while not keeper.told_to_end and not (folder / "munge.socket").exists():
            time.sleep(0.01)  # slurmctld gives up where there is no munged; the owner gives up where this takes long.
        for name in ["slurmctld", *_node_names(folder)]:
            keeper.start(name)
        keeper.keep(detached)
    finally:
        _kill_all()
        if not detached:
            shutil.rmtree(folder, ignore_errors=True)


def _node_names(folder: Path) -> list[str]:
    lines = (folder / "slurm.conf").read_text(encoding="utf-8").splitlines()
    return [line.split()[0].removeprefix("NodeName=") for line in lines if line.startswith("NodeName=")]


if __name__ == "__main__":
    main(sys.argv[1:])
