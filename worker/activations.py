"""How many bytes a forward pass leaves for the backward pass: counted on tensors that have a shape and no contents.

The model is at its full width, depth and batch, and takes neither memory nor time: FakeTensorMode runs the CPU's
operators for their shapes alone. So it also finds a width that heads do not divide, whatever the kind of model.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer


@dataclass
class Saved:
    """Bytes that the operators keep, each tensor once, parameters not counted: by layer, and outside of the layers."""

    layers: list[int] = field(default_factory=list)
    entering: list[int] = field(default_factory=list)
    """What goes into each layer, which is all that stays of one that is computed again."""
    copies: list[int] = field(default_factory=list)
    """Of each layer's bytes: weights that autocast copies to 16 bits, which stay until the forward pass ends."""
    outside: int = 0

    def total(self, every_n: int | None) -> int:
        """Bytes at the most, every ``every_n``-th layer being computed again; None: none is."""
        if every_n is None or not self.layers:
            return self.outside + sum(self.layers)
        again = range(0, len(self.layers), every_n)
        kept = sum(size for number, size in enumerate(self.layers) if number not in again)
        stays = sum(self.entering[number] + self.copies[number] for number in again)
        live = max(self.layers[number] - self.copies[number] for number in again)
        return self.outside + kept + stays + live


@contextmanager
def shapes_only() -> Iterator[None]:
    """Within, tensors are made without memory, and operators compute shapes."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@contextmanager
def as_they_are() -> Iterator[None]:
    """Within, modules move nowhere: a move swaps tensors, which those without contents do not allow."""
    move = torch.nn.Module.to
    torch.nn.Module.to = lambda module, *args, **kwargs: module  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.Module.to = move  # type: ignore[method-assign]


def saved_by(model: torch.nn.Module, batch: dict[str, torch.Tensor], autocast: torch.dtype | None) -> Saved:
    """What one forward pass of ``model`` over ``batch`` leaves, and the logits' gradient in float32, made first."""
    saved, seen = Saved(), {one.untyped_storage()._cdata for one in model.parameters()}
    held, inside = [], [False]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            held.append(storage)  # or its address would be another's
            if inside[0]:
                saved.layers[-1] += storage.nbytes()
            else:
                saved.outside += storage.nbytes()
        return tensor

    with ExitStack() as stack:
        for layer in model.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                stack.callback(layer.register_forward_pre_hook(_entering(saved, inside, autocast)).remove)
                stack.callback(layer.register_forward_hook(_leaving(inside)).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        stack.enter_context(torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None))
        logits = model(**batch, use_cache=False).logits
    saved.outside += logits.numel() * torch.float32.itemsize
    return saved


def _entering(saved: Saved, inside: list[bool], autocast: torch.dtype | None) -> Any:
    def hook(layer: torch.nn.Module, args: tuple[Any, ...]) -> None:
        inside[0] = True
        saved.layers.append(0)
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        saved.entering.append(0 if first is None else first.untyped_storage().nbytes())
        saved.copies.append(0 if autocast is None else _copied(layer, autocast))

    return hook


def _leaving(inside: list[bool]) -> Any:
    def hook(layer: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        inside[0] = False

    return hook


def _copied(layer: torch.nn.Module, autocast: torch.dtype) -> int:
    matrices = (one.weight for one in layer.modules() if isinstance(one, torch.nn.Linear))
    return sum(one.numel() * autocast.itemsize for one in matrices if one.dtype != autocast)
