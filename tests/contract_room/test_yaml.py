"""YAML under the core rules of 1.2, and a config that says which key is wrong."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from worker.contract import config as config_file
from worker.contract.config import Config, config_digest
from worker.contract.files import UnusableFileError
from worker.contract.yaml_file import YamlError, format_yaml, parse_yaml, read_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5e-5", 5e-5), ("1E5", 1e5), ("1.", 1.0), (".5", 0.5), ("-2.5e+3", -2500.0), ("1.0", 1.0), ("+.inf", math.inf),
        ("-.INF", -math.inf), ("7", 7), ("-7", -7), ("010", 10), ("0o17", 15), ("0x1F", 31),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None),
        ("04:00:00", "04:00:00"), ("1-00:00:00", "1-00:00:00"), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"),
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("No", "No"), ("y", "y"), ("1_000", "1_000"), ("0b1", "0b1"),
        ('"1.0"', "1.0"), ("'false'", "false"), ('"5e-5"', "5e-5"), ("5e", "5e"), ("e5", "e5"), (".", "."),
        ("1.2.3", "1.2.3"), ("<<", "<<"), ("=", "="), ("64G", "64G"),
    ],
)  # fmt: skip
def test_what_a_plain_word_means(text: str, value: Any) -> None:
    found = parse_yaml(f"key: {text}")["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' is given twice"),
        ("a:\n  b: 1\n  b: 1\n", "line 3: the key 'b' is given twice"),
        ("a:\n\tb: 1\n", "line 2: "),
        ("a: [1, 2\nb: 3\n", "line 2: "),
        ("a: 'open\n", "line 2: "),
        ("1: a\n", "line 1: the key 1 is not text"),
        ("true: a\n", "line 1: the key True is not text"),
        ("? [a]\n: b\n", "line 1: the key ['a'] is not text"),
        ("a: 1\n---\nb: 2\n", "line 2: "),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1: "),
        ("a: !!float text\n", "a value is not what its tag"),
        ("a: !!bool text\n", "a value is not what its tag"),
        ("a: " + "9" * 5000, "a value is not what its tag"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: \x01", "special characters are not allowed"),
        ("a: *b\n", "line 1: "),
    ],
)
def test_what_is_no_yaml_of_ours_is_one_line_with_its_place(text: str, said: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_yaml(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("", None), ("# nothing\n", None), ("- a\n- b\n", ["a", "b"]), ("5", 5)])
def test_what_is_no_mapping_is_read_as_it_is(text: str, value: Any) -> None:
    assert parse_yaml(text) == value


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
words = st.sampled_from(
    ["on", "5e-5", "1e5", "04:00:00", "~", "", "null", "1_000", "0x1F", ".inf", "- a", "a: b", "#", "<<"]
)


@given(values | words | st.dictionaries(words, words))
@example({"\x85": None})
@example("a\x85b\u2028c")
def test_what_is_written_is_read_back(value: Any) -> None:
    assert parse_yaml(format_yaml({"key": value})) == {"key": value}


@given(st.text(alphabet="ab:-[]{}#&*!|>'\"%@`,?\n\t 01.eE~<=", max_size=60))
def test_no_text_raises_anything_else(text: str) -> None:
    try:
        parse_yaml(text)
        said = ""
    except YamlError as error:
        said = str(error)
    assert "\n" not in said


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes("größe: 1".encode("latin-1"))
    for name, said in (("latin.yaml", "not UTF-8"), ("nowhere.yaml", "cannot be read"), (".", "cannot be read")):
        with pytest.raises(YamlError, match=said):
            read_yaml(tmp_path / name)


SMALL = """
run: {name: a}
model: {path: x/y}
data: {train: data.txt}
training: {optimizer: {learning_rate: 5e-5}}
"""


class TestConfig:
    def test_a_resolved_config_comes_back_with_every_default(self, tmp_path: Path) -> None:
        config = Config.model_validate(parse_yaml(SMALL))
        path = tmp_path / "config.yaml"
        config_file.write(path, config)
        assert config_file.read(path) == config
        assert config_digest(config_file.read(path)) == config_digest(config)
        text = path.read_text()
        for line in ("learning_rate: 5.0e-05", "healthy_after: 25", "ratio: 2.0", "partition: null"):
            assert line in text

    @pytest.mark.parametrize(
        ("old", "new", "key"),
        [
            ("learning_rate: 5e-5", 'learning_rate: "5e-5"', "training.optimizer.learning_rate"),
            ("learning_rate: 5e-5", "learning_rate: 0", "training.optimizer.learning_rate"),
            ("learning_rate: 5e-5", "learning_rate: .nan", "training.optimizer.learning_rate"),
            ("learning_rate: 5e-5", "learning_rate: .inf", "training.optimizer.learning_rate"),
            ("training: {", 'training: {max_grad_norm: "1.0", ', "training.max_grad_norm"),
            ("training: {", "training: {pure_bf16: 'false', ", "training.pure_bf16"),
            ("training: {", "training: {max_steps: 1.5, ", "training.max_steps"),
            ("training: {", "training: {max_steps: true, ", "training.max_steps"),
            ("run: {name: a}", "run: {name: a}\nspike: {windw: 50}", "spike.windw"),
            ("run: {name: a}", "run: {name: 5}", "run.name"),
            ("run: {name: a}", "run: {}", "run.name"),
            ("run: {name: a}", "run: [a]", "run"),
            ("data: {train: data.txt}", "data: {train: [1]}", "data.train"),
        ],
    )
    def test_a_wrong_value_names_its_key(self, tmp_path: Path, old: str, new: str, key: str) -> None:
        path = tmp_path / "config.yaml"
        assert old in SMALL
        path.write_text(SMALL.replace(old, new))
        with pytest.raises(UnusableFileError) as caught:
            config_file.read(path)
        assert str(caught.value).startswith(f"{path}: {key}")

    @pytest.mark.parametrize("text", ["", "- a\n", "5\n", "a: [\n"])
    def test_what_is_no_config_at_all(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        with pytest.raises(UnusableFileError) as caught:
            config_file.read(path)
        assert str(caught.value).startswith(f"{path}: ")

    def test_a_whole_number_is_a_float_where_one_is_meant(self) -> None:
        config = Config.model_validate(parse_yaml(SMALL.replace("5e-5", "1")))
        assert config.training.optimizer.learning_rate == 1.0
