"""The probe: the loss on one fixed batch, in evaluation mode, without a trace in anything.

Computed at each save and again at the resume, it proves weights, model and data on any hardware.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, Final

import torch
from transformers import Trainer

from worker import world
from worker.fed import batch_of
from worker.randomness import random_states_aside
from worker.shards import own_part
from worker.wrap import replaced

_MOST_SAMPLES: Final = 4
_ENOUGH_LABELS: Final = 31
"""A sample of 32 tokens has them. A loss of fewer may be small, and other kernels change it by much of itself."""
_NOT_LEARNED: Final = -100


def probe_samples(trainer: Trainer) -> int:
    """How many of the first training samples a probe takes: the fewest with 31 labels to be learned, 4 at most.

    Training stands still for every one.
    """
    samples: Any = trainer.train_dataset
    most, labels = min(_MOST_SAMPLES, len(samples)), 0
    with random_states_aside():
        for index in range(most):
            labels += _labels_in(batch_of(trainer, [index]))
            if labels >= _ENOUGH_LABELS:
                return index + 1
    return most


def _labels_in(batch: Any) -> int:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return int((labels != _NOT_LEARNED).sum()) if isinstance(labels, torch.Tensor) else 0


def probe_loss(trainer: Trainer, num_samples: int | None = None) -> float | None:
    """The mean loss on the first samples of the training data, one by one; None where it is not finite.

    One by one, so that it needs little memory and is the same whatever the batch size and the number of ranks.
    ``num_samples`` is what a checkpoint's probe was of, and by default what one of now is.
    """
    model: Any = trainer.model
    samples: Any = trainer.train_dataset
    count = min(len(samples), probe_samples(trainer) if num_samples is None else num_samples)
    was_training = model.training
    with random_states_aside(), torch.no_grad():
        model.eval()
        try:
            losses = [float(loss_on(trainer, index)) for index in range(count)]
        finally:
            model.train(was_training)
    loss = sum(losses) / len(losses)
    return loss if math.isfinite(loss) else None


def loss_on(trainer: Trainer, index: int) -> torch.Tensor:
    """The loss of one training sample, as the Trainer computes it; without a trace in the metrics that trl logs."""
    model: Any = trainer.model
    inputs = trainer._prepare_inputs(batch_of(trainer, [index]))
    with _metrics_aside(trainer), trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
        loss: Any = trainer.compute_loss(model, inputs)
        return loss  # type: ignore[no-any-return]


def _metrics_aside(trainer: Trainer) -> AbstractContextManager[None]:
    if not hasattr(trainer, "_metrics"):
        return nullcontext()
    return replaced(trainer, "_metrics", deepcopy(trainer._metrics))


def weights_are_finite(model: torch.nn.Module) -> bool:
    """Whether every parameter is a number everywhere, on every rank; they call it together."""
    return all(world.of_all_ranks(are_finite(own_weights(model))))


def own_weights(model: torch.nn.Module) -> list[torch.Tensor]:
    """This rank's part of every parameter."""
    return [own_part(parameter.detach()) for parameter in model.parameters()]


def are_finite(parts: Iterable[torch.Tensor]) -> bool:
    """Whether these are numbers everywhere."""
    extremes = [extreme.float() for part in parts if part.numel() > 0 for extreme in torch.aminmax(part)]  # NaN is both
    return not extremes or bool(torch.isfinite(torch.stack(extremes)).all())
