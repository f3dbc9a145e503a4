"""The configuration: one frozen model a section, one documented field a setting.

``supervisor.config`` adds ``extends``, ``--set``, cross-checks and messages; the worker reads only the resolved
config.yaml of its run, in which every default is written out.
"""

import hashlib
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from worker.contract.files import UnusableFileError, publish
from worker.contract.yaml_file import YamlError, format_yaml, read_yaml

Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of the configuration: frozen, strict about types, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class RunConfig(Section):
    """Which run this is."""

    name: str
    """Name of the run and of its folder: letters, digits, ``_``, ``.`` and ``-``."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 42
    """Seed of everything random in the worker; numpy takes no larger one."""
    dir: str = "runs"
    """Folder that holds the run folders; relative to where the command is given."""


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
    max_tokens: Positive = 2048
    """Longest sequence, in tokens."""
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


class TrainingConfig(Section):
    """How it is trained."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the data, frozen to steps at the first start; or give ``max_steps``."""
    max_steps: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Optimizer steps."""
    batch_size: Positive = 1
    """Sequences a device and micro-step."""
    gradient_accumulation: Positive = 1
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


class SpikeConfig(Section):
    """When a loss counts as a spike."""

    rule: Literal["robust", "median_ratio"] = "robust"
    """robust: level, noise and the best level; median_ratio: the median of the window alone."""
    window: Positive = 50
    """Losses in the reference window."""
    ratio: Annotated[float, Field(gt=1)] = 2.0
    """A loss above this multiple of the reference level is above the band."""
    warmup: Positive = 20
    """Losses needed before anything but a non-finite one is judged."""
    patience: Positive = 3
    """Losses above the band in a row that make a spike."""
    confirm: Positive = 25
    """Steps after ``patience`` that a level raised by less than ``ratio`` has to come back; robust only."""
    nonfinite_patience: Positive = 2
    """Non-finite steps in a row that are acted on."""
    metrics: dict[str, Literal["fall", "rise"]] = Field(default_factory=dict)
    """Other numbers that the Trainer logs, and which way is bad: ``{reward: fall, kl: rise}``."""


class EmaConfig(Section):
    """The exponential moving average of the weights, kept in float32."""

    decay: Annotated[float, Field(gt=0, lt=1)] = 0.999
    """Decay a step."""
    every: Positive = 10
    """Optimizer steps between updates; each applies ``decay ** every``."""
    device: Literal["same", "cpu"] = "same"
    """Where the average lives: with the weights, or in main memory."""


class CheckpointConfig(Section):
    """What is saved and kept."""

    every_steps: Positive = 500
    """Optimizer steps between checkpoints."""
    keep: Positive = 3
    """Newest checkpoints kept."""
    keep_healthy: Positive = 2
    """Newest healthy checkpoints kept, whatever ``keep`` says."""
    keep_every: Positive | None = None
    """Keep every checkpoint whose step is a multiple of this."""
    keep_quarantined: NotNegative = 1
    """Checkpoints of abandoned branches kept in quarantine."""
    healthy_after: NotNegative = 25
    """Steps without a verdict after a checkpoint that make it healthy."""


class SpikeRecovery(Section):
    """What a spike or divergence leads to."""

    lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the rate scale at each rollback."""
    max_rollbacks: NotNegative = 5
    """Rollbacks without a new healthy checkpoint before the run gives up."""
    min_lr_scale: Annotated[float, Field(gt=0, le=1)] = 0.03125
    """The rate scale never goes below this."""
    hold_steps: NotNegative | None = None
    """Steps that the lowered rate is held before it ramps back; null = for good."""
    ramp_steps: Positive | None = None
    """Steps of the way back to ``ramp_to``; needs ``hold_steps``."""
    ramp_to: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Where the ramp ends."""
    reset_moments: bool = False
    """Drop the optimizer's moments at each rollback."""
    rewarm_steps: Positive | None = None
    """Warm the rate up again over so many steps after each rollback; null = off."""
    skip: Literal["repeat", "always", "never"] = "repeat"
    """Whether the batches of a spike are left out: when it comes again at the same ones, at once, or never; at most
    1 % of all batches of the run."""
    skip_before: NotNegative = 20
    """Batches ahead of the onset that are left out too: a harmful batch shows later than it was trained on."""


class LrFactor(Section):
    """What one kind of event does to the rate."""

    lr_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Factor on the rate scale."""


class RecoveryConfig(Section):
    """What is done when something goes wrong."""

    mode: Literal["act", "observe"] = "act"
    """observe: write down what would be done, touch nothing, and train on through verdicts."""
    spike: SpikeRecovery = SpikeRecovery()
    nonfinite: LrFactor = LrFactor(lr_factor=0.5)
    preemption: LrFactor = LrFactor(lr_factor=1.0)
    max_attempts_without_progress: Positive = 10
    """Attempts without a new healthy checkpoint before the run gives up."""
    directive_wait_s: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that agents keep the allocation while they wait for a decision."""
    relaunches_in_allocation: NotNegative = 2
    """Relaunches in one allocation without a new healthy checkpoint; then a fresh job."""
    max_submissions_per_hour: Positive = 6
    """Jobs submitted within any hour; the next waits."""
    max_gpu_hours: Annotated[float, Field(gt=0)] | None = None
    """GPU hours after which the run saves and gives up, counted from the times at which its jobs were seen to run."""
    hang_timeout_s: Annotated[float, Field(ge=1)] = 1800.0
    """Seconds without progress that are a hang; longer where the run's own steps and saves take long, and in phases
    of which little is known."""
    absent_grace_s: Annotated[float, Field(ge=0)] = 120.0
    """Seconds that a preempted or failed job may be out of Slurm's sight before it counts as over."""
    node_strikes: Positive = 2
    """Attempts that a node may spoil before it is excluded."""
    node_ban_h: Annotated[float, Field(gt=0)] = 24.0
    """Hours that a node stays excluded, and that a strike against it counts."""


class Fallback(Section):
    """Where a job goes that did not start where it was."""

    partition: str | None = None
    qos: str | None = None
    after_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds in the queue before it goes there."""


_GPUS_IN_GRES = re.compile(r"(?:^|,)gpu(?::[^,:]*[^,:\d][^,:]*)?(?::(\d+))?(?:,|$)")


class ClusterConfig(Section):
    """Where the worker runs; what is null is left to the site's defaults."""

    kind: Literal["auto", "slurm", "local"] = "auto"
    """auto = Slurm where sbatch is found and has a configuration, else this machine."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    mem: str | None = None
    """Memory a node, as in Slurm: ``64G``."""
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    nodes: Positive = 1
    tasks_per_node: Positive | None = None
    """Ranks a node; null = one a GPU, or one."""
    gpus_per_node: NotNegative = 0
    cpus_per_task: Positive = 1
    time_limit: str = "1-00:00:00"
    """As in Slurm: ``days-hours:minutes:seconds``."""
    min_time: str | None = None
    """The shortest time limit worth starting with before a maintenance; null = wait until it is over."""
    fallback: Annotated[tuple[Fallback, ...], Field(strict=False)] = ()
    """Partitions and QOS to try, one after the other, for a job that does not start."""
    setup: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Shell lines before the worker starts: module load, conda activate."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the worker."""
    python: str | None = None
    """Interpreter on the nodes; null = the one that submits."""
    srun: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further srun arguments."""
    container: str | None = None
    """Words before the interpreter, such as ``apptainer exec --nv image.sif``; pyxis takes
    ``--container-image=image.sqsh`` in ``srun``."""
    mail_user: str | None = None
    """Whom Slurm itself mails when a job of the run ends, fails or is put back into the queue."""
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    """Any other sbatch option, long name to value; true for an option without one."""

    @property
    def tasks_on_each_node(self) -> int:
        """Ranks a node."""
        return self.tasks_per_node or max(1, self.gpus_per_node)

    @property
    def gpus(self) -> int:
        """GPUs in all, as far as ``gpus_per_node`` or ``gres`` say."""
        in_gres = _GPUS_IN_GRES.search(self.gres or "")
        return self.nodes * (self.gpus_per_node or (int(in_gres[1] or 1) if in_gres else 0))

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.tasks_on_each_node


class SupervisorConfig(Section):
    """Where the supervisor runs after ``submit``."""

    place: Literal["job", "foreground"] = "job"
    """job = a small Slurm job of its own (a detached process without Slurm); foreground = ``higgsfield run`` only."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None


def _target(value: Any) -> Any:
    """``{command: PROGRAM}``, as YAML reads it, becomes the text that it looks like."""
    is_command = isinstance(value, dict) and value.keys() == {"command"} and isinstance(value["command"], str)
    return f"command: {value['command']}" if is_command else value


Targets = Annotated[tuple[Annotated[str, BeforeValidator(_target)], ...], Field(strict=False)]


class Config(Section):
    """A run's whole configuration."""

    run: RunConfig
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    training: TrainingConfig = TrainingConfig()
    spike: SpikeConfig = SpikeConfig()
    ema: EmaConfig | None = EmaConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    cluster: ClusterConfig = ClusterConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    notify: Targets = ()
    """Who is told of rollbacks, hangs, long waits and the end: addresses of apprise, or ``command: PROGRAM``."""


def format_config(config: Config) -> str:
    """The resolved config as YAML, every default written out."""
    return format_yaml(config.model_dump(mode="json"))


def config_digest(config: Config) -> str:
    """16 hex digits that name a resolved config."""
    return hashlib.sha256(format_config(config).encode()).hexdigest()[:16]


def write(path: Path, config: Config) -> None:
    """Publish a resolved config.yaml."""
    publish(path, format_config(config))


def read(path: Path) -> Config:
    """The resolved config of a run; UnusableFileError where it cannot be read."""
    try:
        return Config.model_validate(read_yaml(path))
    except YamlError as error:
        raise UnusableFileError(path, str(error)) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UnusableFileError(path, f"{where}: {first['msg']}") from None
