"""Every field of today's TrainingArguments is either ours or the person's: nobody has forgotten one."""

import ast
import importlib.util
from pathlib import Path

from supervisor.config_findings import all_places
from worker.contract.owned_fields import OWNED_FIELDS, refused_fields

OLD_NAMES = {
    "warmup_ratio",
    "evaluation_strategy",
    "overwrite_output_dir",
    "logging_dir",
    "save_safetensors",
    "group_by_length",
    "no_cuda",
}
# What training.extra may set. A field of a newer transformers is in neither set: decide, then write it down.
_FREE = """
    activation_checkpointing_kwargs average_tokens_across_devices batch_eval_metrics bf16_full_eval
    dataloader_multiprocessing_context dataloader_pin_memory dataloader_prefetch_factor ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph debug deepspeed eval_accumulation_steps
    eval_do_concat_batches eval_use_gather_object fp16_full_eval fsdp fsdp_config full_determinism
    gradient_checkpointing_kwargs include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor
    liger_kernel_config log_level log_level_replica log_on_each_node neftune_noise_alpha parallelism_config project
    skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
    trackio_bucket_id trackio_space_id trackio_static_space_id use_cache use_cpu use_liger_kernel
"""
FREE = set(_FREE.split())


def training_arguments() -> set[str]:
    """The fields of the installed TrainingArguments, read from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "training_args.py").read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    body = classes["TrainingArguments"].body
    fields = (node.target for node in body if isinstance(node, ast.AnnAssign))
    return {target.id for target in fields if isinstance(target, ast.Name)}


def test_each_field_is_ours_or_free() -> None:
    assert training_arguments() == (set(OWNED_FIELDS) - OLD_NAMES) | FREE


def test_ours_and_free_do_not_overlap() -> None:
    assert not FREE & set(OWNED_FIELDS)


def test_the_keys_that_mends_name_exist() -> None:
    known = {".".join(place) for place in all_places()}
    named = {
        word.strip(",:;")
        for mend in OWNED_FIELDS.values()
        for word in mend.split()
        if word.partition(".")[0] in {"run", "model", "data", "training", "checkpoint", "cluster"} and "." in word
    }
    assert named <= known
    assert "training.optimizer.learning_rate" in named


def test_refused_fields_come_with_their_mend() -> None:
    assert refused_fields(["tf32", "save_steps"]) == [("save_steps", "set checkpoint.every_steps")]
