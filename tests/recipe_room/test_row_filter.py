"""Rows that are not trained on: counted by reason, named by row; and what is held back for evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.recipe_room.recipes import chat_tokenizer, configured
from worker.contract.data_report import DataReport, LeftOut
from worker.data import TrainingData, build_data
from worker.documents import DataError

LINES = [
    json.dumps({"text": "a good one"}),
    json.dumps({"text": ""}),
    json.dumps({"text": " \n"}),
    json.dumps({"text": "--- *** ___ \u2014"}),
    '{"text": "cut off',
    json.dumps({"words": "in another column"}),
    json.dumps({"text": "\ud800"}),
    json.dumps({"prompt": "why?", "completion": " "}),
    json.dumps({"messages": [{"role": "user", "content": "hello?"}]}),
    json.dumps({"prompt": "a long answer", "completion": "x" * 200}),
    json.dumps({"text": "y" * 200}),
    json.dumps({"text": "世界 is text"}),
]


def built(base: Path, lines: list[str], cache: Path | None = None, **data: Any) -> TrainingData:
    (base / "rows.jsonl").write_text("\n".join(lines))
    told = {"train": "rows.jsonl", "tokenizer": "chat", "pack": False, "max_tokens": 64, **data}
    return build_data(configured(data=told), chat_tokenizer(), base, cache)


@pytest.mark.parametrize("is_cached", [False, True])
def test_each_reason_is_counted_and_its_rows_are_kept(tmp_path: Path, is_cached: bool) -> None:
    for _ in range(2):
        data = built(tmp_path, LINES, tmp_path / "tokens" if is_cached else None, max_bad_rows=3)
        path = str(tmp_path / "rows.jsonl")
        assert data.report.train.left_out == {
            "empty": LeftOut(count=2, rows={path: [2, 3]}),
            "special_characters": LeftOut(count=1, rows={path: [4]}),
            "broken": LeftOut(count=3, rows={path: [5, 6, 7]}),
            "no_trainable_token": LeftOut(count=2, rows={path: [8, 9]}),
            "too_long": LeftOut(count=1, rows={path: [10]}),
            "cut": LeftOut(count=1, rows={path: [11]}),
        }
        assert (data.report.train.documents, data.report.train.samples) == (3, 3)
        assert [line.partition("rows.jsonl: ")[2][:20] for line in data.lines] == [
            "line 5 is not JSON (",
            "line 6 has no 'text'",
            "line 7: 'text' holds",
        ]
        assert DataReport.model_validate_json(data.report.model_dump_json()) == data.report
        assert data.report.said() == [
            f"data.train: 3 documents, {data.report.train.tokens} tokens, 3 samples; rows that are not used, or not "
            "whole: 2 empty, 1 special characters, 3 broken, 2 no trainable token, 1 too long, 1 cut"
        ]


@pytest.mark.parametrize("share", [None, 0.5])
@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([], "it holds no row; give it text"),
        (LINES[1:4], "none of its rows can be used: 2 empty, 1 without a letter or digit; give them text"),
        (
            [LINES[8], LINES[9], LINES[7]],
            "none of its rows can be used: 2 without an answer to learn, or of a single token, 1 longer than "
            "data.max_tokens (64); write an answer (role assistant, or a completion), or more text",
        ),
        (LINES[9:10], "none of its rows can be used: 1 longer than data.max_tokens (64); raise data.max_tokens"),
    ],
)
def test_where_no_row_is_left_it_is_said_why(
    tmp_path: Path, lines: list[str], why: str, is_cached: bool, share: float | None
) -> None:
    with pytest.raises(DataError) as caught:
        built(tmp_path, lines, tmp_path / "tokens" if is_cached else None, eval_share=share)
    assert str(caught.value) == f"data.train: {why}"


def test_broken_rows_are_fatal_beyond_the_limit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl: line 5 is not JSON .*remove it$"):
        built(tmp_path, LINES)
    with pytest.raises(DataError, match=r"rows.jsonl: line 7: .* \(broken rows: 3; data.max_bad_rows allows 2\)$"):
        built(tmp_path, LINES, max_bad_rows=2)


def test_a_packed_text_is_never_too_long(tmp_path: Path) -> None:
    data = built(tmp_path, [json.dumps({"text": "word " * 200_000})], tokenizer="bytes", pack=True)
    assert data.report.train.left_out == {}
    assert data.report.train.samples == 1_000_000 // 64


def test_the_samples_keep_the_rows_that_they_came_from(tmp_path: Path) -> None:
    data: Any = built(tmp_path, LINES, max_bad_rows=3)
    tokens = data.train._tokens
    assert tokens.files == (str(tmp_path / "rows.jsonl"),)
    assert tokens.rows.tolist() == [[0, 1], [0, 11], [0, 12]]


class TestEvalShare:
    LINES = tuple(json.dumps({"text": f"document {number}"}) for number in range(40))

    def texts(self, samples: Any) -> set[str]:
        return {chat_tokenizer().decode(samples[n]["input_ids"]) for n in range(len(samples))}

    def test_a_share_of_the_documents_is_held_back_and_no_other(self, tmp_path: Path) -> None:
        data = built(tmp_path, list(self.LINES), eval_share=0.1)
        train, held = self.texts(data.train), self.texts(data.evaluation)
        assert (len(train), len(held)) == (36, 4)
        assert not train & held
        again = built(tmp_path, list(self.LINES), eval_share=0.1)
        assert self.texts(again.evaluation) == held
        assert again.digest == data.digest != built(tmp_path, list(self.LINES)).digest

    def test_the_seed_draws_them(self, tmp_path: Path) -> None:
        built(tmp_path, list(self.LINES))
        config = configured(data={"train": "rows.jsonl", "tokenizer": "chat", "pack": False, "eval_share": 0.1})
        other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 1})})
        found = [self.texts(build_data(each, chat_tokenizer(), tmp_path).evaluation) for each in (config, other)]
        assert found[0] != found[1]

    def test_one_document_cannot_be_split(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"^data.eval_share: there are not two documents"):
            built(tmp_path, list(self.LINES[:1]), eval_share=0.5)
