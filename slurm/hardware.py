"""What the nodes of a partition have: GPUs by name, features, memory.  Text in and values out."""

from __future__ import annotations

from dataclasses import dataclass

FORMAT = "%P|%G|%f|%m"
"""Of sinfo: partition, with a star where it is the default; generic resources; features; megabytes of memory."""


@dataclass(frozen=True)
class Hardware:
    """One kind of nodes in a partition."""

    gres: str
    """As Slurm writes it: ``gpu:a100:8(S:0-1)``; empty where there is none."""
    features: frozenset[str]
    memory_bytes: int | None


def kinds_of_nodes(answer: str, partition: str | None) -> tuple[Hardware, ...]:
    """The kinds of nodes in ``partition`` (None = the default one), from an answer to `sinfo --format=FORMAT`."""
    rows = [line.split("|") for line in answer.splitlines() if line.count("|") == 3]
    wanted = [row for row in rows if (row[0].rstrip("*") == partition if partition else row[0].endswith("*"))]
    return tuple(dict.fromkeys(_hardware(*row[1:]) for row in wanted))


def _hardware(gres: str, features: str, memory: str) -> Hardware:
    megabytes = memory.strip().rstrip("+")
    return Hardware(
        gres="" if gres == "(null)" else gres,
        features=frozenset() if features == "(null)" else frozenset(features.lower().split(",")),
        memory_bytes=int(megabytes) * 2**20 if megabytes.isdigit() else None,
    )
