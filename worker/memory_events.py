"""What the kernel counted: processes that it killed because the memory of our control group ran out."""

import re
from pathlib import Path

_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_CGROUPS = Path("/sys/fs/cgroup")


def parse_kills(text: str) -> int | None:
    """The count in memory.events (cgroup v2) or memory.oom_control (v1); None where there is none."""
    found = _KILLS.search(text)
    return int(found[1]) if found else None


def events_file(cgroup: str, root: Path = _CGROUPS) -> Path | None:
    """Where the kills of a process's group are counted; ``cgroup`` is the text of its /proc/PID/cgroup."""
    groups = {names: path for _, names, path in (line.split(":", 2) for line in cgroup.splitlines())}
    for names, path in groups.items():
        if "memory" in names.split(","):
            return root / "memory" / path.lstrip("/") / "memory.oom_control"
    return root / groups[""].lstrip("/") / "memory.events" if "" in groups else None


def free_bytes_of_group() -> int | None:
    """What our control group may still take; None where nobody limits it."""
    try:
        file = events_file(Path("/proc/self/cgroup").read_text(encoding="utf-8"))
        names = ("memory.max", "memory.current")
        if file is None or file.name != "memory.events":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        most, taken = (int((file or _CGROUPS).with_name(name).read_text(encoding="utf-8")) for name in names)
    except (OSError, ValueError):  # "max": there is no limit
        return None
    return max(0, most - taken)


def has_more_kills(before: int | None, now: int | None) -> bool:
    """Whether a process of the group was killed in between; no where nobody counts."""
    return before is not None and now is not None and now > before


def own_kills() -> int | None:
    """How many processes of our group were killed so far for want of memory; None where nobody counts."""
    try:
        file = events_file(Path("/proc/self/cgroup").read_text(encoding="utf-8"))
        return None if file is None else parse_kills(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
