"""Models and tokenizers: the same at every start, and one line for everything that a person can get wrong."""

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.recipe_room.recipes import LLAMA, configured
from worker.lora import base_of
from worker.models import (
    ModelError,
    build_model,
    build_tokenizer,
    byte_tokenizer,
    isolates_documents,
    limit_of_positions,
)


def weights(model: torch.nn.Module) -> bytes:
    return b"".join(one.detach().float().numpy().tobytes() for one in model.state_dict().values())


def error_of(build: Any, *arguments: Any, **more: Any) -> str:
    with pytest.raises(ModelError) as caught:
        build(*arguments, **more)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a tiny model and a tokenizer trained on a few words."""
    folder = tmp_path / "saved model"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(["low lower lowest new newer"] * 4, trainers.BpeTrainer())
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    build_model(configured()).save_pretrained(folder)
    return folder


WIDTHS: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
OWN_WIDTHS: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 4}


class TestFromConfig:
    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"model_type": "gpt2", "n_positions": 16, **OWN_WIDTHS}, 16),
            ({"model_type": "gptj", "n_positions": 16, "rotary_dim": 4, **OWN_WIDTHS}, 16),
            ({"model_type": "opt", "word_embed_proj_dim": 16, "max_position_embeddings": 16, **WIDTHS}, 16),
            ({"model_type": "gpt_neox", "max_position_embeddings": 16, **WIDTHS}, None),
            (LLAMA, None),
        ],
    )
    def test_how_many_positions_a_model_has(self, fields: dict[str, Any], expected: int | None) -> None:
        model = build_model(configured(model={"config": {**fields, "vocab_size": 64}}, data={"pack": False}))
        assert limit_of_positions(model) == expected
        for length in (16, 17):
            with pytest.raises((IndexError, RuntimeError)) if length > (expected or 17) else nullcontext():
                model(input_ids=torch.zeros(1, length, dtype=torch.long))

    def test_every_start_builds_the_same_and_leaves_the_random_states_alone(self) -> None:
        before = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index, union-attr]
        first = build_model(configured())
        after = random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()  # type: ignore[index, union-attr]
        assert after == before
        torch.rand(7)
        assert weights(first) == weights(build_model(configured()))

    def test_the_seed_decides(self) -> None:
        config = configured()
        other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 7})})
        assert weights(build_model(config)) != weights(build_model(other))

    def test_what_training_needs(self) -> None:
        model = build_model(configured())
        assert model.config.use_cache is False
        assert model.config._attn_implementation == "sdpa"
        assert {one.dtype for one in model.parameters()} == {torch.float32}

    def test_special_tokens_are_those_that_are_named(self) -> None:
        assert build_model(configured()).config.eos_token_id is None
        assert build_model(configured({"config": {**LLAMA, "eos_token_id": 7}})).config.eos_token_id == 7

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"hiden_size": 32}, "model.config.hiden_size: llama has no such field"),
            ({"model_type": "lama"}, "model.config: Unrecognized model identifier: lama"),
            ({"model_type": None}, "model.config: needs model_type"),
            ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
            ({"hidden_size": "32"}, "'hidden_size' expected int"),
            ({"vocab_size": 100}, "model.config.vocab_size: the model knows 100 tokens and the tokenizer makes 256"),
        ],
    )
    def test_a_wrong_description(self, fields: dict[str, Any], expected: str) -> None:
        assert expected in error_of(build_model, configured({"config": {**LLAMA, **fields}}), byte_tokenizer())

    def test_a_model_that_writes_no_text(self) -> None:
        assert "model.config" in error_of(build_model, configured({"config": {"model_type": "vit"}}))

    @pytest.mark.parametrize("field", [{"rope_theta": 5e5}, {"tie_word_embeddings": True}, {"num_key_value_heads": 2}])
    def test_fields_that_the_model_does_know(self, field: dict[str, Any]) -> None:
        build_model(configured({"config": {**LLAMA, **field}}))

    def test_an_attention_that_is_not_installed(self) -> None:
        model = {"config": LLAMA, "attention": "flash_attention_2"}
        assert "FlashAttention2" in error_of(build_model, configured(model))


class TestIsolation:
    OPT: ClassVar = {
        "model_type": "opt", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "ffn_dim": 64, "word_embed_proj_dim": 32,
    }  # fmt: skip
    MAMBA: ClassVar = {"model_type": "mamba", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2}

    @pytest.mark.parametrize(("config", "attention"), [(OPT, "sdpa"), (OPT, "eager"), (MAMBA, "eager")])
    def test_models_in_which_packed_documents_see_each_other(self, config: dict[str, Any], attention: str) -> None:
        model = {"config": config, "attention": attention}
        message = error_of(build_model, configured(model))
        assert message.startswith(f"data.pack: in a {config['model_type']} model")
        assert not isolates_documents(build_model(configured(model, {"pack": False})))

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_models_in_which_they_do_not(self, attention: str) -> None:
        model = build_model(configured({"config": LLAMA, "attention": attention}))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.train()
        assert isolates_documents(model)
        assert model.training

    def test_an_attention_that_the_model_does_not_have(self) -> None:
        message = error_of(build_model, configured({"config": self.MAMBA, "attention": "sdpa"}))
        assert message.endswith("; set model.attention: eager")


class TestHalfWeights:
    def test_bfloat16_must_be_asked_for(self) -> None:
        model = {"config": LLAMA, "dtype": "bfloat16"}
        assert "training.pure_bf16" in error_of(build_model, configured(model))
        assert build_model(configured(model, training={"pure_bf16": True})).dtype == torch.bfloat16

    def test_float16_is_never_trained(self) -> None:
        model = {"config": LLAMA, "dtype": "float16"}
        assert "model.dtype" in error_of(build_model, configured(model, training={"pure_bf16": True}))


class TestFromFolder:
    def test_a_saved_model_comes_back(self, saved: Path) -> None:
        loaded = build_model(configured({"path": str(saved)}))
        assert weights(loaded) == weights(build_model(configured()))
        assert loaded.config.use_cache is False

    def test_a_relative_folder_is_taken_from_the_base(self, saved: Path) -> None:
        config = configured({"path": saved.name}, {"tokenizer": None})
        assert weights(build_model(config, base=saved.parent)) == weights(build_model(configured()))
        assert len(build_tokenizer(config, base=saved.parent)) == 22

    def test_its_own_tokenizer(self, saved: Path) -> None:
        tokenizer = build_tokenizer(configured({"path": str(saved)}, {"tokenizer": None}))
        assert tokenizer.decode(tokenizer("lower newest")["input_ids"]) == "lower newest"
        assert build_model(configured({"path": str(saved)}), tokenizer) is not None

    def test_a_tokenizer_that_is_named(self, saved: Path) -> None:
        assert len(build_tokenizer(configured(data={"tokenizer": str(saved)}))) == 22

    @pytest.mark.parametrize("path", ["/nowhere/at/all", "./nowhere", "../nowhere", "a/b/c"])
    def test_a_folder_that_is_not_there(self, path: str, tmp_path: Path) -> None:
        message = error_of(build_model, configured({"path": path}), base=tmp_path)
        assert message == f"model.path: {path}: no such folder ({tmp_path / path})"

    def test_a_hub_that_does_not_answer(self, tmp_path: Path) -> None:
        config = configured({"path": "some/model"}, {"tokenizer": None})
        for build in (build_model, build_tokenizer):
            message = error_of(build, config, base=tmp_path)
            assert message.startswith("model.path: ")
            assert f"no such folder ({tmp_path / 'some/model'}), and the hub does not give it" in message

    def test_a_folder_without_a_model(self, tmp_path: Path) -> None:
        for build in (build_model, build_tokenizer):
            message = error_of(build, configured({"path": str(tmp_path)}, {"tokenizer": None}))
            assert message.startswith("model.path: ")

    def test_a_cut_weights_file(self, saved: Path) -> None:
        file = saved / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
        assert error_of(build_model, configured({"path": str(saved)})).startswith(f"model.path: {saved}: ")

    def test_weights_that_are_missing_are_not_made_up(self, saved: Path) -> None:
        file = saved / "model.safetensors"
        tensors = load_file(file)
        del tensors["model.norm.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        message = error_of(build_model, configured({"path": str(saved)}))
        assert message == f"model.path: {saved} lacks 1 of the model's weights, model.norm.weight among them"

    def test_no_tokenizer_anywhere(self) -> None:
        assert error_of(build_tokenizer, configured(data={"tokenizer": None})).startswith("data.tokenizer: ")


class TestBytes:
    @given(st.text())
    def test_ids_are_the_bytes_of_the_text(self, text: str) -> None:
        tokenizer = BYTES
        ids = list(text.encode())
        assert tokenizer(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == text

    def test_it_has_every_byte_and_nothing_else(self) -> None:
        assert len(BYTES) == 256
        assert sorted(BYTES.get_vocab().values()) == list(range(256))
        assert BYTES.all_special_tokens == []

    def test_it_loads_beside_a_model_like_any_other(self, tmp_path: Path) -> None:
        build_model(configured()).save_pretrained(tmp_path)
        BYTES.save_pretrained(tmp_path)
        text = "Grüße \x00 <s> 世界\n"
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        assert loaded(text)["input_ids"] == list(text.encode())
        assert loaded.decode(list(text.encode())) == text


BYTES = byte_tokenizer()


class TestAdapters:
    def built(self, saved: Path, lora: dict[str, Any] | None = None, **more: Any) -> torch.nn.Module:
        pytest.importorskip("peft", reason="the extra lora is not installed")
        return build_model(configured({"path": str(saved), "lora": {"targets": ["q_proj"], **(lora or {})}, **more}))

    def test_they_alone_are_trained_and_are_the_same_at_every_start(self, saved: Path) -> None:
        before = torch.get_rng_state()
        first = self.built(saved)
        assert torch.equal(before, torch.get_rng_state())
        torch.rand(1)
        again = self.built(saved)
        trained = {name: one for name, one in first.named_parameters() if one.requires_grad}
        assert len(trained) == 4
        assert all("q_proj.lora_" in name for name in trained)
        assert all(torch.equal(one, dict(again.named_parameters())[name]) for name, one in trained.items())

    def test_a_base_in_half_precision_is_no_half_training(self, saved: Path) -> None:
        model = self.built(saved, dtype="bfloat16")
        assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
        assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16}

    def test_the_base_is_named_by_its_weights_alone(self, saved: Path) -> None:
        first, other = base_of(self.built(saved)), base_of(self.built(saved, {"r": 3, "targets": "all-linear"}))
        assert first == other
        changed = self.built(saved)
        with torch.no_grad():
            next(one for one in changed.parameters() if not one.requires_grad).view(torch.int32)[0, 0] ^= 1
        assert base_of(changed) != first

    def test_a_layer_that_the_model_does_not_have_is_named(self, saved: Path) -> None:
        assert "model.lora.targets: Target modules" in error_of(self.built, saved, {"targets": ["no_such_proj"]})

    def test_without_peft_one_line_says_how_to_get_it(self, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        message = error_of(build_model, configured({"path": str(saved), "lora": {}}))
        assert message == "model.lora: the package peft is not installed; pip install 'higgsfield-supervisor[lora]'"
