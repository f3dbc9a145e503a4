"""A full disk under a run on a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.local_cluster.cluster import Cluster, running
from slurm.local_cluster.configuration import missing_packages
from tests.conftest import need
from tests.contract_room.disks import fill, small_disk
from tests.whole_room.house import House
from tests.whole_room.light import STEP_S
from tests.whole_room.survival import Site, ends_whole, jobs_of

pytestmark = [pytest.mark.slurm, pytest.mark.training]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One of its own, with accounting: nobody else's tests share its controller."""
    need(missing_packages(accounting=True))
    with running(nodes=3, accounting=True) as started:
        yield started


@pytest.fixture
def site(cluster: Cluster, tmp_path: Path) -> Iterator[Site]:
    site = Site(cluster, "low", cluster.nodes, tmp_path)
    yield site
    for house in site.houses:
        house.__exit__()


def jobs_ever(site: Site, house: House) -> list[str]:
    """Every job that Slurm ever had under the run's name."""
    name = site.shown(jobs_of(house)[0])["JobName"]
    return site.cluster.ask("squeue", "--me", "--states=all", "-h", f"--name={name}", "-o", "%i").split()


def test_a_full_disk_under_the_run_means_no_job_and_it_goes_on_when_there_is_space(site: Site, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=4096) as disk, site.house("full", variables={STEP_S: "0.1"}) as house:
        (house.folder / "runs").symlink_to(disk)
        site.start(house)
        house.waits_for_step(25)
        filler = fill(disk)
        house.until(lambda: site.cluster.ask("squeue", "--me", "-h") == "")  # the worker could not write any more
        house.until(lambda: "nothing is done before it can be written down" in house.printed(house.started[0]))
        assert len(jobs_ever(site, house)) == len(jobs_of(house)) == 1
        filler.unlink()
        ends_whole(house)
        assert len(jobs_ever(site, house)) == len(jobs_of(house)) == 2
