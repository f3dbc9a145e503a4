"""The probe: the loss on one fixed batch, in evaluation mode, without a trace in anything.

Computed at each save and again at the resume, it proves weights, model and data on any hardware.
"""

import math
from typing import Any

import torch
from transformers import Trainer

from worker.randomness import random_states_aside


def probe_loss(trainer: Trainer) -> float | None:
    """The loss on the first samples of the training data; None where it is not finite."""
    model = trainer.model
    was_training = model.training
    with random_states_aside(), torch.no_grad():
        model.eval()
        try:
            inputs = trainer._prepare_inputs(_fixed_batch(trainer))
            with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
                loss = float(trainer.compute_loss(model, inputs))
        finally:
            model.train(was_training)
    return loss if math.isfinite(loss) else None


def _fixed_batch(trainer: Trainer) -> dict[str, Any]:
    samples: Any = trainer.train_dataset
    size = min(trainer.args.per_device_train_batch_size, len(samples))
    batch: dict[str, Any] = trainer.data_collator([samples[index] for index in range(size)])
    return batch


def weights_are_finite(model: torch.nn.Module) -> bool:
    """Whether every parameter is a number everywhere."""
    finite = [torch.isfinite(parameter).all() for parameter in model.parameters()]
    return bool(torch.stack(finite).all())
