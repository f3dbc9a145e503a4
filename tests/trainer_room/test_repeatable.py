"""What would make a resume another training is refused by name, before a step is made."""

import json
import random
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from accelerate import ParallelismConfig
from transformers import DataCollatorForLanguageModeling, EarlyStoppingCallback, Trainer, TrainingArguments

from tests.trainer_room.rig import Rig, same_end, write_text
from worker.contract.manifest import complete_manifest
from worker.contract.tested import TRANSFORMERS_RANGE
from worker.fits import missing_part
from worker.leaving import RefusedError
from worker.models import byte_tokenizer
from worker.randomness import random_digest
from worker.repeatable import refuse_other_samplers, refuse_untested, refuse_what_cannot_repeat

pytestmark = pytest.mark.training


def refused(rig: Rig, restart: int = 0) -> tuple[str | None, str]:
    rig.finish(23, restart=restart)
    error = rig.error(restart=restart).error
    assert error is not None
    return error.what, error.message


def interrupted(rig: Rig) -> None:
    """A run that was killed after its checkpoint of step 4."""
    rig.start(die_at=[5, "end", signal.SIGKILL, 0])
    rig.ends(-signal.SIGKILL)


def test_edited_data_are_refused(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    path = write_text(tmp_path / "own.txt", num_bytes=640)
    rig = make_rig(data={"train": str(path)})
    interrupted(rig)
    path.write_bytes(path.read_bytes().replace(b"line 3", b"Line 3"))
    what, message = refused(rig, restart=1)
    assert what == "data_digest"
    assert "the samples, or the tokenizer, are not the same" in message


def speaking(folder: Path, swapped: bool = False) -> str:
    """A tokenizer in a folder; swapped, the ids of two letters are exchanged."""
    byte_tokenizer().save_pretrained(folder)
    if swapped:
        path = folder / "tokenizer.json"
        told = json.loads(path.read_text())
        vocabulary = told["model"]["vocab"]
        vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
        path.write_text(json.dumps(told))
    return str(folder)


def test_another_tokenizer_is_refused_and_tokens_are_made_once(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    rig = make_rig(data={"tokenizer": speaking(folder)})
    interrupted(rig)
    (kept,) = rig.run.tokens.iterdir()
    made = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept.iterdir()}
    assert made.keys() == {"ids.npy", "starts.npy", "rows.npy", "notes.json"}

    speaking(folder, swapped=True)
    what, _ = refused(rig, restart=1)
    assert what == "data_digest"
    assert len(list(rig.run.tokens.iterdir())) == 2

    speaking(folder)
    half_made = rig.run.staged_tokens(1, 1, 0)
    half_made.mkdir(parents=True)  # by a trainer that was killed
    rig.finish(restart=2)
    assert not half_made.exists()
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in kept.iterdir()} == made
    bytewise = make_rig("bytewise")
    bytewise.finish()
    assert bytewise.losses() == rig.losses()
    undisturbed = make_rig("undisturbed", data={"tokenizer": str(folder)})
    undisturbed.finish()
    same_end(undisturbed, rig)
    digests = {complete_manifest(one.run.checkpoint(12)).data_digest for one in (rig, undisturbed)}
    assert len(digests) == 1


def test_tokens_that_cannot_be_read_are_named(make_rig: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make_rig(data={"tokenizer": speaking(tmp_path / "tokenizer")})
    interrupted(rig)
    (kept,) = rig.run.tokens.iterdir()
    (kept / "ids.npy").write_bytes(b"")
    _, message = refused(rig, restart=1)
    assert str(kept) in message
    assert "remove it, and it is made again" in message


def test_data_that_draw_random_numbers_are_refused(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.direct()
    rig.claim(1)
    rig.finish(23, draws=True)
    error = rig.error().error
    assert error is not None
    assert error.what == "data"
    assert "draws from the global random states" in error.message
    assert not rig.run.history.exists()


def trainer(
    train_dataset: Any = (1,),
    data_collator: Any = list,
    callbacks: Any = None,
    num_gpus: int = 0,
    kind: type[Trainer] = Trainer,
    **fields: Any,
) -> Trainer:
    """The real one, as a script of a person's own would make it."""
    args = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], remove_unused_columns=False, **fields)
    args._n_gpu = num_gpus
    model = torch.nn.Linear(1, 1)
    return kind(model, args, data_collator=data_collator, train_dataset=train_dataset, callbacks=callbacks)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"num_gpus": 2}, "world"),
        ({"dataloader_in_order": False}, "dataloader_in_order"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config"),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config"),
        ({"callbacks": [EarlyStoppingCallback()]}, "callback"),
        ({"save_only_model": True}, "save_only_model"),
    ],
)
def test_settings_that_cannot_be_repeated_are_refused(fields: dict[str, Any], what: str) -> None:
    refuse_what_cannot_repeat(trainer())
    with pytest.raises(RefusedError) as caught:
        refuse_what_cannot_repeat(trainer(**fields))
    assert caught.value.what == what


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any: ...


def test_a_trainer_that_chooses_its_samples_itself_is_refused() -> None:
    refuse_other_samplers(trainer())
    expected = r"OwnLoader chooses its samples itself \(get_train_dataloader\)"
    with pytest.raises(RefusedError, match=expected):
        refuse_other_samplers(trainer(kind=OwnLoader))


@pytest.mark.parametrize("kind", ["tp", "cp", "sp"])
def test_ranks_that_share_a_batch_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = trainer()
    config = ParallelismConfig(**{f"{kind}_size": 2})
    monkeypatch.setattr(sharing.accelerator.state, "parallelism_config", config, raising=False)
    with pytest.raises(RefusedError, match="every rank trains on batches of its own"):
        refuse_what_cannot_repeat(sharing)


DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(1),
}


class Counting:
    """Samples that are noted when they are made; some of them draw."""

    def __init__(self, size: int, draws_at: int, draw: Callable[[], object]) -> None:
        self._size, self._draws_at, self._draw = size, draws_at, draw
        self.made: list[int] = []

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> int:
        self.made.append(index)
        if index >= self._draws_at:
            self._draw()
        return index


@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.parametrize("draws_at", [0, 1, 50, 99])
def test_samples_that_draw_are_found_wherever_they_begin_to(source: str, draws_at: int) -> None:
    before = random_digest()
    with pytest.raises(RefusedError, match="draws from the global random states"):
        refuse_what_cannot_repeat(trainer(train_dataset=Counting(100, draws_at, DRAWS[source])))
    assert random_digest() == before


@pytest.mark.parametrize("source", DRAWS)
def test_a_collator_that_draws_is_found(source: str) -> None:
    with pytest.raises(RefusedError, match="draws from the global random states"):
        refuse_what_cannot_repeat(trainer(data_collator=lambda samples: DRAWS[source]()))


@pytest.mark.parametrize(
    ("size", "made"), [(0, []), (1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (1_000_000, [0, 500_000, 999_999])]
)
def test_a_few_samples_are_looked_at_twice(size: int, made: list[int]) -> None:
    samples = Counting(size, size, random.random)
    refuse_what_cannot_repeat(trainer(train_dataset=samples))
    assert samples.made == made * 2


def test_a_collator_with_a_generator_of_its_own_is_found() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>", "mask_token": "<mask>"})
    rows = [{"input_ids": list(range(40))} for _ in range(9)]
    refuse_what_cannot_repeat(trainer(rows, DataCollatorForLanguageModeling(tokenizer, mlm=False)))
    with pytest.raises(RefusedError, match="makes another batch of the same sample"):
        refuse_what_cannot_repeat(trainer(rows, DataCollatorForLanguageModeling(tokenizer, mlm=True, seed=3)))


class PerEpoch(Counting):
    def set_epoch(self, epoch: int) -> None: ...


def test_samples_that_are_others_in_each_epoch_are_refused() -> None:
    with pytest.raises(RefusedError, match="set_epoch"):
        refuse_what_cannot_repeat(trainer(PerEpoch(9, 9, random.random)))


PLAIN = {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json", "config.json"}
FSDP = {"pytorch_model_fsdp_0/.metadata", "optimizer_0/.metadata", "scheduler.pt", "trainer_state.json"}
DEEPSPEED = {
    "global_step8/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "global_step8/mp_rank_00_model_states.pt",
    "latest",
    "scheduler.pt",
    "trainer_state.json",
}


@pytest.mark.parametrize(
    ("files", "needed"),
    [
        (PLAIN, ["model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"]),
        (PLAIN | {"additional_chat_templates/one.jinja"}, ["model.safetensors", "optimizer.pt"]),
        (FSDP, ["optimizer_0/.metadata", "scheduler.pt", "trainer_state.json"]),
        ({"pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt", "trainer_state.json"}, ["optimizer.bin"]),
        (DEEPSPEED, ["latest", "scheduler.pt", "global_step8/zero_pp_rank_0_mp_rank_00_optim_states.pt"]),
    ],
)
def test_what_a_checkpoint_of_each_backend_needs(files: set[str], needed: list[str]) -> None:
    assert missing_part(files) is None
    for name in needed:
        missing = missing_part(files - {name})
        assert missing is not None
        assert missing.split("/")[0].rstrip("*") in name


def test_a_release_of_transformers_that_is_not_tested_is_refused() -> None:
    refuse_untested(transformers.__version__)
    for version in ("4.57.6", "5.22.2", "5.25.0", "6.0.0.dev0"):
        with pytest.raises(RefusedError, match=rf"^transformers {version} is not tested .*pip install"):
            refuse_untested(version)


def test_the_tested_releases_are_those_that_pip_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert f"transformers{TRANSFORMERS_RANGE}" in project["dependencies"]
