"""Which rows of which files a sample is made of: a person who looks there finds its text."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import worker.sources
from tests.recipe_room.recipes import configured
from worker.contract.loss_history import SourceRows
from worker.data import TrainingData, build_data
from worker.models import byte_tokenizer
from worker.sources import joined

TEXTS = ["first text", "2", "second one", "a third\nof two lines", "", "the last of them"]
"""Rows 2 and 5 hold nothing to learn and are in no sample."""


def built(base: Path, speaking: Any = None, cache: Path | None = None, **data: Any) -> TrainingData:
    return build_data(configured(data=data), speaking or byte_tokenizer(), base, cache)


def rows_of(data: TrainingData) -> list[list[tuple[str, str, int, int]]]:
    """Of every sample, in its order: (name of the file, unit, first, last)."""
    samples: Any = data.train
    located = data.locate(range(len(samples)))
    return [[(Path(one.file).name, one.unit, one.first, one.last) for one in rows] for rows in located]


def words(template: str = "<s> $A") -> PreTrainedTokenizerFast:
    """Words, and a token at the beginning that stands nowhere in the text; its end-of-text is added by us."""
    names = ["<s>", "</s>", "<unk>", *"abcdefgh"]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def write_rows(folder: Path, name: str) -> None:
    rows = [{"text": text} for text in TEXTS]
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name)
    elif name.endswith(".csv"):
        (folder / name).write_text("\n".join(["text", *(json.dumps(text) for text in TEXTS)]).replace("\\n", "\n"))
    else:
        lines = "\n".join(json.dumps(row) for row in rows)
        (folder / name).write_text(json.dumps(rows) if name.endswith(".json") else lines)


@pytest.mark.parametrize(
    ("name", "unit", "expected"),
    [
        ("a.jsonl", "line", [(1, 1), (3, 3), (4, 4), (6, 6)]),
        ("a.json", "entry", [(1, 1), (3, 3), (4, 4), (6, 6)]),
        ("a.parquet", "row", [(1, 1), (3, 3), (4, 4), (6, 6)]),
        ("a.csv", "line", [(2, 2), (4, 4), (6, 6), (8, 8)]),
    ],
)
def test_a_row_is_counted_as_its_format_counts(
    tmp_path: Path, name: str, unit: str, expected: list[tuple[int, int]]
) -> None:
    write_rows(tmp_path, name)
    found = rows_of(built(tmp_path, train=name, pack=False, max_tokens=6))
    assert found == [[(name, unit, *rows)] for rows in expected]


def test_a_packed_sample_names_every_document_in_it_and_only_those(tmp_path: Path) -> None:
    """Blocks of 15 bytes over documents of 10, 10, 20 and 16: the second begins in the middle of a row."""
    for name in ("a.jsonl", "b.jsonl"):
        write_rows(tmp_path, name)
    found = rows_of(built(tmp_path, train=["a.jsonl", "b.jsonl"], max_tokens=15))
    lines = [[(name[0], first) for name, _, first, _ in rows] for rows in found]
    assert lines[:4] == [[("a", 1), ("a", 3)], [("a", 3), ("a", 4)], [("a", 4), ("a", 6)], [("a", 6), ("b", 1)]]
    assert lines[4:] == [[("b", 1), ("b", 3)], [("b", 3), ("b", 4)], [("b", 4), ("b", 6)]]


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_of_a_text_file_the_lines_are_named(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "a.txt").write_text("a b c\nd e\n\nf g h\n")
    if tokenizer == "bytes":
        found = rows_of(built(tmp_path, train="a.txt", tokenizer="bytes", max_tokens=6))
        assert found == [[("a.txt", "line", *span)] for span in [(1, 1), (2, 4)]]
    else:  # <s> a b | c d e | f g h, and </s>, which fills no block
        found = rows_of(built(tmp_path, words(), train="a.txt", tokenizer="words", max_tokens=3))
        assert found == [[("a.txt", "line", *span)] for span in [(1, 1), (1, 2), (4, 4)]]


def test_of_a_text_file_that_is_too_large_all_lines_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.sources, "LARGEST_TEXT", 8)
    (tmp_path / "a.txt").write_text("a b c\nd e\n\nf g h")
    found = rows_of(built(tmp_path, words(), train="a.txt", tokenizer="words", max_tokens=3))
    assert found == [[("a.txt", "line", 1, 4)]] * 3


def test_a_sample_of_special_tokens_alone_is_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b\nc d")
    found = rows_of(built(tmp_path, words("$A <s>"), train="a.txt", tokenizer="words", max_tokens=2))
    assert found[-1] == [("a.txt", "line", 2, 2)]


def test_tokens_that_were_made_once_know_their_rows_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "a b"}\n{"text": "c d"}\n')
    made, kept = (
        rows_of(built(tmp_path, words(), tmp_path / "tokens", train="a.jsonl", tokenizer="words", max_tokens=4))
        for _ in range(2)
    )
    assert [[first for _, _, first, _ in rows] for rows in made] == [[2], [3]]
    assert made == kept


def test_rows_that_touch_are_one_range() -> None:
    def of(file: str, first: int, last: int) -> SourceRows:
        return SourceRows(file=file, unit="line", first=first, last=last)

    given = [of("b", 1, 1), of("a", 7, 7), of("a", 2, 5), of("a", 4, 4), of("a", 6, 6), of("a", 9, 9)]
    assert joined(given) == (of("a", 2, 7), of("a", 9, 9), of("b", 1, 1))
    assert joined([]) == ()
