"""Sophia's curvature: an estimate of the Hessian's diagonal from labels that the model itself draws.

Sophia-G of Liu et al. 2023 (arXiv:2305.14342): every few steps one more forward and backward pass, the
Gauss-Newton-Bartlett estimator.  The update itself is pytorch_optimizer's.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer

from worker import world
from worker.leaving import RefusedError
from worker.wrap import wrap

RHO, EVERY = 0.04, 10


def sophia_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of pytorch_optimizer's class, whose own estimate is switched off.

    A weight moves by the learning rate at most, as the paper has it: ``rho`` scales the curvature and not the step.
    """
    own = {name: value for name, value in arguments.items() if name not in ("rho", "every")}
    return {"p": 1.0, **own, "update_period": sys.maxsize}


class Curvature:
    """Gives the optimizer of one Trainer an estimate every ``every`` steps, the first one included."""

    def __init__(self, trainer: Trainer, optimizer: torch.optim.Optimizer, args: Mapping[str, Any]) -> None:
        _refuse_what_is_not_whole(trainer)
        self._trainer = trainer
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._rho = float(_positive(args, "rho", RHO, (int, float)))
        self._every = int(_positive(args, "every", EVERY, (int,)))
        self._estimate: list[torch.Tensor] | None = None
        wrap(trainer, "training_step", self._after_micro_step)
        optimizer.register_step_pre_hook(self._give)
        optimizer.register_step_post_hook(_forget)

    def _after_micro_step(self, original: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Estimate on the last micro-step's samples."""
        loss = original(model, inputs, *args, **kwargs)
        trainer = self._trainer
        if trainer.accelerator.sync_gradients and trainer.state.global_step % self._every == 0:
            prepared: Any = trainer._prepare_inputs(inputs)
            whole: Any = trainer.model  # without what reduces gradients over the ranks
            with trainer.compute_loss_context_manager():
                self._estimate = self._of_all_ranks(gauss_newton_bartlett(whole, prepared, self._parameters))
        return loss

    def _of_all_ranks(self, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mean over the ranks, times rho; zeros, which say nothing, where any of it is not finite."""
        for one in own:
            world.add_up(one)
        is_finite = torch.stack([torch.isfinite(one).all() for one in own]).all()
        return [torch.where(is_finite, one * (self._rho / world.world_size()), 0.0) for one in own]

    def _give(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        estimate, self._estimate = self._estimate, None
        return None if estimate is None else (args, {**kwargs, "hessian": estimate})


def _forget(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """The average of the estimates is kept, the last one need not be."""
    for state in optimizer.state.values():
        state.pop("hessian", None)


def gauss_newton_bartlett(
    model: torch.nn.Module, inputs: Mapping[str, Any], parameters: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The Gauss-Newton diagonal on ``inputs``, a tensor a parameter: tokens x squared gradient on drawn labels."""
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits[..., :-1, :]
    learned = logits[inputs["labels"][..., 1:] != -100].float()
    noise = torch.empty_like(learned).exponential_().log_()
    drawn = (learned.detach() - noise).argmax(dim=-1)  # as likely as its softmax says, and no error where it is NaN
    gradients = torch.autograd.grad(cross_entropy(learned, drawn), parameters)
    return [gradient.square() * len(learned) for gradient in gradients]


def _positive(args: Mapping[str, Any], name: str, default: float, kinds: tuple[type, ...]) -> Any:
    value = args.get(name, default)
    if type(value) not in kinds or not value > 0:
        wanted = "a whole number above 0" if float not in kinds else "a number above 0"
        raise RefusedError(f"config.yaml: training.optimizer.args.{name}: {value!r} is not {wanted}", what="optimizer")
    return value


def _refuse_what_is_not_whole(trainer: Trainer) -> None:
    """RefusedError where the curvature could not be estimated beside the gradient."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise RefusedError(
            "sophia needs its parameters whole on each rank: without FSDP and DeepSpeed", what="optimizer"
        )
    if trainer.args.fp16:
        raise RefusedError(
            "sophia: its squared gradients vanish in fp16; set training.precision to bf16 or fp32", what="optimizer"
        )
