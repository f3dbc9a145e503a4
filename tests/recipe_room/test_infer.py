"""Which weights answer, and how: a folder as a run leaves it, without the run."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.recipe_room.recipes import LLAMA, chat_tokenizer, configured
from worker.checkpoints import EMA as EMA_FILE
from worker.contract import config as configuration
from worker.contract.files import publish_message
from worker.contract.inference import Piece, Question
from worker.contract.loss_history import HistoryWriter, Record
from worker.contract.manifest import MANIFEST, FileEntry, Manifest
from worker.contract.recipe_config import EmaConfig, LoraConfig
from worker.contract.run_dir import RunDir
from worker.ema import Ema
from worker.infer import NoWeightsError, answer, choose
from worker.lora import with_adapters
from worker.models import build_model

MODEL: dict[str, Any] = {"config": {**LLAMA, "vocab_size": 260}}


def save(folder: Path, seed: int = 42) -> None:
    """A model, other weights for each seed, with its tokenizer."""
    config = configured(MODEL)
    model = build_model(config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})}))
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that is finished, never evaluated."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    configuration.write(run.config, configured(MODEL))
    for seed, folder in enumerate((run.final, run.final / "ema", run.best)):
        save(folder, seed)
    return run


def evaluate(run: RunDir, loss: float, average: float | None) -> None:
    told = {"segment": 1, "attempt": 1, "restart": 0, "step": 1, "epoch": 0.1, "time": 1.0, "loss": 1.0}
    told |= {"grad_norm": 1.0, "lr": 0.1, "verdict": "ok", "eval_loss": loss}
    HistoryWriter(run.history, lambda: None).append(Record.model_validate({**told, "ema_eval_loss": average}))


def ask(run: RunDir, **question: Any) -> list[Piece]:
    pieces: list[Piece] = []
    answer(run, Question(**{"prompt": "hello", "max_tokens": 8, **question}), pieces.append)
    return pieces


def text(pieces: list[Piece]) -> str:
    assert pieces[-1] == Piece(is_last=True)
    return "".join(piece.text for piece in pieces)


def complete(folder: Path, weights: str, step: int) -> None:
    """Write the manifest that makes a checkpoint of ``folder``."""
    files = {weights: FileEntry(bytes=(folder / weights).stat().st_size, xxh128="")}
    needed = [name for name, field in Manifest.model_fields.items() if field.is_required()]
    told = dict.fromkeys(needed, 1) | {"step": step, "files": files, "versions": {}, "weights_finite": True}
    publish_message(folder / MANIFEST, Manifest.model_validate({**told, "config_digest": "", "data_digest": ""}))


class TestWeights:
    @pytest.mark.parametrize(
        ("losses", "expected"),
        [(None, "."), ((2.0, 2.1), "."), ((2.0, 2.0), "ema"), ((2.0, 1.5), "ema"), ((2.0, None), ".")],
    )
    def test_the_average_answers_where_its_evaluation_is_no_worse(
        self, run: RunDir, losses: Any, expected: str
    ) -> None:
        if losses:
            evaluate(run, *losses)
        assert choose(run, None).folder == run.final / expected

    def test_whoever_names_them_gets_them(self, run: RunDir) -> None:
        evaluate(run, 1.0, 9.0)
        folders = {wanted: choose(run, wanted).folder for wanted in ("raw", "ema", "best")}  # type: ignore[arg-type]
        assert folders == {"raw": run.final, "ema": run.final / "ema", "best": run.best}

    def test_a_run_that_goes_on_answers_from_its_newest_complete_checkpoint(self, tmp_path: Path) -> None:
        run = RunDir(tmp_path)
        configuration.write(run.config, configured(MODEL))
        with pytest.raises(NoWeightsError, match="no finished weights and no complete checkpoint"):
            choose(run, None)
        for step in (4, 8, 12):
            folder = run.checkpoint(step)
            save(folder, seed=step)
            Ema(build_model(configured(MODEL)), EmaConfig()).save(folder / EMA_FILE)
            complete(folder, "model.safetensors", step)
        (run.checkpoint(12) / "model.safetensors").write_bytes(b"cut")
        assert choose(run, "raw").folder == run.checkpoint(8)
        assert choose(run, "ema").is_average
        raw, average = text(ask(run, weights="raw", temperature=0)), text(ask(run, weights="ema", temperature=0))
        assert raw != average
        save(run.path / "as_ema")
        (run.path / "as_ema").rename(run.final)
        assert text(ask(run, weights="raw", temperature=0)) == average

    @pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 on transformers 5.24
    def test_the_average_of_adapters_answers_before_the_run_is_finished(self, tmp_path: Path) -> None:
        pytest.importorskip("peft", reason="the extra lora is not installed")
        save(tmp_path / "base")
        run, rules = RunDir(tmp_path), LoraConfig(r=4)
        model = {"path": str(tmp_path / "base"), "lora": rules.model_dump()}
        configuration.write(run.config, configured({"config": None, **model}))
        folder = run.checkpoint(4)
        folder.mkdir(parents=True)
        adapted = with_adapters(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), rules, None)
        for name, one in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(one)
        Ema(adapted, EmaConfig()).save(folder / EMA_FILE)
        for name, one in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(one)
        adapted.save_pretrained(folder)
        chat_tokenizer().save_pretrained(folder)
        complete(folder, "adapter_model.safetensors", 4)
        raw, average = text(ask(run, weights="raw", temperature=0)), text(ask(run, weights="ema", temperature=0))
        assert raw != average
        shutil.copytree(tmp_path / "base", run.final)
        assert text(ask(run, weights="raw", temperature=0)) == raw  # adapters of nothing but zeros

    def test_what_a_run_does_not_have_is_named(self, tmp_path: Path) -> None:
        run = RunDir(tmp_path)
        save(run.final)
        with pytest.raises(NoWeightsError, match="was never evaluated"):
            choose(run, "best")
        with pytest.raises(NoWeightsError, match="final has no average"):
            choose(run, "ema")


class TestAnswers:
    def test_the_weights_decide_and_are_named(self, run: RunDir) -> None:
        found = {wanted: ask(run, weights=wanted, temperature=0) for wanted in ("raw", "ema", "best")}
        assert len({text(pieces) for pieces in found.values()}) == 3
        assert found["ema"][0].note == str(run.final / "ema")

    def test_sampling_is_drawn_again_from_its_seed(self, run: RunDir) -> None:
        found = [text(ask(run, seed=seed, max_tokens=32)) for seed in (1, 1, 2)]
        assert found[0] == found[1] != found[2]
        assert text(ask(run, seed=1, top_k=1)) == text(ask(run, temperature=0))
        assert text(ask(run, seed=1, top_p=1e-6)) == text(ask(run, temperature=0))

    def test_a_chat_prompt_is_written_by_the_template(self, run: RunDir) -> None:
        template = chat_tokenizer().apply_chat_template(
            [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
        )
        assert text(ask(run, is_chat=True, temperature=0)) == text(ask(run, prompt=template, temperature=0))

    def test_what_cannot_be_answered_is_one_line(self, run: RunDir) -> None:
        (piece,) = [one for one in ask(run, prompt="") if one.note is None]
        assert piece == Piece(error="--prompt: it makes no token; write some text")
        (run.final / "chat_template.jinja").unlink()
        (piece,) = [one for one in ask(run, is_chat=True, weights="raw") if one.note is None]
        assert piece.error == "--chat: the run's tokenizer has no chat template"
        (run.final / "model.safetensors").write_bytes(b"cut")
        (piece,) = [one for one in ask(run, weights="raw") if one.note is None]
        assert piece.error
        assert "\n" not in piece.error
