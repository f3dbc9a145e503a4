"""Each key has an effect: change it alone, and something that is built or decided from it is another one."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from supervisor.config_findings import all_places
from supervisor.job_request import supervisor_request, worker_request
from tests.recipe_room.recipes import LLAMA, chat_tokenizer, configured
from worker.contract.config import Config
from worker.contract.run_dir import RunDir
from worker.documents import DataError
from worker.leaving import RefusedError
from worker.models import ModelError, build_model
from worker.setup import build_trainer

ROOT = Path(__file__).parents[2]
BASE: dict[str, Any] = {
    "run": {"name": "r", "dir": "/runs"},
    "model": {"config": LLAMA},
    "data": {"train": "rows.jsonl", "tokenizer": "bytes", "max_tokens": 16, "eval": "other.jsonl"},
    "training": {"max_steps": 20, "eval_every": 5, "optimizer": {"learning_rate": 1e-3}, "precision": "fp32"},
}
SGD = {"training.optimizer.name": "sgd"}
ADAPTED = {"model.config": None, "model.path": "model", "model.lora.targets": "all-linear"}
EPOCHS = {"training.max_steps": None, "training.epochs": 1.0}
# Key -> another value; or that and what must be set with it. What the trainer is built from:
RECIPE: dict[str, Any] = {
    "run.seed": 7,
    "model.path": ("model", {"model.config": None}),
    "model.config": {**LLAMA, "num_hidden_layers": 1},
    "model.dtype": ("bfloat16", {"training.pure_bf16": True}),
    "model.attention": "eager",
    "model.lora.r": (4, ADAPTED),
    "model.lora.alpha": (8, ADAPTED),
    "model.lora.dropout": (0.5, ADAPTED),
    "model.lora.targets": (("q_proj",), ADAPTED),
    "data.train": "other.jsonl",
    "data.eval": "rows.jsonl",
    "data.eval_share": (0.5, {"data.eval": None}),
    "data.format": "text",
    "data.text": "words",
    "data.prompt": "question",
    "data.completion": "answer",
    "data.messages": ("turns", {"data.tokenizer": "model", "model.config": {**LLAMA, "vocab_size": 260}}),
    "data.max_bad_rows": (1, {"data.train": "broken.jsonl"}),
    "data.tokenizer": ("model", {"model.config": {**LLAMA, "vocab_size": 260}}),
    "data.max_tokens": 17,
    "data.pack": False,
    "data.shuffle": False,
    "data.workers": 1,
    "training.epochs": (2.0, EPOCHS),
    "training.max_steps": 21,
    "training.batch_size": 2,
    "training.gradient_accumulation": 2,
    "training.optimizer.name": "adam",
    "training.optimizer.learning_rate": 2e-3,
    "training.optimizer.betas": (0.8, 0.9),
    "training.optimizer.eps": 1e-6,
    "training.optimizer.weight_decay": 0.1,
    "training.optimizer.momentum": (0.5, SGD),
    "training.optimizer.args": {"amsgrad": True},
    "training.schedule.name": "linear",
    "training.schedule.warmup": 5,
    "training.schedule.floor": 0.5,
    "training.schedule.decay": (0.5, {"training.schedule.name": "warmup_stable_decay"}),
    "training.schedule.power": (3.0, {"training.schedule.name": "polynomial"}),
    "training.max_grad_norm": None,
    "training.precision": "bf16",
    "training.pure_bf16": (False, {"model.dtype": "bfloat16", "training.pure_bf16": True}),
    "training.activation_checkpointing": 2,
    "training.eval_every": 6,
    "training.log_every": 3,
    "training.report_to": ("tensorboard",),
    "training.extra": {"label_smoothing_factor": 0.1},
}
# What the jobs are made from:
JOBS: dict[str, Any] = {
    "cluster.partition": "p", "cluster.account": "a", "cluster.qos": "q", "cluster.constraint": "c",
    "cluster.gres": "g:1", "cluster.mem": "1G", "cluster.reservation": "r", "cluster.nodelist": "n1",
    "cluster.exclude": "n2", "cluster.nodes": 2, "cluster.tasks_per_node": 2, "cluster.gpus_per_node": 2,
    "cluster.cpus_per_task": 2, "cluster.time_limit": "1:00:00", "cluster.setup": ("true",),
    "cluster.environment": {"A": "b"}, "cluster.python": "/p", "cluster.srun": ("-v",), "cluster.container": "c",
    "cluster.sbatch": {"exclusive": True}, "supervisor.partition": "p", "supervisor.account": "a",
    "supervisor.qos": "q", "supervisor.time_limit": "1:00:00", "run.dir": "/elsewhere", "run.name": "s",
}  # fmt: skip
# Refused, or of no effect on what one machine builds; each with the test that shows what it does.
SHOWN_ELSEWHERE = {
    "model.revision": "test_models.py: the hub, which no test asks",
    "training.entrypoint": "test_own_script.py",
    "training.zygote": "test_zygote_training.py",
}


def with_changes(*changes: dict[str, Any]) -> Config:
    fields = json.loads(json.dumps(BASE))
    for key, value in (item for one in changes for item in one.items()):
        *parents, name = key.split(".")
        here = fields
        for parent in parents:
            here = here.setdefault(parent, {})
        here[name] = value
    return Config.model_validate(fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data in which each column matters, and a model."""
    folder = tmp_path_factory.mktemp("recipe")
    row = {"text": "some text of a row", "words": "other words in that row"}
    pair = {"prompt": "why", "question": "who", "completion": "because of it", "answer": "somebody"}
    chat = [[{"role": "user", "content": one}, {"role": "assistant", "content": "yes, " + one}] for one in ("a", "b")]
    rows = [row, pair, {"messages": chat[0], "turns": chat[1], **row}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows[:2] * 4))
    (folder / "chat.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows * 4))
    (folder / "other.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} and more", "words": f"{n} other"}) + "\n" for n in range(9))
    )
    (folder / "broken.jsonl").write_text('{"text": "a good row of text"}\n{\n')
    build_model(configured()).save_pretrained(folder / "model")
    chat_tokenizer().save_pretrained(folder / "model")
    return folder


def built(config: Config, base: Path, cache: Path) -> Any:
    """All that is decided when a trainer is built, in words; what refuses it is a decision too."""
    try:
        trainer, data = build_trainer(RunDir(cache), config, base)
    except (DataError, ModelError, RefusedError) as error:
        return f"{type(error).__name__}: {error}"
    torch.manual_seed(0)
    trainer.create_optimizer()
    trainer.create_scheduler(trainer.args.max_steps)
    optimizer: Any = trainer.optimizer
    model: Any = trainer.model
    schedule: Any = trainer.lr_scheduler
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    samples: Any = data.evaluation
    weights = [one.detach().float().sum().item() for one in model.parameters()]
    return (
        repr(trainer.args), repr(model.config), model.config._attn_implementation, model.dtype, weights,
        repr(getattr(model, "peft_config", None)),
        type(optimizer).__name__, repr(groups),
        [schedule.lr_lambdas[0](step) for step in range(20)], data.digest, samples.digest(), data.collator,
    )  # fmt: skip


@pytest.mark.parametrize("key", RECIPE)
def test_a_key_of_the_recipe_changes_what_is_built(folder: Path, tmp_path: Path, key: str) -> None:
    given = RECIPE[key]
    value, needed = given if isinstance(given, tuple) and isinstance(given[-1], dict) else (given, {})
    if key == "data.messages":
        needed = {**needed, "data.train": "chat.jsonl", "data.eval": "chat.jsonl"}
    transformers.set_seed(1)
    before = built(with_changes(needed), folder, tmp_path)
    after = built(with_changes(needed, {key: value}), folder, tmp_path)
    assert before != after
    refusals = [one for one in (before, after) if isinstance(one, str)]
    assert len(refusals) <= (key in {"data.max_bad_rows", "data.eval_share", "training.pure_bf16", "model.path"}), (
        refusals
    )


@pytest.mark.parametrize("key", JOBS)
def test_a_key_of_the_cluster_changes_a_job(key: str) -> None:
    def jobs(config: Config) -> Any:
        run = RunDir(Path(config.run.dir) / config.run.name)
        return worker_request(config, run, "hf-0", 1), supervisor_request(config, run, "hs-0")

    assert jobs(with_changes({key: JOBS[key]})) != jobs(with_changes())


def attributes() -> Iterator[str]:
    """Every name that our code reads from a value, config.py itself left out."""
    for package in ("supervisor", "slurm", "worker"):
        for path in (ROOT / package).rglob("*.py"):
            if path != ROOT / "worker" / "contract" / "config.py":
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Attribute):
                        yield node.attr


def test_every_key_is_read_and_those_of_recipe_and_jobs_are_tried_here() -> None:
    keys = [".".join(place) for place in all_places()]
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    read = set(attributes())
    assert {key for key in leaves if key.rpartition(".")[2] not in read} == set()
    tried = RECIPE.keys() | JOBS.keys() | SHOWN_ELSEWHERE.keys()
    of_the_recipe = {key for key in leaves if key.split(".")[0] in {"run", "model", "data", "training"}}
    assert of_the_recipe - tried == set(), "say in RECIPE which other value changes what is built"
