"""What trains: the optimizer of the configuration, and the schedule of its learning rate."""

import importlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from worker.contract.recipe_config import OptimizerConfig, ScheduleConfig, TrainingConfig, schedule_factor
from worker.leaving import RefusedError
from worker.sophia import sophia_arguments

_BETAS = {
    "adamw": (0.9, 0.95),
    "adam": (0.9, 0.95),
    "lion": (0.9, 0.99),
    "lamb": (0.9, 0.999),
    "sophia": (0.965, 0.99),
}
_CLASSES = {
    "adamw": "torch.optim:AdamW",
    "adam": "torch.optim:Adam",
    "sgd": "torch.optim:SGD",
    "lion": "pytorch_optimizer:Lion",
    "lamb": "pytorch_optimizer:Lamb",
    "sophia": "pytorch_optimizer:SophiaH",
}
_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


def build_optimizer(model: torch.nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer of ``training`` over the trained parameters; weight decay touches matrices only.

    Two groups, the first with decay: parameters of two dimensions or more; the second without: norms and biases.
    A group without parameters is left out.  RefusedError where nothing is trained, or the optimizer cannot be had.
    """
    rules = training.optimizer
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise RefusedError("nothing is trained: every parameter of the model is frozen", what="optimizer")
    groups = [
        {"params": [one for one in trained if one.ndim >= 2], "weight_decay": rules.weight_decay},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    return _build([group for group in groups if group["params"]], rules, is_fused=_can_be_fused(trained))


def _build(groups: list[dict[str, Any]], rules: OptimizerConfig, *, is_fused: bool) -> torch.optim.Optimizer:
    if rules.learning_rate is None:
        raise RefusedError("config.yaml: training.optimizer.learning_rate: it is missing", what="optimizer")
    kind = _class_of(rules.name)
    arguments = _arguments(rules, is_fused=is_fused)
    try:
        optimizer = kind(groups, **arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise RefusedError(
            f"config.yaml: training.optimizer: {kind.__name__} does not take {_in_words(arguments)} "
            f"({' '.join(str(error).split())})",
            what="optimizer",
        ) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RefusedError(
            f"config.yaml: training.optimizer.name: {rules.name} is no torch.optim.Optimizer", what="optimizer"
        )
    return optimizer


def _arguments(rules: OptimizerConfig, *, is_fused: bool) -> dict[str, Any]:
    """The arguments of the optimizer's class: those that have a key, and the person's own."""
    name, arguments = rules.name, {"lr": rules.learning_rate, **rules.args}
    if name in _BETAS:
        arguments["betas"] = rules.betas or _BETAS[name]
    if name in ("adamw", "adam", "lamb"):
        arguments["eps"] = rules.eps
    if name in ("adamw", "adam"):
        arguments.setdefault("fused", is_fused)
    if name == "sgd":
        arguments["momentum"] = rules.momentum
    return sophia_arguments(arguments) if name == "sophia" else arguments


def _class_of(name: str) -> type[torch.optim.Optimizer]:
    module, _, kind = (_CLASSES.get(name) or name).partition(":")
    try:
        found: type[torch.optim.Optimizer] = getattr(importlib.import_module(module), kind)
    except ImportError as error:
        mend = (
            "pip install 'higgsfield-supervisor[optimizers]'"
            if name in _CLASSES
            else "install it, or put its folder into PYTHONPATH in cluster.environment"
        )
        raise RefusedError(
            f"config.yaml: training.optimizer.name: {name} needs {module} ({error}); {mend}", what="optimizer"
        ) from error
    except AttributeError as error:
        raise RefusedError(
            f"config.yaml: training.optimizer.name: {module} has no {kind}; correct the name", what="optimizer"
        ) from error
    return found


def _in_words(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in arguments.items())


def _can_be_fused(parameters: Iterable[torch.Tensor]) -> bool:
    return all(one.device.type in _FUSED_DEVICES and one.is_floating_point() for one in parameters)


def build_schedule(optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, max_steps: int) -> LambdaLR:
    """The schedule on every group of ``optimizer``."""
    return LambdaLR(optimizer, partial(schedule_factor, schedule, max_steps=max_steps))
