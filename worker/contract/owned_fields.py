"""Fields of transformers.TrainingArguments: what ``training.extra`` may set, and what to do instead of the others.

The names are those of transformers 5.24; the last group are older names that people still write.
"""

import difflib
from collections.abc import Iterable

_EXACT = "leave it out: a resumed run would no longer see the same batches"
_SAVED = "leave it out: checkpoints are written and published by the worker itself"
_HUB = "leave it out, and upload the run's final/ folder when the run has finished"
_BEST = "leave it out: the weights with the lowest evaluation loss are kept in the run's best/ folder"
_WORLD = "leave it out: the worker makes the process group itself, from what the scheduler says"
_IDLE = "leave it out: it has no effect here"
_OPTIMIZER = "set training.optimizer.name"

OWNED_FIELDS: dict[str, str] = {
    "output_dir": "set run.dir and run.name",
    "run_name": "set run.name",
    # The length of the run and its batches.
    "num_train_epochs": "set training.epochs",
    "max_steps": "set training.max_steps",
    "per_device_train_batch_size": "set training.batch_size",
    "per_device_eval_batch_size": "set training.batch_size",
    "gradient_accumulation_steps": "set training.gradient_accumulation",
    "auto_find_batch_size": "set training.batch_size: a batch that changes by itself cannot be resumed",
    # The optimizer and its rate: what a rollback scales.
    "learning_rate": "set training.optimizer.learning_rate",
    "optim": _OPTIMIZER,
    "optim_args": "set training.optimizer.args",
    "optim_target_modules": _OPTIMIZER,
    "weight_decay": "set training.optimizer.weight_decay",
    "adam_beta1": "set training.optimizer.betas",
    "adam_beta2": "set training.optimizer.betas",
    "adam_epsilon": "set training.optimizer.eps",
    "max_grad_norm": "set training.max_grad_norm",
    "lr_scheduler_type": "set training.schedule.name",
    "lr_scheduler_kwargs": "set training.schedule.floor",
    "warmup_steps": "set training.schedule.warmup",
    # Precision and memory.
    "bf16": "set training.precision",
    "fp16": "set training.precision",
    "activation_checkpointing": "set training.activation_checkpointing",
    "gradient_checkpointing": "set training.activation_checkpointing",
    # Checkpoints: a folder that the worker did not publish may be torn, or of an abandoned branch.
    "save_strategy": "set checkpoint.every_steps",
    "save_steps": "set checkpoint.every_steps",
    "save_total_limit": "set checkpoint.keep and checkpoint.keep_healthy",
    "save_only_model": _SAVED,
    "save_on_each_node": _SAVED,
    "enable_jit_checkpoint": "leave it out: the worker saves at a signal itself, on all ranks",
    "resume_from_checkpoint": "leave it out: where an attempt begins is the supervisor's decision",
    "restore_callback_states_from_checkpoint": _SAVED,
    "load_best_model_at_end": _BEST,
    "metric_for_best_model": _BEST,
    "greater_is_better": _BEST,
    "push_to_hub": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    # What is seen of it.
    "logging_strategy": "set training.log_every",
    "logging_steps": "set training.log_every",
    "logging_first_step": "set training.log_every; loss_history.json has every step",
    "logging_nan_inf_filter": "leave it out: it would hide losses that are not finite",
    "disable_tqdm": "leave it out: progress is shown by higgsfield status",
    "report_to": "set training.report_to",
    "eval_strategy": "set training.eval_every and data.eval",
    "eval_steps": "set training.eval_every",
    "eval_delay": "set training.eval_every",
    "eval_on_start": "set training.eval_every",
    "prediction_loss_only": "leave it out: the loss is what is evaluated",
    # The order of the data, which a resume repeats to the sample.
    "seed": "set run.seed",
    "data_seed": "set run.seed",
    "dataloader_num_workers": "set data.workers",
    "dataloader_persistent_workers": _EXACT,
    "dataloader_drop_last": _EXACT,
    "dataloader_in_order": _EXACT,
    "ignore_data_skip": _EXACT,
    "train_sampling_strategy": _EXACT,
    "length_column_name": _EXACT,
    "accelerator_config": _EXACT,
    "remove_unused_columns": "leave it out: the worker's own batches hold only what the model takes",
    # The processes.
    "parallelism_config": "leave it out: every rank trains on batches of its own",
    "local_rank": _WORLD,
    "ddp_backend": _WORLD,
    "ddp_timeout": _WORLD,
    "do_train": _IDLE,
    "do_eval": _IDLE,
    "do_predict": _IDLE,
    # Older names.
    "warmup_ratio": "set training.schedule.warmup",
    "evaluation_strategy": "set training.eval_every and data.eval",
    "overwrite_output_dir": "leave it out: a run continues or has another run.name",
    "logging_dir": "leave it out: everything of a run lies in its folder",
    "save_safetensors": _SAVED,
    "group_by_length": _EXACT,
    "no_cuda": "set CUDA_VISIBLE_DEVICES to nothing in cluster.environment",
}
"""Name of the field -> what to do instead, as the end of a message."""


SCHEDULES_WITHOUT_BASE_RATE = ("reduce_lr_on_plateau", "greedy")
"""Names of transformers' schedules that go by the losses, so that no rollback could scale them."""


_FREE = """
    activation_checkpointing_kwargs average_tokens_across_devices batch_eval_metrics bf16_full_eval
    dataloader_multiprocessing_context dataloader_pin_memory dataloader_prefetch_factor ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph debug deepspeed eval_accumulation_steps
    eval_do_concat_batches eval_use_gather_object fp16_full_eval fsdp fsdp_config full_determinism
    gradient_checkpointing_kwargs include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor
    liger_kernel_config log_level log_level_replica log_on_each_node neftune_noise_alpha project
    skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id use_cache use_cpu use_liger_kernel
"""
FREE_FIELDS = frozenset(_FREE.split())
"""What ``training.extra`` may set; a test compares both sets with the fields that TrainingArguments has."""


def unknown_fields(names: Iterable[str]) -> list[tuple[str, str]]:
    """Of the names under ``training.extra``: those that TrainingArguments does not have, each with what to do."""
    mends = ((name, difflib.get_close_matches(name, FREE_FIELDS, n=1)) for name in names)
    unknown = ((name, near) for name, near in mends if name not in FREE_FIELDS and name not in OWNED_FIELDS)
    return [(name, f"did you mean {near[0]}?" if near else "leave it out") for name, near in unknown]


def refused_fields(names: Iterable[str]) -> list[tuple[str, str]]:
    """Of the names under ``training.extra``: those that are refused, each with what to do instead."""
    return [(name, OWNED_FIELDS[name]) for name in names if name in OWNED_FIELDS]
