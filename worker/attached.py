"""What is attached to one Trainer: the parts that its beginning, its steps and its saves share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import cast

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import Trainer

from worker.background import Background
from worker.contract.config import Config, config_digest
from worker.contract.directive import Directive
from worker.contract.manifest import FrozenBase
from worker.contract.run_dir import RunDir
from worker.ema import Ema
from worker.interrupts import RunFiles
from worker.laps import Laps
from worker.order import EpochOrder
from worker.pulse import Heart
from worker.resume import Chosen, Settings, optimizer_steps
from worker.segment import Segment
from worker.sources import Locate
from worker.spikes import Detector
from worker.start import Start


@dataclass(frozen=True)
class Context:
    """What a start of the worker is to do, the same on every rank."""

    run: RunDir
    start: Start
    directive: Directive
    config: Config
    data_digest: str
    chosen: Chosen | None
    """The checkpoint to begin from; None is from scratch."""
    locate: Locate | None = None
    """The rows of files that samples, given by index, are made of; None where nothing is known of files."""
    then: Callable[["Attached"], None] | None = None
    """Called with what was attached, before training begins; a replay's."""
    is_altered: bool = False
    """Whether this start differs on purpose from what its checkpoint was made with: a replay with a change, which
    restores what fits and proves that it is the same data."""
    laps: Laps = field(default_factory=Laps)
    """How long the parts of this start took so far."""

    @cached_property
    def config_digest(self) -> str:
        """The configuration's, which takes some milliseconds to make."""
        return config_digest(self.config)


@dataclass
class Attached:
    """The parts, and how far training is."""

    trainer: Trainer
    context: Context
    order: EpochOrder
    detector: Detector
    heart: Heart
    base: FrozenBase | None = None
    """What the adapters belong to; None where the whole model is trained."""
    average: Ema | None = None
    files: RunFiles | None = None
    """Rank 0's."""
    segment: Segment | None = None
    """Rank 0's."""
    background: Background | None = None
    """Saves beside the training; None where that was not asked for."""
    step: int = 0
    saved_step: int | None = None

    @property
    def model(self) -> torch.nn.Module:
        """The model itself, without what wraps it in a world of several ranks."""
        return cast(torch.nn.Module, self.trainer.model)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The Trainer's optimizer, once training has begun."""
        return cast(torch.optim.Optimizer, self.trainer.optimizer)

    @property
    def schedule(self) -> LRScheduler:
        """The schedule of the learning rate, once training has begun; it goes on with every step."""
        return cast(LRScheduler, self.trainer.lr_scheduler)

    @property
    def optimizer_steps(self) -> int:
        """Updates that the optimizer has seen."""
        return optimizer_steps(self.optimizer, self.schedule.last_epoch)

    @property
    def settings(self) -> Settings:
        """What may not change between a checkpoint and its resume."""
        return Settings(
            max_steps=self.trainer.state.max_steps,
            seed=self.trainer.args.seed,
            global_batch=self.order.global_batch,
            data_digest=self.context.data_digest,
        )


@cache
def versions() -> dict[str, str]:
    """The versions that a checkpoint and a segment were made with; looked for once, as it takes 8 ms."""
    names = {"torch": "torch", "transformers": "transformers", "accelerate": "accelerate"}
    names["higgsfield"] = "higgsfield-supervisor"
    return {short: _version(name) for short, name in names.items()} | {"torch": torch.__version__}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
