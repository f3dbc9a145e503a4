"""What no resume could repeat to the bit: refused by name, before the first step."""

from typing import Any

from transformers import Trainer

from worker.leaving import RefusedError
from worker.randomness import random_digest, random_states_aside


def refuse_what_cannot_repeat(trainer: Trainer) -> None:
    """RefusedError where a resumed run would train on other samples, or with other random numbers."""
    args = trainer.args
    if not hasattr(trainer.train_dataset, "__len__"):
        raise RefusedError("the training data has no length: an exact resume needs a map-style data set", what="data")
    if args.n_gpu > 1:
        raise RefusedError("one task with several GPUs would train with DataParallel; use one task a GPU", what="world")
    for name in ("dataloader_persistent_workers", "ignore_data_skip"):
        if getattr(args, name):
            raise RefusedError(f"{name}: a resumed run would no longer see the same batches; leave it out", what=name)
    if draws_random_numbers(trainer):
        raise RefusedError(
            "the data set or its collator draws from the global random states: a resumed run would see other samples; "
            "draw from a generator that is seeded by the sample's index",
            what="data",
        )


def draws_random_numbers(trainer: Trainer) -> bool:
    """Whether making a batch of the first sample moves the random states of python, numpy or torch."""
    samples: Any = trainer.train_dataset
    if len(samples) == 0:
        return False
    with random_states_aside():
        before = random_digest()
        trainer.data_collator([samples[0]])
        return random_digest() != before
