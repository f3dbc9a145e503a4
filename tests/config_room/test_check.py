"""check: the batch text and the scheduler's word, before anything is spent and without leaving anything."""

import json
from pathlib import Path

import pytest

from slurm.local_cluster.cluster import Cluster
from slurm.scheduler import SlurmScheduler
from supervisor.check import CheckResult, check
from supervisor.config import load_config


def checked(*overrides: str) -> CheckResult:
    return check(load_config(Path("small.yaml"), overrides), "small.yaml")


def test_a_good_configuration_shows_its_batch_text_and_leaves_nothing(folder: Path) -> None:
    result = checked("cluster.time_limit='30'", "cluster.sbatch.exclusive=true")
    assert (result.errors, result.warnings) == ((), ())
    assert "#SBATCH --time=30\n" in result.sbatch
    assert "#SBATCH --exclusive\n" in result.sbatch
    assert f"#SBATCH --output={folder}/runs/small/jobs/" in result.sbatch
    assert result.as_text().endswith("the configuration is fine")
    assert sorted(path.name for path in folder.iterdir()) == ["small.yaml", "words.txt"]


def test_the_json_has_the_contract_s_fields(folder: Path) -> None:
    printed = json.loads(json.dumps(checked("cluster.partition=gpu").as_json()))
    assert printed.keys() == {"errors", "warnings", "sbatch", "memory", "data"}
    (warning,) = printed["warnings"]
    assert warning.keys() == {"file", "key", "message", "mend"}
    assert (warning["file"], warning["key"]) == ("small.yaml", "cluster.partition")


def test_a_run_folder_that_slurm_cannot_carry_is_an_error(folder: Path) -> None:
    result = checked("run.dir=100%")
    assert [found.key for found in result.errors] == ["run.dir"]
    assert "error: small.yaml: run.dir: " in result.as_text()


def test_slurm_that_was_asked_for_and_is_not_there_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    result = checked("cluster.kind=slurm")
    assert [found.key for found in result.errors] == ["cluster.kind"]
    assert result.sbatch.startswith("#!")


def test_a_configuration_of_slurm_that_is_not_there_is_never_a_local_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sbatch").write_text("#!/bin/sh\n")
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("SLURM_CONF", str(folder / "none.conf"))
    result = checked("cluster.kind=auto")
    assert [found.key for found in result.errors] == ["cluster.kind"]


@pytest.mark.slurm
def test_slurm_says_what_it_thinks(folder: Path, on_slurm: Cluster) -> None:
    good = checked("cluster.kind=slurm")
    assert good.errors == ()
    assert good.opinion is not None
    assert "to start at" in good.opinion
    for override, key in (("cluster.partition=none", "cluster"), ("supervisor.partition=none", "supervisor")):
        result = checked("cluster.kind=slurm", override)
        assert [found.key for found in result.errors] == [key]
        assert "partition" in result.errors[0].message
        assert len(str(result.errors[0]).splitlines()) == 1
    assert SlurmScheduler().find("hf-00000000") == []
