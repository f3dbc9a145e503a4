"""Samples as a Trainer's own loader feeds them: without the columns that its model does not take."""

from collections.abc import Sequence
from typing import Any

from transformers import Trainer


def batch_of(trainer: Trainer, indices: Sequence[int]) -> Any:
    """One batch of the training samples with these indices."""
    samples: Any = trainer.train_dataset
    collator: Any = trainer.data_collator
    if hasattr(samples, "column_names"):
        samples = trainer._remove_unused_columns(samples, description="training")
    else:
        collator = trainer._get_collator_with_removed_columns(collator, description="training")
    return collator([samples[index] for index in indices])
