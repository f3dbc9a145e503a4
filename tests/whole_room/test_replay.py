"""`higgsfield diagnose RUN --replay`: runs that really fail, and the change that cures each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from supervisor.believed import read_evidence
from supervisor.diagnosis import diagnose
from supervisor.replay import furnish, planned
from supervisor.replay_plan import Planned, checkpoints_of, plan_replay
from tests.trainer_room.rig import Launcher, Rig, tiny_config
from tests.whole_room.failing_runs import CASES, MARKER, POISONED_BATCH, Failing, end_of, fail
from tests.whole_room.house import House, environment
from worker.contract import config as configuration
from worker.contract.loss_history import read_history
from worker.contract.replay import Change, Tried
from worker.contract.run_dir import RunDir

pytestmark = pytest.mark.training

CURES: Final[dict[str, tuple[set[Change], set[Change]]]] = {
    "poisoned_row": ({"smallest-batch", "without-batches"}, {"again", "tenth-rate"}),
    "hot_rate": ({"tenth-rate"}, {"again", "smallest-batch", "without-batches"}),
    "short_warmup": ({"tenth-rate"}, {"again", "smallest-batch", "without-batches"}),
    "bad_restore": ({"again"}, set()),
    "overflow": ({"fp32"}, {"again", "smallest-batch", "tenth-rate", "without-batches"}),
}
"""Of each case: what cures it, and what does not."""


def replayed(
    launcher: Launcher, folder: Path, run_dir: RunDir, plan: Planned, faults: dict[str, Any], world: int = 1
) -> dict[Change, Tried]:
    """What each change led to, told by as many ranks as there are."""
    furnish(folder, run_dir, plan)
    out = folder / "told.jsonl"
    ranks = []
    for rank in range(world):
        told = faults | {"replays": {"rank": rank, "world": world, "local_rank": rank}}
        ranks.append(launcher.start([str(folder), str(out), json.dumps(told)], {}, folder / f"log-{rank}"))
    assert [end_of(rank) for rank in ranks] == [0] * world, (folder / "log-0").read_text()
    lines = [Tried.model_validate_json(line) for line in out.read_text().splitlines()]
    assert lines[-1] == Tried(is_last=True)
    return {one.change: one for one in lines if one.change is not None}


def all_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file and folder below, with the time of its last change and its content."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


@pytest.mark.parametrize("name", CASES)
def test_each_failure_is_cured_by_its_own_change_and_by_no_other(name: str, launcher: Launcher, tmp_path: Path) -> None:
    run = fail(name, tmp_path / "failed", launcher)
    before = all_of(run.run_dir.path)
    folder = tmp_path / "replay"
    folder.mkdir()
    tried = replayed(launcher, folder, run.run_dir, planned(run.run_dir, is_alone=True), CASES[name].faults[-1])
    assert all_of(run.run_dir.path) == before
    [found] = diagnose(read_evidence(run.run_dir))
    assert found.cure is not None
    assert tried[found.cure].cured, "the change that the diagnosis names"
    cures, does_not = CURES[name]
    said = {change: one.said for change, one in tried.items()}
    cured = {change for change, one in tried.items() if one.cured}
    assert cures <= cured, said
    assert {change for change, one in tried.items() if one.cured is False} >= does_not, said
    if name == "bad_restore":
        assert said["tenth-rate"] == "needless: as it was, it does not come again"
    else:
        assert said["again"].endswith("every loss the same to the bit")
    if name == "poisoned_row":
        assert f"train.data line {POISONED_BATCH * 4 + 1}) is not finite" in said["smallest-batch"]


def test_both_ranks_of_a_run_replay_it_to_the_bit(launcher: Launcher, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"".join(b"line %d of text\n" % number for number in range(9, 90)) + bytes([MARKER]) + b"z" * 999)
    config = tiny_config(
        text, data={"shuffle": False}, training={"max_steps": 12, "batch_size": 2}, spike={"nonfinite_patience": 1}
    )
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"tasks_per_node": 2})})
    rig = Rig(RunDir(tmp_path / "run"), config, launcher)
    rig.run.path.mkdir()
    configuration.write(rig.run.config, config)
    rig.finish(20, world=2, poison=MARKER)
    plan = plan_replay(rig.run.path, config, read_history(rig.run.history), [], checkpoints_of(rig.run), is_alone=False)
    folder = tmp_path / "replay"
    folder.mkdir()
    tried = replayed(launcher, folder, rig.run, plan, {"poison": MARKER}, world=2)
    assert tried["again"].said.endswith("every loss the same to the bit")
    assert [change for change, one in tried.items() if one.cured] == ["smallest-batch", "without-batches"]
    alone = plan_replay(rig.run.path, config, read_history(rig.run.history), [], checkpoints_of(rig.run), is_alone=True)
    folder = tmp_path / "here"
    folder.mkdir()
    assert replayed(launcher, folder, rig.run, alone, {"poison": MARKER})["again"].said.startswith("comes again")


@pytest.fixture(scope="module")
def hot(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Failing:
    """A run whose rate is too high: it needs no fault, so that the command's own processes fail as well."""
    return fail("hot_rate", tmp_path_factory.mktemp("hot"), launcher)


def test_a_job_and_this_machine_say_the_same_and_leave_nothing(hot: Failing) -> None:
    run = hot.run_dir.path
    house = House(run.parent, environment())
    beside = set(run.parent.iterdir())
    before = all_of(run)
    job = house.higgsfield("diagnose", str(run), "--replay", "--json")
    assert job.returncode == 0, job.stderr
    here = house.higgsfield("diagnose", str(run), "--replay", "--here")
    assert here.returncode == 0, here.stderr
    assert all_of(run) == before
    assert set(run.parent.iterdir()) == beside
    told = {one["change"]: one for one in json.loads(job.stdout)["replay"]}
    assert told["again"]["said"].endswith("every loss the same to the bit")
    assert told["tenth-rate"]["cured"] is True
    assert all(one["said"] in here.stdout for one in told.values())
    assert "it is the rate: go on with a lower one" in here.stdout
    assert "replaying spike at step" in here.stderr


def test_a_run_without_bad_steps_is_one_line(tmp_path: Path, launcher: Launcher) -> None:
    run = Failing(tmp_path, CASES["bad_restore"], launcher)
    house = House(tmp_path, environment())
    done = house.higgsfield("diagnose", str(run.run_dir.path), "--replay")
    assert done.returncode == 2
    assert done.stderr == f"{run.run_dir.path}: no step of this run was judged bad, so there is nothing to replay\n"
