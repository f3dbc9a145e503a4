"""Checkpoints: which are complete, which are healthy, and where a rollback goes."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.contract.files import publish_message
from worker.contract.loss_history import ACTED, Record, record
from worker.contract.manifest import (
    MANIFEST,
    FileEntry,
    Health,
    Manifest,
    Target,
    UnusableCheckpointError,
    complete_checkpoints,
    complete_manifest,
    health,
    rollback_target,
)
from worker.contract.run_dir import RunDir

CONTENT = {"model.safetensors": b"weights", "rng_state_0.pth": b"random", "shards/0.distcp": b"shard"}


def manifest(step: int = 100, **more: Any) -> Manifest:
    fields: dict[str, Any] = {
        "attempt": 1, "segment": 1, "time": 1.0, "epoch": 0.5, "batches_into_epoch": 1, "samples_seen": 8,
        "world_size": 1, "batch_size": 1, "gradient_accumulation": 1, "max_steps": 500, "seed": 42, "lr_scale": 1.0,
        "config_digest": "c", "data_digest": "d", "weights_finite": True, "probe_loss": 1.0, "optimizer_steps": step,
        "versions": {}, "files": {},
    }  # fmt: skip
    return Manifest(**{**fields, "step": step, **more})


def saved(run: RunDir, step: int, **more: Any) -> Path:
    """A complete checkpoint of three small files."""
    folder = run.checkpoint(step)
    for name, content in CONTENT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    files = {name: FileEntry(bytes=len(content), xxh128="0" * 32) for name, content in CONTENT.items()}
    publish_message(folder / MANIFEST, manifest(**{"step": step, "files": files, **more}))
    return folder


def step_record(step: int, verdict: str = "ok", onset: int | None = None, **more: Any) -> Record:
    fields = {"segment": 1, "attempt": 1, "restart": 0, "epoch": 0.0, "time": 0.0, "loss": 1.0, **more}
    return record(step=step, verdict=verdict, onset_step=onset, **fields)


def branch(last: int, *special: Record) -> list[Record]:
    """Records 1 to ``last``, some of them special."""
    by_step = {one.step: one for one in special}
    return [by_step.get(step, step_record(step)) for step in range(1, last + 1)]


def failing_disk(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Neither a look at this file nor reading it works any more."""

    def failing(original: Any) -> Any:
        def look(at: Any, *args: Any, **kwargs: Any) -> Any:
            if str(at) == str(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return original(at, *args, **kwargs)

        return look

    monkeypatch.setattr("os.open", failing(os.open))
    monkeypatch.setattr("pathlib.Path.stat", failing(Path.stat))


class TestComplete:
    def test_all_files_with_their_sizes(self, tmp_path: Path) -> None:
        folder = saved(RunDir(tmp_path), 500)
        assert complete_manifest(folder).step == 500

    @pytest.mark.parametrize("name", CONTENT)
    @pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer"])
    def test_a_file_that_is_not_as_it_was(self, tmp_path: Path, name: str, damage: str) -> None:
        folder = saved(RunDir(tmp_path), 500)
        content = {"empty": b"", "cut": CONTENT[name][:-1], "longer": CONTENT[name] + b"x"}
        (folder / name).unlink()
        if damage != "missing":
            (folder / name).write_bytes(content[damage])
        with pytest.raises(UnusableCheckpointError, match=name):
            complete_manifest(folder)

    @pytest.mark.parametrize("name", [*CONTENT, MANIFEST])
    def test_a_file_that_the_disk_does_not_give_back(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        folder = saved(RunDir(tmp_path), 500)
        failing_disk(monkeypatch, folder / name)
        with pytest.raises(UnusableCheckpointError, match=r"cannot be read \(\[Errno 5\] Input/output error: '.*'\)"):
            complete_manifest(folder)
        assert complete_checkpoints(RunDir(tmp_path)) == []

    @pytest.mark.parametrize("content", [None, b"", b"{}", b'{"format": 1', b'{"format": 2}', b"\0\0"])
    def test_no_manifest_that_can_be_read(self, tmp_path: Path, content: bytes | None) -> None:
        folder = saved(RunDir(tmp_path), 500)
        (folder / MANIFEST).unlink()
        if content is not None:
            (folder / MANIFEST).write_bytes(content)
        with pytest.raises(UnusableCheckpointError, match="manifest"):
            complete_manifest(folder)

    def test_a_format_of_the_future_is_refused(self, tmp_path: Path) -> None:
        folder = saved(RunDir(tmp_path), 500)
        text = (folder / MANIFEST).read_text()
        (folder / MANIFEST).write_text(text.replace('"format": 1', '"format": 2'))
        with pytest.raises(UnusableCheckpointError, match="format"):
            complete_manifest(folder)

    def test_the_run_lists_them_by_step_and_leaves_the_others_out(self, tmp_path: Path) -> None:
        run = RunDir(tmp_path)
        assert complete_checkpoints(run) == []
        for step in (9000, 10000, 500, 1000, 1500):
            saved(run, step)
        (run.checkpoint(1000) / "model.safetensors").unlink()
        (run.checkpoint(1500) / "rng_state_0.pth").write_bytes(b"")
        run.checkpoint(500).rename(run.checkpoint(600))
        saved(run, 700).rename(run.checkpoints / "checkpoint-0700")
        saved(run, 8).rename(run.checkpoints / "checkpoint-8.tmp")
        run.checkpoint(11).write_text("a file")
        assert [one.step for one in complete_checkpoints(run)] == [9000, 10000]


class TestHealth:
    @pytest.mark.parametrize(
        ("records", "expected"),
        [
            pytest.param(branch(125), Health.HEALTHY, id="25 steps past it"),
            pytest.param(branch(124), Health.UNTESTED, id="one step short of them"),
            pytest.param([], Health.UNTESTED, id="no history"),
            pytest.param(branch(100), Health.UNTESTED, id="nothing after it"),
            pytest.param(branch(130, step_record(130, "spike", 126)), Health.HEALTHY, id="an onset just past the span"),
            pytest.param(branch(130, step_record(130, "spike", 125)), Health.UNTESTED, id="an onset within the span"),
            pytest.param(branch(130, step_record(130, "spike", 101)), Health.UNTESTED, id="an onset right after it"),
            pytest.param(branch(130, step_record(130, "spike", 100)), Health.SUSPECT, id="an onset at it"),
            pytest.param(branch(102, step_record(102, "nonfinite", 99)), Health.SUSPECT, id="an onset before it"),
            pytest.param(
                branch(102, step_record(102, "divergence")), Health.UNTESTED, id="no onset: the record itself"
            ),
            pytest.param(branch(130, step_record(110, "pending", 110)), Health.HEALTHY, id="a transient after it"),
            pytest.param(branch(130, step_record(100, "pending", 99)), Health.UNTESTED, id="saved while pending"),
            pytest.param(branch(130, step_record(100, "suspect", 90)), Health.UNTESTED, id="saved while suspect"),
            pytest.param(branch(130, step_record(100, "skipped", 100)), Health.HEALTHY, id="one skipped update"),
        ],
    )
    def test_what_the_branch_says(self, records: list[Record], expected: Health) -> None:
        assert health(manifest(100), records, 25) is expected

    def test_weights_that_are_not_finite(self) -> None:
        assert health(manifest(100, weights_finite=False), branch(500), 25) is Health.SUSPECT

    def test_a_branch_that_was_abandoned_says_nothing(self) -> None:
        """The survivors only: a verdict of an older branch is gone from them."""
        assert health(manifest(100), branch(130), 25) is Health.HEALTHY


class TestRollbackTarget:
    @pytest.mark.parametrize(
        ("steps", "onset", "expected"),
        [
            ([100, 200, 300], 310, Target(200, Health.HEALTHY)),
            ([100, 200, 300], 330, Target(300, Health.HEALTHY)),
            ([300], 310, Target(300, Health.UNTESTED)),
            ([300], 300, Target(0, None)),
            ([], 310, Target(0, None)),
            ([200, 9000, 10000], 9001, Target(200, Health.HEALTHY)),
        ],
    )
    def test_the_newest_healthy_one_before_the_onset(self, steps: Sequence[int], onset: int, expected: Target) -> None:
        judged = branch(onset + 2, step_record(onset + 2, "spike", onset))
        assert rollback_target([manifest(step) for step in steps], judged[: onset + 2], onset, 25) == expected

    def test_never_to_weights_that_are_not_finite(self) -> None:
        judged = branch(312, step_record(312, "nonfinite", 311))
        manifests = [manifest(100), manifest(300, weights_finite=False)]
        assert rollback_target(manifests, judged, 311, 25) == Target(100, Health.HEALTHY)
        assert rollback_target(manifests[1:], judged, 311, 25) == Target(0, None)

    @given(
        st.sets(st.integers(1, 60)),
        st.sets(st.integers(1, 60)),
        st.lists(
            st.sampled_from(["ok", "ok", "ok", "pending", "suspect", "spike", "nonfinite"]), min_size=1, max_size=60
        ),
        st.integers(0, 10),
        st.data(),
    )
    def test_it_is_before_the_onset_and_never_suspect(
        self, steps: set[int], broken: set[int], verdicts: list[str], healthy_after: int, data: st.DataObject
    ) -> None:
        records = [
            step_record(step, verdict, data.draw(st.integers(1, step)) if verdict in ACTED else None)
            for step, verdict in enumerate(verdicts, start=1)
        ]
        onset = data.draw(st.integers(1, len(records)))
        manifests = [manifest(step, weights_finite=step not in broken) for step in steps]
        target = rollback_target(manifests, records, onset, healthy_after)
        graded = {one.step: health(one, records, healthy_after) for one in manifests if one.step < onset}
        if target.health is None:
            assert target.step == 0
            assert set(graded.values()) <= {Health.SUSPECT}
        else:
            assert graded[target.step] is target.health is not Health.SUSPECT
            assert target.step == max(step for step, grade in graded.items() if grade is target.health)
            assert target.health is Health.HEALTHY or Health.HEALTHY not in graded.values()
