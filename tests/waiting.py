"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from slurm.local_cluster.cluster import Cluster

T = TypeVar("T")


def eventually(look: Callable[[], T], timeout_s: float = 60.0) -> T:
    """The first true value of `look`, asked again and again; fails with the last one after `timeout_s`.

    A look that takes long is made less often: those who wait leave the processors to those they wait for.
    """
    until = time.monotonic() + timeout_s
    asked = time.monotonic()
    while not (value := look()):
        assert time.monotonic() < until, f"not within {timeout_s:g} s; the last look gave {value!r}"
        time.sleep(min(0.2, max(0.05, 9 * (time.monotonic() - asked))))
        asked = time.monotonic()
    return value


def keeps_what_it_knows(cluster: Cluster, job_id: str) -> None:
    """Wait until the controller has on its disk that the job runs: one that is killed before begins the job again."""
    cluster.ask("scontrol", "update", f"JobId={job_id}", "AdminComment=on-the-disk")
    eventually(lambda: b"on-the-disk" in (cluster.folder / "state" / "job_state").read_bytes())
