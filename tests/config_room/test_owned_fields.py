"""Every field of today's TrainingArguments is either ours or the person's: nobody has forgotten one."""

import ast
import importlib.util
from pathlib import Path

from supervisor.config_findings import all_places
from worker.contract.owned_fields import FREE_FIELDS, OWNED_FIELDS, refused_fields

OLD_NAMES = {
    "warmup_ratio",
    "evaluation_strategy",
    "overwrite_output_dir",
    "logging_dir",
    "save_safetensors",
    "group_by_length",
    "no_cuda",
}


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
    assert training_arguments() == (set(OWNED_FIELDS) - OLD_NAMES) | FREE_FIELDS


def test_ours_and_free_do_not_overlap() -> None:
    assert not FREE_FIELDS & set(OWNED_FIELDS)


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
