"""What may hold a password: in a file for its owner alone, and nowhere else in a run's folder."""

import stat
from pathlib import Path

import pytest

from slurm.job import RequestError
from supervisor.job_request import worker_request
from supervisor.runs import open_or_create
from tests.supervisor_room.stage import config
from worker.contract.config import Config, config_digest, read, write
from worker.contract.run_dir import RunDir

SECRET = "hunter2-never-shown"
TARGET = f"tgram://{SECRET}/chat"


@pytest.fixture
def told(tmp_path: Path) -> Config:
    settings = config(tmp_path, cluster={"environment": {"API_KEY": SECRET, "LEVEL": "1"}})
    return settings.model_copy(update={"notify": (TARGET, "command: ./tell.sh")})


def test_its_owner_reads_all_of_it_and_the_copy_of_the_configuration_holds_no_secret(told: Config) -> None:
    run = open_or_create(told)
    assert read(run.config) == told
    assert config_digest(read(run.config)) == config_digest(told)
    holders = [path for path in run.path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert [path.name for path in holders] == ["private.yaml"]
    assert stat.S_IMODE(holders[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(run.config.stat().st_mode) != 0o600  # a group may look at the run


@pytest.mark.parametrize("spoilt", [None, "", "notify: 1\n", "{", "environment: {API_KEY: 3}\n"])
def test_somebody_else_sees_the_rest_and_starts_no_job_with_it(told: Config, spoilt: str | None) -> None:
    run = open_or_create(told)
    private = run.config.with_name("private.yaml")
    private.unlink()
    if spoilt is not None:
        private.write_text(spoilt)
    seen = read(run.config)
    assert (seen.run, seen.training, seen.notify) == (told.run, told.training, ("***", "***"))
    with pytest.raises(RequestError, match=r"private\.yaml"):
        worker_request(seen, run, "hf-0", 1)


def test_what_a_person_writes_into_the_copy_counts(told: Config, tmp_path: Path) -> None:
    run = open_or_create(told)
    text = run.config.read_text().replace('LEVEL: "***"', 'LEVEL: "2"').replace("LEVEL: '***'", 'LEVEL: "2"')
    run.config.write_text(text)
    assert read(run.config).cluster.environment == {"API_KEY": SECRET, "LEVEL": "2"}
    write(tmp_path / "config.yaml", read(run.config))
    assert read(tmp_path / "config.yaml").cluster.environment["LEVEL"] == "2"


def test_a_run_without_any_has_no_such_file(tmp_path: Path) -> None:
    assert not RunDir(open_or_create(config(tmp_path)).path).config.with_name("private.yaml").exists()
