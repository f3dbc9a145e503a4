"""What no resume could repeat to the bit: refused by name, before the first step."""

from typing import Any

from transformers import Trainer

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
    for name in _NEVER:
        if getattr(args, name, False):
            raise RefusedError(f"{name}: {OWNED_FIELDS[name]}", what=name)
    if draws_random_numbers(trainer):
        raise RefusedError(
            "the data set or its collator draws from the global random states: a resumed run would see other samples; "
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


def draws_random_numbers(trainer: Trainer) -> bool:
    """Whether a batch of the first, the middle or the last sample moves the random states of python, numpy or torch."""
    samples: Any = trainer.train_dataset
    if len(samples) == 0:
        return False
    with random_states_aside():
        before = random_digest()
        for index in sorted({0, len(samples) // 2, len(samples) - 1}):
            batch_of(trainer, [index])
        return random_digest() != before
