"""The process that a cluster's daemons cannot outlive: `python -m slurm.local_cluster.keeper FOLDER [--detached]`.

It starts munged, slurmctld, the slurmds, and with accounting MariaDB and slurmdbd, as its children, is the subreaper of
all that they start (a step daemon leaves its slurmd, and a job its step), and kills the whole tree when told to by
SIGTERM, or when its standard input ends: the owner holds the other end of that pipe, so that the owner's death ends the
cluster, whatever killed it. The folder goes with a cluster that has an owner.

The owner may write `start NAME` and `signal NAME NUMBER`; the answer is `ok` or what was wrong.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slurm import processes
from slurm.local_cluster import accounting
from slurm.local_cluster.configuration import program

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.2
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Have the kernel kill the calling process when its parent dies; for a child, before it executes anything."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Keeper:
    """The daemons of one cluster, by name: munged, mariadbd, slurmdbd, slurmctld, n1, n2, ..."""

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
                env={
                    **os.environ,
                    "SLURM_CONF": str(self.folder / "slurm.conf"),
                    "MYSQL_UNIX_PORT": str(self.folder / accounting.SOCKET),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        self.pids[name] = daemon.pid
        daemon.returncode = 0  # We reap by ourselves, whatever it is; Popen need not care.

    def boot(self) -> None:
        """Start all of them, each when what it needs is there; the owner gives up where this takes long."""
        self.start("munged")
        self._wait_for(lambda: (self.folder / "munge.socket").exists())
        if (self.folder / "slurmdbd.conf").exists():
            self._boot_accounting()
        for name in ["slurmctld", *_node_names(self.folder)]:
            self.start(name)

    def _boot_accounting(self) -> None:
        accounting.make_database(self.folder)
        self.start("mariadbd")
        self._wait_for(lambda: (self.folder / accounting.SOCKET).exists())
        self.start("slurmdbd")
        self._wait_for(lambda: _listens(_accounting_port(self.folder)))
        if not self.told_to_end:
            accounting.admit_owner(self.folder)

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        while not self.told_to_end and not is_there():
            time.sleep(0.01)

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
    if name == "mariadbd":
        return accounting.database_argv(folder)
    if name in ("slurmctld", "slurmdbd"):
        return [program(name) or name, "-D"]
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
        keeper.boot()
        keeper.keep(detached)
    finally:
        _kill_all()
        if not detached:
            shutil.rmtree(folder, ignore_errors=True)


def _conf_words(folder: Path, key: str) -> list[str]:
    """The first value in each line of slurm.conf that begins with `key`."""
    lines = (folder / "slurm.conf").read_text(encoding="utf-8").splitlines()
    return [line.split()[0].removeprefix(f"{key}=") for line in lines if line.startswith(f"{key}=")]


def _node_names(folder: Path) -> list[str]:
    return _conf_words(folder, "NodeName")


def _accounting_port(folder: Path) -> int:
    return int(_conf_words(folder, "AccountingStoragePort")[0])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    main(sys.argv[1:])
