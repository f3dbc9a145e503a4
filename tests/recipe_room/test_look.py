"""The look at model and data before a run: what a started worker would refuse, and what nobody would see, is named."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from supervisor.memory import plan_memory
from tests.recipe_room.recipes import LLAMA, chat_tokenizer, configured
from worker import check_data, documents
from worker.activations import saved_by, shapes_only
from worker.check import look
from worker.check_model import look_at_model
from worker.contract.check_report import CheckReport, Found
from worker.contract.config import Config
from worker.contract.recipe_config import EmaConfig
from worker.contract.run_dir import RunDir
from worker.ema import Ema
from worker.models import ModelError, build_model, describe
from worker.optimizers import build_optimizer
from worker.rows import BadFileError
from worker.setup import build_trainer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data file, and the folder of a model of 260 tokens with its tokenizer and without weights."""
    rows = [{"text": f"text number {number} of some length"} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "model").mkdir()
    model = {**LLAMA, "vocab_size": 260, "max_position_embeddings": 64, "num_key_value_heads": 4}
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    chat_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path


def wanted(folder: Path, **data: Any) -> Config:
    given = {"train": str(folder / "rows.jsonl"), "tokenizer": None, "max_tokens": 32, **data}
    return configured(model={"path": str(folder / "model")}, data=given, training={"max_steps": 10})


def found(report: CheckReport, level: str) -> list[Found]:
    return [one for one in report.found if one.level == level]


def test_sound_data_and_a_model_without_weights(folder: Path) -> None:
    report = look(wanted(folder), folder)
    assert found(report, "error") == found(report, "warning") == []
    assert [one.message for one in found(report, "not checked")] == [f"no weights are in {folder / 'model'}"]
    assert report.data.train is not None
    assert (report.data.train.documents, report.data.train.duplicates, report.data.train.is_whole) == (20, 0, True)
    assert report.model is not None
    assert report.model.parameters == sum(
        one.numel() for one in build_model(configured(model={"config": {**LLAMA, "vocab_size": 260}})).parameters()
    )


def test_the_look_leaves_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    look(wanted(folder), folder)
    assert sorted(folder.rglob("*")) == before


def _rows(folder: Path, *rows: Any, name: str = "rows.jsonl") -> None:
    (folder / name).write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def _config(folder: Path, **fields: Any) -> None:
    path = folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _without_template(folder: Path) -> None:
    (folder / "model" / "chat_template.jinja").unlink()
    _rows(folder, *[{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}] * 3)


def _index(folder: Path) -> None:
    shards = {"weight_map": {"a": "model-00001.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(shards))


ASKED = {"messages": [{"role": "user", "content": "x"}]}
TEXTS = [{"text": f"some text {number} to train on, and a little more of it"} for number in range(30)]
WRONG = {
    "missing column": (lambda f: _rows(f, *[{"body": "a text"}] * 3), {}, "data.train", "has no 'text'", "data.text"),
    "a key twice": (lambda f: _rows(f, *TEXTS, '{"text": "a", "text": "b"}'), {}, "data.train", "twice", "keep one"),
    "no chat template": (_without_template, {}, "data.train", "no chat template", "data.tokenizer"),
    "no row": (lambda f: _rows(f), {}, "data.train", "it holds no row", "give it text"),
    "no text": (lambda f: _rows(f, {"text": "  "}), {}, "data.train", "can be used: 1 empty", "give them text"),
    "no answer": (
        lambda f: _rows(f, ASKED, ASKED), {"eval_share": 0.5}, "data.train", "can be used: 2 without an answer",
        "write an answer",
    ),
    "all too long": (
        lambda f: _rows(f, *[{"prompt": "what?", "completion": "a long answer"}] * 3), {"max_tokens": 8}, "data.train",
        "can be used: 3 longer than data.max_tokens (8)", "raise data.max_tokens",
    ),
    "less than a block": (
        lambda f: _rows(f, {"text": "few words"}), {}, "data.train", "do not fill one block", "data.max_tokens",
    ),
    "tokenizer too large": (lambda f: _config(f, vocab_size=9), {}, "model.path", "knows 9 tokens", "own tokenizer"),
    "width and heads": (lambda f: _config(f, hidden_size=30), {}, "model.path", "not a multiple", "config.json"),
    "heads and their groups": (lambda f: _config(f, num_key_value_heads=3), {}, "model.path", "shapes", "num_key"),
    "packed documents": (
        lambda f: _config(f, model_type="opt", ffn_dim=64, word_embed_proj_dim=32), {}, "data.pack", "see each other",
        "data.pack: false",
    ),
    "a missing shard": (_index, {}, "model.path", "1 cannot be found", "load the model again"),
    "no config": (
        lambda f: (f / "model" / "config.json").unlink(), {"tokenizer": "bytes"}, "model.path", "config.json", "correct"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_a_worker_would_refuse_is_an_error_with_its_mend(folder: Path, kind: str) -> None:
    spoil, data, key, message, mend = WRONG[kind]
    spoil(folder)
    (error,) = found(look(wanted(folder, **data), folder), "error")
    assert error.key == key
    assert message in error.message
    assert mend in error.mend


def test_a_row_that_is_left_out_counts_once(folder: Path) -> None:
    said = {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}
    _rows(folder, *[said] * 3, "no row", ASKED)
    (error,) = found(look(wanted(folder, tokenizer="bytes"), folder), "error")
    assert error.evidence == "broken: 4 of 5 rows; data.max_bad_rows allows 0"


@pytest.mark.parametrize(
    ("training", "key", "message", "mend"),
    [
        (
            {"extra": {"full_determinism": "false"}},
            "training.extra.full_determinism",
            "'false' is not",
            "true or false",
        ),
        (
            {"extra": {"label_smoothing_factor": "x"}},
            "training.extra.label_smoothing_factor",
            "not a number",
            "a number",
        ),
        ({"extra": {"fsdp": "rubbish"}}, "training.extra", "Unknown `fsdp` option", "correct that field"),
        ({"report_to": ["nope"]}, "training.report_to", "nope is no tracker", "choose of"),
        (
            {"optimizer": {"args": {"bogus": 1}, "learning_rate": 1e-3}},
            "training.optimizer",
            "bogus",
            "training.optimizer",
        ),
        (
            {"optimizer": {"name": "no.where:It", "learning_rate": 1.0}},
            "training.optimizer.name",
            "needs",
            "install it",
        ),
    ],
)
def test_what_the_trainer_would_refuse_or_take_amiss_is_an_error(
    folder: Path, training: dict[str, Any], key: str, message: str, mend: str
) -> None:
    _, errors = look_at_model(configured(training={"max_steps": 5, **training}), None, folder)
    (error,) = [one for one in errors if one.level == "error"]
    assert error.key == key
    assert message in error.message
    assert mend in error.mend


def test_what_only_a_gpu_can_tell_is_not_checked(folder: Path) -> None:
    _, (said,) = look_at_model(configured(training={"max_steps": 5, "extra": {"tf32": True}}), None, folder)
    assert (said.level, said.key) == ("not checked", "training.extra")


def test_experts_and_layers_of_several_kinds_are_followed(folder: Path) -> None:
    for kind in ({"model_type": "mixtral"}, {"model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 7}):
        look_at, found_there = look_at_model(
            configured(model={"config": {**LLAMA, "num_key_value_heads": 4, **kind}}, data={"max_tokens": 64}),
            None,
            folder,
        )
        assert found_there == []
        assert look_at is not None
        assert (look_at.activations or 0) > 100_000


GPT2 = {"model_type": "gpt2", "vocab_size": 260, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}


@pytest.mark.parametrize(
    ("words", "level", "message"),
    [
        (40, "error", "its sequences need 32 positions, and the model has 16 (n_positions)"),
        (2, "warning", "sequences of 32 tokens, and the model was made for 16"),
    ],
)
def test_a_table_of_positions_that_is_too_short_for_the_documents_is_an_error(
    folder: Path, words: int, level: str, message: str
) -> None:
    _rows(folder, *({"text": f"{number} word " * words} for number in range(9)))
    data = {"train": str(folder / "rows.jsonl"), "tokenizer": "bytes", "max_tokens": 32}
    config = configured(model={"config": GPT2}, data=data, training={"max_steps": 5})
    (said,) = [one for one in look(config, folder).found if one.key == "data.max_tokens"]
    assert (said.level, said.message) == (level, message)
    mend = "set it to 16 or less"
    assert said.mend == (f"{mend}, or model.config.n_positions to 32 or more" if level == "error" else mend)
    run = RunDir(folder / "run")
    if level == "error":
        with pytest.raises(ModelError, match="its sequences need 32 positions, and the model has 16"):
            build_trainer(run, config, folder)
    else:
        build_trainer(run, config, folder)


ODD = {
    "duplicates": (lambda f: _rows(f, *TEXTS, *TEXTS[:5]), {}, "data.train", "5 of 35 repeat", "remove the copies"),
    "evaluated on what is trained on": (
        lambda f: _rows(f, *TEXTS[:2], {"text": "unseen before"}, name="eval.jsonl"), {"eval": "eval.jsonl"},
        "data.eval", "2 of 3 are in data.train", "remove them",
    ),
    "rows left out": (lambda f: _rows(f, *TEXTS, *[{"text": "---"}] * 4), {}, "data.train", "4 special ch", "look"),
    "cut": (lambda f: None, {"pack": False, "max_tokens": 8}, "data.max_tokens", "20 of 20", "data.pack: true"),
    "longer than the model": (lambda f: None, {"max_tokens": 128}, "data.max_tokens", "is 64", "64 or less"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_what_nobody_would_see_is_a_warning_with_reason_evidence_and_mend(folder: Path, kind: str) -> None:
    spoil, data, key, evidence, mend = ODD[kind]
    spoil(folder)
    if "eval" in data:
        _rows(folder, *TEXTS)
    report = look(wanted(folder, **data), folder)
    assert found(report, "error") == []
    (warning,) = [one for one in found(report, "warning") if one.key == key]
    assert warning.message
    assert evidence in warning.evidence
    assert mend in warning.mend


def test_reading_stops_in_time_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1_000))
    monkeypatch.setattr(check_data.time, "monotonic", lambda: float(next(ticks)))
    config = wanted(folder, tokenizer="bytes")
    looked = check_data.look_at_data(config, build_bytes(), folder, read_for_s=10.0)
    assert looked.look.train is not None
    assert (looked.look.train.documents, looked.look.train.is_whole, looked.look.train.samples) == (10, False, None)
    assert [one.level for one in looked.found] == ["not checked"]


def build_bytes() -> Any:
    from worker.models import byte_tokenizer

    return byte_tokenizer()


def test_data_of_the_hub_is_not_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_away(name: str) -> Iterator[Any]:
        raise BadFileError("is no file, and the hub does not give it (OfflineModeIsEnabled: no)")

    monkeypatch.setattr(documents, "rows_of_hub", is_away)
    report = look(wanted(folder, train="org/rows"), folder)
    assert "org/rows is of the hub, and not on this machine" in [one.message for one in found(report, "not checked")]
    assert found(report, "error") == []


@pytest.mark.parametrize(("model", "mend"), [("org/never-here", []), ("modell", ["did you mean ./model?"])])
def test_a_model_of_the_hub_is_not_checked_and_nobody_is_asked(folder: Path, model: str, mend: list[str]) -> None:
    config = wanted(folder, tokenizer="bytes")
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
    report = look(config, folder)
    assert {one.level for one in report.found} - {"warning"} == {"not checked"}
    assert [one.mend for one in found(report, "warning")] == mend
    assert report.model is None


def test_a_tokenizer_that_the_hub_s_cache_has_is_no_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned() -> list[str]:
        return [one.key for one in found(look(wanted(folder, tokenizer="gpt0"), folder), "warning")]

    assert warned() == ["data.tokenizer"]
    (folder / "hub" / "models--gpt0").mkdir(parents=True)
    monkeypatch.setattr("worker.check.HF_HUB_CACHE", str(folder / "hub"))
    assert warned() == []


# -- memory, against what is really there ------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, {"r": 4, "targets": ["q_proj", "v_proj"]}])
@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 2), ("sgd", 1)])
def test_the_plan_is_what_a_training_step_really_holds(
    tmp_path: Path, lora: dict[str, Any] | None, optimizer: str, moments: int
) -> None:
    build_model(configured()).save_pretrained(tmp_path / "base")
    config = configured(
        model={"path": str(tmp_path / "base"), "lora": lora},
        training={"max_steps": 3, "precision": "fp32", "optimizer": {"name": optimizer, "learning_rate": 1e-3}},
    )
    model = build_model(config)
    average = Ema(model, EmaConfig())
    stepper = build_optimizer(model, config.training)
    model(input_ids=torch.arange(8).reshape(1, 8), labels=torch.arange(8).reshape(1, 8)).loss.backward()
    stepper.step()
    weights = list(model.parameters())
    trained = [one for one in weights if one.requires_grad]
    plan = plan_memory(config, sum(one.numel() for one in weights), sum(one.numel() for one in trained))
    moments_held = [value for state in stepper.state.values() for value in state.values() if value.numel() > 1]
    assert plan.weights == _bytes(weights)
    assert plan.gradients == _bytes([one.grad for one in trained if one.grad is not None])
    assert plan.optimizer == _bytes(moments_held) == moments * _bytes(trained)
    assert plan.average == _bytes(list(average._average.values()))
    assert plan.device == plan.weights + plan.gradients + plan.optimizer + plan.average


def _bytes(tensors: list[Any]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_activations_are_those_of_a_real_forward_pass(kind: str, half: torch.dtype | None) -> None:
    sizes = (
        {"n_embd": 32, "n_layer": 3, "n_head": 4}
        if kind == "gpt2"
        else {"num_hidden_layers": 3, "num_key_value_heads": 4}
    )
    described = describe({**LLAMA, **sizes, "model_type": kind}) if kind != "gpt2" else describe(
        {"model_type": kind, "vocab_size": 256, **sizes}
    )  # fmt: skip
    ids = torch.zeros((2, 48), dtype=torch.long)
    real = saved_by(AutoModelForCausalLM.from_config(described), {"input_ids": ids, "labels": ids}, half)
    with shapes_only():
        ids = torch.zeros((2, 48), dtype=torch.long)
        told = saved_by(AutoModelForCausalLM.from_config(described), {"input_ids": ids, "labels": ids}, half)
    assert len(told.layers) == len(real.layers) == 3
    for every_n in (None, 1, 2):
        assert told.total(every_n) == pytest.approx(real.total(every_n), rel=0.1)
    assert told.total(1) < told.total(2) < told.total(None)


def test_adapters_are_counted_as_peft_makes_them(folder: Path) -> None:
    build_model(configured(model={"config": {**LLAMA, "vocab_size": 260}})).save_pretrained(folder / "base")
    chat_tokenizer().save_pretrained(folder / "base")
    config = configured(
        model={"path": str(folder / "base"), "lora": {"r": 4}, "dtype": "bfloat16"},
        data={"train": str(folder / "rows.jsonl"), "tokenizer": None, "max_tokens": 32},
    )
    report = look(config, folder)
    assert report.found == ()
    assert report.model is not None
    model = build_model(config)
    assert report.model.parameters == sum(one.numel() for one in model.parameters())
    assert report.model.trained == sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert report.model.activations is not None
    assert torch.nn.Linear(1, 1).to(torch.float64).weight.dtype == torch.float64
