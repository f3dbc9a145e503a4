"""The slurm.conf of a cluster on one machine, and what is needed to boot it."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "srun": "slurm-client",
}
"""Programs that a cluster needs, and the Debian packages that they come in."""
ACCOUNTING_PACKAGES = {
    "slurmdbd": "slurmdbd",
    "mariadbd": "mariadb-server-core",
    "sacct": "slurm-client",
    "sacctmgr": "slurm-client",
}
"""What accounting needs beside them. Of MariaDB the server alone: no client, no service, no database of the system."""
SYSTEM_TABLES = Path("/usr/share/mysql/mysql_system_tables.sql")
ACCOUNT = "lab"
"""The account that the cluster's owner has."""
CPUS_PER_NODE = 2
MAX_FOLDER = 107 - len("/n100/n100_4294967295.4294967291")
"""A step daemon's socket is <node>/<node>_<job>.<step> below it, and a socket's name has 107 letters at most."""


@dataclass(frozen=True)
class Layout:
    """A cluster's folder, and the ports of its daemons."""

    folder: Path
    node_names: tuple[str, ...]
    ports: tuple[int, ...]
    """The controller's, then one per node, then slurmdbd's."""
    accounting: bool = False
    """Whether slurmdbd keeps the jobs, and limits of accounts and QOS hold."""

    @property
    def conf(self) -> Path:
        """What SLURM_CONF must name."""
        return self.folder / "slurm.conf"


def program(name: str) -> str | None:
    """Full path of a daemon; they live in /usr/sbin, which is not on everybody's PATH."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def missing_packages(accounting: bool = False) -> list[str]:
    """Debian packages that are not installed here and are needed."""
    needed = PACKAGES | (ACCOUNTING_PACKAGES if accounting else {})
    return sorted({package for name, package in needed.items() if program(name) is None})


def unfit(folder: Path) -> str | None:
    """Why a cluster cannot live in this folder, or None."""
    if not re.fullmatch(r"/[A-Za-z0-9_./-]+", str(folder)):
        return "slurm.conf cannot carry its name; use letters, digits, '_', '.' and '-'"
    if len(str(folder)) > MAX_FOLDER:
        return f"its name has more than {MAX_FOLDER} letters, and Slurm makes sockets below it"
    return None


def plan(folder: Path, nodes: int, accounting: bool = False) -> Layout:
    """A layout on ports that are free now."""
    return Layout(folder, tuple(f"n{number}" for number in range(1, nodes + 1)), _free_ports(nodes + 2), accounting)


def _free_ports(count: int) -> tuple[int, ...]:
    """Different ports: all are held until the last one is found."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return tuple(one.getsockname()[1] for one in sockets)


def write(layout: Layout) -> None:
    """Make the folder with its configuration and its own munge key."""
    for name in ("state", "log", *layout.node_names):
        (layout.folder / name).mkdir(parents=True)
    layout.folder.chmod(0o700)
    key = layout.folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    layout.conf.write_text(slurm_conf(layout, os.getuid(), socket.gethostname(), name_is_loopback()), encoding="utf-8")
    if layout.accounting:
        (layout.folder / "database").mkdir()
        conf = layout.folder / "slurmdbd.conf"
        conf.touch(mode=0o600)  # slurmdbd refuses one that others may read
        conf.write_text(slurmdbd_conf(layout, getpass.getuser(), name_is_loopback()), encoding="utf-8")


def name_is_loopback() -> bool:
    """Does this machine's name stand for 127.0.0.1?

    Slurm's daemons listen either everywhere or where the machine's name points to. Only 127.0.0.1 is also the address
    that a connection over loopback comes from, so with 127.0.1.1 srun would wait for its tasks in vain.
    """
    try:
        return socket.gethostbyname(socket.gethostname()) == "127.0.0.1"
    except OSError:
        return False


def slurm_conf(layout: Layout, user_id: int, host: str, loopback: bool) -> str:
    """The text of slurm.conf: quick to notice a dead node, slow to forget a job, preempting `low` for `high`."""
    folder, names = layout.folder, layout.node_names
    # Without it the daemons listen everywhere, where munge's key, which is in the folder alone, keeps others out.
    listen = "CommunicationParameters=NoCtldInAddrAny,NoInAddrAny" if loopback else ""
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} State=UNKNOWN"
        for name, port in zip(names, layout.ports[1:-1], strict=True)
    )
    accounting = "AccountingStorageType=accounting_storage/none"
    if layout.accounting:
        accounting = f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={layout.ports[-1]}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,limits,qos"""
    every = ",".join(names)
    return f"""\
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={layout.ports[0]}
{listen}
SlurmUser={user_id}
SlurmdUser={user_id}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/%n.log
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
{accounting}
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
SlurmdTimeout=10
SlurmctldTimeout=30
ReturnToService=2
MinJobAge=3600
{nodes}
PartitionName=low Nodes={every} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=10 MaxTime=INFINITE State=UP
PartitionName=high Nodes={every} PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def slurmdbd_conf(layout: Layout, user: str, loopback: bool) -> str:
    """The text of slurmdbd.conf. The database is reached through a socket in the folder, and listens nowhere else."""
    folder = layout.folder
    listen = "CommunicationParameters=NoInAddrAnyDBD" if loopback else ""
    return f"""\
{listen}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={layout.ports[-1]}
SlurmUser={user}
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageLoc=slurm
"""
