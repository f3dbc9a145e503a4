"""Which process is which on this machine, read from /proc.

A pid is used again some day, so a process is its pid, its start time in clock ticks and the boot that it belongs to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process of one boot of one machine."""

    pid: int
    started_ticks: int
    boot_id: str
    host: str


def identify(pid: int) -> Process:
    """The process that has this pid now. Raises ProcessLookupError if there is none."""
    fields = _stat(pid)
    if fields is None:
        raise ProcessLookupError(f"no process {pid}")
    return Process(pid, int(fields[19]), boot_id(), socket.gethostname())


def boot_id() -> str:
    """Which boot of which machine this is."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def is_alive(process: Process) -> bool:
    """Does exactly this process still run? A zombie does not."""
    fields = _stat(process.pid)
    return fields is not None and fields[0] not in "ZX" and int(fields[19]) == process.started_ticks


def session_members(leader: Process) -> list[int]:
    """Live pids of the leader's session, the leader among them; nothing of a later process with the same pid."""
    taken = _stat(leader.pid)
    if taken is not None and int(taken[19]) != leader.started_ticks:
        return []
    return [pid for pid, fields in _all() if fields[0] not in "ZX" and int(fields[3]) == leader.pid]


def signal_members(leader: Process, number: signal.Signals) -> None:
    """Signal every process of the job but its controller, as Slurm does with a step."""
    for pid in session_members(leader):
        if pid != leader.pid:
            signal_pid(pid, number)


def signal_process(process: Process, number: signal.Signals) -> None:
    """Signal this process if it still runs."""
    if is_alive(process):
        signal_pid(process.pid, number)


def signal_pid(pid: int, number: signal.Signals) -> None:
    """Signal a pid; one that is gone needs nothing."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on: [0] state, [1] parent, [3] session, [19] start time in ticks."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
    """Everything that the process has started, and what that has started; zombies too."""
    parents = {child: int(fields[1]) for child, fields in _all()}
    found: list[int] = []
    todo = [pid]
    while todo:
        parent = todo.pop()
        children = [child for child, its_parent in parents.items() if its_parent == parent]
        found += children
        todo += children
    return found


def _all() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdecimal() else None
        if fields:
            yield int(entry.name), fields
