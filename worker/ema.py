"""The exponential moving average of the trained weights, in float32."""

import copy
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from worker.contract.recipe_config import EmaConfig
from worker.shards import let_go_of_the_whole, own_part, part_of_whole, whole_of_parts

FILE_NAME = "ema.safetensors"
_UPDATES = "num_updates"


class EmaError(Exception):
    """A stored average that does not belong to this model; one line that says why."""


class Ema:
    """The average of every trained parameter, tied ones once; begins as the weights that it is built from.

    Float32 whatever the weights are: in bfloat16 a decay of 0.999 never moves anything.  Buffers and frozen
    parameters are not averaged; they are the model's own.  Where a parameter is spread over the ranks, so is its
    average: each rank averages its own part, and ``save``, ``load`` and ``digest`` speak of the whole.
    """

    def __init__(self, model: torch.nn.Module, rules: EmaConfig) -> None:
        if any(hasattr(one, "ds_id") for one in model.parameters()):
            raise EmaError("ema: DeepSpeed ZeRO-3 keeps the weights where no average can be made; set ema: null")
        self._every, self._decay, self._is_on_cpu = rules.every, rules.decay**rules.every, rules.device == "cpu"
        self.num_updates = 0
        self._like = dict(trained(model))
        is_spread = any(own_part(one) is not one for one in self._like.values())
        self._lasting = None if is_spread else model
        is_as_averaged = all(one.dtype is torch.float32 for one in self._like.values()) and not self._is_on_cpu
        self._as_averaged = list(self._like.values()) if is_as_averaged and not is_spread else None
        """The parameters themselves, where nothing need be done to them before they are taken in."""
        self._average = {name: self._placed(own_part(one.detach()).float().clone()) for name, one in trained(model)}
        self._spare = list[torch.Tensor]()
        self._is_lent = False

    def _placed(self, one: torch.Tensor) -> torch.Tensor:
        return one.cpu() if self._is_on_cpu else one

    def update(self, model: torch.nn.Module, step: int) -> None:
        """Take the weights in when ``step``, the number of finished steps, is a multiple of ``every``."""
        if step % self._every == 0:
            self._take_in(model)

    @torch.no_grad()
    def _take_in(self, model: torch.nn.Module) -> None:
        average, weights, share = list(self._average.values()), self._weights_of(model), 1.0 - self.next_decay()
        if self._is_lent:
            for one, weight, place in zip(average, weights, self._spare, strict=True):
                torch.lerp(one, weight, share, out=place)
            self._average = dict(zip(self._average, self._spare, strict=True))
            self._spare, self._is_lent = average, False
        else:
            torch._foreach_lerp_(average, weights, share)
        self.num_updates += 1

    def _weights_of(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """The weights as the average has them: whole or a part, in float32, and on its device."""
        if model is self._lasting and self._as_averaged is not None:
            return list(self._as_averaged)
        return [self._placed(own_part(one)).float() for one in self._now(model)]

    def _now(self, model: torch.nn.Module) -> Iterable[torch.Tensor]:
        """The trained parameters; searched for again only where a forward pass may have put others in their place."""
        return self._like.values() if model is self._lasting else dict(trained(model)).values()

    def next_decay(self) -> float:
        """The decay of the next update: small at first, or the initial weights would outlive a short run."""
        updates = self.num_updates
        return float(min(self._decay, (1 + updates) / (10 + updates)))

    @contextmanager
    def swapped_into(self, model: torch.nn.Module) -> Iterator[None]:
        """Within the block the model has the average for weights; after it, however it ends, bitwise its own again."""
        own = [own_part(one.detach()).clone() for _, one in trained(model)]
        try:
            _copy(model, list(self._average.values()))
            yield
        finally:
            _copy(model, own)

    def as_now(self, copied: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Self:
        """This average as it is now, in memory that ``copied`` returns; it is only to be saved."""
        same = copy.copy(self)
        same._average = dict(zip(self._average, copied(list(self._average.values())), strict=True))
        return same

    @property
    def is_in_main_memory(self) -> bool:
        """Whether this rank's part is."""
        return all(one.device.type == "cpu" for one in self._average.values())

    def lent(self, given: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Self:
        """This average as it is now, without a copy, until the next one is asked for; it is only to be saved.

        The next update goes elsewhere, into memory that ``given`` returns the first time; and so in turns.
        """
        self._spare = self._spare or given(list(self._average.values()))
        self._is_lent = True
        return copy.copy(self)

    def save(self, path: Path | None) -> str:
        """Write the average and its number of updates to a new file; its digest.

        Every rank calls it together; one of them gives the path.
        """
        kept: dict[str, torch.Tensor] | None = None if path is None else {}
        digest = self._digest(kept)
        if path is not None:
            with open(path, "xb") as file:
                mode = os.fstat(file.fileno()).st_mode
            save_file(kept or {}, path, metadata={_UPDATES: str(self.num_updates)})
            path.chmod(stat.S_IMODE(mode))  # safetensors leaves 0600, whatever the person's umask says
        return digest

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Become, bitwise, what ``save`` wrote; EmaError where it is no average of this model."""
        try:
            with safe_open(path, framework="pt") as file:
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
                updates = int((file.metadata() or {})[_UPDATES])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise EmaError(f"{path}: is no stored average ({error})") from None
        _check_shapes(path, stored, self._like)
        for name, one in self._average.items():
            one.copy_(part_of_whole(stored[name], self._like[name]))
        self.num_updates = updates

    def digest(self) -> str:
        """Names the average and its number of updates, bit by bit; every rank calls it together."""
        return self._digest(None)

    def _digest(self, kept: dict[str, torch.Tensor] | None) -> str:
        """The digest; ``kept`` receives the whole tensors, in main memory, on their way."""
        hasher = xxhash.xxh3_128(f"{_UPDATES} {self.num_updates}\n".encode())
        for name, part in self._average.items():
            one = whole_of_parts(part, self._like[name]).cpu().contiguous()
            hasher.update(f"{name} {tuple(one.shape)}\n".encode())
            hasher.update(one.numpy().data)
            if kept is not None:
                kept[name] = one
        return str(hasher.hexdigest())


def trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters that are averaged, by the name that they have without any wrapper; tied ones under their first."""
    let_go_of_the_whole(model)
    return [(_unwrapped(name), one) for name, one in model.named_parameters() if one.requires_grad]


def _unwrapped(name: str) -> str:
    """FSDP's checkpointing of activations and torch.compile put a module around others."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


@torch.no_grad()
def _copy(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    torch._foreach_copy_([own_part(one.detach()) for _, one in trained(model)], values)


def _check_shapes(path: Path, stored: dict[str, torch.Tensor], own: dict[str, torch.nn.Parameter]) -> None:
    for name in sorted(stored.keys() | own.keys()):
        if name not in own:
            raise EmaError(f"{path}: holds {name}, which this model does not train")
        if name not in stored:
            raise EmaError(f"{path}: lacks {name}")
        if stored[name].shape != own[name].shape or stored[name].dtype != torch.float32:
            found = f"{tuple(stored[name].shape)} {stored[name].dtype}"
            raise EmaError(f"{path}: {name} is {found}, not {tuple(own[name].shape)} float32")
