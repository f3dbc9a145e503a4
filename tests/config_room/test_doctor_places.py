"""doctor knows which of the supervisor's places a cluster allows, and names one that works where another does not."""

from pathlib import Path

import pytest

from slurm.partitions import parse_partitions
from supervisor import doctor_places
from supervisor.doctor import CheckedItem
from supervisor.doctor_places import look_at_places
from tests.fakes import FakeScheduler

OPEN = "PartitionName={} AllowGroups=ALL AllowAccounts=ALL AllocNodes=ALL Default={} Nodes={} State=UP"
CLOSED = "PartitionName={} AllowGroups=ALL AllocNodes={} Default=NO Nodes={} State=UP"


def looked_at(monkeypatch: pytest.MonkeyPatch, *lines: str, refused: str = "") -> dict[str, CheckedItem]:
    scheduler = FakeScheduler()
    if refused:
        scheduler.says = refused
        scheduler.fail("test_only")
    monkeypatch.setattr(doctor_places, "partitions", lambda: parse_partitions("\n".join(lines)))
    return {item.name: item for item in look_at_places(scheduler, Path("/runs"))}


def test_scontrol_s_list_is_read() -> None:
    low, gpu = parse_partitions(f"{OPEN.format('low', 'YES', 'n[1-2]')}\n{CLOSED.format('gpu', 'login[1-2]', 'g1')}\n")
    assert (low.name, low.nodes, low.submit_from) == ("low", ("n1", "n2"), None)
    assert gpu.submit_from == ("login1", "login2")
    assert low.takes_from(gpu)
    assert not gpu.takes_from(low)


def test_where_everything_is_allowed_nothing_is_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    items = looked_at(monkeypatch, OPEN.format("low", "YES", "n[1-2]"))
    assert [(item.ok, item.mend) for item in items.values()] == [(True, None)] * 2


def test_a_cluster_that_refuses_small_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "sbatch: error: Batch job submission failed: GPUs must be asked for"
    item = looked_at(monkeypatch, OPEN.format("gpu", "YES", "g1"), refused=said)["supervisor's job"]
    assert (item.ok, item.mend is not None) == (False, True)
    for way in ("supervisor.partition", "embedded", "higgsfield run", "--once"):
        assert way in str(item.mend)


def test_nodes_that_may_not_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = CLOSED.format("gpu", "login1", "g[1-9]")
    item = looked_at(monkeypatch, closed)["submitting from nodes"]
    assert (item.ok, item.message) == (False, "gpu takes jobs from login1 only (AllocNodes)")
    assert "supervisor.place to embedded" in str(item.mend)


def test_another_partition_whose_nodes_may(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, small = CLOSED.format("gpu", "login1,c[1-2]", "g[1-9]"), OPEN.format("cpu", "YES", "c[1-2]")
    item = looked_at(monkeypatch, closed, small)["submitting from nodes"]
    assert (item.ok, "supervisor.partition to cpu," in str(item.mend)) == (False, True)
