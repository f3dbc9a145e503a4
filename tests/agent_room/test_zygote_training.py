"""Real training through the zygote: to the bit what it is without, also after relaunches in the allocation."""

import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_rooms import Room, is_alive

from tests.waiting import eventually
from worker.contract import config
from worker.contract.exit_report import Outcome
from worker.contract.loss_history import Record, read_history, surviving
from worker.contract.manifest import complete_manifest

pytestmark = pytest.mark.training

EXPLODES: dict[str, Any] = {
    "max_steps": 8,
    "batch_size": 4,
    "precision": "fp32",
    "max_grad_norm": None,
    "optimizer": {"name": "sgd", "momentum": 0.9, "learning_rate": 300.0},
    "schedule": {"name": "constant", "warmup": 0},
}


class TrainingRoom(Room):
    """A room with the real trainer and a tiny model, whose rate is far too high unless a directive lowers it."""

    trainer_module = "pausing_train"

    def configure(self, **recovery: Any) -> None:
        text = self.path / "text.txt"
        text.write_text("".join(f"line {number}: {number * number}\n" for number in range(150)))
        document = {
            "run": {"name": "r", "seed": 7},
            "model": {
                "config": {
                    "model_type": "llama",
                    "vocab_size": 256,
                    "hidden_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "intermediate_size": 64,
                    "max_position_embeddings": 64,
                    "attention_dropout": 0.1,
                }
            },
            "data": {"train": str(text), "tokenizer": "bytes", "max_tokens": 32},
            "training": {**EXPLODES, "zygote": self.zygote},
            "spike": {"warmup": 1, "patience": 1, "ratio": 1.5},
            "ema": {"every": 2},
            "checkpoint": {"every_steps": 4, "keep": 9},
            "recovery": recovery,
        }
        config.write(self.run_dir.config, config.Config.model_validate(document))

    def history(self) -> list[Record]:
        return surviving(read_history(self.run_dir.history))

    def trainer_of(self, agent_pid: int) -> int:
        """The running trainer of an agent, waited for: it leads a process group of its own."""

        def look() -> list[int]:
            found = Path(f"/proc/{agent_pid}/task/{agent_pid}/children").read_text().split()
            return [int(pid) for pid in found if os.getpgid(int(pid)) == int(pid) and is_alive(int(pid))]

        return eventually(look)[0]

    def pauses(self, attempt: int) -> None:
        """Returns when the attempt, asked before it began, has come to the pause after step 6."""
        eventually((self.path / f"paused-{attempt}-6").exists, 240)

    def digests(self) -> dict[str, str]:
        files = [self.run_dir.final / "model.safetensors", self.run_dir.final / "ema" / "model.safetensors"]
        return {str(path.parent.name): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TrainingRoom]]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    rooms: list[TrainingRoom] = []

    def make(name: str, zygote: bool) -> TrainingRoom:
        (tmp_path / name).mkdir()
        rooms.append(TrainingRoom(tmp_path / name, zygote))
        return rooms[-1]

    yield make
    for room in rooms:
        room.close()


def disturbed(room: TrainingRoom) -> list[Record]:
    """A spike, a relaunch from scratch at a small rate, a kill after step 6, a relaunch from a checkpoint, the end."""
    room.direct(1)
    agent = room.agent()
    assert eventually(lambda: room.run_dir.exit_report(1, 0, 0).exists(), 240)
    assert room.report(1).outcome is Outcome.VERDICT
    (room.path / "pause-2-6").touch()
    room.direct(2, cause="spike", lr_scale=0.0003)
    room.pauses(2)
    os.kill(room.trainer_of(agent.pid), signal.SIGKILL)
    assert room.report(2).signal == signal.SIGKILL
    room.direct(3, cause="crash", resume_from="checkpoint-4", lr_scale=0.0003)
    assert agent.wait(240) == 0
    assert room.report(3).outcome is Outcome.DONE
    assert room.said("its zygote is gone") is False
    return room.history()


def test_a_run_through_the_zygote_is_to_the_bit_the_run_without(make_room: Callable[..., TrainingRoom]) -> None:
    forked, cold = make_room("forked", zygote=True), make_room("cold", zygote=False)
    records, others = disturbed(forked), disturbed(cold)
    assert [record.step for record in records] == list(range(1, 9))
    for name in ("attempt", "loss", "grad_norm", "lr", "data", "epoch"):
        assert [getattr(one, name) for one in records] == [getattr(one, name) for one in others], name
    assert [one.start and one.start.rng_digests for one in records] == [
        one.start and one.start.rng_digests for one in others
    ]
    assert forked.digests() == cold.digests()
    everything = [room.run_dir.history.read_text() for room in (forked, cold)]
    assert all('"verdict": "spike"' in text or '"verdict": "nonfinite"' in text for text in everything)


def test_two_ranks_are_relaunched_and_finish_together(make_room: Callable[..., TrainingRoom]) -> None:
    room = make_room("two", zygote=True)
    (room.path / "pause-1-6").touch()
    room.direct(1, lr_scale=0.0003)
    agents = [room.agent(rank=rank, world=2, local_rank=rank) for rank in (0, 1)]
    room.pauses(1)
    os.kill(room.trainer_of(agents[1].pid), signal.SIGKILL)
    assert room.report(1, rank=1).signal == signal.SIGKILL
    (room.path / "pause-1-6").unlink()
    room.report(1, rank=0)
    zygotes = [room.zygote_of(agent) for agent in agents]
    room.direct(2, cause="crash", resume_from="checkpoint-4", lr_scale=0.0003)
    assert [agent.wait(240) for agent in agents] == [0, 0]
    assert [room.report(2, rank=rank).outcome for rank in (0, 1)] == [Outcome.DONE, Outcome.DONE]
    assert [record.step for record in room.history()] == list(range(1, 9))
    assert complete_manifest(room.run_dir.checkpoint(8)).world_size == 2
    eventually(lambda: not any(is_alive(pid) for pid in zygotes))


def test_the_real_imports_leave_nothing_that_a_fork_would_trip_over(make_room: Callable[..., TrainingRoom]) -> None:
    room = make_room("idle", zygote=True)
    (room.path / "pause-1-6").touch()
    room.direct(1, lr_scale=0.0003)
    agent = room.agent()
    room.pauses(1)
    zygote, trainer = Path(f"/proc/{room.zygote_of(agent)}"), Path(f"/proc/{room.trainer_of(agent.pid)}")
    threads = [len(list(process.glob("task/*"))) for process in (zygote, trainer)]
    assert threads[0] <= 3  # its own, an allocator's, and OpenBLAS's where there are two cores for it
    assert b"worker.zygote" in (trainer / "cmdline").read_bytes()
    assert "libcuda.so" not in (zygote / "maps").read_text()
    (room.path / "pause-1-6").unlink()
    assert agent.wait(240) == 0
    assert room.report(1).outcome is Outcome.DONE
