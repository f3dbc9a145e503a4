"""What no resume could repeat to the bit: refused by name, before the first step."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import EarlyStoppingCallback, Trainer

from worker.contract.owned_fields import OWNED_FIELDS
from worker.contract.tested import TRANSFORMERS_RANGE, is_tested
from worker.fed import batch_of
from worker.leaving import RefusedError
from worker.randomness import random_digest, random_states_aside

_NEVER = (
    *("dataloader_persistent_workers", "ignore_data_skip", "load_best_model_at_end", "save_only_model", "push_to_hub"),
    *("auto_find_batch_size", "enable_jit_checkpoint"),
)
"""Fields of TrainingArguments that a script of a person's own may have set, and that break what is promised."""


def refuse_untested(version: str) -> None:
    """RefusedError where this release of transformers is not one that the tests were run with."""
    if not is_tested(version):
        mend = f'pip install "transformers{TRANSFORMERS_RANGE}"'
        raise RefusedError(f"transformers {version} is not tested with this version; {mend}", what="transformers")


def refuse_what_cannot_repeat(trainer: Trainer) -> None:
    """RefusedError where a resumed run would train on other samples, or with other random numbers."""
    args = trainer.args
    if not hasattr(trainer.train_dataset, "__len__"):
        raise RefusedError("the training data has no length: an exact resume needs a map-style data set", what="data")
    if args.n_gpu > 1:
        raise RefusedError("one task with several GPUs would train with DataParallel; use one task a GPU", what="world")
    if trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1:
        raise RefusedError(f"parallelism_config: {OWNED_FIELDS['parallelism_config']}", what="world")
    for name in _NEVER:
        if getattr(args, name, False):
            raise RefusedError(f"{name}: {OWNED_FIELDS[name]}", what=name)
    if not args.dataloader_in_order:
        raise RefusedError(f"dataloader_in_order: {OWNED_FIELDS['dataloader_in_order']}", what="dataloader_in_order")
    accelerator: Any = args.accelerator_config
    for name in ("split_batches", "dispatch_batches"):
        if getattr(accelerator, name):
            mend = OWNED_FIELDS["accelerator_config"]
            raise RefusedError(f"accelerator_config.{name}: {mend}", what="accelerator_config")
    if any(isinstance(one, EarlyStoppingCallback) for one in trainer.callback_handler.callbacks):
        mend = OWNED_FIELDS["load_best_model_at_end"]
        raise RefusedError(f"EarlyStoppingCallback: {mend}", what="callback")
    _refuse_data_that_change(trainer)


def _refuse_data_that_change(trainer: Trainer) -> None:
    if hasattr(trainer.train_dataset, "set_epoch"):
        raise RefusedError(
            "the data set has set_epoch: with other samples in each epoch no checkpoint could be proved; leave it out",
            what="data",
        )
    change = change_of_data(trainer)
    if change is not None:
        raise RefusedError(
            f"the data set or its collator {change}: a resumed run would see other samples; "
            "draw from a generator that is seeded by the sample's index",
            what="data",
        )


def refuse_other_samplers(trainer: Trainer) -> None:
    """RefusedError where it is not the Trainer itself that chooses the samples: ours would take the place of theirs."""
    args = trainer.args
    if args.train_sampling_strategy not in ("random", "sequential"):
        raise RefusedError(f"train_sampling_strategy: {OWNED_FIELDS['train_sampling_strategy']}", what="data")
    for name in ("_get_train_sampler", "get_train_dataloader"):
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            kind = type(trainer).__name__
            raise RefusedError(f"{kind} chooses its samples itself ({name}): a resume cannot repeat them", what="data")


def change_of_data(trainer: Trainer) -> str | None:
    """How the batch of the first, the middle or the last sample is not the same each time it is made, if it is not.

    It moves the random states of python, numpy or torch, or a state of its own.
    """
    samples: Any = trainer.train_dataset
    if len(samples) == 0:
        return None
    indices = sorted({0, len(samples) // 2, len(samples) - 1})
    with random_states_aside():
        before = random_digest()
        first, again = ([batch_of(trainer, [index]) for index in indices] for _ in range(2))
        if random_digest() != before:
            return "draws from the global random states"
    return None if _is_same(first, again) else "makes another batch of the same sample when it is asked again"


def _is_same(one: Any, other: Any) -> bool:
    """By the bytes of tensors; what holds no plain values is not looked into."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) and one.layout == torch.strided:
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes_of(one), _bytes_of(other))
    if isinstance(one, np.ndarray):
        return _is_same(one.tolist(), other.tolist())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return not isinstance(one, str | bytes | int | float) or repr(one) == repr(other)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
