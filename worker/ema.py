"""The exponential moving average of the trained weights, in float32."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from worker.contract.config import EmaConfig

FILE_NAME = "ema.safetensors"
_UPDATES = "num_updates"


class EmaError(Exception):
    """A stored average that does not belong to this model; one line that says why."""


class Ema:
    """The average of every trained parameter, tied ones once; begins as the weights that it is built from.

    Float32 whatever the weights are: in bfloat16 a decay of 0.999 never moves anything.  Buffers and frozen
    parameters are not averaged; they are the model's own.
    """

    def __init__(self, model: torch.nn.Module, rules: EmaConfig) -> None:
        self._rules = rules
        self.num_updates = 0
        self._average = {name: self._placed(one.detach().float().clone()) for name, one in trained(model)}

    def _placed(self, one: torch.Tensor) -> torch.Tensor:
        return one.cpu() if self._rules.device == "cpu" else one

    @torch.no_grad()
    def update(self, model: torch.nn.Module, step: int) -> None:
        """Take the weights in when ``step``, the number of finished steps, is a multiple of ``every``."""
        if step % self._rules.every:
            return
        weights = [self._placed(one.detach()).float() for _, one in trained(model)]
        torch._foreach_lerp_(list(self._average.values()), weights, 1.0 - self.next_decay())
        self.num_updates += 1

    def next_decay(self) -> float:
        """The decay of the next update: small at first, or the initial weights would outlive a short run."""
        updates = self.num_updates
        return float(min(self._rules.decay**self._rules.every, (1 + updates) / (10 + updates)))

    @contextmanager
    def swapped_into(self, model: torch.nn.Module) -> Iterator[None]:
        """Within the block the model has the average for weights; after it, however it ends, bitwise its own again."""
        weights = [one.detach() for _, one in trained(model)]
        own = [one.clone() for one in weights]
        try:
            _copy(weights, list(self._average.values()))
            yield
        finally:
            _copy(weights, own)

    def save(self, path: Path) -> None:
        """Write the average and its number of updates to a new file."""
        tensors = {name: one.contiguous() for name, one in self._average.items()}
        with open(path, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode
        save_file(tensors, path, metadata={_UPDATES: str(self.num_updates)})
        path.chmod(stat.S_IMODE(mode))  # safetensors leaves 0600, whatever the person's umask says

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Become, bitwise, what ``save`` wrote; EmaError where it is no average of this model."""
        try:
            with safe_open(path, framework="pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
                updates = int((file.metadata() or {})[_UPDATES])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise EmaError(f"{path}: is no stored average ({error})") from None
        _check_shapes(path, stored, self._average)
        for name, one in self._average.items():
            one.copy_(stored[name])
        self.num_updates = updates

    def digest(self) -> str:
        """Names the average and its number of updates, bit by bit."""
        hasher = xxhash.xxh3_128(f"{_UPDATES} {self.num_updates}\n".encode())
        for name, one in self._average.items():
            hasher.update(f"{name} {tuple(one.shape)}\n".encode())
            hasher.update(one.cpu().contiguous().numpy().data)
        return str(hasher.hexdigest())


def trained(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that are averaged, by name; tied ones under their first name."""
    return ((name, one) for name, one in model.named_parameters() if one.requires_grad)


@torch.no_grad()
def _copy(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    torch._foreach_copy_(into, values)


def _check_shapes(path: Path, stored: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    for name in sorted(stored.keys() | own.keys()):
        if name not in own:
            raise EmaError(f"{path}: holds {name}, which this model does not train")
        if name not in stored:
            raise EmaError(f"{path}: lacks {name}")
        if stored[name].shape != own[name].shape or stored[name].dtype != torch.float32:
            found = f"{tuple(stored[name].shape)} {stored[name].dtype}"
            raise EmaError(f"{path}: {name} is {found}, not {tuple(own[name].shape)} float32")
