"""Adapters in place of full training, through peft; and the base that they belong to, named bit by bit."""

import importlib.util
import warnings
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel

from worker.contract.manifest import FrozenBase
from worker.contract.recipe_config import LoraConfig
from worker.leaving import RefusedError
from worker.shards import own_part


class LoraError(Exception):
    """Adapters that cannot be made; one line that names the key and what to do."""


def with_adapters(model: PreTrainedModel, rules: LoraConfig, revision: str | None) -> Any:
    """``model`` with trainable adapters on its linear layers, everything else frozen.

    The adapters' first values come from the global random state. Raises LoraError.
    """
    if importlib.util.find_spec("peft") is None:
        raise LoraError("model.lora: the package peft is not installed; pip install 'higgsfield-supervisor[lora]'")
    import peft

    targets = rules.targets if isinstance(rules.targets, str) else list(rules.targets)
    wanted = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rules.r,
        lora_alpha=rules.alpha,
        lora_dropout=rules.dropout,
        target_modules=targets,
        revision=revision,
    )
    try:
        with warnings.catch_warnings():  # peft 0.21 asks transformers by a name that is about to go
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            return peft.get_peft_model(model, wanted)
    except ValueError as error:
        raise LoraError(f"model.lora.targets: {' '.join(str(error).split()):.300}") from None


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether peft has put adapters into ``model``."""
    return hasattr(model, "peft_config")


def refuse_named_adapter(model: torch.nn.Module) -> None:
    """RefusedError where peft saves the adapters in a folder of their own, in which no resume looks for them."""
    names: Any = getattr(model, "peft_config", {"default": None})
    if "default" not in names:
        told = ", ".join(map(repr, names))
        raise RefusedError(f"the adapter is named {told}: call get_peft_model without adapter_name", what="lora")


def saved_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The adapters of ``model`` under the names that they are saved with."""
    import peft

    return dict(peft.get_peft_model_state_dict(model))


def base_of(model: torch.nn.Module) -> FrozenBase | None:
    """The frozen weights that the adapters of ``model`` belong to; None where the whole model is trained."""
    if not has_adapters(model):
        return None
    config: Any = model.config
    hasher = xxhash.xxh3_128()
    for name, one in model.named_parameters():
        if not one.requires_grad:
            value = own_part(one.detach()).cpu().contiguous()
            plain = name.replace(".base_layer.", ".")  # whichever layers have an adapter
            hasher.update(f"{plain} {tuple(value.shape)} {value.dtype}\n".encode())
            hasher.update(value.reshape(-1).view(torch.uint8).numpy().data)
    revision = getattr(config, "_commit_hash", None)
    return FrozenBase(name=config.name_or_path, revision=revision, digest=str(hasher.hexdigest()))


def refuse_other_base(stored: FrozenBase | None, own: FrozenBase | None) -> None:
    """RefusedError where a checkpoint's adapters are for another base, or only one of the two has adapters."""
    if (stored is None) != (own is None):
        checkpoint, run = ("the whole model", "adapters") if stored is None else ("adapters", "the whole model")
        raise RefusedError(f"the checkpoint holds {checkpoint} and this run trains {run} (model.lora)", what="lora")
    if stored is not None and own is not None and stored.digest != own.digest:
        raise RefusedError(
            f"the checkpoint's adapters are for {_in_words(stored)}, and model.path is {_in_words(own)} now",
            what="base",
            expected=stored.digest,
            found=own.digest,
        )


def _in_words(base: FrozenBase) -> str:
    revision = f" at revision {base.revision}" if base.revision else ""
    return f"{base.name}{revision} (weights {base.digest[:8]})"
