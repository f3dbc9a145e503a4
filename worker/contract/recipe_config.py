"""What is trained, on what and how, as one documented field a setting."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from worker.contract.section import Beta, NotNegative, Positive, Section, Share, Size


class LoraConfig(Section):
    """Adapters that are trained in place of the model, through peft."""

    r: Positive = 16
    """Rank of each adapter."""
    alpha: Positive = 32
    """Adapters count ``alpha / r``."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """On the way into each adapter."""
    targets: str | Annotated[tuple[str, ...], Field(strict=False)] = "all-linear"
    """Layers that get one, by the ends of their names; ``all-linear`` = all but the output layer."""


class ModelConfig(Section):
    """What is trained."""

    path: str | None = None
    """Folder or hub name of a pretrained model; or give ``config``."""
    config: dict[str, Any] | None = None
    """A model built here from scratch: the fields of a transformers config, ``model_type`` among them."""
    revision: str | None = None
    """Revision of the hub model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights; bf16 training means autocast over float32 weights."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation."""
    lora: LoraConfig | None = None
    """Adapters in place of full training, of a model from ``path``; null = off."""


class DataConfig(Section):
    """What it is trained on."""

    train: str | Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """File, glob, folder or hub name (``owner/name``, with ``:split`` or ``:subset:split``), or a list of them,
    relative to where the command is given; ``stdlib`` = the sources of Python's own standard library, text that every
    machine has."""
    eval: str | Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """The same for evaluation."""
    eval_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the documents of ``train`` that is held back for evaluation; drawn by the seed."""
    format: Literal["auto", "text", "jsonl", "json", "csv", "parquet"] = "auto"
    """How files are read; auto = by their endings, text for all others."""
    text: str | None = "text"
    """Column that holds the text, in formats that have columns; null = no such column is looked for."""
    prompt: str | None = "prompt"
    """Column that holds a prompt; only the ``completion`` of its row is learned."""
    completion: str | None = "completion"
    """Column that holds what follows the prompt."""
    messages: str | None = "messages"
    """Column that holds a conversation, written by the tokenizer's chat template; only the answers are learned."""
    max_bad_rows: NotNegative = 0
    """Rows that cannot be used (broken JSON, a missing column, ...) before the run is refused; they are named."""
    tokenizer: str | None = None
    """``bytes`` for the 256 byte values, a folder or hub name; null = the model's own."""
    max_tokens: Annotated[Size, Field(ge=2)] = 2048
    """Longest sequence, in tokens; of a single one there is no next token to learn."""
    pack: bool = True
    """Fill sequences with several documents, each seeing only itself; false = one document a sequence."""
    shuffle: bool = True
    """Another order in each epoch, from the seed."""
    workers: NotNegative = 0
    """DataLoader processes a rank."""


STARTING_RATES = {"adamw": 2e-5, "adam": 2e-5, "sgd": 1e-2, "lion": 4e-6, "lamb": 1e-3, "sophia": 2e-5}
"""Rates to begin with when a trained model is trained further; from scratch, ten times as much and more."""


class OptimizerConfig(Section):
    """The optimizer; decay applies to matrices only (parameters of two dimensions or more)."""

    name: (
        Literal["adamw", "adam", "sgd", "lion", "lamb", "sophia"]
        | Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")]
    ) = "adamw"
    """adamw (fused where the device has it), adam, sgd; lion, lamb and sophia of the extra ``optimizers``; or any
    optimizer as ``package.module:Class``."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate; where it is not given, one to start with for the optimizer of that name, to train a trained
    model further: adamw, adam and sophia 2e-5, lion 4e-6, lamb 1e-3, sgd 1e-2."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] | None = None
    """adamw, adam, lion, lamb and sophia; null = the optimizer's own: 0.9 with 0.95 for adamw and adam, 0.99 for lion,
    0.999 for lamb; 0.965 with 0.99 for sophia."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """adamw, adam and lamb."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 for adam and sgd, decoupled for the others."""
    momentum: Share = 0.9
    """sgd."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Any further argument of the optimizer's class; sophia takes ``rho`` (0.04) and ``every`` (10)."""

    @model_validator(mode="before")
    @classmethod
    def _start_somewhere(cls, values: Any) -> Any:
        """Write out the rate to start with; another package's optimizer has none."""
        if not isinstance(values, dict) or values.get("learning_rate") is not None:
            return values
        name = values.get("name", "adamw")
        if not isinstance(name, str) or ":" in name:
            return values
        return {**values, "learning_rate": STARTING_RATES.get(name, STARTING_RATES["adamw"])}


class ScheduleConfig(Section):
    """The learning rate over the run: warmup from zero, then down to ``floor`` of the peak."""

    name: Literal["cosine", "linear", "polynomial", "constant", "warmup_stable_decay"] = "cosine"
    """Shape after the warmup; constant ignores ``floor``, warmup_stable_decay is constant until its last steps."""
    warmup: Annotated[float, Field(ge=0)] = 0.03
    """Below 1 a share of all steps, else a number of steps."""
    decay: Annotated[float, Field(ge=0)] = 0.1
    """warmup_stable_decay: how long it falls at the end, linearly; below 1 a share of all steps, else steps."""
    power: Annotated[float, Field(gt=0)] = 2.0
    """polynomial: of the share of the way that is left."""
    floor: Share = 0.1
    """Share of the peak at the last step."""


def schedule_factor(schedule: ScheduleConfig, step: int, max_steps: int) -> float:
    """The share of the peak for the update that makes ``step + 1`` the number of finished steps.

    Counted as LambdaLR and transformers do: update k, from 0, has factor(k).  Over w warmup steps it climbs from zero,
    k / w; update w is the first at the peak; then it falls and would be ``floor`` at k = max_steps, one past the last.
    """
    warmup = _steps_of(schedule.warmup, max_steps)
    if step < warmup:
        return step / warmup
    is_stable = schedule.name == "warmup_stable_decay"
    falls_from = max(warmup, max_steps - _steps_of(schedule.decay, max_steps)) if is_stable else warmup
    past = min(1.0, max(0, step - falls_from) / max(1, max_steps - falls_from))
    return schedule.floor + (1.0 - schedule.floor) * _share_left(schedule, past)


def _share_left(schedule: ScheduleConfig, past: float) -> float:
    """How much of the way from the peak to the floor is left, ``past`` of the time after."""
    match schedule.name:
        case "constant":
            return 1.0
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * past))
        case "polynomial":
            return float((1.0 - past) ** schedule.power)
        case "linear" | "warmup_stable_decay":
            return 1.0 - past


def _steps_of(told: float, max_steps: int) -> int:
    """A number of steps: a share of all, rounded up, where it is below 1."""
    return math.ceil(told * max_steps) if told < 1 else int(told)


class TrainingConfig(Section):
    """How it is trained."""

    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Passes over the data, frozen to steps at the first start; or give ``max_steps``."""
    max_steps: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Optimizer steps."""
    batch_size: Size = 1
    """Sequences a device and micro-step."""
    gradient_accumulation: Size = 1
    """Micro-steps an optimizer step."""
    entrypoint: str | None = None
    """A training script of your own: ``package.module:function``, with its folder before it (``scripts/sft:main``)
    where that is not the one the command is given in. It builds what it likes; ``model``, ``data`` and the other keys
    of ``training`` are then for it to read."""
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the global gradient norm to this; null = off."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Autocast type of the forward pass."""
    pure_bf16: bool = False
    """Allow bfloat16 weights in full training; they under-train silently at small rates."""
    activation_checkpointing: bool | Positive = False
    """Recompute activations in the backward pass instead of keeping them; a number n: of every n-th layer."""
    eval_every: Positive | None = None
    """Optimizer steps between evaluations; needs ``data.eval`` or ``data.eval_share``."""
    log_every: Positive = 50
    """Optimizer steps between lines in logs/train.log."""
    report_to: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Trackers of the Trainer: tensorboard, wandb, mlflow."""
    zygote: bool = True
    """Start each trainer from a process that has imported everything: a relaunch in well under a second instead of
    many, for the memory of those imports; false = a new interpreter each time."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Any other field of transformers.TrainingArguments that is not ours."""


class EmaConfig(Section):
    """The exponential moving average of the weights, kept in float32."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Decay a step."""
    every: Positive = 10
    """Optimizer steps between updates; each applies ``decay ** every``."""
    device: Literal["same", "cpu"] = "same"
    """Where the average lives: with the weights, or in main memory."""
