"""Files become samples: every format, every way in which one can be wrong, and documents that do not see each other."""

import csv
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.recipe_room.recipes import LLAMA, configured
from worker.data import IGNORED, Blocks, Pad, Rows, Stack, TrainingData, build_data
from worker.documents import DataError, Row, read_rows
from worker.models import build_model, byte_tokenizer
from worker.row_filter import RowFilter
from worker.token_cache import Tokens
from worker.tokens import collect, encode_bytes

BYTES = byte_tokenizer()


def documents(base: Path, key: Any = "train", **data: Any) -> list[Any]:
    return [row.content for row in read_rows(key, configured(data=data).data, base)]


def tokens_of(texts: Iterable[bytes]) -> Tokens:
    rows = ((Row("a.txt", number, "line", text), text) for number, text in enumerate(texts, start=1))
    return collect(rows, encode_bytes, np.uint8, 99, True, RowFilter("train", 0))


def built(base: Path, speaking: Any = BYTES, **data: Any) -> TrainingData:
    return build_data(configured(data=data), speaking, base)


def error_of(base: Path, **data: Any) -> str:
    with pytest.raises(DataError) as caught:
        built(base, **data)
    message = str(caught.value)
    assert "\n" not in message
    return message


def samples(data: Any) -> list[dict[str, list[int]]]:
    return [{name: value.tolist() for name, value in data[n].items()} for n in range(len(data))]


class TestFiles:
    def test_stdlib_is_the_sources_of_python(self, tmp_path: Path) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        assert documents(tmp_path, train="stdlib") == [file.read_bytes() for file in files]
        assert len(files) > 100

    def test_a_file_a_folder_a_glob_and_a_list(self, tmp_path: Path) -> None:
        (tmp_path / "b" / "deep").mkdir(parents=True)
        (tmp_path / "b" / ".git").mkdir()
        for name in ("b/2.txt", "b/1.txt", "b/deep/3.txt", "b/.git/no.txt", "b/.hidden", "a b[1].md"):
            (tmp_path / name).write_text(name)
        assert documents(tmp_path, train="b") == [b"b/1.txt", b"b/2.txt", b"b/deep/3.txt"]
        assert documents(tmp_path, train="b/*.txt") == [b"b/1.txt", b"b/2.txt"]
        assert documents(tmp_path, train="b/**/*.txt") == [b"b/1.txt", b"b/2.txt", b"b/deep/3.txt"]
        assert documents(tmp_path, train="a b[1].md") == [b"a b[1].md"]
        assert documents(tmp_path, train=["b/2.txt", str(tmp_path / "b/1.txt")]) == [b"b/2.txt", b"b/1.txt"]

    def test_a_file_that_several_entries_name_counts_once(self, tmp_path: Path) -> None:
        for name in ("1.txt", "2.txt", "3.txt"):
            (tmp_path / name).write_text(name)
        twice = ["2.txt", "*.txt", f"{tmp_path}/deep/../3.txt", str(tmp_path)]
        (tmp_path / "deep").mkdir()
        assert documents(tmp_path, train=twice) == [b"2.txt", b"1.txt", b"3.txt"]

    def test_a_glob_below_a_folder_whose_name_looks_like_one(self, tmp_path: Path) -> None:
        odd = tmp_path / "run [1]*"
        odd.mkdir()
        (odd / "1.txt").write_text("one")
        assert documents(odd, train="*.txt") == [b"one"]

    def test_two_columns_of_one_name_in_parquet(self, tmp_path: Path) -> None:
        table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        assert "has the column 'text' 2 times" in error_of(tmp_path, train="a.parquet")

    @pytest.mark.parametrize("missing", ["nowhere.txt", "nowhere/*.txt", "nowhere/"])
    def test_what_is_not_there_is_named(self, tmp_path: Path, missing: str) -> None:
        message = error_of(tmp_path, train=missing)
        assert message.startswith("data.train: ")
        assert str(tmp_path / missing) in message

    def test_the_key_of_the_evaluation_data_is_named(self, tmp_path: Path) -> None:
        assert error_of(tmp_path, train="stdlib", eval="nowhere.txt").startswith("data.eval: ")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert "holds no file" in error_of(tmp_path, train="empty")


class TestFormats:
    TEXTS = ("one", "zwei, mit Komma", "", 'drei "und" mehr\n', "四")

    def write(self, path: Path) -> None:
        rows = [{"n": n, "body": text} for n, text in enumerate(self.TEXTS)]
        if path.suffix == ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
        elif path.suffix == ".json":
            path.write_text(json.dumps(rows, indent=1))
        elif path.suffix == ".csv":
            with open(path, "w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, ["n", "body"])
                writer.writeheader()
                writer.writerows(rows)
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    @pytest.mark.parametrize("ending", [".jsonl", ".json", ".csv", ".parquet"])
    def test_the_ending_decides(self, tmp_path: Path, ending: str) -> None:
        self.write(tmp_path / f"data{ending}")
        assert documents(tmp_path, train=f"data{ending}", text="body") == [text.encode() for text in self.TEXTS]

    def test_a_named_format_beats_the_ending(self, tmp_path: Path) -> None:
        (tmp_path / "data.txt").write_text('{"text": "a"}\n')
        assert documents(tmp_path, train="data.txt", format="jsonl") == [b"a"]
        assert documents(tmp_path, train="data.txt", format="text") == [b'{"text": "a"}\n']

    def test_columns_that_come_late_or_change_their_type(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "a", "x": 1}\n{"text": "b", "x": "u", "y": 2}\n{"text": "c"}\n')
        assert documents(tmp_path, train="a.jsonl") == [b"a", b"b", b"c"]

    def test_words_that_other_readers_take_for_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("text\nNA\n007\nnull\n")
        assert documents(tmp_path, train="a.csv") == [b"NA", b"007", b"null"]

    def test_a_row_of_a_million_characters(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("text\n" + "x" * 1_000_000 + "\n")
        assert len(built(tmp_path, train="a.csv", max_tokens=1000).train) == 1000  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("name", "content", "expected"),
        [
            ("a.jsonl", b'{"text": "a"}\n' * 8299 + b'{"text": "bro', "line 8300 is not JSON"),
            ("a.jsonl", b'{"text": "a"}\n{"words": "b"}\n', "line 2 has no 'text' or 'prompt' with 'completion'"),
            (
                "a.jsonl",
                b'{"text": "a"}\n{"words": "b"}\n',
                "(it has 'words'); mend it, or name the column in data.text",
            ),
            ("a.jsonl", b'{"text": null}\n', "line 1: 'text' is null"),
            ("a.jsonl", b'{"text": 5}\n', "line 1: 'text' is not text but 5"),
            ("a.jsonl", b'["text"]\n', "line 1 is no object"),
            ("a.jsonl", b'{"text": "\xff"}\n', "line 1 is not UTF-8"),
            ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1: 'text' holds half of a character"),
            ("a.json", b'{"text": "a"}', "is no array"),
            ("a.jsonl", b'{"text": "a"}\n{"text": "b", "text": "c"}', "line 2 has the key 'text' twice in one object"),
            ("a.json", b'[{"text": "a", "meta": {"k": 1, "k": 2}}]', "the file has the key 'k' twice in one object"),
            ("a.json", b'[{"text": "a"},\n{"text": }]', "the file is not JSON (Expecting value, line 2)"),
            ("a.csv", b"text,n\na,1,2\n", "line 2 has more fields than the header"),
            ("a.csv", b"words\na\n", "line 2 has no 'text'"),
            ("a.csv", b'text\n"a\n', "is not CSV"),
            ("a.csv", b"text,n,text\na,1,b\n", "has the column 'text' 2 times"),
            ("a.csv", b"text\n\xff\n", "is not UTF-8"),
            ("a.parquet", b"nope", "is not Parquet"),
        ],
    )
    def test_bad_content_is_one_line_with_file_and_place(
        self, tmp_path: Path, name: str, content: bytes, expected: str
    ) -> None:
        (tmp_path / name).write_bytes(content)
        message = error_of(tmp_path, train=name)
        assert message.startswith(f"data.train: {tmp_path / name}: ")
        assert expected in message

    def test_bytes_need_no_encoding_and_other_tokenizers_do(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_bytes(b"ok\n\xff\xfe")
        assert documents(tmp_path, train="a.txt") == [b"ok\n\xff\xfe"]
        message = error_of(tmp_path, train="a.txt", tokenizer="some/model")
        assert "a.txt: line 2 is not UTF-8; convert the file, or set data.tokenizer: bytes" in message

    def test_a_file_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.txt").write_text("a")

        def refuse(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "read_bytes", refuse)
        assert "a.txt cannot be read (Permission denied)" in error_of(tmp_path, train="a.txt")

    @pytest.mark.parametrize(
        ("content", "expected"),
        [(b"", "1 empty"), (b"x", "of a single token"), (b"xyz", "its 3 tokens do not fill")],
    )
    def test_too_little_text(self, tmp_path: Path, content: bytes, expected: str) -> None:
        (tmp_path / "a.txt").write_bytes(content)
        assert expected in error_of(tmp_path, train="a.txt")


class TestBlocks:
    def test_documents_fill_blocks_and_positions_restart(self) -> None:
        blocks = Blocks(tokens_of([b"abc", b"", b"defghi", b"j", b"klmn"]), 5)
        assert samples(blocks) == [
            {"input_ids": list(b"abcde"), "position_ids": [0, 1, 2, 0, 1], "labels": [-100, 98, 99, -100, 101]},
            {"input_ids": list(b"fghik"), "position_ids": [0, 1, 2, 3, 0], "labels": [-100, 103, 104, 105, -100]},
        ]

    @given(st.lists(st.binary(max_size=12), max_size=30), st.integers(1, 9))
    def test_nothing_is_lost_but_the_last_part(self, texts: list[bytes], length: int) -> None:
        blocks = Blocks(tokens_of(texts), length)
        text = b"".join(one for one in texts if len(one) > 1)
        whole = [token for sample in samples(blocks) for token in sample["input_ids"]]
        assert whole == list(text[: len(text) // length * length])
        for sample in samples(blocks):
            rows = zip(*(sample[name] for name in ("input_ids", "position_ids", "labels")), strict=True)
            assert all(label == (IGNORED if position == 0 else token) for token, position, label in rows)

    def test_an_index_outside_is_an_error(self) -> None:
        blocks = Blocks(tokens_of([b"abcdef"]), 3)
        for index in (-1, 2):
            with pytest.raises(IndexError):
                blocks[index]

    def test_documents_do_not_see_each_other(self) -> None:
        model = build_model(configured()).eval()
        texts = [b"the first document", b"and another one", b"zz"]
        packed = Stack()([Blocks(tokens_of(texts), sum(map(len, texts)))[0]])
        with torch.no_grad():
            found = model(**packed).logits[0]
            alone = [model(input_ids=torch.tensor([list(text)])).logits[0] for text in texts]
            leaking = model(input_ids=packed["input_ids"]).logits[0]
        assert torch.allclose(found, torch.cat(alone), atol=1e-5)
        assert not torch.allclose(leaking, torch.cat(alone), atol=1e-2)

    def test_the_loss_of_a_block_is_that_of_its_documents(self) -> None:
        model = build_model(configured()).eval()
        texts = [b"the first document", b"and another one", b"zz"]
        packed = Stack()([Blocks(tokens_of(texts), sum(map(len, texts)))[0]])
        padded = Pad(0)([Rows(tokens_of(texts), 99)[n] for n in range(3)])
        with torch.no_grad():
            assert model(**packed).loss.item() == pytest.approx(model(**padded).loss.item(), abs=1e-5)

    def test_flat_batches_hold_the_same(self) -> None:
        """flash_attention_2 keeps documents apart only in one row: the samples end to end must mean the same."""
        model = build_model(configured()).eval()
        blocks = Blocks(tokens_of([b"hello you", b"there, how are", b"things"]), 12)
        pair = [blocks[0], blocks[1]]
        stacked, flat = Stack()(pair), Stack(flat=True)(pair)
        assert flat["input_ids"].shape == (1, 24)
        with torch.no_grad():
            assert model(**flat).loss.item() == pytest.approx(model(**stacked).loss.item(), abs=1e-5)

    def test_the_attention_decides_about_flat_batches(self, tmp_path: Path) -> None:
        flash = {"config": LLAMA, "attention": "flash_attention_2"}
        assert build_data(configured(flash, {"max_tokens": 64}), BYTES, tmp_path).collator == Stack(flat=True)
        assert build_data(configured(data={"max_tokens": 64}), BYTES, tmp_path).collator == Stack()


class TestRows:
    def test_one_document_a_row_cut_and_padded(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "abcdef"}\n{"text": ""}\n{"text": "xy"}\n')
        data = built(tmp_path, train="a.jsonl", pack=False, max_tokens=4)
        batch = data.collator([data.train[0], data.train[1]])
        assert {name: value.tolist() for name, value in batch.items()} == {
            "input_ids": [[97, 98, 99, 100], [120, 121, 0, 0]],
            "attention_mask": [[1, 1, 1, 1], [1, 1, 0, 0]],
            "labels": [[97, 98, 99, 100], [120, 121, -100, -100]],
        }

    def test_what_is_padded_changes_nothing(self, tmp_path: Path) -> None:
        model = build_model(configured()).eval()
        rows = Rows(tokens_of([b"abc", b"a longer document"]), 99)
        with torch.no_grad():
            both = model(**Pad(7)([rows[0], rows[1]])).logits
            alone = model(**Pad(7)([rows[0]])).logits
        assert torch.allclose(both[:1, :3], alone, atol=1e-5)


class TestTokenizers:
    @pytest.fixture
    def words(self) -> PreTrainedTokenizerFast:
        """A tokenizer of words, with a token at the beginning that it adds and one for the end that it does not."""
        names = ["<s>", "</s>", "<unk>", "a", "b", "c"]
        tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")

    def test_each_document_begins_and_ends_as_the_tokenizer_says(
        self, tmp_path: Path, words: PreTrainedTokenizerFast
    ) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "c x"}\n')
        data = built(tmp_path, words, train="a.jsonl", tokenizer="words", max_tokens=8)
        assert data.train[0]["input_ids"].tolist() == [0, 3, 4, 1, 0, 5, 2, 1]
        assert data.train[0]["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]

    def test_a_document_that_already_ends_gets_no_second_end(
        self, tmp_path: Path, words: PreTrainedTokenizerFast
    ) -> None:
        (tmp_path / "a.txt").write_text("a </s>")
        data = built(tmp_path, words, train="a.txt", tokenizer="words", max_tokens=3)
        assert data.train[0]["input_ids"].tolist() == [0, 3, 1]

    def test_padding_is_the_tokenizers_own(self, tmp_path: Path, words: PreTrainedTokenizerFast) -> None:
        words.pad_token = "</s>"
        (tmp_path / "a.jsonl").write_text('{"text": "a b"}\n{"text": "c"}\n')
        data = built(tmp_path, words, train="a.jsonl", tokenizer="words", pack=False)
        batch = data.collator([data.train[0], data.train[1]])
        assert batch["input_ids"][1].tolist() == [0, 5, 1, 1]
        assert batch["labels"][1].tolist() == [0, 5, 1, IGNORED]


class TestDigest:
    def digest(self, folder: Path, content: bytes, **data: Any) -> str:
        (folder / "a.txt").write_bytes(content)
        return built(folder, **{"train": "a.txt", "max_tokens": 4, **data}).digest

    def test_it_names_the_samples(self, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_bytes(b"hello world")
        own = self.digest(tmp_path, b"hello world")
        assert own == self.digest(tmp_path, b"hello world")
        assert own == self.digest(tmp_path, b"hello world", train=["a.txt", "a.txt"])
        assert own == self.digest(tmp_path, b"hello world", eval="stdlib", workers=2, shuffle=False)
        others = [
            self.digest(tmp_path, b"hello worle"),
            self.digest(tmp_path, b"hello world!"),
            self.digest(tmp_path, b"hello world", max_tokens=5),
            self.digest(tmp_path, b"hello world", pack=False),
            self.digest(tmp_path, b"hello world", train=["a.txt", "b.txt"]),
        ]
        assert len({own, *others}) == 6

    def test_it_knows_where_documents_begin(self, tmp_path: Path) -> None:
        found = set()
        for first, second in (("abcd", "efgh"), ("abcde", "fgh")):
            rows = [json.dumps({"text": text}) for text in (first, second)]
            (tmp_path / "a.jsonl").write_text("\n".join(rows))
            found.add(built(tmp_path, train="a.jsonl", max_tokens=4).digest)
        assert len(found) == 2


def test_evaluation_data_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("training text")
    (tmp_path / "b.txt").write_text("other")
    data = built(tmp_path, train="a.txt", eval="b.txt", max_tokens=4)
    assert data.evaluation is not None
    assert bytes(data.evaluation[0]["input_ids"].tolist()) == b"othe"
    assert built(tmp_path, train="a.txt", max_tokens=4).evaluation is None


def test_samples_go_through_worker_processes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)))
    data = built(tmp_path, train="a.txt", max_tokens=4)
    loader = torch.utils.data.DataLoader(data.train, batch_size=8, num_workers=2, collate_fn=data.collator)
    assert torch.cat([batch["input_ids"].flatten() for batch in loader]).tolist() == list(range(256))
