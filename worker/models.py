"""What is trained: a model and its tokenizer, from a folder, the hub, or a description in the configuration."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from worker.contract.config import Config
from worker.contract.recipe_config import ModelConfig
from worker.lora import LoraError, with_adapters

LIBRARY_ERRORS = (OSError, ValueError, ImportError, KeyError, TypeError, RuntimeError, ArithmeticError)
_OF_POSITIONS = re.compile(r"(^|\.)(wpe|[^.]*pos[^.]*)$")
"""Learned positions, by the name of their module."""
_FIXED_TABLES = ("gptj", "codegen", "ctrl")
"""Kinds whose positions are a table that is not learned."""
_FILE_ERRORS = (StrictDataclassError, SafetensorError)


class ModelError(Exception):
    """A model or tokenizer that cannot be built; one line that names the key and what to do."""


def build_model(config: Config, tokenizer: Any = None, base: Path = Path()) -> PreTrainedModel:
    """The model of ``config``, ready to train: the same on every rank and at every start, without a cache.

    Relative folders are taken from ``base``.  Raises ModelError, also where ``tokenizer`` has more tokens than the
    model, or ``data.pack`` is set and the model would let packed documents see each other.  Leaves the global random
    state as it was.
    """
    _refuse_half_weights(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        model = _load(config.model, base) if config.model.path else _create(config.model)
    # a cache of keys lets packed documents see each other, and trains nothing; generation_config keeps the own value
    model.config.use_cache = False
    embedding: Any = model.get_input_embeddings()
    rows = int(embedding.weight.shape[0])
    if tokenizer is not None and len(tokenizer) > rows:
        key = "model.path" if config.model.path else "model.config.vocab_size"
        raise ModelError(f"{key}: the model knows {rows} tokens and the tokenizer makes {len(tokenizer)}")
    # flash attention runs on no CPU, where the model is now; it takes documents apart by their positions itself
    if config.data.pack and config.model.attention != "flash_attention_2" and not isolates_documents(model):
        kind = model.config.model_type
        raise ModelError(f"data.pack: in a {kind} model packed documents see each other; set data.pack: false")
    return model if config.model.lora is None else _adapted(config, model)


def _adapted(config: Config, model: PreTrainedModel) -> PreTrainedModel:
    assert config.model.lora is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.run.seed)
        try:
            return with_adapters(model, config.model.lora, config.model.revision)  # type: ignore[no-any-return]
        except LoraError as error:
            raise ModelError(str(error)) from None


@torch.no_grad()
def isolates_documents(model: PreTrainedModel) -> bool:
    """Whether a packed document is blind to the one before it: asked of the model, because many ignore positions.

    Two samples differ in their first document only, so the second must come out the same.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    was_training = model.training
    model.train(False)
    try:
        samples = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3], [3, 2, 1, 0, 0, 1, 2, 3]])
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]]).expand(2, -1)
        first, second = model(input_ids=samples, position_ids=positions, use_cache=False).logits[:, 4:].float()
    finally:
        model.train(was_training)
    return bool((first - second).abs().max() <= 1e-4 * first.abs().max())


def refuse_too_few_positions(config: Config, model: PreTrainedModel, longest: int) -> None:
    """ModelError where the ``longest`` tokens of one document are more than the model's table of positions holds."""
    most = limit_of_positions(model)
    if most is not None and longest > most:
        field = field_of_positions(model.config)
        instead = "" if config.model.config is None else f", or model.config.{field} to {longest} or more"
        why = f"its sequences need {longest} positions, and the model has {most} ({field})"
        raise ModelError(f"data.max_tokens: {why}; set it to {most} or less{instead}")


def limit_of_positions(model: PreTrainedModel) -> int | None:
    """How many positions a model has that looks them up in a table; None where it knows no limit."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(most, int):
        return None
    tables = (name for name, one in model.named_modules() if isinstance(one, torch.nn.Embedding))
    is_learned = any(_OF_POSITIONS.search(name) for name in tables)
    return most if is_learned or model.config.model_type in _FIXED_TABLES else None


def field_of_positions(described: PreTrainedConfig) -> str:
    """What ``max_position_embeddings`` is called in this kind of config: ``n_positions`` for GPT-2."""
    names: dict[str, str] = described.get_text_config().attribute_map
    return names.get("max_position_embeddings", "max_position_embeddings")


def _refuse_half_weights(config: Config) -> None:
    if config.model.lora is not None:
        return  # they are frozen, and adapters are float32 whatever they are
    if config.model.dtype == "float16":
        raise ModelError("model.dtype: float16 weights cannot be trained; use float32 with training.precision: fp16")
    if config.model.dtype == "bfloat16" and not config.training.pure_bf16:
        raise ModelError(
            "model.dtype: bfloat16 weights under-train silently at small rates; use float32 with "
            "training.precision: bf16, or ask for it with training.pure_bf16: true"
        )


def _load(wanted: ModelConfig, base: Path) -> PreTrainedModel:
    path = str(wanted.path)
    with one_line(f"model.path: {path}", hint=_where(path, base)):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            _local_or_hub(path, base),
            revision=wanted.revision or "main",
            dtype=getattr(torch, wanted.dtype),
            attn_implementation=wanted.attention,
            output_loading_info=True,
        )
    model: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"model.path: {path} lacks {len(missing)} of the model's weights, {missing[0]} among them")
    return model


def _create(wanted: ModelConfig) -> PreTrainedModel:
    config = describe(wanted.config or {})
    with one_line("model.config"):
        return AutoModelForCausalLM.from_config(  # type: ignore[no-any-return, no-untyped-call]
            config, dtype=getattr(torch, wanted.dtype), attn_implementation=wanted.attention
        )


def describe(fields: dict[str, Any]) -> PreTrainedConfig:
    """The transformers config that ``model.config`` describes; ModelError for a field that the model does not know.

    transformers keeps an unknown field without a word, so a misspelt one would train another model than was meant.
    Special tokens that are not named are none: their numbers in a model's defaults belong to another tokenizer.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str):
        raise ModelError("model.config: needs model_type, such as llama")
    given = {name: value for name, value in fields.items() if name != "model_type"}
    with one_line("model.config"):
        default = AutoConfig.for_model(kind)
        special = {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(default, name)}
        config = AutoConfig.for_model(kind, **{**special, **given})
    for name in given:
        if not hasattr(default, name) and hasattr(config, name):
            raise ModelError(f"model.config.{name}: {kind} has no such field")
    return config


def build_tokenizer(config: Config, base: Path = Path()) -> PreTrainedTokenizerBase:
    """The tokenizer of ``config``: the 256 byte values, or one from a folder or the hub, or the model's own."""
    wanted = config.data.tokenizer or config.model.path
    if wanted == "bytes":
        return byte_tokenizer()
    if wanted is None:
        raise ModelError("data.tokenizer: a model built from model.config has none of its own; name one, or bytes")
    key = "data.tokenizer" if config.data.tokenizer else "model.path"
    revision = None if config.data.tokenizer else config.model.revision
    with one_line(f"{key}: the tokenizer of {wanted}", hint=_where(wanted, base)):
        found = AutoTokenizer.from_pretrained(_local_or_hub(wanted, base), revision=revision or "main")
    if len(found) == 0:
        raise ModelError(f"{key}: the tokenizer of {wanted} is empty")
    return found


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose 256 ids are the byte values, without special tokens; saves and loads like any other."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)  # type: ignore[no-untyped-call]


def _byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte: itself where it prints, else one from 256 on."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


def _local_or_hub(name: str, base: Path) -> str:
    folder = base / Path(name).expanduser()
    return str(folder) if folder.is_dir() else name


def _where(name: str, base: Path) -> str:
    folder = base / Path(name).expanduser()
    if folder.is_dir():
        return ""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        return f"no such folder ({folder})"
    return f"no such folder ({folder}), and the hub does not give it: "


@contextmanager
def one_line(what: str, hint: str = "") -> Iterator[None]:
    """Turn what a library raises into a ModelError of one line."""
    try:
        yield
    except (*LIBRARY_ERRORS, *_FILE_ERRORS) as error:
        said = str(error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error)
        said = " ".join(said.split())
        said = said.split(" Should contain one of ")[0].split(" Model type should be one of ")[0]
        if "does not support an attention implementation" in said:
            said = f"{said.split(' yet. Please ')[0]}; set model.attention: eager"
        why = hint if hint.endswith(")") else f"{hint}{said or type(error).__name__}"
        raise ModelError(f"{what}: {why:.300}") from None
