"""How much memory a configuration needs, by arithmetic alone: no model is built and nothing is measured."""

import json
import math
import struct
from collections.abc import Mapping
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
        return sum(_in_file(path) for path in folder.glob("*.safetensors")) or None
    except (OSError, ValueError, struct.error):
        return None


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
