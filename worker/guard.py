"""The guard: an update whose gradient is not finite is applied on no rank.

The norm is that of the gradient after it was reduced over the ranks, so every rank comes to the same answer by itself.
Whose gradient it was that was not finite is seen before the reduction.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from transformers import Trainer


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of accelerate's wrappers."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def withhold(optimizer: Optimizer, norm: torch.Tensor | float) -> None:
    """Make the coming ``optimizer.step()`` change nothing if the norm is not finite: neither weights nor moments.

    The norm is that of all shards. A fused optimizer is told on its device and nobody waits for the answer; any other
    has its gradients taken, and for that the device is waited for. Where the norm is at hand, a fused one with nothing
    to withhold is not asked to look.
    """
    inner = innermost(optimizer)
    is_at_hand = not isinstance(norm, torch.Tensor) or norm.device.type == "cpu"
    if is_at_hand and math.isfinite(norm):
        inner.found_inf = None  # type: ignore[attr-defined]
    elif isinstance(norm, torch.Tensor) and _takes_found_inf(inner):
        inner.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
    elif not math.isfinite(norm):
        for group in inner.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _takes_found_inf(optimizer: Optimizer) -> bool:
    fused = all(group.get("fused") for group in optimizer.param_groups)
    return fused and getattr(optimizer, "_step_supports_amp_scaling", False)


def why_unguarded(trainer: Trainer) -> str | None:
    """Why updates of this Trainer cannot be withheld, for a person; None where they can."""
    if getattr(trainer, "is_deepspeed_enabled", False):
        return (
            "DeepSpeed applies its updates by itself: one whose gradient is not finite cannot be withheld, "
            "only answered by a rollback"
        )
    return None


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


class OwnGradient:
    """This rank's own gradient of a step, as it is before DistributedDataParallel averages it over the ranks."""

    def __init__(self) -> None:
        self._largest: list[torch.Tensor] = []

    def watch(self, model: torch.nn.Module) -> None:
        """Look at every bucket of gradients on its way to the reduction; of any other model nothing is known."""
        if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, self._reduce)

    def _reduce(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self._largest.append(torch.linalg.vector_norm(bucket.buffer(), ord=math.inf))
        return allreduce_hook(_default_group(), bucket)

    def take(self) -> torch.Tensor | None:
        """The largest magnitude since the last time: NaN or infinite where the gradient is; None if not watched."""
        largest, self._largest = self._largest, []
        return torch.stack(largest).sum() if largest else None
