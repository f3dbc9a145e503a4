"""Files that build on each other, overrides, and who is named when something is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from supervisor.config import ConfigError, Finding, load_config, shipped_configs
from worker.contract import config as contract

Findings = Callable[..., tuple[Finding, ...]]


def test_a_config_comes_back_as_it_was_written_with_its_defaults(folder: Path) -> None:
    config = load_config(Path("small.yaml"))
    assert (config.run.name, config.training.max_steps, config.training.optimizer.learning_rate) == ("small", 10, 1e-3)
    assert config.spike == contract.SpikeConfig()
    contract.write(folder / "config.yaml", config)
    assert contract.read(folder / "config.yaml") == config
    assert load_config(folder / "config.yaml") == config


def test_groups_are_joined_and_everything_else_is_replaced(folder: Path) -> None:
    (folder / "below.yaml").write_text("cluster: {setup: [a, b], mem: 1G}\nema: {decay: 0.9}\nspike: {window: 60}\n")
    (folder / "run.yaml").write_text("extends: [small.yaml, below.yaml]\ncluster: {setup: [c]}\nema: null\n")
    config = load_config(Path("run.yaml"))
    assert (config.cluster.setup, config.cluster.mem, config.cluster.kind) == (("c",), "1G", "local")
    assert (config.ema, config.spike.window) == (None, 60)


def test_the_last_file_of_a_list_wins_and_a_common_base_is_laid_once(folder: Path) -> None:
    (folder / "base.yaml").write_text("extends: small.yaml\nspike: {window: 30, ratio: 3.0}\n")
    (folder / "left.yaml").write_text("extends: base.yaml\nspike: {window: 40}\nrun: {seed: 1}\n")
    (folder / "right.yaml").write_text("extends: ./base.yaml\nrun: {seed: 2}\n")
    (folder / "top.yaml").write_text("extends: [left.yaml, right.yaml]\n")
    config = load_config(Path("top.yaml"))
    assert (config.spike.window, config.spike.ratio, config.run.seed) == (40, 3.0, 2)


def test_names_are_looked_for_beside_the_file_and_then_among_the_shipped_ones(folder: Path) -> None:
    deep = folder / "deep"
    deep.mkdir()
    (deep / "mine.yaml").write_text("extends: base.yaml\nspike: {window: 33}\n")
    (deep / "run.yaml").write_text("extends: [../small.yaml, mine.yaml]\n")
    config = load_config(Path("deep/run.yaml"))
    assert (config.spike.window, config.training.optimizer.eps, config.run.name) == (33, 1e-8, "small")


@pytest.mark.parametrize("extends", ["run.yaml", "other.yaml", "[small.yaml, other.yaml]"])
def test_a_circle_is_an_error(folder: Path, findings: Findings, extends: str) -> None:
    (folder / "run.yaml").write_text(f"extends: {extends}\n")
    (folder / "other.yaml").write_text("extends: run.yaml\n")
    (found,) = findings(name="run.yaml")
    assert found.key == "extends"
    assert "circle" in found.mend


def test_a_missing_one_is_an_error_that_names_the_nearest(folder: Path, findings: Findings) -> None:
    (folder / "run.yaml").write_text("extends: smal.yaml\n")
    (found,) = findings(name="run.yaml")
    assert (found.file, found.key, found.mend) == ("run.yaml", "extends", "did you mean small.yaml?")


@pytest.mark.parametrize("extends", ["5", "null", "{a: b}", "[1]", "''"])
def test_extends_takes_names_only(folder: Path, findings: Findings, extends: str) -> None:
    (folder / "run.yaml").write_text(f"extends: {extends}\n")
    assert [found.key for found in findings(name="run.yaml")] == ["extends"]


def test_the_file_named_is_the_one_where_the_key_was_written(folder: Path, findings: Findings) -> None:
    (folder / "below.yaml").write_text("spike: {windw: 3, ratio: 0.5}\nnonsense: {a: 1}\n")
    (folder / "run.yaml").write_text("extends: [small.yaml, below.yaml]\nspike: {ratio: 0.25}\ndata: {pack: 'no'}\n")
    found = {one.key: one.file for one in findings("ema.decay=2", name="run.yaml")}
    assert found == {
        "spike.windw": "below.yaml",
        "spike.ratio": "run.yaml",
        "data.pack": "run.yaml",
        "ema.decay": "--set",
        "nonsense": "below.yaml",
    }


def test_what_nobody_wrote_is_missed_in_the_file_that_was_asked_for(folder: Path, findings: Findings) -> None:
    (folder / "below.yaml").write_text("run: {seed: 1}\nmodel: {dtype: float32}\n")
    (folder / "run.yaml").write_text("extends: below.yaml\ndata: {train: words.txt}\n")
    found = {one.key: one.file for one in findings(name="run.yaml")}
    assert found == {"run.name": "run.yaml"}
    found = {one.key: one.file for one in findings("run.name=mine", name="run.yaml")}
    assert found == dict.fromkeys(["model", "training"], "run.yaml")


def test_set_changes_one_key_by_our_yaml_rules(folder: Path) -> None:
    overrides = ["training.optimizer.learning_rate=5e-5", "run.name=04:00", "ema=null", "cluster.environment.A=x=y"]
    with pytest.raises(ConfigError):
        load_config(Path("small.yaml"), overrides)  # 04:00 stays text, and ':' cannot be in a name
    overrides[1] = "run.name=on"
    config = load_config(Path("small.yaml"), overrides)
    assert (config.training.optimizer.learning_rate, config.run.name, config.ema) == (5e-5, "on", None)
    assert config.cluster.environment == {"A": "x=y"}


def test_set_replaces_a_group_as_a_whole(folder: Path) -> None:
    config = load_config(Path("small.yaml"), ["model.config={model_type: gpt2}"])
    assert config.model.config == {"model_type": "gpt2"}


@pytest.mark.parametrize(
    "override", ["run.name", "=x", ".name=x", "run..name=x", "run.name=[", "run.name={a: 1, a: 2}"]
)
def test_set_that_sets_nothing_is_an_error(findings: Findings, override: str) -> None:
    (found,) = findings(override)
    assert found.file == "--set"
    assert found.mend


def test_set_below_a_value_names_set(findings: Findings) -> None:
    (found,) = findings("run.name.x=1")
    assert (found.file, found.key) == ("--set", "run.name")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("# nothing\n", "it is empty"),
        ("- run\n", "instead of keys"),
        ("words\n", "instead of keys"),
        ("run:\n\tname: x\n", "line 2"),
        ("run: {name: a}\nrun: {name: b}\n", "given twice"),
        ("run: {name: a\n", "line"),
        ("5: x\n", "not text"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(folder: Path, findings: Findings, text: str, said: str) -> None:
    (folder / "run.yaml").write_text(text)
    (found,) = findings(name="run.yaml")
    assert said in found.message
    assert found.mend
    assert "\n" not in str(found)
    assert str(found).startswith("run.yaml: ")


def test_a_tab_is_mended_with_spaces(folder: Path, findings: Findings) -> None:
    (folder / "run.yaml").write_text("run:\n\tname: x\n")
    assert findings(name="run.yaml")[0].mend == "indent with spaces"


def test_files_that_cannot_be_read(folder: Path, findings: Findings) -> None:
    (folder / "latin.yaml").write_bytes("run: {name: ä}\n".encode("latin-1"))
    assert findings(name="latin.yaml")[0].mend == "save it as UTF-8"
    assert "No such file" in findings(name="none.yaml")[0].message
    assert "is a folder" in findings(name=str(folder))[0].message


def test_a_finding_is_one_line_whatever_the_value_holds(findings: Findings) -> None:
    (found,) = findings('run.name="a\\nb\\u2028c"')
    assert str(found).splitlines() == [str(found)]


def test_a_file_in_a_folder_with_odd_characters(folder: Path) -> None:
    odd = folder / 'it\'s a "folder"\n$HOME ä'
    odd.mkdir()
    (odd / "run.yaml").write_text("extends: ../small.yaml\nspike: {windw: 1}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(odd / "run.yaml")
    assert len(str(caught.value).splitlines()) == 1


def test_the_shipped_folder_holds_the_shipped_files() -> None:
    assert {path.name for path in shipped_configs().glob("*.yaml")} >= {"base.yaml", "dataset.yaml", "demo.yaml"}
