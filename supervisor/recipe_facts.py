"""What the rules of ``check`` go by: a configuration, and what is known of model, data and machine.  Pure."""

import math
from dataclasses import dataclass
from typing import Final, Literal

from supervisor.config_findings import Place
from supervisor.devices import Device
from supervisor.memory import MemoryPlan, plan_memory
from worker.contract.config import Config

SHARE_OF_PEAK: Final = 0.4
"""Of a GPU's arithmetic that training makes use of; an assumption, at the good end of what is published."""
DISK_BYTES_PER_S: Final = 1e9
"""How fast one node writes a checkpoint; an assumption, ``save_s`` in a run's history says what it is."""
SHORT_RUN_STEPS: Final = 100
"""A run of fewer steps is a trial: what it loses is soon made again."""


@dataclass(frozen=True)
class Remark:
    """What a rule says of one key."""

    level: Literal["error", "warning", "note", "not checked"]
    place: Place
    message: str
    """The reason."""
    evidence: str = ""
    mend: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known before anything runs; None where nobody knows."""

    config: Config
    parameters: int | None = None
    """Of the whole model."""
    trained: int | None = None
    """Those that are trained: all, or the adapters."""
    base_bits: int | None = None
    """Bits a parameter of a base that is stored quantised."""
    samples: int | None = None
    """Training samples of an epoch."""
    activations: int | None = None
    """Bytes on a device that a forward pass leaves for the backward pass."""
    device: Device | None = None
    """The GPU that the run asks for."""
    main_memory: int | None = None
    """Bytes of a node."""
    free_disk: int | None = None
    """Bytes that are free where the runs lie."""
    features: frozenset[str] = frozenset()
    """Of all nodes that the job may get, as the site calls them."""

    @property
    def is_from_scratch(self) -> bool:
        """The model is built from its description: what is known of fine-tuning does not bind it."""
        return self.config.model.path is None

    @property
    def global_batch(self) -> int:
        """Sequences an optimizer step."""
        training = self.config.training
        return training.batch_size * training.gradient_accumulation * self.config.cluster.world_size

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps of the run."""
        training = self.config.training
        if training.max_steps is not None or training.epochs is None or self.samples is None:
            return training.max_steps
        return max(1, round(training.epochs * math.ceil(self.samples / self.global_batch)))

    @property
    def is_trial(self) -> bool:
        """So short that nothing about its schedule matters."""
        return self.max_steps is not None and self.max_steps < SHORT_RUN_STEPS

    @property
    def step_s(self) -> float | None:
        """Seconds of an optimizer step, by arithmetic, ``SHARE_OF_PEAK`` of what the GPUs can do in 16 bits."""
        config = self.config
        if self.device is None or self.parameters is None or not config.cluster.gpus:
            return None
        if config.training.precision == "fp32":
            return None
        # A product is 2 operations; backwards it is two, of frozen weights one; activations may be computed again.
        backward = 2 if config.model.lora is not None else 4
        again = 2 if _recomputes(config) else 0
        operations = (2 + backward + again) * self.parameters * self.global_batch * config.data.max_tokens
        return operations / (config.cluster.gpus * self.device.tera_flops * 1e12 * SHARE_OF_PEAK)

    @property
    def memory(self) -> MemoryPlan | None:
        """What each device holds."""
        if self.parameters is None or self.trained is None:
            return None
        return plan_memory(self.config, self.parameters, self.trained, self.activations, self.base_bits)

    @property
    def checkpoint_bytes(self) -> int | None:
        """A checkpoint on the disk: weights, moments and average of what is trained."""
        if self.parameters is None or self.trained is None:
            return None
        whole = plan_memory(self.config, self.parameters, self.trained, is_whole=True)
        weights = whole.weights if self.config.model.lora is None else 4 * self.trained
        average = 4 * self.trained if self.config.ema is not None else 0
        return weights + whole.optimizer + average

    @property
    def save_s(self) -> float | None:
        """Seconds of a save, at ``DISK_BYTES_PER_S`` a node where every rank writes its own part."""
        size = self.checkpoint_bytes
        writers = self.config.cluster.nodes if self.config.training.extra.get("fsdp") else 1
        return None if size is None else size / (DISK_BYTES_PER_S * writers)


def _recomputes(config: Config) -> bool:
    settings = config.training.extra.get("fsdp_config")
    sharded = isinstance(settings, dict) and bool(settings.get("activation_checkpointing"))
    return sharded or bool(config.training.activation_checkpointing)
