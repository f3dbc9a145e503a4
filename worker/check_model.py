"""What is known of a model before its weights are loaded: built for its shapes alone, as large as it is."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations

from worker.activations import Saved, as_they_are, saved_by, shapes_only
from worker.contract.check_report import Found, ModelLook
from worker.contract.config import Config
from worker.contract.run_dir import RunDir
from worker.contract.words import count
from worker.leaving import RefusedError
from worker.lora import LoraError, with_adapters
from worker.models import (
    LIBRARY_ERRORS,
    ModelError,
    describe,
    field_of_positions,
    isolates_documents,
    limit_of_positions,
    one_line,
    refuse_too_few_positions,
)
from worker.optimizers import build_optimizer
from worker.setup import training_fields

_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "model*.bin")
_NEEDS_A_GPU = re.compile(r"\b(gpus?|cuda|ampere|npu|xpu|device|hardware)\b", re.IGNORECASE)
_A_WRONG_SHAPE = re.compile(r"shape|size", re.IGNORECASE)
_LARGEST_LAYER = 300_000_000
"""Parameters, in float32: more than a gigabyte is too much to ask of a login node."""
_SPECIAL = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
    "torch_dtype",
    "architectures",
    "transformers_version",
)
_WORDS = {bool: "true or false", int: "a whole number", float: "a number"}
_SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def found_of(error: Exception, mend: str = "") -> Found:
    """``KEY: what; mend``, as the worker refuses it, taken apart."""
    key, _, said = str(error).removeprefix("config.yaml: ").partition(": ")
    message, _, own_mend = said.rpartition("; ")
    return Found(level="error", key=key, message=message or said, mend=own_mend if message else mend)


def look_at_model(config: Config, tokenizer: Any, base: Path, longest: int = 0) -> tuple[ModelLook | None, list[Found]]:
    """The model's size, and what does not fit: config and tokenizer, widths and heads, optimizer, arguments, files.

    ``longest`` is how many tokens the longest document has, as far as the data are known.
    """
    found = _arguments(config)
    folder = base / Path(config.model.path or "").expanduser()
    if config.model.path is not None and not folder.is_dir():
        message = f"{config.model.path} is not a folder of this machine, so its shape is not known"
        return None, [*found, Found(level="not checked", key="model.path", message=message)]
    if config.model.path is not None:
        found += _files(folder)
    try:
        described = _described(config, folder)
        with shapes_only():
            measured = _measured(config, described, tokenizer, found, longest)
        return measured, found + _packing(config, described)
    except (ModelError, LoraError) as error:
        mend = "correct it in the model's config.json" if config.model.path else "correct model.config"
        return None, [*found, found_of(error, mend)]


def _arguments(config: Config) -> list[Found]:
    """What TrainingArguments say to ``training``; what they say of missing hardware or packages is not counted."""
    wrong = [*_wrong_types(config.training.extra), *_trackers(config)]
    if wrong:
        return wrong
    try:
        TrainingArguments(**training_fields(RunDir(Path("run")), config, config.training.max_steps or 1))
    except RefusedError as error:
        return [found_of(error)]
    except (TypeError, ValueError, ImportError, RuntimeError) as error:
        said = " ".join(str(error).split())
        if isinstance(error, ImportError) or (not torch.cuda.is_available() and _NEEDS_A_GPU.search(said)):
            return [
                Found(level="not checked", key="training.extra", message=f"here TrainingArguments say: {said:.300}")
            ]
        return [Found(level="error", key="training.extra", message=f"{said:.300}", mend="correct that field")]
    return []


def _wrong_types(extra: Mapping[str, Any]) -> Iterator[Found]:
    """Switches and numbers of another type, which TrainingArguments take without a word: "false" is true."""
    hints = get_type_hints(TrainingArguments)
    for name, value in extra.items():
        kinds = set(get_args(hints[name]) or (hints[name],))
        allowed = kinds | ({int} if float in kinds else set())
        if kinds <= {bool, int, float, NoneType} and type(value) not in allowed:
            words = " or ".join(_WORDS[kind] for kind in _WORDS if kind in kinds)
            message = f"{value!r:.60} is not {words}"
            yield Found(level="error", key=f"training.extra.{name}", message=message, mend=f"write {words}")


def _trackers(config: Config) -> Iterator[Found]:
    """Trackers that nobody knows, and those whose package is missing where the worker has this environment."""
    available = get_available_reporting_integrations()  # type: ignore[no-untyped-call]
    for name in config.training.report_to:
        if name in available or name in ("none", "all"):
            continue
        key, is_known = "training.report_to", name in INTEGRATION_TO_CALLBACK
        if is_known and (config.cluster.python or config.cluster.container):
            yield Found(level="not checked", key=key, message=f"whether {name} is installed there")
        elif is_known:
            yield Found(level="error", key=key, message=f"{name} is not installed", mend=f"pip install {name}")
        else:
            mend = f"choose of {', '.join(sorted(INTEGRATION_TO_CALLBACK))}"
            yield Found(level="error", key=key, message=f"{name} is no tracker of the Trainer", mend=mend)


def _files(folder: Path) -> list[Found]:
    """Weights that are not there, and shards that the index names and nobody has."""
    index = folder / _INDEX
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return [Found(level="error", key="model.path", message=f"{index} cannot be read", mend="load it again")]
        gone = [name for name in names if not (folder / name).is_file()]
        if gone:
            message = f"of its {count(len(names), 'file')} of weights {len(gone)} cannot be found, {gone[0]} among them"
            return [Found(level="error", key="model.path", message=message, mend="load the model again")]
        return []
    if not any(path for pattern in _WEIGHTS for path in folder.glob(pattern)):
        return [Found(level="not checked", key="model.path", message=f"no weights are in {folder}")]
    return []


def _described(config: Config, folder: Path) -> PreTrainedConfig:
    if config.model.config is not None:
        return describe(config.model.config)
    with one_line(f"model.path: {folder}"):
        return AutoConfig.from_pretrained(folder)  # type: ignore[no-any-return]


def _lengths(config: Config, described: PreTrainedConfig, model: PreTrainedModel, longest: int) -> list[Found]:
    """Sequences longer than the model has positions for, or than any that it has seen."""
    most = getattr(described.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int) or config.data.max_tokens <= most:
        return []
    try:
        refuse_too_few_positions(config, model, min(longest, config.data.max_tokens))
    except ModelError as error:
        return [found_of(error)]
    if config.model.path is None and limit_of_positions(model) is None:
        return []
    message = f"sequences of {config.data.max_tokens} tokens, and the model was made for {most}"
    where = "its config.json" if config.model.path is not None else "model.config"
    evidence = f"{field_of_positions(described)} in {where} is {most}"
    mend = f"set it to {most} or less"
    return [Found(level="warning", key="data.max_tokens", message=message, evidence=evidence, mend=mend)]


def _is_sharded(config: Config) -> bool:
    """FSDP and DeepSpeed gather each layer in 16 bits: nothing is copied by autocast."""
    return bool(config.training.extra.get("fsdp") or config.training.extra.get("deepspeed"))


def _built(config: Config, described: PreTrainedConfig, *, all_half: bool) -> PreTrainedModel:
    attention = "sdpa" if config.model.attention == "flash_attention_2" else config.model.attention
    half = _SIXTEEN_BITS[config.training.precision]
    dtype = half if half is not None and all_half else getattr(torch, config.model.dtype)
    if hasattr(described, "quantization_config"):
        del described.quantization_config  # its layers want a GPU; their shapes are those of the plain ones
    key = f"model.path: {config.model.path}" if config.model.path else "model.config"
    with one_line(key):
        return AutoModelForCausalLM.from_config(described, dtype=dtype, attn_implementation=attention)  # type: ignore[no-any-return, no-untyped-call]


def _measured(
    config: Config, described: PreTrainedConfig, tokenizer: Any, found: list[Found], longest: int
) -> ModelLook:
    model: Any = _built(config, described, all_half=_is_sharded(config))
    found += _lengths(config, described, model, longest)
    found += _vocabulary(config, model, tokenizer)
    if config.model.lora is not None:
        with as_they_are():
            model = with_adapters(model, config.model.lora, config.model.revision)
    try:
        build_optimizer(model, config.training)
    except RefusedError as error:
        found.append(found_of(error, "correct training.optimizer"))
    parameters = {one.untyped_storage()._cdata: one for one in model.parameters()}.values()
    return ModelLook(
        parameters=sum(one.numel() for one in parameters),
        trained=sum(one.numel() for one in parameters if one.requires_grad),
        activations=_activations(config, described, model, found),
    )


def _packing(config: Config, described: PreTrainedConfig) -> list[Found]:
    """Whether packed documents would see each other, asked of one layer of each kind, with a tiny vocabulary."""
    if not config.data.pack or config.model.attention == "flash_attention_2":
        return []  # that takes documents apart by their positions itself, and runs on no CPU
    fields = {name: value for name, value in described.to_dict().items() if name not in _SPECIAL}
    kinds = list(dict.fromkeys(fields.get("layer_types") or [""]))
    small: dict[str, Any] = {"num_hidden_layers": len(kinds), "vocab_size": 8}
    small |= {"layer_types": kinds} if fields.get("layer_types") else {}
    not_asked = Found(level="not checked", key="data.pack", message="whether packed documents see each other")
    try:
        with shapes_only():
            size = _of_fields({**fields, **small}, config).num_parameters()
        if size > _LARGEST_LAYER:
            return [not_asked]
        is_apart = isolates_documents(_of_fields({**fields, **small}, config))
    except (*LIBRARY_ERRORS, StrictDataclassError, AttributeError):
        return [not_asked]
    if is_apart:
        return []
    message = f"in a {described.model_type} model packed documents see each other"
    return [Found(level="error", key="data.pack", message=message, mend="set data.pack: false")]


def _of_fields(fields: dict[str, Any], config: Config) -> PreTrainedModel:
    described = AutoConfig.for_model(**fields)
    return AutoModelForCausalLM.from_config(described, attn_implementation=config.model.attention)  # type: ignore[no-any-return, no-untyped-call]


def _vocabulary(config: Config, model: PreTrainedModel, tokenizer: Any) -> list[Found]:
    embedding: Any = model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    if tokenizer is None or len(tokenizer) <= rows:
        return []
    key, mend = ("model.path", "name the model's own tokenizer in data.tokenizer, or leave that out")
    if config.model.config is not None:
        key, mend = ("model.config.vocab_size", f"set it to {len(tokenizer)}")
    message = f"the model knows {rows} tokens and the tokenizer makes {len(tokenizer)}"
    return [Found(level="error", key=key, message=message, mend=mend)]


def _activations(config: Config, described: PreTrainedConfig, model: Any, found: list[Found]) -> int | None:
    training, key = config.training, "model.config" if config.model.config is not None else "model.path"
    shape = (training.batch_size, config.data.max_tokens)
    ids = torch.zeros(shape, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    try:
        saved = _followed(config, described, model, batch)
    except LIBRARY_ERRORS as error:
        said = " ".join(str(error).split())
        if isinstance(error, RuntimeError) and _A_WRONG_SHAPE.search(said):
            mend = "make hidden_size a multiple of num_attention_heads, and that one of num_key_value_heads"
            found.append(Found(level="error", key=key, message=f"its shapes do not fit: {said:.200}", mend=mend))
        else:
            why = f"activations: this kind of model cannot be followed for its shapes alone ({said:.100})"
            found.append(Found(level="not checked", key=key, message=why))
        return None
    return saved.total(_recomputed(config)) + _gathered(config, model, saved)


def _followed(config: Config, described: PreTrainedConfig, model: Any, batch: dict[str, torch.Tensor]) -> Saved:
    """What a forward pass leaves; of experts, whose products the CPU has in 16 bits only, in 16 bits throughout."""
    half = None if _is_sharded(config) else _SIXTEEN_BITS[config.training.precision]
    if half is not None and config.model.lora is None and any("expert" in name for name in described.to_dict()):
        return saved_by(_built(config, described, all_half=True), batch, None)
    return saved_by(model, batch, half)


def _recomputed(config: Config) -> int | None:
    settings = config.training.extra.get("fsdp_config")
    if isinstance(settings, dict) and settings.get("activation_checkpointing"):
        return 1
    return int(config.training.activation_checkpointing) or None


def _gathered(config: Config, model: Any, saved: Saved) -> int:
    """Two layers at a time, whole, where the weights are sharded."""
    if not _is_sharded(config) or not saved.layers:
        return 0
    whole = sum(int(one.numel()) * int(one.element_size()) for one in model.parameters())
    return 2 * whole // len(saved.layers)
