"""A checkpoint is there whole or not at all, whenever the process that writes it is killed."""

import os
import random
import shutil
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainer_room.rig import Rig, same_end, weights
from tests.trainer_room.test_exact import IS_COMPLETE, SEED
from worker.checkpoints import PROOF, digest_of, digesting_torch_save
from worker.contract.manifest import MANIFEST, UnusableCheckpointError, complete_manifest
from worker.contract.run_dir import RunDir
from worker.resume import choose, verified_manifest
from worker.staging import clear_own_staging

pytestmark = pytest.mark.training

SMALL = {"max_steps": 6}
RULES = {
    "all stay": {"every_steps": 2, "keep": 9},
    "the old one goes, a torn one is in the way": {"every_steps": 2, "keep": 1, "keep_healthy": 1, "healthy_after": 0},
    "beside the training": {"every_steps": 2, "keep": 1, "keep_healthy": 1, "healthy_after": 0, "background": True},
}


@pytest.mark.parametrize("kind", RULES if IS_COMPLETE else list(RULES)[1:])
def test_a_kill_at_every_boundary_of_a_save_leaves_a_checkpoint_to_go_on_from(
    make_rig: Callable[..., Rig], tmp_path: Path, kind: str
) -> None:
    rig = make_rig(checkpoint=RULES[kind], training=SMALL)
    is_in_the_way = kind.endswith("in the way")
    if is_in_the_way:
        rig.run.checkpoint(4).mkdir(parents=True)
        (rig.run.checkpoint(4) / "optimizer.pt").write_bytes(b"torn")
    rig.finish(kill_in_save=[4, "kills"])
    boundaries = (tmp_path / "kills" / "boundaries").read_text(encoding="utf-8").splitlines()
    published = 1 + boundaries.index("os.rename .staging/a1-r0-checkpoint-4/checkpoint-4")
    assert boundaries.count("os.fsync") > 12
    last = RunDir(tmp_path / "kills" / str(len(boundaries) + 1)).checkpoint(4)
    by_words = [name.split() for name in boundaries]
    made = {Path(words[-1]).name for words in by_words if words[0] in {"open", "safetensors", "tokenizers"}}
    assert complete_manifest(last).files.keys() <= {*made, PROOF}, "a writer that Boundaries does not hear"

    for number in range(1, len(boundaries) + 2):
        run = RunDir(tmp_path / "kills" / str(number))
        said = f"killed before {number}: {boundaries[number - 1] if number <= len(boundaries) else 'the end'}"
        found = choose(run, 1, "checkpoint-2", sizes_only=False)
        assert found is not None, said
        assert found.manifest.step == (4 if number > published else 2), said
        if number <= published:
            verified_manifest(run.checkpoint(2))
        torn = [*run.path.glob("checkpoints/*/optimizer.pt"), *run.path.glob("quarantine/*/optimizer.pt")]
        assert [path.read_bytes() for path in torn].count(b"torn") == is_in_the_way, said

    undisturbed = make_rig("undisturbed", checkpoint=RULES[kind], training=SMALL)
    undisturbed.finish()
    numbers = range(1, len(boundaries) + 2)
    for number in numbers if IS_COMPLETE else random.Random(f"{SEED} {kind}").sample(numbers, 2):
        print(f"seed {SEED}: goes on from a kill before {number}")
        shutil.rmtree(rig.run.path)
        (tmp_path / "kills" / str(number)).rename(rig.run.path)
        rig.finish(restart=1)
        assert list(rig.run.staging.iterdir()) == []
        same_end(undisturbed, rig)


def test_a_rank_that_is_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before(
    make_rig: Callable[..., Rig],
) -> None:
    sections = {"training": SMALL, "checkpoint": {"every_steps": 2}}
    undisturbed = make_rig("undisturbed", **sections)
    undisturbed.finish(world=2)
    for name, rank, change in (
        ("the other's files are not yet among all", 1, r"os\.rename \.staging/.*/checkpoint-4/rng_state_1\.pth$"),
        ("its own random state is written", 0, r"open \.staging/.*/checkpoint-4/trainer_state\.json$"),
        ("all but the manifest is there", 0, r"open \.staging/.*/checkpoint-4/\.tmp-MANIFEST"),
    ):
        rig = make_rig(name, **sections)
        rig.start(world=2, dies_before=[change, rank])
        assert rig.processes[rank].wait() == -signal.SIGKILL, rig.processes[rank].said()
        rig.is_killed()
        assert list(rig.run.staging.rglob(f"rng_state_{rank}.pth")), name
        assert rig.run.checkpoint_steps() == [2], name
        found = choose(rig.run, 1, None, sizes_only=False)
        assert found is not None, name
        assert found.manifest.step == 2, name
        rig.finish(world=2, restart=1)
        assert list(rig.run.staging.iterdir()) == [], name
        same_end(undisturbed, rig)


def test_weights_whose_publication_is_killed_in_the_middle_are_published_by_the_next_start(
    make_rig: Callable[..., Rig], text: Path
) -> None:
    sections = {
        "data": {"eval": str(text)},
        "training": {**SMALL, "eval_every": 2},
        "checkpoint": {"every_steps": 2},
    }
    undisturbed, rig = make_rig("undisturbed", **sections), make_rig(**sections)
    undisturbed.finish()
    rig.finish(-signal.SIGKILL, dies_before=[r"os\.rename best\nos\.rename \.staging/a1-r0-best$", 0])
    assert not rig.run.best.exists()
    rig.finish(-signal.SIGKILL, restart=1, dies_before=[r"safetensors \.staging/a1-r1-final/ema/", 0])
    assert not rig.run.final.exists()
    rig.finish(-signal.SIGKILL, restart=2, dies_before=[r"os\.rename \.staging/a1-r2-final$", 0])
    assert not rig.run.final.exists()
    rig.finish(restart=3)
    assert list(rig.run.staging.iterdir()) == []
    same_end(undisturbed, rig)
    assert weights(rig.run.best) == weights(undisturbed.run.best)
    told = [one.run.best / "best.json" for one in (rig, undisturbed)]
    assert told[0].read_text(encoding="utf-8") == told[1].read_text(encoding="utf-8")


@pytest.mark.parametrize("background", [False, True])
def test_what_cannot_be_removed_now_ends_no_training_and_is_removed_later(
    make_rig: Callable[..., Rig], text: Path, background: bool
) -> None:
    rules = {"every_steps": 2, "keep": 1, "keep_healthy": 1, "healthy_after": 0, "background": background}
    rig = make_rig(data={"eval": str(text)}, training={**SMALL, "eval_every": 1}, checkpoint=rules)
    rig.finish(is_busy=True)
    assert rig.run.checkpoint_steps() == [6]
    assert rig.run.final.is_dir()
    said, left = rig.processes[0].said(), [entry.name for entry in rig.run.staging.iterdir()]
    for name in ("a1-r0-checkpoint-2", "a1-r0-retired-checkpoint-2", "a1-r0-best-replaced-3"):
        assert name in left
        assert f"Directory not empty: '{rig.run.staging / name}'" in said
    clear_own_staging(rig.run, 1, 0)
    assert list(rig.run.staging.iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_files_and_folders_follow_the_umask(make_rig: Callable[..., Rig], text: Path, umask: int) -> None:
    rig = make_rig(data={"eval": str(text)}, training={"max_steps": 2, "eval_every": 2}, checkpoint={"every_steps": 2})
    rig.finish(umask=umask)
    for folder in (rig.run.checkpoint(2), rig.run.final, rig.run.best):
        for path in [folder, *folder.rglob("*")]:
            wanted = (0o777 if path.is_dir() else 0o666) & ~umask
            assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(wanted), path
    assert (rig.run.final / "ema" / "model.safetensors").exists()


def test_every_rank_digests_its_own_files_and_the_manifest_has_all_of_them(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(training={"max_steps": 2}, checkpoint={"every_steps": 2})
    rig.finish(world=2)
    folder = rig.run.checkpoint(2)
    manifest = verified_manifest(folder)
    assert {path.name for path in folder.iterdir()} == {*manifest.files, MANIFEST}
    assert {"rng_state_0.pth", "rng_state_1.pth", "model.safetensors", "ema.safetensors"} <= manifest.files.keys()


def test_rank_0_takes_the_digests_of_the_others_as_they_made_them(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(training={"max_steps": 2}, checkpoint={"every_steps": 2})
    rig.finish(world=2, alters="rng_state_1.pth")
    with pytest.raises(UnusableCheckpointError, match=r"the content of rng_state_1\.pth is not what was written"):
        verified_manifest(rig.run.checkpoint(2))


def test_what_torch_saves_is_digested_on_its_way(tmp_path: Path) -> None:
    value = {"one": torch.arange(100_000), "two": "text"}
    before = torch.save
    with digesting_torch_save() as digests:
        torch.save(value, tmp_path / "one.pt")
        torch.save(value, str(tmp_path / "two.pt"))
        with open(tmp_path / "three.pt", "wb") as file:
            torch.save(value, file)
    assert torch.save is before
    assert digests == {tmp_path / name: digest_of(tmp_path / name) for name in ("one.pt", "two.pt")}
    assert torch.equal(torch.load(tmp_path / "one.pt", weights_only=True)["one"], value["one"])


def test_a_relaunch_in_the_same_allocation_looks_at_sizes_only(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(training={"max_steps": 2}, checkpoint={"every_steps": 2})
    rig.finish()
    path = rig.run.checkpoint(2) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    complete_manifest(path.parent)
    found = choose(rig.run, 1, None, sizes_only=True)
    assert found is not None
    with pytest.raises(Exception, match=r"the content of model\.safetensors is not what was written"):
        choose(rig.run, 1, None, sizes_only=False)
    os.truncate(path, 10)
    with pytest.raises(Exception, match=r"was to be resumed from|it has|no checkpoint"):
        choose(rig.run, 1, "checkpoint-2", sizes_only=True)
