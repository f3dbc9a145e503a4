"""Tensors that are spread over the ranks (the DTensors of FSDP2): this rank's part, and the whole of it.

And whether the Trainer spreads them at all, where it was asked to.
"""

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Trainer, TrainingArguments

from worker.leaving import RefusedError


def own_part(one: torch.Tensor) -> torch.Tensor:
    """What of ``one`` lies on this rank, with the same memory; ``one`` itself where it is not spread."""
    return one.to_local() if isinstance(one, DTensor) else one


def whole(one: torch.Tensor) -> torch.Tensor:
    """All of ``one``; every rank calls it together, and no rank waits where it is not spread."""
    return one.full_tensor() if isinstance(one, DTensor) else one


def whole_of_parts(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor whose part on each rank is ``part``, spread as ``like`` is; every rank calls it together."""
    if not isinstance(like, DTensor):
        return part
    mesh = like.device_mesh
    there = part.to(mesh.device_type)
    return DTensor.from_local(
        there, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()


def part_of_whole(one: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``one``, which every rank holds, spread as ``like`` is; nobody waits for another."""
    if not isinstance(like, DTensor):
        return one
    return distribute_tensor(
        one.to(like.device_mesh.device_type), like.device_mesh, like.placements, src_data_rank=None
    ).to_local()


def let_go_of_the_whole(model: torch.nn.Module) -> None:
    """Have a spread model's parameters be its parts again: a forward pass may leave the last layers gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def refuse_old_sharding(args: TrainingArguments) -> None:
    """RefusedError for FSDP 1: each rank would average a shard, and rank 0 would save its own for the whole."""
    if (getattr(args, "fsdp_plugin_args", None) or {}).get("fsdp_version", 2) != 2:
        raise RefusedError("training.extra.fsdp_config.version: only FSDP 2 is supported; leave it out", what="fsdp")


def refuse_silent_fallback(trainer: Trainer) -> None:
    """RefusedError where FSDP was asked for and is not in force: on a CPU the Trainer takes plain DDP for it."""
    refuse_old_sharding(trainer.args)
    if trainer.args.fsdp and not trainer.is_fsdp_enabled:
        raise RefusedError("training.extra.fsdp: was asked for and is not in force on this machine", what="fsdp")


def refuse_background(trainer: Trainer) -> None:
    """RefusedError for saves beside the training where what is saved is gathered from all ranks, or by DeepSpeed."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        kind = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise RefusedError(f"checkpoint.background: not with {kind}; set it to false", what="background")
