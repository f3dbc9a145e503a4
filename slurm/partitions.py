"""The partitions of a cluster, and from where jobs may be submitted to them."""

from __future__ import annotations

from dataclasses import dataclass

from slurm import commands, parsing


@dataclass(frozen=True)
class Partition:
    """What the configuration says of one partition."""

    name: str
    nodes: tuple[str, ...]
    submit_from: tuple[str, ...] | None
    """Hosts from which a job may be submitted to it (AllocNodes); None = all."""

    def takes_from(self, other: Partition) -> bool:
        """Whether a job that runs in the ``other`` partition may submit one to this, wherever it runs there."""
        return self.submit_from is None or set(other.nodes) <= set(self.submit_from)


def parse_partitions(answer: str) -> list[Partition]:
    """What `scontrol show --oneliner partition` lists."""
    rows = (parsing.fields(line) for line in answer.splitlines())
    return [
        Partition(
            name=row["PartitionName"],
            nodes=parsing.nodes(row.get("Nodes", "")),
            submit_from=None if row.get("AllocNodes", "ALL") == "ALL" else parsing.nodes(row["AllocNodes"]),
        )
        for row in rows
        if "PartitionName" in row
    ]


def partitions() -> list[Partition]:
    """Those that this user may see; SchedulerError where the controller does not answer."""
    return parse_partitions(commands.query(["scontrol", "show", "--oneliner", "partition"]))
