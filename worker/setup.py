"""The Trainer of a configuration: model, data, optimizer, schedule and arguments, nothing attached yet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_callback import ProgressCallback

from worker import world
from worker.contract.config import Config
from worker.contract.owned_fields import refused_fields
from worker.contract.run_dir import RunDir
from worker.data import TrainingData, build_data
from worker.leaving import RefusedError
from worker.models import build_model, build_tokenizer, refuse_too_few_positions
from worker.optimizers import build_optimizer, build_schedule
from worker.order import batches_an_epoch
from worker.shards import refuse_old_sharding
from worker.sophia import Curvature


def build_trainer(
    run: RunDir, config: Config, base: Path, alive: Callable[[], None] = lambda: None, staged: Path | None = None
) -> tuple[Trainer, TrainingData]:
    """A Trainer that has everything to train ``config``; relative data paths are taken from ``base``.

    ``alive`` is called whenever something of it is done; ``staged`` is where tokens lie until they are whole.
    """
    tokenizer = build_tokenizer(config, base)
    data = build_data(config, tokenizer, base, run.tokens, alive, staged)
    alive()
    model = build_model(config, tokenizer, base)
    refuse_too_few_positions(config, model, data.longest)
    alive()
    try:
        args = TrainingArguments(**training_fields(run, config, max_steps_of(config, data)))
        refuse_old_sharding(args)
        trainer = Trainer(
            model=model,
            args=args,
            data_collator=data.collator,
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            processing_class=tokenizer,
        )
    except (TypeError, ValueError, ImportError) as error:
        raise RefusedError(f"config.yaml: training: {' '.join(str(error).split())}") from error
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    _build_when_asked(trainer, config)
    return trainer, data


def _build_when_asked(trainer: Trainer, config: Config) -> None:
    """Have the Trainer use our optimizer and schedule at the moment when it would create its own.

    That moment comes after the model was placed, sharded or wrapped.
    """

    def create_optimizer(model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if trainer.optimizer is None:
            whole: Any = trainer.model if model is None else model
            trainer.optimizer = build_optimizer(whole, config.training)
            if config.training.optimizer.name == "sophia":
                Curvature(trainer, trainer.optimizer, config.training.optimizer.args)
        return trainer.optimizer

    def create_scheduler(num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if trainer.lr_scheduler is None:
            inner: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
            trainer.lr_scheduler = build_schedule(inner, config.training.schedule, num_training_steps)
        return trainer.lr_scheduler

    setattr(trainer, "create_optimizer", create_optimizer)  # noqa: B010 (a method of one instance)
    setattr(trainer, "create_scheduler", create_scheduler)  # noqa: B010


def max_steps_of(config: Config, data: TrainingData) -> int:
    """The optimizer steps of the run: as configured, or the epochs in steps of the global batch."""
    training = config.training
    if training.max_steps is not None:
        return training.max_steps
    if training.epochs is None:
        raise RefusedError("config.yaml: training: give max_steps or epochs", what="max_steps")
    samples: Any = data.train
    global_batch = training.batch_size * training.gradient_accumulation * world.world_size()
    return max(1, round(training.epochs * batches_an_epoch(len(samples), global_batch)))


def training_fields(run: RunDir, config: Config, max_steps: int) -> dict[str, Any]:
    """The fields of TrainingArguments; RefusedError, by name, for one that is not the person's to set."""
    training = config.training
    for name, instead in refused_fields(training.extra):
        raise RefusedError(f"config.yaml: training.extra.{name}: {instead}", what=name)
    every_n = training.activation_checkpointing or 1  # true is 1
    fields: dict[str, Any] = {
        "output_dir": str(run.checkpoints),
        "run_name": config.run.name,
        "seed": config.run.seed,
        "max_steps": max_steps,
        "per_device_train_batch_size": training.batch_size,
        "per_device_eval_batch_size": training.batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation,
        "max_grad_norm": training.max_grad_norm or 0.0,
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "activation_checkpointing": bool(training.activation_checkpointing),
        "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": int(every_n)},
        "logging_strategy": "steps",
        "logging_steps": training.log_every,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "report_to": list(training.report_to),
        "eval_strategy": "steps" if training.eval_every else "no",
        "eval_steps": training.eval_every,
        "save_strategy": "steps",
        "save_steps": config.checkpoint.every_steps,
        "train_sampling_strategy": "random" if config.data.shuffle else "sequential",
        "dataloader_num_workers": config.data.workers,
        "remove_unused_columns": False,
        "use_cpu": not torch.cuda.is_available(),
        "dataloader_pin_memory": torch.cuda.is_available(),
        "ddp_find_unused_parameters": False,  # every parameter is used, and looking costs each step
    }
    if training.optimizer.learning_rate is not None:
        fields["learning_rate"] = training.optimizer.learning_rate
    return {**fields, **training.extra}
