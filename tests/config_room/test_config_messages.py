"""Each wrong setting, and the line that a person gets for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.config import Finding, load_config

Findings = Callable[..., tuple[Finding, ...]]

LINES = [
    (
        'training.optimizer.learning_rate="5e-5"',
        "training.optimizer.learning_rate: '5e-5' is text, a number is wanted; write it without quotes",
    ),
    (
        'training.max_grad_norm="1.0"',
        "training.max_grad_norm: '1.0' is text, a number is wanted; write it without quotes",
    ),
    ('data.pack="false"', "data.pack: 'false' is text, true or false is wanted; write it without quotes"),
    ("data.pack=no", "data.pack: 'no' is text, true or false is wanted; write true or false"),
    ("data.pack=0", "data.pack: 0 is a number, true or false is wanted; write true or false"),
    (
        "training.extra.tf23=true",
        "training.extra.tf23: transformers.TrainingArguments has no such field; did you mean tf32?",
    ),
    ('training.extra.bf16="false"', "training.extra.bf16: it is not set here; set training.precision"),
    ("spike.windw=50", "spike.windw: there is no such key; did you mean window?"),
    ("trainning.epochs=1", "trainning: there is no such key; did you mean training?"),
    (
        "training.learning_rate=1",
        "training.learning_rate: there is no such key; did you mean training.optimizer.learning_rate?",
    ),
    (
        "training.per_device_train_batch_size=1",
        "training.per_device_train_batch_size: there is no such key; set training.batch_size",
    ),
    (
        "training.tf32=true",
        "training.tf32: there is no such key; a field of transformers.TrainingArguments goes below training.extra",
    ),
    ("ema.zzz=1", "ema.zzz: there is no such key; known here are decay, every, device"),
    ("training.max_steps=5e2", "training.max_steps: 500.0 is a number, a whole number is wanted; write 500"),
    (
        "training.max_steps=true",
        "training.max_steps: true is a truth value, a whole number is wanted; write a whole number",
    ),
    (
        "training.batch_size=100000000000000000000000",
        "training.batch_size: 100000000000000000000000 is out of range; write a number of at most 1000000000",
    ),
    ("training.max_steps=0", "training.max_steps: 0 is out of range; write a number of at least 1"),
    ("data.max_tokens=1", "data.max_tokens: 1 is out of range; write a number of at least 2"),
    ("run.seed=4294967296", "run.seed: 4294967296 is out of range; write a number of at most 4294967295"),
    (
        "training.max_steps=1000000000001",
        "training.max_steps: 1000000000001 is out of range; write a number of at most 1000000000000",
    ),
    ("training.optimizer.betas=[0.9, 1.0]", "training.optimizer.betas.1: 1.0 is out of range; write a number below 1"),
    ("recovery.hang_timeout_s=0.5", "recovery.hang_timeout_s: 0.5 is out of range; write a number of at least 1"),
    (
        "training.optimizer.name=a..b:C",
        "training.optimizer.name: 'a..b:C' is none of 'adamw', 'adam', 'sgd', 'lion', 'lamb' or 'sophia'; choose one "
        "of these",
    ),
    ("training.schedule.floor=1.5", "training.schedule.floor: 1.5 is out of range; write a number of at most 1"),
    ("spike.ratio=1.0", "spike.ratio: 1.0 is out of range; write a number above 1"),
    ("ema.decay=1", "ema.decay: 1 is out of range; write a number below 1"),
    ("spike.ratio=.nan", "spike.ratio: nan is not finite; write a finite number"),
    ("spike.ratio=.inf", "spike.ratio: inf is not finite; write a finite number"),
    (
        "training.optimizer.name=adamx",
        "training.optimizer.name: 'adamx' is none of 'adamw', 'adam', 'sgd', 'lion', 'lamb' or 'sophia'; write adam",
    ),
    (
        "training.schedule.name=reduce_lr_on_plateau",
        "training.schedule.name: reduce_lr_on_plateau has no base rate that a rollback could scale: it goes by the "
        "losses; choose 'cosine', 'linear', 'polynomial', 'constant' or 'warmup_stable_decay'",
    ),
    (
        "training.precision=8bit",
        "training.precision: '8bit' is none of 'bf16', 'fp16' or 'fp32'; choose one of these",
    ),
    (
        "training.optimizer.betas=[0.9]",
        "training.optimizer.betas: a wrong number of values; write 2 of them",
    ),
    (
        "training.optimizer.betas=[0.9, 0.9, 0.9]",
        "training.optimizer.betas: a wrong number of values; write 2 of them",
    ),
    ("run.name=2024", 'run.name: 2024 is a number, text is wanted; write "2024", in quotes'),
    ("cluster.time_limit=60", 'cluster.time_limit: 60 is a number, text is wanted; write "60", in quotes'),
    ("cluster.mem=true", 'cluster.mem: true is a truth value, text is wanted; write "true", in quotes'),
    (
        "cluster.setup=module load cuda",
        "cluster.setup: 'module load cuda' is text, a list is wanted; write [module load cuda]",
    ),
    ("cluster.setup=[1]", 'cluster.setup.0: 1 is a number, text is wanted; write "1", in quotes'),
    ("data.train=5", 'data.train: 5 is a number, text or a list is wanted; write "5", in quotes'),
    ("data.train=[words.txt, 5]", 'data.train.1: 5 is a number, text is wanted; write "5", in quotes'),
    ("spike=null", "spike: it is empty, keys below it are wanted; give it a value, or remove the line"),
    ("spike=[1]", "spike: [1] is a list, keys below it are wanted; write keys below it"),
    ("run.name=null", "run.name: it is empty, text is wanted; give it a value, or remove the line"),
    ("run={}", "run.name: it is missing; write it, or give --set run.name=VALUE"),
]


@pytest.mark.parametrize(("override", "line"), LINES, ids=[override for override, _ in LINES])
def test_the_line_for_a_wrong_setting(findings: Findings, override: str, line: str) -> None:
    (found,) = findings(override)
    where = found.file
    assert where == ("small.yaml" if "is missing" in line else "--set")
    assert str(found) == f"{where}: {line}"


def test_several_errors_are_several_lines(findings: Findings) -> None:
    found = findings("spike.windw=50", 'spike.ratio="2"', "training.max_steps=0")
    assert [one.key for one in found] == ["training.max_steps", "spike.ratio", "spike.windw"]


CONTRADICTIONS = [
    (["training.entrypoint=main"], "training.entrypoint"),
    (["training.entrypoint='a b:c'"], "training.entrypoint"),
    (["training.entrypoint=none/script:main"], "training.entrypoint"),
    (["data.train=null"], "data.train"),
    (["training.optimizer.name=a.b:C", "training.optimizer.learning_rate=null"], "training.optimizer.learning_rate"),
    (["training.optimizer.name=a.b:C", "training.optimizer.args.lr=1"], "training.optimizer.args.lr"),
    (["training.optimizer.args.betas=[0.9, 0.9]"], "training.optimizer.args.betas"),
    (["training.optimizer.name=sophia", "training.precision=fp16"], "training.optimizer.name"),
    (["run.name=a/b"], "run.name"),
    (["run.name=../x"], "run.name"),
    (["run.name=''"], "run.name"),
    (["run.name='a b'"], "run.name"),
    (["model.path=gpt2"], "model.config"),
    (["model.config=null"], "model"),
    (["model.config={hidden_size: 8}"], "model.config"),
    (["cluster.min_time='2-00:00:00'"], "cluster.min_time"),
    (["cluster.min_time='soon'"], "cluster.min_time"),
    (["cluster.fallback=[{after_s: 60}]"], "cluster.fallback.0"),
    (["data.tokenizer=null"], "model.config"),
    (["model.lora={r: 8}"], "model.lora"),
    (["training.epochs=1"], "training.max_steps"),
    (["training.max_steps=null"], "training"),
    (["training.schedule.warmup=11"], "training.schedule.warmup"),
    (["training.schedule.warmup=1.5"], "training.schedule.warmup"),
    (["training.schedule.warmup=11.5"], "training.schedule.warmup"),
    (["training.schedule.decay=2.5"], "training.schedule.decay"),
    (["training.eval_every=5"], "training.eval_every"),
    (["data.eval=words.txt"], "data.eval"),
    (["data.eval_share=0.1"], "data.eval_share"),
    (["data.eval_share=0.1", "data.eval=words.txt", "training.eval_every=5"], "data.eval_share"),
    (["data.eval_share=0.1", "data.eval=words.txt"], "data.eval_share"),
    (["model.path=gpt2", "data.tokenizer=null"], "model.config"),
    (["run.dir=words.txt"], "run.dir"),
    (["run.dir=words.txt/runs"], "run.dir"),
    (["cluster.python=/nowhere/bin/python"], "cluster.python"),
    (["notify=['']"], "notify.0"),
    (["notify=['command: true', someone@host]"], "notify.1"),
    (["notify=[{command: ''}]"], "notify.0"),
    (["notify=['command: ']"], "notify.0"),
    (['notify=[{command: "say \'it"}]'], "notify.0"),
    (["data.completion=null"], "data.completion"),
    (["data.text=null", "data.prompt=null", "data.completion=null", "data.messages=null"], "data.text"),
    (["recovery.spike.ramp_steps=5"], "recovery.spike.ramp_steps"),
    (["checkpoint.background=true", "training.extra={fsdp: full_shard}"], "checkpoint.background"),
    (["checkpoint.background=true", "training.extra={deepspeed: zero.json}"], "checkpoint.background"),
    (["recovery.max_gpu_hours=5"], "recovery.max_gpu_hours"),
    (["model.dtype=bfloat16"], "model.dtype"),
    (["model.dtype=float16", "training.pure_bf16=true"], "model.dtype"),
    (["spike.warmup=51"], "spike.warmup"),
    (["training.extra.output_dir=x"], "training.extra.output_dir"),
    (["training.extra={save_steps: 3}"], "training.extra.save_steps"),
    (["cluster.nodes=2"], "cluster.nodes"),
    (["cluster.time_limit=soon"], "cluster.time_limit"),
    (["cluster.time_limit=''"], "cluster.time_limit"),
    (["cluster.time_limit=INVALID"], "cluster.time_limit"),
    (["cluster.time_limit='0'"], "cluster.time_limit"),
    (["supervisor.time_limit=1d"], "supervisor.time_limit"),
    (["cluster.sbatch.requeue=true"], "cluster.sbatch.requeue"),
    (["cluster.sbatch.time='60'"], "cluster.sbatch.time"),
    (["cluster.sbatch.partition=x"], "cluster.sbatch.partition"),
    (["cluster.sbatch={--exclusive: true}"], "cluster"),
    (["cluster.environment={A B: x}"], "cluster"),
    (['cluster.partition="a\\nb"'], "cluster"),
    (['supervisor.partition="a\\nb"'], "supervisor"),
]


@pytest.mark.parametrize(("overrides", "key"), CONTRADICTIONS, ids=[" ".join(given) for given, _ in CONTRADICTIONS])
def test_settings_that_contradict_each_other(findings: Findings, overrides: list[str], key: str) -> None:
    (found,) = findings(*overrides)
    assert found.key == key
    assert found.message
    assert found.mend
    assert len(str(found).splitlines()) == 1


FINE = [
    ["training.entrypoint=pack.mod:main", "data.train=null", "training.max_steps=null", "model.config=null"],
    ["training.activation_checkpointing=true"],
    ["training.activation_checkpointing=2"],
    ["model.config=null", "model.path=gpt2", "data.tokenizer=null"],
    ["training.max_steps=null", "training.epochs=0.5"],
    ["training.eval_every=5", "data.eval=words.txt"],
    ["training.eval_every=5", "data.eval_share=0.1"],
    ["data.text=null", "data.prompt=null", "data.completion=null"],
    ["recovery.spike.ramp_steps=5", "recovery.spike.hold_steps=0"],
    ["recovery.max_gpu_hours=5", "cluster.gpus_per_node=1"],
    ["recovery.max_gpu_hours=5", "cluster.gres=gpu:2"],
    ["model.dtype=bfloat16", "training.pure_bf16=true"],
    ["model.config=null", "model.path=gpt2", "data.tokenizer=null", "model.lora={}", "model.dtype=bfloat16"],
    ["spike.warmup=50"],
    ["training.extra={torch_compile: true, fsdp: full_shard}"],
    ["cluster.kind=slurm", "cluster.nodes=2"],
    ["cluster.time_limit=1-00:00:00", "supervisor.time_limit='30'"],
    ["cluster.time_limit=UNLIMITED"],
    ["run.seed=4294967295", "training.max_steps=1000000000000", "training.optimizer.betas=[0.0, 0.999]"],
    ["training.schedule.warmup=1.0", "training.schedule.decay=2.0"],
    ["notify=['syslog://', 'mailto://me:secret@host', {command: \"say \\\"it's\\\"  # it's\"}]"],
    ["cluster.python=sh"],
    ["cluster.python=/nowhere/bin/python", "cluster.setup=[module load python]"],
    ["cluster.python=/nowhere/bin/python", "cluster.kind=slurm"],
    ["run.dir=not/yet/there"],
    ["cluster.time_limit=04:00:00"],
    ["cluster.sbatch={exclusive: true, mail-user: me, switches: 1}"],
]


@pytest.mark.parametrize("overrides", FINE, ids=map(" ".join, FINE))
def test_settings_that_go_together(folder: Path, overrides: list[str]) -> None:
    load_config(Path("small.yaml"), overrides)


def test_an_address_that_is_none_is_not_shown(findings: Findings) -> None:
    (found,) = findings("notify=['secret@host']")
    assert str(found) == (
        "--set: notify.0: it is no address; write an address as apprise takes it (scheme://...), or command: PROGRAM"
    )


def test_adapters_need_their_package_where_the_worker_runs(
    folder: Path, findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = ["model.config=null", "model.path=gpt2", "data.tokenizer=null", "model.lora={}"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = findings(*adapted)
    assert str(found) == (
        "--set: model.lora: the package peft is not installed here; pip install 'higgsfield-supervisor[lora]', or set "
        "it to null"
    )
    load_config(Path("small.yaml"), [*adapted, "cluster.kind=slurm", "cluster.python=/elsewhere/bin/python"])
