"""How much main memory this process may still take: what the machine has free, and what its control groups allow."""

import re
from collections.abc import Iterator
from pathlib import Path

_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_CACHE = re.compile(r"^(?:total_)?(?:in)?active_file (\d+)$", re.MULTILINE)
_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = Path("/proc"), root: Path = _CGROUPS) -> int | None:
    """The least that any of them leaves; None where nobody tells. The cache of files counts as free."""
    told = [*_of_machine(proc / "meminfo"), *_of_groups(proc / "self" / "cgroup", root)]
    return min(told, default=None)


def _of_machine(meminfo: Path) -> Iterator[int]:
    found = _AVAILABLE.search(_text(meminfo))
    if found:
        yield int(found[1]) * 1024


def _of_groups(own: Path, root: Path) -> Iterator[int]:
    """What is left in our group and in each above it, of cgroup v2 and v1."""
    for line in _text(own).splitlines():
        _, names, path = line.split(":", 2)
        if names and "memory" not in names.split(","):
            continue
        top, limit, usage = (
            (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            if names
            else (root, "memory.max", "memory.current")
        )
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(top):
                break
            most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
            if most.isdigit() and used.isdigit():
                yield int(most) - int(used) + _cache(folder / "memory.stat")


def _cache(stat: Path) -> int:
    """In active_file and inactive_file; v1 also counts those below, in total_*, and these are the ones that matter."""
    found = _CACHE.findall(_text(stat))
    return sum(map(int, found[-2:]))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
