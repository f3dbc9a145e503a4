"""Slurm itself away: the controller frozen under a submission, then dead for a minute, accounting gone, a full disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm.commands import SchedulerError
from slurm.local_cluster.cluster import Cluster, running
from slurm.local_cluster.configuration import missing_packages
from supervisor.journal import LookFailed, LookRecovered, SubmitFailed, SubmitIntended, Submitted
from tests.conftest import need
from tests.contract_room.disks import fill, small_disk
from tests.waiting import eventually, keeps_what_it_knows
from tests.whole_room.house import House
from tests.whole_room.light_trainer import STEP_S
from tests.whole_room.survival import Site, ends_whole, first_steps, jobs_of

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


def controller(cluster: Cluster) -> int:
    return int((cluster.folder / "slurmctld.pid").read_text())


def freezing_sbatch(house: House, cluster: Cluster) -> Path:
    """Let the first submission of this house freeze the controller for 15 s before it asks it for anything."""
    folder = house.folder / "bin"
    folder.mkdir()
    frozen = folder / "frozen"
    (folder / "sbatch").write_text(
        f"""#!/bin/sh
case "$*" in *--test-only*) exec {shutil.which("sbatch")} "$@" ;; esac
if mkdir "{frozen}" 2>/dev/null; then
    kill -STOP {controller(cluster)}
    (sleep 15; kill -CONT {controller(cluster)}) </dev/null >/dev/null 2>&1 &
fi
exec {shutil.which("sbatch")} "$@"
""",
        encoding="utf-8",
    )
    (folder / "sbatch").chmod(0o755)
    house.environment["PATH"] = f"{folder}:{house.environment['PATH']}"
    return frozen


def jobs_ever(site: Site, house: House) -> list[str]:
    """Every job that Slurm ever had under the run's name."""
    name = house.those(SubmitIntended)[0].name
    return site.cluster.ask("squeue", "--me", "--states=all", "-h", f"--name={name}", "-o", "%i").split()


def answers(cluster: Cluster, *argv: str) -> bool:
    try:
        cluster.ask(*argv)
    except SchedulerError:
        return False
    return True


def test_a_controller_that_freezes_and_dies_makes_no_second_worker_and_no_false_ending(site: Site) -> None:
    trains = site.start(site.house("trains", variables={STEP_S: "0.2"}, training={"max_steps": 560}))
    trains.waits_for_step(5)
    frozen = site.house("frozen", variables={STEP_S: "0.2"}, training={"max_steps": 460})
    freezing_sbatch(frozen, site.cluster)
    site.start(frozen)
    failed = frozen.waits_for(SubmitFailed)
    assert not failed.answered
    site.cluster.kill_accounting()
    frozen.waits_for_step(1)  # what was queued without an answer has all that it needs
    keeps_what_it_knows(site.cluster, jobs_ever(site, frozen)[0])
    site.cluster.kill_controller()
    late = site.house("late", variables={STEP_S: "0.02"})
    refused = late.higgsfield("run", "tiny.yaml")
    assert (refused.returncode, late.run.path.exists(), len(refused.stderr.splitlines())) == (2, False, 1)
    silent = trains.waits_for(LookFailed)  # in a quiet minute it asks once
    trains.waits_for_step(trains.records[-1].step + 20)
    site.cluster.start_accounting()  # first: this controller died before it had kept what it knows of accounts
    eventually(lambda: answers(site.cluster, "sacctmgr", "-n", "show", "cluster"))
    site.cluster.start_controller()
    # It refuses every --test-only until its nodes have told it that they are there.
    eventually(lambda: answers(site.cluster, "sbatch", "--test-only", "--wrap", "true"))
    for house in (trains, frozen, site.start(late)):
        ends_whole(house)
        assert (first_steps(house), {record.attempt for record in house.records}) == ([1], {1})
        assert len(jobs_ever(site, house)) == 1
    assert all(event.adopted for event in frozen.those(Submitted))
    assert trains.waits_for(LookRecovered).time > silent.time


def full_house(site: Site) -> House:
    return site.house("full", variables={STEP_S: "0.1"}, training={"max_steps": 60})


def test_a_full_disk_under_the_run_means_no_job_and_it_goes_on_when_there_is_space(site: Site, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size_kib=4096) as disk, full_house(site) as house:
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
