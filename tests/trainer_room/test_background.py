"""Saves beside the training: the same files, the same bytes, and nothing of a step that came later."""

import json
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.trainer_room.rig import Rig, same_end
from worker import copying
from worker.background import Background, KeptMemory, LargeParts, id_of
from worker.checkpoints import digested_save
from worker.contract.loss_history import read_history
from worker.contract.manifest import complete_manifest
from worker.free_memory import available_bytes
from worker.probe import are_finite

BESIDE = {"every_steps": 4, "background": True}
OF_THIS_RUN = {"training_args.bin", "loss_history.json", "trainer_state.json", "proof.json"}
"""Files that hold times or paths: two plain runs do not agree about them either; proof.json is compared as a value."""


def value(seed: int) -> dict[str, Any]:
    """What an optimizer's state looks like, with tensors that share memory in every way there is."""
    generator = torch.Generator().manual_seed(seed)
    one, two = (torch.randn(200, 300, generator=generator) for _ in range(2))
    return {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": one}, 1: {"exp_avg": two.t(), "part": two[3:5]}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1]}],
        "same": one,
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "half": torch.ones(40_000, dtype=torch.bfloat16),
        "none": torch.empty(0),
    }


@pytest.mark.parametrize("is_reserved", [False, True])
def test_a_copy_is_written_byte_for_byte_as_the_state_was(tmp_path: Path, is_reserved: bool) -> None:
    now = value(1)
    tensors = {"one": now["same"], "half": now["half"]}
    digested_save(now, tmp_path / "optimizer.pt")
    save_file(tensors, tmp_path / "model.safetensors")
    expected = [(tmp_path / name).read_bytes() for name in ("optimizer.pt", "model.safetensors")]

    memory, digests = KeptMemory(), dict[Path, str]()
    if is_reserved:
        assert memory.reserve(Counter({240_000: 2, 80_000: 1, 4: 1}), None) is None
    for _ in range(2):  # in kept memory the second time
        now = value(1)
        tensors = {"one": now["same"], "half": now["half"]}
        large = LargeParts(memory, digests, is_copied=True)
        with large.noted():
            import safetensors.torch as safetensors

            torch.save(now, tmp_path / "optimizer.pt")
            safetensors.save_file(tensors, tmp_path / "model.safetensors")
            torch.save({"small": 1}, tmp_path / "small.pt")
        assert (tmp_path / "small.pt").exists()
        large.finish()
        for one in (now["same"], now["state"][1]["part"], now["half"]):
            one.zero_()
        now["param_groups"][0]["lr"] = 0.2
        large.write()
        memory.give_back()
        assert [(tmp_path / name).read_bytes() for name in ("optimizer.pt", "model.safetensors")] == expected
    assert digests.keys() == {tmp_path / "optimizer.pt"}
    assert large.sizes == Counter({size: len(kept) for size, kept in memory._free.items() if kept})  # what is learned


@pytest.mark.parametrize("is_changed", [False, True])
def test_what_only_an_update_changes_is_copied_before_the_next_one(is_changed: bool) -> None:
    memory, now, later = KeptMemory(), torch.ones(1_000), torch.ones(2_000)
    kept_now, kept_later = memory.copies([now, later], {id_of(later)})
    memory.finish()
    now.zero_()
    assert torch.equal(kept_now, torch.ones(1_000))
    has_waited = threading.Event()
    update = threading.Thread(target=lambda: (memory.wait_until_copied(), has_waited.set()))
    update.start()
    if is_changed:
        later.mul_(1)
        with pytest.raises(RuntimeError, match="was changed between the save and the next update"):
            memory.copy_waiting()
    else:
        assert not has_waited.is_set()
        memory.copy_waiting()
        assert torch.equal(kept_later, later)
    update.join()
    assert has_waited.is_set()
    memory.give_back()


def test_a_save_that_fails_before_it_has_copied_lets_the_next_update_go_on() -> None:
    memory, later = KeptMemory(), torch.ones(2_000)
    memory.copies([later], {id_of(later)})
    memory.give_back()
    memory.wait_until_copied()
    memory.copy_waiting()


@pytest.mark.parametrize("cpus", [1, 3])
def test_every_byte_is_copied_by_however_many_threads(monkeypatch: pytest.MonkeyPatch, cpus: int) -> None:
    monkeypatch.setattr(copying, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    sources = [torch.randint(256, (length,), dtype=torch.uint8) for length in (0, 1, 99, 100, 101, 12_345)]
    places = [torch.zeros_like(one) for one in sources]
    under_way = copying.Copying()
    for part in (slice(2), slice(2, None)):  # the second while the first may be under way
        under_way.begin(places[part], sources[part])
    under_way.finish()
    assert all(torch.equal(one, other) for one, other in zip(places, sources, strict=True))


def test_what_was_not_copied_is_looked_at_at_once_and_what_was_as_it_was(tmp_path: Path) -> None:
    copied, other = torch.nn.Parameter(torch.ones(200, 300)), torch.nn.Parameter(torch.ones(2))
    large = LargeParts(KeptMemory(), {}, is_copied=True)
    with large.noted():
        torch.save({"weights": [copied.detach().t(), torch.full((2,), math.nan)]}, tmp_path / "optimizer.pt")
    large.finish()
    rest, copies = large.parted([copied.detach(), other.detach()])
    assert [one.data_ptr() for one in rest] == [other.data_ptr()]
    assert [one.shape for one in copies] == [copied.shape]
    with torch.no_grad():
        copied[3, 4] = math.nan
    assert are_finite(copies)
    assert not are_finite([copied.detach()])


def test_too_little_memory_is_said_and_what_a_thread_raises_is_raised_once() -> None:
    memory = KeptMemory()
    assert memory.reserve(Counter({2**20: 3}), 3 * 2**20) == (
        "copies for a save take 0.00293 GiB, and 0.00293 GiB are free"
    )
    assert not memory.is_ready
    assert memory.reserve(Counter({2**20: 3}), 2**30) is None
    assert memory.reserve(Counter({2**20: 3}), 0) is None  # they are there already

    def fail() -> float:
        raise OSError("no space")

    background = Background()
    background.start(fail)
    with pytest.raises(OSError, match="no space"):
        background.wait()
    background.start(lambda: 2.5)
    background.wait()
    assert [background.result(), background.result()] == [2.5, None]


def test_the_least_of_machine_and_control_groups_is_what_is_free(tmp_path: Path) -> None:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert available_bytes(proc, root) is None
    (proc / "meminfo").write_text("MemTotal:       24684096 kB\nMemAvailable:       1000 kB\n")
    assert available_bytes(proc, root) == 1_024_000
    (proc / "self" / "cgroup").write_text("0::/job_1/step_0\n")
    group = root / "job_1" / "step_0"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (root / "job_1" / "memory.max").write_text("700000\n")
    (root / "job_1" / "memory.current").write_text("600000\n")
    assert available_bytes(proc, root) == 100_000
    (root / "job_1" / "memory.stat").write_text("anon 5\ninactive_file 300000\nactive_file 7000\nunevictable 0\n")
    assert available_bytes(proc, root) == 407_000
    (proc / "self" / "cgroup").write_text("8:cpu,memory:/slurm\n0::/\n")
    old = root / "memory" / "slurm"
    old.mkdir(parents=True)
    for name, told in (("limit_in_bytes", 900), ("usage_in_bytes", 700)):
        (old / f"memory.{name}").write_text(f"{told}\n")
    (old / "memory.stat").write_text("inactive_file 1\nactive_file 1\ntotal_inactive_file 20\ntotal_active_file 30\n")
    assert available_bytes(proc, root) == 250


@pytest.fixture
def beside(make_rig: Callable[..., Rig], text: Path) -> Callable[..., Rig]:
    def make(name: str, checkpoint: dict[str, Any] = BESIDE) -> Rig:
        training = {"eval_every": 3, "batch_size": 2}
        return make_rig(name, checkpoint=checkpoint, training=training, data={"eval": str(text), "workers": 2})

    return make


@pytest.mark.training
def test_it_is_the_plain_run_to_the_bit_however_it_ends(beside: Callable[..., Rig]) -> None:
    plain, rig = beside("plain", {"every_steps": 4}), beside("beside")
    plain.finish()
    rig.finish(holds_writes=True)
    same_end(plain, rig)
    assert [one.step for one in rig.history() if one.save_s is not None] == [5, 9]
    assert [one.step for one in rig.history() if one.write_s is not None] == []  # held until the last save, and left
    for step in (4, 8, 12):
        manifests = [complete_manifest(one.run.checkpoint(step)) for one in (plain, rig)]
        ours, theirs = ({**one.files} for one in manifests)
        assert ours.keys() == theirs.keys()
        assert {name for name in ours if ours[name] != theirs[name]} <= OF_THIS_RUN
        proofs = [json.loads((one.run.checkpoint(step) / "proof.json").read_text()) for one in (plain, rig)]
        assert proofs[0] == proofs[1]
        copies = [read_history(one.run.checkpoint(step) / "loss_history.json") for one in (plain, rig)]
        assert [[one.step for one in copy] for copy in copies] == [list(range(1, step + 1))] * 2
        told = [json.loads((one.run.checkpoint(step) / "trainer_state.json").read_text()) for one in (plain, rig)]
        assert [one["global_step"] for one in told] == [step, step]

    killed = beside("killed")
    killed.start(holds_writes=True, die_at=[10, "update", signal.SIGKILL, 0])
    killed.ends(-signal.SIGKILL)
    assert killed.run.checkpoint_steps() == [4]
    assert [one.step for one in killed.history()] == list(range(1, 10))  # it trained on while checkpoint-8 was written
    killed.finish(21, restart=1, holds_writes=True, die_at=[10, "begin", signal.SIGTERM, 0])
    assert killed.run.checkpoint_steps() == [4, 8, 10]
    killed.finish(restart=2)
    same_end(plain, killed)


@pytest.mark.training
def test_a_verdict_is_written_when_the_checkpoint_before_it_is_there(make_rig: Callable[..., Rig]) -> None:
    spike = {"rule": "median_ratio", "window": 4, "warmup": 3, "patience": 1, "ratio": 1.5}
    rig = make_rig(checkpoint=BESIDE, spike=spike, training={"optimizer": {"learning_rate": 1e-3}})
    rig.finish(20, holds_writes=True, spike_at=10)
    assert rig.run.checkpoint_steps() == [4, 8]
    last = rig.history()[-1]
    assert last.is_acted
    assert rig.run.checkpoint(8).stat().st_ctime <= last.time
    assert rig.error().saved_step == 8


FAILED = "checkpoint.background: a save failed: SafetensorError: Error while serializing: I/O error: No space left"


@pytest.mark.training
@pytest.mark.parametrize("how", [{"holds_writes": True, "spike_at": 10, "world": 2}, {"spike_at": 9, "is_late": True}])
def test_a_verdict_is_written_and_acted_on_though_the_save_before_it_failed(
    make_rig: Callable[..., Rig], how: dict[str, Any]
) -> None:
    spike = {"rule": "median_ratio", "window": 4, "warmup": 3, "patience": 1, "ratio": 1.5}
    training = {"optimizer": {"learning_rate": 1e-3}, "batch_size": 2}
    rig = make_rig(checkpoint=BESIDE, spike=spike, training=training)
    rig.finish(20, fails_writes=True, **how)
    assert rig.run.checkpoint_steps() == [4]
    [told] = [one for one in rig.history() if one.warnings]
    assert (told.step, told.is_acted) == (how["spike_at"], True)
    assert told.warnings is not None
    assert told.warnings[0].startswith(FAILED)


@pytest.mark.training
def test_a_failed_save_ends_the_trainer_after_the_steps_record(beside: Callable[..., Rig]) -> None:
    rig = beside("failing")
    rig.finish(1, fails_writes=True)
    last = rig.history()[-1]
    assert (last.step, rig.error().step) == (9, 9)
    assert last.warnings is not None
    assert last.warnings[0].startswith(FAILED)


@pytest.mark.training
@pytest.mark.parametrize("held", [{"holds_writes": True}, {}])
def test_who_is_asked_to_leave_saves_though_the_save_before_failed(
    beside: Callable[..., Rig], held: dict[str, Any]
) -> None:
    rig = beside("leaving")
    rig.finish(21, fails_writes=True, die_at=[9, "begin", signal.SIGTERM, 0], **held)
    assert rig.run.checkpoint_steps() == [4, 9]


@pytest.mark.training
def test_who_leaves_at_once_leaves_though_the_save_under_way_fails(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(checkpoint=BESIDE)
    rig.start(fails_writes=True, holds_writes=True, pause_at=[9])
    rig.pauses(9)
    rig.direct(stop="now")
    rig.goes_on(9)
    rig.ends(21)


@pytest.mark.training
def test_two_ranks_resume_bitwise_and_too_little_memory_is_a_plain_save(make_rig: Callable[..., Rig]) -> None:
    settings: dict[str, Any] = {"checkpoint": {**BESIDE, "every_steps": 3}, "training": {"batch_size": 2}}
    plain, killed, short = (make_rig(name, **settings) for name in ("plain", "killed", "short"))
    plain.finish(world=2, free_bytes=10)
    assert not [one for one in plain.history() if one.write_s is not None]
    killed.start(world=2, holds_writes=True, pause_at=[10])
    killed.pauses(10)
    killed.is_killed()
    assert killed.run.checkpoint_steps() == [3, 6]  # checkpoint-9 was being written
    killed.finish(restart=1, world=2)
    same_end(plain, killed)
    assert "rng_state_1.pth" in complete_manifest(killed.run.checkpoint(6)).files
    short.finish(free_bytes=1000)
    [told] = [one.warnings for one in short.history() if one.warnings]
    assert "copies for a save take" in told[0]
