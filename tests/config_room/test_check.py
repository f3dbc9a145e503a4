"""check: the batch text and the scheduler's word, before anything is spent and without leaving anything."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.hardware import kinds_of_nodes
from slurm.local_cluster.cluster import Cluster
from slurm.scheduler import LocalScheduler, SlurmScheduler
from supervisor import cli, known_facts
from supervisor.check import CheckResult, check
from supervisor.config import load_config, writer_of_keys
from supervisor.config_findings import ConfigError
from supervisor.runs import RunError
from tests.fakes import FakeScheduler
from worker.contract.check_report import CheckReport, DataLook, Found, LookedAt


def checked(*overrides: str) -> CheckResult:
    return check(load_config(Path("small.yaml"), overrides), "small.yaml")


def test_a_good_configuration_shows_its_batch_text_and_leaves_nothing(folder: Path) -> None:
    result = checked("cluster.time_limit='30'", "cluster.sbatch.exclusive=true")
    assert (result.errors, result.warnings) == ((), ())
    assert "#SBATCH --time=30\n" in result.sbatch
    assert "#SBATCH --exclusive\n" in result.sbatch
    assert f"#SBATCH --output={folder}/runs/small/jobs/" in result.sbatch
    assert result.not_checked
    assert result.as_text().endswith("\nnothing is wrong as far as it was checked")
    assert replace(result, not_checked=()).as_text().endswith("\nthe configuration is fine")
    assert sorted(path.name for path in folder.iterdir()) == ["small.yaml", "words.txt"]


def test_the_json_has_the_contract_s_fields(folder: Path) -> None:
    printed = json.loads(json.dumps(checked("cluster.partition=gpu").as_json()))
    kinds = {"errors", "warnings", "notes", "not_checked"}
    assert printed.keys() == kinds | {"sbatch", "opinion", "memory", "data", "time"}
    (warning,) = printed["warnings"]
    assert warning.keys() == {"file", "key", "message", "mend", "evidence"}
    assert (warning["file"], warning["key"]) == ("small.yaml", "cluster.partition")
    assert all(warning.values())


def test_sizes_are_told_in_words(folder: Path) -> None:
    memory = {"parameters": 7_615_616_512, "trained": 857_344, "weights": 2**35, "gradients": 0, "optimizer": 2**20}
    memory |= {"average": None, "activations": None, "main": 0, "device": 2**35 + 2**20}
    told = replace(checked(), memory=memory).as_text()
    assert "memory: 7.62 billion parameters, 0.857 million of them trained: 32 GiB a device" in told
    assert "(weights 32 GiB, optimizer 1 MiB)" in told


WARMUP = ["--set", "training.max_steps=500", "--set", "training.schedule.warmup=0"]


def test_strict_makes_warnings_errors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(known_facts, "look_closer", lambda config: CheckReport())
    assert (
        cli.main(["check", "small.yaml", "--strict", *WARMUP, "--set", "checkpoint.every_steps=50"]) == cli.WRONG_INPUT
    )
    printed = capsys.readouterr().out
    assert "warning: --set: training.schedule.warmup: without a warmup" in printed
    assert "; set it to 0.02" in printed
    assert cli.main(["check", "small.yaml", *WARMUP]) == cli.OK
    assert cli.main(["check", "small.yaml", "--strict"]) == cli.OK


def test_run_says_what_is_odd_in_short_and_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin(run_dir: object, out: object) -> None:
        raise RunError("that is enough")

    monkeypatch.setattr("supervisor.verbs.going.supervise", begin)
    assert cli.main(["run", "small.yaml", *WARMUP]) == cli.WRONG_INPUT
    *lines, end = capsys.readouterr().err.splitlines()
    assert end == "that is enough"
    assert [line.split(": ")[:3] for line in lines] == [
        ["warning", "--set", "training.schedule.warmup"],
        ["warning", "small.yaml", "checkpoint.every_steps"],
    ]


def test_what_the_look_finds_is_told_with_the_file_that_wrote_it(folder: Path) -> None:
    (folder / "mine.yaml").write_text("extends: small.yaml\nrun: {name: mine}\n")
    path, said = (
        Path("mine.yaml"),
        Found(level="error", key="data.train", message="gone", evidence="here", mend="mend it"),
    )
    result = check(load_config(path), "mine.yaml", writer_of_keys(path), lambda config: CheckReport(found=(said,)))
    assert [str(found) for found in result.errors] == ["small.yaml: data.train: gone (here); mend it"]


def test_the_length_of_the_run_is_told_in_steps_and_epochs(folder: Path) -> None:
    data = DataLook(
        train=LookedAt(documents=9, tokens=90, samples=1_000, left_out={}, lengths=None, duplicates=0, is_whole=True)
    )
    text = check(
        load_config(Path("small.yaml"), ["training.batch_size=8"]), look=lambda config: CheckReport(data=data)
    ).as_text()
    assert "training: 10 steps, 8 samples each, 0.08 epochs of 1,000 samples" in text.splitlines()


def nodes(gres: str, features: str = "", megabytes: str = "1031000") -> str:
    return f"gpu*|{gres}|{features or '(null)'}|{megabytes}\n"


@pytest.mark.parametrize(
    ("answer", "constraint", "gpu", "gib"),
    [
        (nodes("gpu:a100:8(S:0-1)", "ib,hdr"), None, "A100", 1006),
        (nodes("gpu:4", "v100-32g"), None, "V100", 1006),
        (nodes("gpu:a100:8") + nodes("gpu:v100:4", megabytes="384000+"), None, None, 375),
        (nodes("gpu:8", "a100") + nodes("gpu:4", "v100"), "a100", "A100", 1006),
        (nodes("gpu:a100:8").replace("gpu*", "other"), None, None, None),
        (nodes("gpu:a100:8", megabytes="1"), None, "A100", None),
        ("garbage\n|||\n", None, None, None),
    ],
)
def test_what_slurm_says_of_its_nodes_is_known(
    folder: Path, answer: str, constraint: str | None, gpu: str | None, gib: int | None
) -> None:
    scheduler = FakeScheduler()
    scheduler.kinds_of_nodes = kinds_of_nodes(answer, None)
    given = ["cluster.gpus_per_node=4", *([f"cluster.constraint={constraint}"] if constraint else [])]
    known = known_facts.known_facts(load_config(Path("small.yaml"), given), CheckReport(), scheduler)
    assert (known.device and known.device.name, known.main_memory and known.main_memory // 2**30) == (gpu, gib)


def test_a_configuration_for_another_machine_is_not_held_against_this_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.check.choose", lambda kind: LocalScheduler())
    far = [
        "cluster.kind=auto",
        "cluster.nodes=2",
        "cluster.gpus_per_node=8",
        "cluster.partition=gpu",
        "cluster.mem=9999T",
    ]
    result = check(load_config(Path("small.yaml"), far))
    assert (result.errors, result.warnings) == ((), ())
    assert {found.key for found in result.not_checked} >= {"cluster", "cluster.partition", "checkpoint.keep"}


def test_a_look_that_ends_otherwise_is_not_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_facts.sys, "executable", "/bin/false")
    result = check(load_config(Path("small.yaml")), look=known_facts.look_closer)
    assert result.errors == ()
    assert "exit code 1" in result.not_checked[0].message


def test_an_interpreter_of_the_nodes_is_not_checked_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.check.choose", lambda kind: FakeScheduler())
    far = ["cluster.kind=auto", "cluster.python=/nope/python"]
    assert "cluster.python" in {found.key for found in checked(*far).not_checked}
    contained = checked(*far, "cluster.container=apptainer exec image.sif")
    assert "cluster.python" not in {found.key for found in contained.not_checked}
    with pytest.raises(ConfigError, match="there is no program '/nope/python'"):
        checked("cluster.kind=local", "cluster.python=/nope/python")


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
    (kind, *_) = SlurmScheduler().hardware(None)
    assert (kind.memory_bytes or 0) > 0
    assert SlurmScheduler().hardware("none") == ()
