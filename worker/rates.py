"""The learning rate, absolute: configured peak x schedule(step) x scale(step), exact from the very first step.

A checkpoint brings the rate it was written with in four places (``lr`` and ``initial_lr`` of the optimizer,
``base_lrs`` and ``_last_lr`` of the schedule), so a scale that was applied to any of them would compound with every
resume.  Here all four are set from the configured peak, and the scale goes into the schedule's own function.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from worker.leaving import RefusedError

Scale = Callable[[int], float]
"""The factor on the rate of the update that makes its argument the number of finished steps."""


def configured_rates(optimizer: Optimizer) -> list[float]:
    """Each group's peak rate, before a checkpoint is loaded over it."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def hold_rates(optimizer: Optimizer, schedule: Any, peaks: Sequence[float], scale: Scale) -> Callable[[int], float]:
    """Make every coming update use its peak x schedule x scale; a scale of 1.0 changes no bit.

    Returns what the first group's rate is to be after a number of finished steps.
    """
    if not isinstance(schedule, LambdaLR):
        raise RefusedError(
            f"the schedule {type(schedule).__name__} has no base rate that could be scaled; use one that is a "
            "function of the step (cosine, linear, constant, ...)"
        )
    schedule.base_lrs = list(peaks)
    schedule.lr_lambdas = [_scaled(factor, scale) for factor in schedule.lr_lambdas]
    rates: list[Any] = [
        peak * factor(schedule.last_epoch) for peak, factor in zip(peaks, schedule.lr_lambdas, strict=True)
    ]
    for group, peak, rate in zip(optimizer.param_groups, peaks, rates, strict=True):
        group["initial_lr"], group["lr"] = peak, rate
    schedule._last_lr = rates
    return lambda done: peaks[0] * schedule.lr_lambdas[0](done)


def _scaled(factor: Callable[[int], float], scale: Scale) -> Callable[[int], float]:
    def scaled(done: int) -> float:
        return factor(done) * scale(done + 1)

    return scaled
