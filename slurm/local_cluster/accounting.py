"""slurmdbd and its database: what has to be there before they start, and before Slurm counts on them."""

from __future__ import annotations

import getpass
import os
import subprocess
from pathlib import Path

from slurm.local_cluster.configuration import ACCOUNT, SYSTEM_TABLES, program

SOCKET = "database.socket"
_BEGIN = b"create database mysql;\nuse mysql;\n"


def make_database(folder: Path) -> None:
    """MariaDB's own tables, in the folder; they are all that its server needs, and take a fraction of a second."""
    argv = [*_server(folder), "--bootstrap"]
    tables = _BEGIN + SYSTEM_TABLES.read_bytes()
    with (folder / "log" / "bootstrap.out").open("wb") as log:
        subprocess.run(argv, input=tables, stdout=log, stderr=log, check=True)


def database_argv(folder: Path) -> list[str]:
    """The server, reached through a socket in the folder alone; who may enter the folder may do everything in it."""
    return [*_server(folder), f"--socket={folder / SOCKET}", f"--pid-file={folder}/database.pid", "--skip-networking"]


def _server(folder: Path) -> list[str]:
    small = ("--innodb-log-file-size=4M", "--innodb-buffer-pool-size=16M", "--innodb-lock-wait-timeout=900")
    # At its start a server removes what look like its temporary tables, others' too where they share a folder.
    places = (f"--datadir={folder}/database", f"--tmpdir={folder}")
    # Safe from a killed server, not from a killed machine: such a cluster does not outlive one either.
    options = ("--skip-grant-tables", *small, "--innodb-flush-log-at-trx-commit=0")
    server = program("mariadbd") or "mariadbd"
    return [server, "--no-defaults", *places, f"--user={getpass.getuser()}", *options]


def admit_owner(folder: Path) -> None:
    """Enter the cluster, an account and the owner into the database: with limits on, nobody else may submit."""
    user = getpass.getuser()
    for words in (
        ["cluster", "local"],
        ["account", ACCOUNT, "cluster=local"],
        ["user", user, f"account={ACCOUNT}", f"defaultaccount={ACCOUNT}", "adminlevel=admin"],
    ):
        _sacctmgr(folder, "add", *words)


def _sacctmgr(folder: Path, *words: str) -> None:
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with (folder / "log" / "sacctmgr.out").open("ab") as log:
        subprocess.run(["sacctmgr", "--immediate", *words], env=environment, stdout=log, stderr=log, check=True)
