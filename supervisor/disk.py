"""The disk that a run lies on: how often to look there, and how to be told what is, not what was a minute ago."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

LOCAL_PASS_S: Final = 0.25
REMOTE_PASS_S: Final = 2.0
_NETWORK_FILESYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "fuse.ceph", "fuse.sshfs", "9p", "afs"}
    | {"pvfs2", "orangefs", "wekafs", "panfs"}
)
_MOUNTS: Final = Path("/proc/self/mountinfo")


def seconds_between_passes(folder: Path, mounts: Path = _MOUNTS) -> float:
    """How often to look at a run's files: 0.25 s on a local disk, 2 s on one that other hosts share."""
    return REMOTE_PASS_S if _is_shared(folder, mounts) else LOCAL_PASS_S


def stat_for(folder: Path, mounts: Path = _MOUNTS) -> Callable[[Path], os.stat_result]:
    """What tells a file's attributes there as they are; OSError where there is none."""
    return stat_anew if _is_shared(folder, mounts) else Path.stat


def stat_anew(path: Path) -> os.stat_result:
    """A file's attributes as its server has them: those that NFS keeps may be a minute old, unless it is opened.

    Nothing is read, and a pipe is not waited for.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _is_shared(folder: Path, mounts: Path) -> bool:
    return _filesystem(folder, mounts) in _NETWORK_FILESYSTEMS


def _filesystem(folder: Path, mounts: Path) -> str:
    """The type of the file system that ``folder`` lies on; empty where that cannot be known."""
    best, kind, folder = "", "", folder.resolve()
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape")
        if len(point) >= len(best) and folder.is_relative_to(point):
            best, kind = point, fields[fields.index("-") + 1]
    return kind
