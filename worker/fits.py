"""Whether a checkpoint belongs to this model and this optimizer: the Trainer would load what fits and say nothing."""

import json
import zipfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer
from transformers import Trainer

from worker.leaving import RefusedError
from worker.lora import has_adapters, saved_state

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTERS = "adapter_model.safetensors"
_BIN = "pytorch_model.bin"
_SHARDS = "pytorch_model_fsdp_0"
_PLAIN_WEIGHTS = frozenset({_WEIGHTS, _INDEX, _ADAPTERS, _BIN})
_MOMENTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "momentum", "hessian_moment"})


def missing_part(names: Collection[str]) -> str | None:
    """What a checkpoint with these files lacks so that the Trainer would silently begin it afresh; None if nothing.

    DeepSpeed and FSDP have folders of shards in place of the plain files, and FSDP may have ``.bin`` files.
    """
    tops = {name.split("/", 1)[0] for name in names}
    for always in ("trainer_state.json", "scheduler.pt"):
        if always not in tops:
            return always
    if any(top.startswith("global_step") for top in tops):
        shards = any(name.endswith("_optim_states.pt") for name in names)
        return "latest" if "latest" not in tops else None if shards else "global_step*/*_optim_states.pt"
    if any(top.startswith("pytorch_model_fsdp") for top in tops):
        state = "optimizer.bin" if "pytorch_model_fsdp.bin" in tops else "optimizer_0"
        return None if state in tops else state
    if "optimizer.pt" not in tops:
        return "optimizer.pt"
    return None if tops & _PLAIN_WEIGHTS else _WEIGHTS


def _backend_of(names: Collection[str]) -> str:
    """What wrote a checkpoint with these files."""
    tops = {name.split("/", 1)[0] for name in names}
    if any(top.startswith("global_step") for top in tops):
        return "DeepSpeed"
    if "pytorch_model_fsdp.bin" in tops:
        return "FSDP with fsdp_config.state_dict_type FULL_STATE_DICT"
    return "FSDP with shards" if any(top.startswith("pytorch_model_fsdp") for top in tops) else "plain files"


def _backend_now(trainer: Trainer) -> str:
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed"
    if not trainer.is_fsdp_enabled:
        return "plain files"
    is_full = "FULL_STATE_DICT" in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
    return "FSDP with fsdp_config.state_dict_type FULL_STATE_DICT" if is_full else "FSDP with shards"


def refuse_other_backend(names: Collection[str], trainer: Trainer) -> None:
    """RefusedError where a checkpoint with these files was written by another way of sharding than this run's."""
    expected, found = _backend_now(trainer), _backend_of(names)
    if expected != found:
        raise RefusedError(
            f"the checkpoint is of {found}, and this run (training.extra) loads {expected}",
            what="backend",
            expected=expected,
            found=found,
        )


def refuse_other_model(folder: Path, model: torch.nn.Module) -> None:
    """RefusedError where the checkpoint's weights are not, name by name and shape by shape, those of ``model``.

    DeepSpeed's weights are left to its loader.
    """
    path, stored = _stored_shapes(folder)
    if not stored:
        return
    own = saved_state(model) if has_adapters(model) else model.state_dict()
    own = {name: one for name, one in own.items() if isinstance(one, torch.Tensor)}
    aliases = {name: (one.data_ptr(), one.shape) for name, one in own.items()}
    there = {aliases[name] for name in stored if name in own}
    for name, shape in stored.items():
        if name not in own:
            _refuse(path, _unknown_name(name, own.keys() - stored.keys()))
        if shape != tuple(own[name].shape):
            _refuse(path, f"{name} is {shape}, and this model's is {tuple(own[name].shape)}{_ANOTHER}")
    if path.name in (_WEIGHTS, _BIN) and len(there) < len(stored):
        _refuse(path, f"holds weights apart that this model ties{_ANOTHER}")
    for name in own:
        if aliases[name] not in there:
            _refuse(path, f"lacks {name}{_ANOTHER}")


_ANOTHER = ": it is a checkpoint of another model"


def _unknown_name(name: str, unmet: Collection[str]) -> str:
    """Why a stored name that the model does not have is refused; ``unmet`` are names that only the model has.

    transformers saves some models, mixtures of experts among them, under other names than they have in memory, and
    translates when it loads them from the hub. A resume loads by name and would leave those weights as they are.
    """
    if not unmet:
        return f"holds {name}, which this model does not have{_ANOTHER}"
    return (
        f"holds {name}, which this model has under no such name, and lacks {min(unmet)}: it is a checkpoint of another "
        "model, or was saved under the hub's names, which a resume does not translate"
    )


def _refuse(path: Path, why: str) -> NoReturn:
    raise RefusedError(f"{path}: {why}", what="model")


def _stored_shapes(folder: Path) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """Where a checkpoint's weights lie, and their names and shapes, without reading them; {} where there are none."""
    if (folder / _SHARDS).is_dir():
        return folder / _SHARDS, _shapes_of_shards(folder / _SHARDS)
    if (folder / _BIN).exists() and not (folder / _WEIGHTS).exists():  # in the order in which the Trainer looks
        return folder / _BIN, _shapes_in_bin(folder / _BIN)
    if (folder / _ADAPTERS).exists():
        return folder / _ADAPTERS, _shapes_in([folder / _ADAPTERS])
    return folder / _WEIGHTS, _shapes_of_plain(folder)


def _shapes_of_shards(folder: Path) -> dict[str, tuple[int, ...]]:
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = ((name, one) for name, one in stored.items() if isinstance(one, TensorStorageMetadata))
    return {name.removeprefix("model."): tuple(one.size) for name, one in tensors}


def _shapes_of_plain(folder: Path) -> dict[str, tuple[int, ...]]:
    files = [folder / _WEIGHTS] if (folder / _WEIGHTS).exists() else []
    if (folder / _INDEX).exists():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    return _shapes_in(files)


def _shapes_in(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def _shapes_in_bin(path: Path) -> dict[str, tuple[int, ...]]:
    """The same of a file that torch wrote; of weights that are tied there the first, as safetensors holds them."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnpicklingError:
        _refuse(path, "torch does not load it as weights alone")
    tensors = state.items() if isinstance(state, dict) else ()
    named = {name: one for name, one in tensors if isinstance(one, torch.Tensor)}
    if not named:
        _refuse(path, "holds no weights by their names")
    first = {(one.data_ptr(), one.shape): name for name, one in reversed(named.items())}
    return {name: tuple(named[name].shape) for name in first.values()}


def optimizer_facts(optimizer: Optimizer) -> tuple[str, int]:
    """The optimizer's class, and for how many parameters it keeps a state."""
    return type(optimizer).__name__, len(optimizer.state)


@contextmanager
def checked_optimizer(optimizer: Optimizer, path: Path, expected: tuple[str, int] | None) -> Iterator[None]:
    """Within, a state that is loaded into ``optimizer`` is refused, by name, where it is another optimizer's.

    torch itself looks at the number of parameters only, and casts every moment to the type of its weight.
    ``expected`` is what ``optimizer_facts`` said at the save.
    """

    def check(optimizer: Optimizer, state: dict[str, Any]) -> None:
        kind, number = expected or (type(optimizer).__name__, len(state["state"]))
        if kind != type(optimizer).__name__:
            _refuse_state(path, f"is the state of {kind}, and this run trains with {type(optimizer).__name__}")
        if len(state["state"]) != number:
            _refuse_state(path, f"holds a state for {len(state['state'])} parameters instead of {number}")
        _check_groups(path, optimizer, state["param_groups"])
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        order = [index for group in state["param_groups"] for index in group["params"]]
        for index, parameter in zip(order, parameters, strict=True):
            _check_moments(path, index, state["state"].get(index, {}), parameter)

    handle = optimizer.register_load_state_dict_pre_hook(check)
    try:
        yield
    except CheckpointException as error:  # what a loader of shards does not find
        why = next((str(one) for one, _ in error.failures.values()), str(error))
        _refuse_state(path, f"does not fit this optimizer ({why.splitlines()[0]})")
    finally:
        handle.remove()


def _check_groups(path: Path, optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    stored = [len(group["params"]) for group in groups]
    own = [len(group["params"]) for group in optimizer.param_groups]
    if stored != own:
        _refuse_state(path, f"is for groups of {stored} parameters, and this optimizer has {own}")


def _check_moments(path: Path, index: int, state: dict[str, Any], parameter: torch.Tensor) -> None:
    for name in _MOMENTS & state.keys():
        value = state[name]
        if value is not None and (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
            found, wanted = (f"{tuple(one.shape)} {one.dtype}" for one in (value, parameter))
            _refuse_state(path, f"{name} of parameter {index} is {found}, and the parameter is {wanted}")


def _refuse_state(path: Path, why: str) -> None:
    raise RefusedError(f"{path}: {why}", what="optimizer")
