"""A real Slurm of several nodes on one machine, in a folder, without root: for a person who tries, and for tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from slurm import commands, processes
from slurm.commands import SchedulerError
from slurm.local_cluster import configuration

BOOT_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0


class ClusterError(RuntimeError):
    """The cluster cannot be had; the message is one line."""


@dataclass(frozen=True)
class Cluster:
    """A running cluster. The faults below are real ones: what happens next is Slurm's doing.

    Settings that matter to a test: two CPUs a node, partitions `low` (default, preempted by requeue after 10 s of
    grace) and `high`, KillWait 5 s, a silent node is down after 10 s and comes back by itself, ended jobs stay known.
    """

    folder: Path
    nodes: tuple[str, ...]
    keeper: subprocess.Popen[bytes]
    said: BinaryIO
    """What the keeper printed; readable also when the folder is gone."""
    has_accounting: bool = False
    """slurmdbd keeps its jobs, and limits of accounts and QOS hold; the owner may change them with sacctmgr."""

    @property
    def conf(self) -> Path:
        """What SLURM_CONF has to be."""
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """A clean environment in which Slurm's programs talk to this cluster."""
        return {**commands.clean_environment(os.environ), "SLURM_CONF": str(self.conf)}

    def ask(self, *argv: str, timeout_s: float = 60.0) -> str:
        """What one of Slurm's programs prints about this cluster."""
        return commands.call(argv, self.environment, timeout_s=timeout_s)[0]

    def node_states(self) -> dict[str, str]:
        """`idle`, `allocated`, `down*` and the like, of each node."""
        return dict(line.split() for line in self.ask("sinfo", "-h", "-N", "-p", "low", "-o", "%N %T").splitlines())

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL a node's daemon; what it has started lives on, as on a node that the network lost."""
        self._tell(f"signal {node} {signal.SIGKILL.value}")

    def start_slurmd(self, node: str) -> None:
        """Start a node's daemon again."""
        self._tell(f"start {node}")

    def kill_controller(self) -> None:
        """SIGKILL slurmctld."""
        self._tell(f"signal slurmctld {signal.SIGKILL.value}")

    def start_controller(self) -> None:
        """Start slurmctld again; it knows its jobs."""
        self._tell("start slurmctld")

    def kill_accounting(self) -> None:
        """SIGKILL slurmdbd; jobs go on without it."""
        self._tell(f"signal slurmdbd {signal.SIGKILL.value}")

    def start_accounting(self) -> None:
        """Start slurmdbd again; the controller tells it what it has missed."""
        self._tell("start slurmdbd")

    def stop(self, daemon: str) -> None:
        """Freeze `slurmctld`, `slurmdbd` or a node's daemon."""
        self._tell(f"signal {daemon} {signal.SIGSTOP.value}")

    def cont(self, daemon: str) -> None:
        """Thaw it."""
        self._tell(f"signal {daemon} {signal.SIGCONT.value}")

    def _tell(self, command: str) -> None:
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        self.keeper.stdin.write(f"{command}\n".encode())
        self.keeper.stdin.flush()
        answer = self.keeper.stdout.readline().decode().strip()
        if answer != "ok":
            raise ClusterError(f"{command}: {answer or 'the keeper is gone'}")

    def wait_until_idle(self, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Until every node has nothing to do; raises ClusterError with the daemons' last words."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with suppress(SchedulerError, ValueError):
                if set(self.node_states().values()) == {"idle"}:
                    return
            if self.keeper.poll() is not None:
                break
            time.sleep(0.2)
        raise ClusterError(
            f"the cluster in {self.folder} has no idle nodes after {timeout_s:g} s: {self._last_words()}"
        )

    def _last_words(self) -> str:
        logs = sorted(log for log in self.folder.glob("log/*") if log.name != "keeper.out")
        self.said.seek(0)
        texts = [self.said.read().decode(errors="replace"), *(log.read_text(errors="replace") for log in logs)]
        return "; ".join(text.strip().splitlines()[-1] for text in texts if text.strip())


@contextmanager
def running(nodes: int = 3, accounting: bool = False) -> Iterator[Cluster]:
    """A cluster for as long as the block lasts, and never longer than this process; its folder goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="higgsfield-slurm-"))
    try:
        cluster = _boot(folder, nodes, accounting, detached=False)
    except ClusterError:
        folder.rmdir()
        raise
    try:
        cluster.wait_until_idle()
        yield cluster
    finally:
        _end(cluster)


def up(folder: Path, nodes: int = 3, accounting: bool = False) -> Path:
    """Start a cluster that stays until `down`; the answer is its slurm.conf."""
    if folder.exists() and any(folder.iterdir()):
        raise ClusterError(f"{folder} is not empty; is a cluster up in it? `down` ends it")
    cluster = _boot(folder, nodes, accounting, detached=True)
    identity = asdict(processes.identify(cluster.keeper.pid))
    (folder / "keeper.json").write_text(json.dumps(identity), encoding="utf-8")
    try:
        cluster.wait_until_idle()
    except ClusterError:
        _end(cluster)
        raise
    cluster.keeper.returncode = 0  # It outlives us: Popen need not wait for it.
    cluster.said.close()
    return cluster.conf


def down(folder: Path) -> None:
    """End the cluster of `up`, with every job in it, and remove its folder."""
    try:
        keeper = processes.Process(**json.loads((folder / "keeper.json").read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ClusterError(f"no cluster is up in {folder}") from None
    processes.signal_process(keeper, signal.SIGTERM)
    until = time.monotonic() + END_TIMEOUT_S
    while processes.is_alive(keeper):
        if time.monotonic() > until:
            raise ClusterError(f"the cluster in {folder} does not end; its keeper is process {keeper.pid}")
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


def _boot(folder: Path, nodes: int, accounting: bool, detached: bool) -> Cluster:
    missing = configuration.missing_packages(accounting)
    if missing:
        raise ClusterError(f"a local Slurm needs Debian packages that are not installed: {' '.join(missing)}")
    unfit = configuration.unfit(folder)
    if unfit:
        raise ClusterError(f"no cluster in {str(folder)!r}: {unfit}")
    layout = configuration.plan(folder, nodes, accounting)
    configuration.write(layout)
    argv = [sys.executable, "-m", "slurm.local_cluster.keeper", str(folder), *(["--detached"] if detached else [])]
    environment = commands.python_environment(commands.clean_environment(os.environ))
    pipe = subprocess.DEVNULL if detached else subprocess.PIPE
    log = (folder / "log" / "keeper.out").open("a+b")
    # A session of its own: a Ctrl-C in the terminal is the owner's business.
    keeper = subprocess.Popen(argv, env=environment, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True)
    return Cluster(folder, layout.node_names, keeper, log, accounting)


def _end(cluster: Cluster) -> None:
    cluster.said.close()
    cluster.keeper.terminate()
    cluster.keeper.communicate(timeout=END_TIMEOUT_S)
