"""How much memory a configuration needs, by arithmetic alone: no model is built and nothing is measured."""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from worker.contract.config import Config

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOMENTS: Final = {"sgd": 1, "lion": 1}
"""Values that an optimizer keeps a parameter, where that is not two."""
_HEADER_LENGTH = struct.Struct("<Q")
_LONGEST_HEADER: Final = 100_000_000


def bytes_a_parameter(config: Config) -> dict[str, int]:
    """What each trained parameter needs on a device that holds all of them: 16 bytes for plain AdamW in float32."""
    training = config.training
    weight = _BYTES[config.model.dtype]
    moments = _MOMENTS.get(training.optimizer.name, 2)
    if training.optimizer.name == "sgd" and training.optimizer.momentum == 0:
        moments = 0
    average = 4 if config.ema is not None and config.ema.device == "same" else 0
    return {"weights": weight, "gradients": weight, training.optimizer.name: moments * weight, "average": average}


def memory_text(config: Config) -> str:
    """The estimate as a sentence for a person, without activations; with the total where the size is known."""
    parts = bytes_a_parameter(config)
    total = sum(parts.values())
    told = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
    count = num_parameters(config)
    rate = f"{total} bytes a parameter ({told})"
    if count is None:
        return f"{rate}, before activations and unless sharded"
    return f"{count:.3g} parameters x {rate} = {count * total / 2**30:.3g} GiB, before activations and unless sharded"


def num_parameters(config: Config) -> int | None:
    """Parameters of the model; None where neither its files nor its configuration are of a kind that tells."""
    if config.model.config is not None:
        return _of_decoder(config.model.config)
    folder = Path(config.model.path or "")
    try:
        stored = sum(_in_file(path) for path in folder.glob("*.safetensors"))
    except (OSError, ValueError, struct.error):
        return None
    described = _described(folder)
    return _of_decoder(described) if not stored or bits_of_base(config) else stored


def bits_of_base(config: Config) -> int | None:
    """Bits a parameter of a base that is stored quantised, by its config.json; None where it is not."""
    settings = _described(Path(config.model.path or "")).get("quantization_config")
    if not isinstance(settings, dict):
        return None
    bits = settings.get("bits") or (4 if settings.get("load_in_4bit") else 8)
    return bits if isinstance(bits, int) else 8


def _described(folder: Path) -> Mapping[str, Any]:
    """The model's config.json; {} where there is none that can be read."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _in_file(path: Path) -> int:
    """Numbers in a safetensors file, from the shapes in its header."""
    with open(path, "rb") as file:
        (length,) = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size))
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file")
        header = json.loads(file.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _of_decoder(fields: Mapping[str, Any]) -> int | None:
    """Of a decoder as Llama's: attention with grouped keys, a gated MLP, two norms a layer and one at the end."""
    if any("experts" in name for name in fields):
        return None
    try:
        hidden, layers, vocabulary, inner, heads = (
            int(fields[name])
            for name in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size", "num_attention_heads")
        )
    except (KeyError, TypeError, ValueError):
        return None
    head = int(fields.get("head_dim") or hidden // heads)
    keys = int(fields.get("num_key_value_heads") or heads) * head
    layer = 2 * hidden * heads * head + 2 * hidden * keys + 3 * hidden * inner + 2 * hidden
    embeddings = vocabulary * hidden * (1 if fields.get("tie_word_embeddings") else 2)
    return embeddings + layers * layer + hidden


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that training needs on each device, and beside it in a node's main memory; by arithmetic alone."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int | None
    """None: not measured."""
    main: int = 0
    """What is offloaded, on one node."""

    @property
    def device(self) -> int:
        """Bytes on a device, activations included as far as they are known."""
        return self.weights + self.gradients + self.optimizer + self.average + (self.activations or 0)


def plan_memory(
    config: Config,
    parameters: int,
    trained: int,
    activations: int | None = None,
    base_bits: int | None = None,
    *,
    is_whole: bool = False,
) -> MemoryPlan:
    """What each device needs to train ``trained`` of ``parameters``; ``is_whole``: were nothing sharded or offloaded.

    Adapters, their gradients and moments are float32; what is frozen has weights only, of ``base_bits`` if quantised.
    """
    sharding = Sharding() if is_whole else sharding_of(config)
    each = bytes_a_parameter(config)
    weight, gradient, optimizer = each["weights"], each["gradients"], each[config.training.optimizer.name]
    if config.model.lora is not None:
        bits = 8 * weight if base_bits is None else base_bits + 0.5  # half a bit for the scales
        weights, gradients = int((parameters - trained) * bits / 8) + 4 * trained, 4 * trained
        optimizer = optimizer // weight * 4
    else:
        if sharding.has_master_weights:  # DeepSpeed computes with 16 bits, and its optimizer keeps weights of its own
            weight, gradient, optimizer = 2, 2, optimizer // weight * 4 + 4
        weights, gradients = parameters * weight, trained * gradient
    ranks = config.cluster.world_size
    parts = {
        "weights": weights // (ranks if sharding.weights else 1),
        "gradients": gradients // (ranks if sharding.gradients else 1),
        "optimizer": optimizer * trained // (ranks if sharding.optimizer else 1),
        "average": each["average"] * trained // (ranks if sharding.weights else 1),
    }
    away = sum(parts[name] for name in sharding.offloaded)
    kept = {name: 0 if name in sharding.offloaded else size for name, size in parts.items()}
    in_main = 4 * trained // (ranks if sharding.weights else 1) if _average_is_in_main_memory(config) else 0
    return MemoryPlan(**kept, activations=activations, main=(away + in_main) * config.cluster.tasks_on_each_node)


def _average_is_in_main_memory(config: Config) -> bool:
    return config.ema is not None and config.ema.device == "cpu"


@dataclass(frozen=True)
class Sharding:
    """What is spread over the ranks, and what of it waits in main memory."""

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    offloaded: frozenset[str] = frozenset()
    has_master_weights: bool = False


def sharding_of(config: Config) -> Sharding:
    """How ``training.extra`` spreads the model: FSDP over all ranks, or DeepSpeed by its ZeRO stage."""
    extra = config.training.extra
    if extra.get("fsdp"):
        settings = extra.get("fsdp_config")
        is_away = isinstance(settings, dict) and bool(settings.get("cpu_offload"))
        away = frozenset({"weights", "gradients", "optimizer"}) if is_away else frozenset()
        return Sharding(weights=True, gradients=True, optimizer=True, offloaded=away)
    settings = extra.get("deepspeed")
    if not isinstance(settings, dict) or not isinstance(settings.get("zero_optimization"), dict):
        return Sharding()
    zero = settings["zero_optimization"]
    stage = zero.get("stage", 0)
    names = {"offload_optimizer": "optimizer", "offload_param": "weights"}
    away = frozenset(name for key, name in names.items() if _is_away(zero.get(key)))
    halves = any(isinstance(settings.get(kind), dict) and settings[kind].get("enabled") for kind in ("bf16", "fp16"))
    return Sharding(stage >= 3, stage >= 2, stage >= 1, away, halves)


def _is_away(settings: object) -> bool:
    return isinstance(settings, dict) and settings.get("device", "none") != "none"
