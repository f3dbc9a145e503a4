"""The probe: the loss on one fixed batch, in evaluation mode, without a trace in anything.

Computed at each save and again at the resume, it proves weights, model and data on any hardware.
"""

import math
from typing import Any

import torch
from transformers import Trainer

from worker import world
from worker.fed import batch_of
from worker.randomness import random_states_aside
from worker.shards import own_part

_NUM_SAMPLES = 4


def probe_loss(trainer: Trainer) -> float | None:
    """The mean loss on the first samples of the training data, one by one; None where it is not finite.

    One by one, so that it needs little memory and is the same whatever the batch size and the number of ranks.
    """
    model: Any = trainer.model
    samples: Any = trainer.train_dataset
    was_training = model.training
    with random_states_aside(), torch.no_grad():
        model.eval()
        try:
            losses = [float(loss_on(trainer, index)) for index in range(min(_NUM_SAMPLES, len(samples)))]
        finally:
            model.train(was_training)
    loss = sum(losses) / len(losses)
    return loss if math.isfinite(loss) else None


def loss_on(trainer: Trainer, index: int) -> torch.Tensor:
    """The loss of one training sample, as the Trainer computes it."""
    model: Any = trainer.model
    inputs = trainer._prepare_inputs(batch_of(trainer, [index]))
    with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
        loss: Any = trainer.compute_loss(model, inputs)
        return loss  # type: ignore[no-any-return]


def weights_are_finite(model: torch.nn.Module) -> bool:
    """Whether every parameter is a number everywhere, on every rank; they call it together."""
    parts = (own_part(parameter.detach()) for parameter in model.parameters())
    extremes = [extreme.float() for part in parts if part.numel() > 0 for extreme in torch.aminmax(part)]  # NaN is both
    return all(world.of_all_ranks(not extremes or bool(torch.isfinite(torch.stack(extremes)).all())))
