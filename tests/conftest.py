"""Fixtures of all rooms."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from slurm.local_cluster.cluster import Cluster, running
from slurm.local_cluster.configuration import missing_packages

if TYPE_CHECKING:
    from tests.trainer_room.rig import Launcher

settings.register_profile("untimed", deadline=None)  # a busy machine is no wrong answer
settings.load_profile("untimed")


WAITING_ROOMS = ("whole_room", "slurm_room", "agent_room", "trainer_room")
"""Their tests take long, most of it waiting; begun first, they have the short ones beside them to the end."""


def pytest_configure() -> None:
    """Ctrl-C ends what the tests start, also where a script's background job, which ignores it, started the tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays to the end: no collection of garbage walks it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rooms = {room: place for place, room in enumerate(WAITING_ROOMS)}
    items.sort(key=lambda item: rooms.get(item.path.parent.name, len(rooms)))


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """The session's zygote, which forks a real trainer in a fraction of a second."""
    from tests.trainer_room.rig import Launcher

    launcher = Launcher(tmp_path_factory.mktemp("launcher") / "log")
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Cluster]:
    """A real Slurm of three nodes, one for the whole session. A test that breaks it mends it.

    With accounting where its packages are; a test that cannot do without asks for `accounting`.
    """
    need(missing_packages())
    with running(nodes=3, accounting=not missing_packages(accounting=True)) as cluster:
        yield cluster


@pytest.fixture
def accounting(slurm_cluster: Cluster) -> Cluster:
    """The cluster, which has slurmdbd; skips where its packages are missing."""
    need(missing_packages(accounting=True))
    return slurm_cluster


def need(missing: list[str]) -> None:
    """Skip where Debian packages are missing, fail where they must not be."""
    if not missing:
        return
    message = f"needs the Debian packages {' '.join(missing)}"
    if os.environ.get("HIGGSFIELD_REQUIRE_SLURM") == "1":
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture
def on_slurm(slurm_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The cluster, with SLURM_CONF set for this test."""
    monkeypatch.setenv("SLURM_CONF", str(slurm_cluster.conf))
    return slurm_cluster
