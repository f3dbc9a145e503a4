"""Prompts with completions, and conversations: only answers are learned, and none of them is cut from its question."""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.recipe_room.recipes import LLAMA, chat_tokenizer, configured
from worker.data import IGNORED, TrainingData, build_data, kept_whole
from worker.documents import DataError, read_rows
from worker.models import build_model
from worker.token_cache import Tokens

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]
GENERATION = (
    "{% for message in messages %}<{{ message['role'] }}>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% else %}{{ message['content'] }}</s>{% endif %}"
    "{% endfor %}"
)
STRIPPING = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{{ message['content'] if loop.last or message['role'] != 'assistant' else '(said)' }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def built(base: Path, rows: list[Any], speaking: Any = None, **data: Any) -> TrainingData:
    (base / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = {"train": "rows.jsonl", "tokenizer": "chat", "pack": False, **data}
    return build_data(configured(data=told), speaking or chat_tokenizer(), base)


def learned(sample: dict[str, torch.Tensor], tokenizer: Any = None) -> str:
    """What a sample teaches, as text: every label, which is the token at its place or none."""
    labels = sample["labels"]
    is_learned = labels != IGNORED
    assert torch.equal(labels[is_learned], sample["input_ids"][is_learned])
    return str((tokenizer or chat_tokenizer()).decode(labels[is_learned]))


class TestWhatIsLearned:
    def test_a_completion_with_its_end_and_not_its_prompt(self, tmp_path: Path) -> None:
        sample: Any = built(tmp_path, [{"prompt": "2+2=", "completion": "4, of course"}]).train[0]
        assert chat_tokenizer().decode(sample["input_ids"]) == "2+2=4, of course</s>"
        assert learned(sample) == "4, of course</s>"

    def test_bytes_have_completions_too(self, tmp_path: Path) -> None:
        data: Any = built(tmp_path, [{"prompt": "ä", "completion": "bc"}], tokenizer="bytes", pack=False)
        assert data.train[0]["labels"].tolist() == [IGNORED, IGNORED, 98, 99]

    @pytest.mark.parametrize("template", [None, GENERATION], ids=["by what an answer adds", "as the template says"])
    def test_the_answers_of_a_conversation_with_their_ends(self, tmp_path: Path, template: str | None) -> None:
        tokenizer = chat_tokenizer(template) if template else chat_tokenizer()
        sample: Any = built(tmp_path, [{"messages": CHAT}], tokenizer).train[0]
        whole = tokenizer.apply_chat_template(CHAT, tokenize=False)
        assert tokenizer.decode(sample["input_ids"]) == whole
        assert learned(sample) == "Hello!</s>So long</s>"

    def test_messages_come_before_a_pair_and_that_before_a_text(self, tmp_path: Path) -> None:
        row = {"text": "text", "prompt": "p", "completion": "c", "messages": CHAT}
        assert learned(built(tmp_path, [row]).train[0]) == "Hello!</s>So long</s>"
        assert learned(built(tmp_path, [row], messages=None).train[0]) == "c</s>"
        assert learned(built(tmp_path, [row], messages=None, prompt=None, completion=None).train[0]) == "text</s>"

    def test_kinds_may_be_mixed_and_columns_renamed(self, tmp_path: Path) -> None:
        rows = [{"q": "p", "a": "c"}, {"words": "some text"}, {"turns": CHAT, "words": None}]
        data: Any = built(tmp_path, rows, text="words", prompt="q", completion="a", messages="turns")
        assert [learned(data.train[n]) for n in range(3)] == ["c</s>", "some text</s>", "Hello!</s>So long</s>"]

    def test_the_model_s_loss_is_that_of_the_answers(self, tmp_path: Path) -> None:
        data: Any = built(tmp_path, [{"messages": CHAT}])
        model = build_model(configured({"config": {**LLAMA, "vocab_size": 260}})).eval()
        batch = data.collator([data.train[0]])
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits[0, :-1]
            targets = data.train[0]["labels"][1:]
            expected = torch.nn.functional.cross_entropy(logits[targets != IGNORED], targets[targets != IGNORED])
            assert model(**batch).loss.item() == pytest.approx(expected.item(), abs=1e-5)


class TestPacked:
    def rows(self) -> list[Any]:
        turns = ["first question", "2nd", "and the third question, which is longer"]
        return [
            {"messages": [{"role": "user", "content": turn}, {"role": "assistant", "content": turn.upper()}]}
            for turn in turns
        ]

    def test_no_answer_is_cut_from_its_question(self, tmp_path: Path) -> None:
        data: Any = built(tmp_path, self.rows(), pack=True, max_tokens=96)
        said = [learned(data.train[n]) for n in range(len(data.train))]
        assert said == ["FIRST QUESTION</s>2ND</s>", "AND THE THIRD QUESTION, WHICH IS LONGER</s>"]
        assert all(len(data.train[n]["input_ids"]) == 96 for n in range(2))

    def test_conversations_do_not_see_each_other(self, tmp_path: Path) -> None:
        model = build_model(configured({"config": {**LLAMA, "vocab_size": 260}})).eval()
        packed: Any = built(tmp_path, self.rows(), pack=True, max_tokens=96)
        alone: Any = built(tmp_path, self.rows(), pack=False, max_tokens=96)
        with torch.no_grad():
            found = model(**packed.collator([packed.train[0]])).logits[0]
            single = [model(input_ids=alone.train[n]["input_ids"][None]).logits[0] for n in range(2)]
        assert torch.allclose(found[: sum(map(len, single))], torch.cat(single), atol=1e-5)

    @given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 9))
    def test_every_document_that_fits_lies_in_one_block(self, lengths: list[int], block: int) -> None:
        ids = np.arange(1, sum(lengths) + 1, dtype=np.int64)
        starts = np.cumsum([0, *lengths])[:-1]
        rows = np.stack([np.zeros(len(lengths), dtype=np.int64), np.arange(len(lengths))], axis=1)
        tokens = Tokens(ids, starts, rows, ("f",), np.ones(len(ids), dtype=np.bool_))
        filled = kept_whole(tokens, block, padding=0)
        assert len(filled.ids) % block == 0
        assert filled.ids[filled.learned].tolist() == ids.tolist()  # nothing is lost, and fillers teach nothing
        assert (filled.ids[~filled.learned] == 0).all()  # type: ignore[operator]
        is_own = filled.rows[:, 0] >= 0
        assert filled.rows[is_own].tolist() == rows.tolist()
        for start, length in zip(filled.starts[is_own], filled.lengths[is_own], strict=True):
            assert start // block == (start + length - 1) // block or length > block


class TestRefusals:
    def error(self, base: Path, rows: list[Any], speaking: Any = None, **data: Any) -> str:
        with pytest.raises(DataError) as caught:
            built(base, rows, speaking, **data)
        assert "\n" not in str(caught.value)
        return str(caught.value).removeprefix(f"data.train: {base / 'rows.jsonl'}: ")

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"messages": "hi"}, "line 1: 'messages' is no list of messages but 'hi'"),
            ({"messages": [{"content": "hi"}]}, "line 1: message 1 of 'messages' has no role"),
            ({"messages": [{"role": "user", "content": 5}]}, "line 1: 'content of message 1' is not text but 5"),
            ({"prompt": "a", "completion": 5}, "line 1: 'completion' is not text but 5"),
            ({"prompt": "a"}, "line 1 has no 'text' or 'prompt' with 'completion' or 'messages' (it has 'prompt')"),
        ],
    )
    def test_a_row_of_the_wrong_shape(self, tmp_path: Path, row: Any, expected: str) -> None:
        assert expected in self.error(tmp_path, [row])

    @pytest.mark.parametrize("how", ["bytes", "no template"])
    def test_a_tokenizer_without_a_template(self, tmp_path: Path, how: str) -> None:
        told = {"tokenizer": "bytes"} if how == "bytes" else {}
        message = self.error(tmp_path, [{"messages": CHAT}], chat_tokenizer(None), **told)
        assert "line 1 is a conversation, and the tokenizer has no chat template" in message

    def test_a_template_that_refuses(self, tmp_path: Path) -> None:
        message = self.error(tmp_path, [{"messages": CHAT}], chat_tokenizer("{{ raise_exception('no system') }}"))
        assert "line 1 is refused by the tokenizer's chat template (no system)" in message

    def test_a_template_that_writes_answers_otherwise_later(self, tmp_path: Path) -> None:
        message = self.error(tmp_path, [{"messages": CHAT}], chat_tokenizer(STRIPPING))
        assert "line 1: the chat template writes message 3 otherwise when others follow" in message
        one = CHAT[:3]
        assert learned(built(tmp_path, [{"messages": one}], chat_tokenizer(STRIPPING)).train[0]) == "Hello!</s>"


class TestDigest:
    def test_another_template_is_another_digest_and_another_key_of_the_cache(self, tmp_path: Path) -> None:
        found = set()
        for template in (None, GENERATION.replace("</s>{% endgeneration", "!</s>{% endgeneration")):
            tokenizer = chat_tokenizer(template) if template else chat_tokenizer()
            (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CHAT}))
            config = configured(data={"train": "rows.jsonl", "tokenizer": "chat", "pack": False})
            cache = tmp_path / "tokens"
            first = build_data(config, tokenizer, tmp_path, cache, staged=tmp_path / "staged")
            assert not (tmp_path / "staged").exists()
            again = build_data(config, tokenizer, tmp_path, cache)
            assert first.digest == again.digest == build_data(config, tokenizer, tmp_path).digest
            assert first.report == again.report
            found.add(first.digest)
        assert len(found) == 2
        assert len(list((tmp_path / "tokens").iterdir())) == 2

    def test_what_is_learned_is_part_of_it(self, tmp_path: Path) -> None:
        pairs = [("ab", "cd"), ("abc", "d")]
        digests = {built(tmp_path, [{"prompt": one, "completion": two}]).digest for one, two in pairs}
        assert len(digests) == 2


class TestHub:
    def test_a_folder_that_datasets_loads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The hub is not asked here: ``datasets`` takes a folder for a name as well."""
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "owner" / "set").mkdir(parents=True)
        for split in ("train", "test"):
            (tmp_path / "owner" / "set" / f"{split}.jsonl").write_text(json.dumps({"text": f"some {split}"}) + "\n")
        rows = [
            row.content
            for entry in ("owner/set", "owner/set:test")
            for row in read_rows("train", configured(data={"train": entry}).data, tmp_path / "elsewhere")
        ]
        assert rows == [b"some train", b"some test"]

    def test_a_name_that_the_hub_does_not_give(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"^data.train: owner/none is no file, and the hub does not give it \("):
            built(tmp_path, [], train="owner/none")
