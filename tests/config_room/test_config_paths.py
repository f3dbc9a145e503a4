"""Paths become absolute where the command is given; what is not there is said at once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.config import Finding, load_config
from worker.documents import find_files

Findings = Callable[..., tuple[Finding, ...]]


def train(*overrides: str) -> str | tuple[str, ...]:
    return load_config(Path("small.yaml"), overrides).data.train


def files_of(named: str | tuple[str, ...]) -> list[Path]:
    """What the worker, somewhere else, reads for it."""
    return find_files("train", (named,) if isinstance(named, str) else named, Path("/"))


def test_run_dir_and_data_are_absolute(folder: Path) -> None:
    config = load_config(Path("small.yaml"), ["data.eval=[words.txt]", "training.eval_every=1"])
    assert config.run.dir == str(folder / "runs")
    assert config.data.train == str(folder / "words.txt")
    assert config.data.eval == (str(folder / "words.txt"),)


def test_they_are_seen_from_the_current_directory_and_not_from_the_file(folder: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "run.yaml").write_text("extends: ../small.yaml\n")
    assert load_config(Path("deep/run.yaml")).data.train == str(folder / "words.txt")


def test_the_home_folder_is_expanded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    (folder / "model").mkdir()
    given = ["data.train=~/words.txt", "run.dir=~/r", "data.tokenizer=~/model"]
    config = load_config(Path("small.yaml"), given)
    assert (config.data.train, config.run.dir) == (str(folder / "words.txt"), str(folder / "r"))
    assert config.data.tokenizer == str(folder / "model")


def test_words_and_hub_names_stay(folder: Path) -> None:
    (folder / "bytes").mkdir()
    (folder / "stdlib").mkdir()
    given = ["data.train=[stdlib, words.txt]", "model.config=null", "model.path=org/model"]
    config = load_config(Path("small.yaml"), given)
    assert config.data.train == ("stdlib", str(folder / "words.txt"))
    assert (config.model.path, config.data.tokenizer) == ("org/model", "bytes")


def test_a_folder_beside_is_taken_before_the_hub(folder: Path) -> None:
    (folder / "org" / "model").mkdir(parents=True)
    config = load_config(Path("small.yaml"), ["model.config=null", "model.path=org/model", "data.tokenizer=org/model"])
    assert config.model.path == config.data.tokenizer == str(folder / "org" / "model")


def test_the_worker_finds_files_folders_and_globs_from_anywhere(folder: Path) -> None:
    (folder / "texts" / "more").mkdir(parents=True)
    (folder / "texts" / "more" / "a.txt").write_text("a")
    (folder / "texts" / ".hidden").write_text("h")
    for named in ("texts", "texts/**/*.txt", "te*/more/a.txt"):
        assert files_of(train(f"data.train='{named}'")) == [folder / "texts" / "more" / "a.txt"], named


def test_a_glob_below_a_folder_whose_name_looks_like_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = folder / "run [1]*"
    odd.mkdir()
    (odd / "words.txt").write_text("here")
    (odd / "x[1].txt").write_text("here, too")
    (odd / "small.yaml").write_text((folder / "small.yaml").read_text())
    monkeypatch.chdir(odd)
    assert files_of(train("data.train='w*.txt'")) == [odd / "words.txt"]
    assert files_of(train("data.train='x[1].txt'")) == [odd / "x[1].txt"]


@pytest.mark.parametrize("named", ["owner/name", "owner/name:test", "owner/name:subset:test"])
def test_a_name_of_the_hub_stays_as_it_is(folder: Path, named: str) -> None:
    assert train(f"data.train='{named}'") == named


@pytest.mark.parametrize(
    "named",
    [
        "none.txt",
        "owner/none.jsonl",
        "owner/name/more",
        "owner/na*e",
        "owner/name:a:b:c",
        "'*.none'",
        "empty",
        "hidden",
        "''",
        "[]",
        "['']",
        "[words.txt, none.txt]",
        "~nobody-of-this-name/x",
    ],
)
def test_data_that_is_not_there(folder: Path, findings: Findings, named: str) -> None:
    (folder / "empty" / "deeper").mkdir(parents=True)
    (folder / "hidden" / ".git").mkdir(parents=True)
    (folder / "hidden" / ".git" / "config").write_text("x")
    (found,) = findings(f"data.train={named}")
    assert (found.file, found.key) == ("--set", "data.train")
    assert found.mend.startswith("name a file, a glob")


@pytest.mark.parametrize("named", ["./model", "/none/model", "~/none", "a/b/c", "''"])
def test_a_model_folder_that_is_not_there(findings: Findings, named: str) -> None:
    (found,) = findings("model.config=null", f"model.path={named}")
    assert found.key == "model.path"


def test_a_tokenizer_folder_that_is_not_there(findings: Findings) -> None:
    assert [found.key for found in findings("data.tokenizer=./none")] == ["data.tokenizer"]


@pytest.mark.parametrize(("given", "place"), [("s:main", ""), ("deep/s:main", "/deep"), ("./deep/a.b:main", "/deep")])
def test_the_folder_of_a_script_is_the_one_it_is_given_in(folder: Path, given: str, place: str) -> None:
    (folder / "deep").mkdir()
    found = load_config(Path("small.yaml"), [f"training.entrypoint={given}"]).training.entrypoint
    assert found == f"{folder}{place}/{given.rpartition('/')[2]}"
