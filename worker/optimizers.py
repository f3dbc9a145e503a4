"""What trains: the optimizer of the configuration, and the schedule of its learning rate."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from worker.contract.config import OptimizerConfig, ScheduleConfig, TrainingConfig

_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def build_optimizer(model: torch.nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer of ``training`` over the trained parameters; weight decay touches matrices only.

    Two groups, the first with decay: parameters of two dimensions or more; the second without: norms and biases.
    A group without parameters is left out.  Raises ValueError where nothing is trained.
    """
    rules = training.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": rules.weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    return _build([group for group in groups if group["params"]], rules, fused=_can_be_fused(trained))


def _build(groups: list[dict[str, Any]], rules: OptimizerConfig, *, fused: bool) -> torch.optim.Optimizer:
    if rules.learning_rate is None:
        raise ValueError("training.optimizer.learning_rate is missing")
    if rules.name == "sgd":
        return torch.optim.SGD(groups, lr=rules.learning_rate, momentum=rules.momentum)
    kind = torch.optim.AdamW if rules.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=rules.learning_rate, betas=rules.betas, eps=rules.eps, fused=fused)


def _can_be_fused(parameters: Iterable[torch.Tensor]) -> bool:
    return all(one.device.type in _FUSED_DEVICES and one.is_floating_point() for one in parameters)


def schedule_factor(schedule: ScheduleConfig, step: int, max_steps: int) -> float:
    """The share of the peak for the update that makes ``step + 1`` the number of finished steps.

    Counted as LambdaLR and transformers do: update k, from 0, has factor(k).  Over w warmup steps it climbs from zero,
    k / w; update w is the first at the peak; then it falls and would be ``floor`` at k = max_steps, one past the last.
    """
    warmup = warmup_steps(schedule, max_steps)
    if step < warmup:
        return step / warmup
    if schedule.name == "constant":
        return 1.0
    past = min(1.0, (step - warmup) / max(1, max_steps - warmup))
    share = 0.5 * (1.0 + math.cos(math.pi * past)) if schedule.name == "cosine" else 1.0 - past
    return schedule.floor + (1.0 - schedule.floor) * share


def warmup_steps(schedule: ScheduleConfig, max_steps: int) -> int:
    """The number of warmup steps: a share of all, rounded up, where ``warmup`` is below 1."""
    return math.ceil(schedule.warmup * max_steps) if schedule.warmup < 1 else int(schedule.warmup)


def build_schedule(optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, max_steps: int) -> LambdaLR:
    """The schedule on every group of ``optimizer``."""
    return LambdaLR(optimizer, partial(schedule_factor, schedule, max_steps=max_steps))
