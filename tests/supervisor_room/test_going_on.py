"""Who supervises a run when nobody does: its supervisor's own job, a person's word, and what may change with it."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState, JobStatus
from slurm.local import LocalScheduler
from supervisor import cli, supervise
from supervisor.config_history import by_key, changes, rate_of_attempt, told_of_scale
from supervisor.config_history import told as told_of_changes
from supervisor.fold import replay
from supervisor.job_request import supervisor_request
from supervisor.journal import (
    ConfigEdited,
    Continued,
    Event,
    GaveUp,
    Journal,
    Pinned,
    ResumeRequested,
    RollbackRequested,
    RolledBack,
    RunCreated,
    SupervisorStarted,
    VerdictSeen,
)
from supervisor.lease import take_lease
from supervisor.report.screen import Lines
from supervisor.runs import RunError, open_or_create, refuse_other_training, standing
from supervisor.verbs import going
from supervisor.verbs.exits import STOPPED
from tests.fakes import FakeScheduler
from tests.supervisor_room.stage import Stage
from tests.supervisor_room.stage import config as stage_config
from worker.contract.config import Config, format_config, read, write
from worker.contract.directive import SkippedBatches
from worker.contract.exit_report import ErrorDetail, Outcome
from worker.contract.recipe_config import OptimizerConfig
from worker.contract.recovery_config import RecoveryConfig
from worker.contract.run_dir import RunDir


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A run that trains, whose supervisor is gone; the verbs ask its scheduler."""
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.claim()
    stage.train(25)
    stage.settle()
    stage._forget_lease()
    monkeypatch.setattr(supervise, "choose", lambda *_: stage.scheduler)
    monkeypatch.setattr(going, "choose", lambda *_: stage.scheduler)
    return stage


def supervisors_job(stage: Stage) -> str:
    name = supervise.own_job_name(stage.watched.run.state)
    return stage.scheduler.submit(supervisor_request(stage.config, stage.run_dir, name))


def stopped(stage: Stage) -> Stage:
    stage.start_supervisor()
    stage.scheduler.set_state(stage.job_id, JobState.CANCELLED)
    stage.settle()
    assert stage.state == "stopped"
    stage._forget_lease()
    return stage


def other_file(stage: Stage, **sections: dict[str, Any]) -> Path:
    """The run's configuration with other values, as a person's file."""
    config = stage.config
    for name, keys in sections.items():
        config = config.model_copy(update={name: getattr(config, name).model_copy(update=keys)})
    file = stage.run_dir.path.with_name("mine.yaml")
    file.write_text(format_config(config))
    return file


def by_config(stage: Stage) -> str:
    return f"higgsfield submit {stage.run_dir.config} (a job), or higgsfield resume {stage.run_dir.path} (here)"


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert cli.main(argv) == cli.OK
    return " ".join(capsys.readouterr().out.split())


# -- status ------------------------------------------------------------------------------------------------------------


def test_nobody_is_told_to_resume_while_the_supervisor_s_own_job_may_come(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(stage.run_dir.path)
    assert f"nobody supervises it: {by_config(stage)}" in told(capsys, "status", run)
    job_id = supervisors_job(stage)
    for state in (JobState.PENDING, JobState.REQUEUED, JobState.HELD):
        stage.scheduler.set_state(job_id, state, why="Priority")
        text = told(capsys, "status", run)
        assert f"its supervisor's job {job_id} is {state.value} (Priority)" in text
        assert "resume" not in text
        assert f"its supervisor's job {job_id} waits" in told(capsys, "status", "--dir", str(stage.run_dir.path.parent))
    [row] = json.loads(told(capsys, "status", run, "--json"))["runs"]
    assert row["supervisor_job"] == {"id": job_id, "state": "HELD", "why": "Priority", "starts_at": None}
    stage.scheduler.set_state(job_id, JobState.CANCELLED)
    assert f"nobody supervises it: {by_config(stage)}" in told(capsys, "status", run)


def test_a_supervisor_that_died_before_it_began_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = stage_config(tmp_path)
    run_dir, scheduler = open_or_create(config), FakeScheduler()
    monkeypatch.setattr(supervise, "choose", lambda *_: scheduler)
    job_id = scheduler.submit(
        supervisor_request(config, run_dir, supervise.own_job_name(supervise.read_state(run_dir)))
    )
    (run_dir.jobs / f"{job_id}_0_log.err").write_text("a warning\nbash: /nope/python: No such file\n\n")
    run, said = str(run_dir.path), f"job {job_id} ended without starting: bash: /nope/python: No such file"
    assert "ended" not in told(capsys, "status", run)  # it lives, and may begin yet
    scheduler.set_state(job_id, JobState.FAILED)
    assert said in told(capsys, "status", run)
    assert said in told(capsys, "status", "--dir", str(tmp_path))
    assert cli.main(["log", run]) == cli.OK
    assert said in capsys.readouterr().err

    def begins(in_job: str | None) -> None:
        began = SupervisorStarted(reason="", host="h", pid=1, job_id=in_job)
        Journal(run_dir.journal, time.time, lambda: None).record(began, 0, 1)

    begins(None)
    assert "nobody supervises it" in told(capsys, "status", run)
    later = "a later start comes to nothing"
    (run_dir.jobs / "99_0_log.err").write_text(f"{later}\n")
    assert f"its supervisor's job 99 ended without starting: {later}" in told(capsys, "status", run)
    (run_dir.jobs / "99_submission.sh").write_text("#SBATCH --job-name=hx-00000000-1234\n")
    assert "nobody supervises it" in told(capsys, "status", run)  # it was a question to the weights
    begins(job_id)
    said = f"job {job_id} ended before the run did: bash: /nope/python: No such file (its log: "
    assert said in told(capsys, "status", run)
    (run_dir.jobs / f"{job_id}_0_log.err").write_text("")
    said = f"job {job_id} ended before the run did, without an error, as one that is killed does (its log: "
    assert said in told(capsys, "status", run)
    Journal(run_dir.journal, time.time, lambda: None).record(GaveUp(reason="enough"), 0, 1)
    assert "supervisor's job" not in told(capsys, "status", run)
    assert cli.main(["log", run]) == cli.OK
    assert "supervisor's job" not in capsys.readouterr().err


def test_an_embedded_supervisor_comes_back_with_the_worker_s_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path, supervisor={"place": "embedded"})
    monkeypatch.setattr(supervise, "choose", lambda *_: stage.scheduler)
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    began = SupervisorStarted(reason="", host="n1", pid=1, job_id=stage.job_id)
    Journal(stage.run_dir.journal, time.time, lambda: None).record(began, 1, 1)
    stage._forget_lease()
    run, job_id = str(stage.run_dir.path), stage.job_id
    assert f"supervisor comes with the worker's job {job_id}, which is RUNNING" in told(capsys, "status", run)
    stage.scheduler.set_state(job_id, JobState.PENDING, why="BeginTime", restarts=1, starts_at=time.time() + 60)
    text = told(capsys, "status", run)
    assert f"job {job_id} is PENDING (BeginTime), Slurm expects it to start about " in text
    assert f"supervisor comes with the worker's job {job_id}, which is PENDING (BeginTime)" in text
    assert not any(words in text for words in ("ended before", "higgsfield resume"))
    assert f"job {job_id} waits, and its supervisor comes with it" in told(capsys, "status", "--dir", str(tmp_path))
    assert cli.main(["log", run]) == cli.OK
    assert "ended before" not in capsys.readouterr().err
    stage.scheduler.set_state(job_id, JobState.CANCELLED)
    assert f"its supervisor's job {job_id} ended before the run did" in told(capsys, "status", run)


def test_a_scheduler_that_does_not_answer_leaves_it_open_who_comes(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.scheduler.fail("find")
    text = told(capsys, "status", str(stage.run_dir.path))
    assert f"unless a job of its supervisor waits, {by_config(stage)}" in text


def test_a_run_whose_supervisor_may_be_no_job_is_not_to_be_submitted(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.run_dir.config.write_text(other_file(stage, supervisor={"place": "foreground"}).read_text())
    text = told(capsys, "status", str(stage.run_dir.path))
    assert f"nobody supervises it: higgsfield resume {stage.run_dir.path} (here)" in text
    assert "higgsfield submit" not in text


def test_a_supervisor_that_lives_is_not_asked_for(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.start_supervisor()
    stage.scheduler.calls.clear()
    assert "supervisor process" in told(capsys, "status", str(stage.run_dir.path))
    assert stage.scheduler.calls == []


def test_why_a_job_waited_is_not_the_last_that_happened_once_it_runs(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.scheduler.set_state(stage.job_id, JobState.PENDING, why="Priority")
    stage.settle()
    assert "waits: " in standing(stage.run_dir, in_detail=True)["job"]["because"]
    stage.start_job()
    stage.settle()
    assert standing(stage.run_dir, in_detail=True)["reason"] == f"job {stage.job_id} is RUNNING"


def test_a_run_that_gave_up_has_no_running_job(stage: Stage) -> None:
    stage.start_supervisor()
    assert standing(stage.run_dir, in_detail=False)["job"]["state"] == "RUNNING"
    stage.leave(Outcome.REFUSED, error=ErrorDetail(type="DataError", message="gone"))
    stage.settle()
    assert stage.state == "gave_up"
    job = replay(stage.events).job
    assert job is not None
    assert job.state == "RUNNING", "nobody looks at it any more"
    assert standing(stage.run_dir, in_detail=False)["job"] is None


# -- rollback ----------------------------------------------------------------------------------------------------------


def test_a_rollback_that_nobody_supervises_says_so_first_and_names_who_may(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    run = stage.run_dir
    text = told(capsys, "rollback", str(run.path), "--to", "20")
    assert text.startswith("r: nobody supervises it; its job is started from here, and left alone")
    assert f"higgsfield submit {run.config} (a job), or higgsfield resume {run.path} (here)" in text
    job_id = supervisors_job(stage)
    text = told(capsys, "rollback", str(run.path), "--to", "20")
    assert f"its supervisor's job {job_id} supervises it when it starts" in text
    assert "resume" not in text
    assert "the supervisor is" in told(capsys, "submit", str(run.config)), "the run's own file serves too"


# -- submit ------------------------------------------------------------------------------------------------------------


def test_a_submit_goes_on_where_a_stop_file_was_obeyed_while_nobody_supervised(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.run_dir.stop_file.touch()
    assert "the worker saves and leaves at its next step" in told(capsys, "status", str(stage.run_dir.path))
    stage.leave(Outcome.LEFT, error=ErrorDetail(type="Left", message="", what="stop"))
    stage.scheduler.set_state(stage.job_id, JobState.COMPLETED)
    assert "a STOP file is there, and the worker has left" in told(capsys, "status", str(stage.run_dir.path))
    assert "the supervisor is job" in told(capsys, "submit", str(other_file(stage)))
    assert not stage.run_dir.stop_file.exists()
    assert [name for name in stage.names if name in ("Stopped", "ResumeRequested")] == ["Stopped", "ResumeRequested"]


def test_who_may_log_out_after_a_submit(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(stage.run_dir.config)
    job_id = supervisors_job(stage)
    assert f"r: the supervisor is job {job_id}; you may log out now" in told(capsys, "submit", file)
    runs = take_lease(RunDir(stage.run_dir.path.parent))
    text = told(capsys, "submit", file)
    assert f"(process {os.getpid()}), for as long as that process lives" in text
    assert "log out" not in text, "that process may be the terminal's own"
    runs.give_up()

    class StandIn(LocalScheduler):
        def find(self, name: str) -> list[JobStatus]:
            return list(stage.scheduler.find(name))

    monkeypatch.setattr(going, "choose", lambda *_: StandIn())
    text = told(capsys, "submit", file)
    assert "r: the supervisor is a process of its own; you may log out now" in text
    assert job_id not in text.partition("where it stands")[0], "status names the process that holds the run"


# -- another configuration ---------------------------------------------------------------------------------------------


def test_a_stopped_run_goes_on_with_another_time_limit_and_mode(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped(stage)
    recovery = {"mode": "observe"}
    file = other_file(stage, cluster={"time_limit": "02:00:00", "partition": "long"}, recovery=recovery)
    assert "the supervisor is" in told(capsys, "submit", str(file))
    config = read(stage.run_dir.config)
    assert (config.cluster.time_limit, config.cluster.partition) == ("02:00:00", "long")
    assert config.recovery.mode == "observe"
    [resumed] = [event for event in stage.events if isinstance(event, ResumeRequested)]
    assert resumed.changed is not None
    assert resumed.changed["recovery.mode"] == ("act", "observe")
    assert "; cluster.partition: unset -> long; cluster.time_limit: " in resumed.reason
    assert "-> 02:00:00" in resumed.reason


def test_a_supervisor_tells_what_was_edited_while_nobody_held_the_run(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.start_supervisor()
    stage.run_dir.config.write_text(other_file(stage, cluster={"time_limit": "02:00:00"}).read_text())
    for _ in range(2):
        stage._forget_lease()
        config, lease = read(stage.run_dir.config), take_lease(stage.run_dir)
        run = supervise.take_up(stage.run_dir, config, stage.scheduler, lease, Lines(StringIO(), "r")).run
        run.record(Pinned(by="ada", to=0))
    limit = stage.config.cluster.time_limit
    changed = [event.changed for event in stage.events if isinstance(event, SupervisorStarted)]
    assert changed[-2:] == [{"cluster.time_limit": (limit, "02:00:00")}, None]
    assert f"changed config.yaml: cluster.time_limit: {limit} -> 02:00:00" in told(
        capsys, "log", str(stage.run_dir.path)
    )


def test_an_edit_under_a_living_supervisor_is_told_once_with_what_comes_of_it(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.start_supervisor()
    stage.settle()
    whole = stage.run_dir.config.read_text()
    limit = stage.config.cluster.time_limit

    def edited(text: str) -> list[tuple[Any, str]]:
        before = len(stage.events)
        stage.run_dir.config.write_text(text)
        stage.look()
        assert len(stage.events) == before  # it may be half written
        for _ in range(3):
            stage.look()
        return [(event.changed, event.reason) for event in stage.events[before:] if isinstance(event, ConfigEdited)]

    longer = other_file(stage, cluster={"time_limit": "02:00:00"}).read_text()
    goes_by_it = "the worker goes by it from its next start on, the supervisor from its own"
    assert edited(longer) == [
        (
            {"cluster.time_limit": (limit, "02:00:00")},
            f"config.yaml: cluster.time_limit: {limit} -> 02:00:00: {goes_by_it}",
        )
    ]
    assert edited(longer) == []  # saved again as it was
    [(changed, reason)] = edited(whole + "\nrun: {")
    assert changed is None
    assert reason.startswith(f"{stage.run_dir.config}: ")
    assert reason.endswith(": the worker's next start is refused; mend it")
    assert cli.main(["log", str(stage.run_dir.path)]) == cli.WRONG_INPUT
    said = capsys.readouterr()
    assert "the worker's next start is refused; mend it" in " ".join(said.out.split())
    assert str(stage.run_dir.config) in said.err
    assert edited(longer) == [({}, "config.yaml can be read again, and is what it was")]
    [(_, reason)] = edited(other_file(stage, cluster={"time_limit": "03:00:00"}, run={"seed": 8}).read_text())
    assert reason.startswith(
        "config.yaml: the seed of a run cannot change (run.seed: 42 -> 8): the worker refuses to resume"
    )
    assert reason.endswith(f" by it; put it back; cluster.time_limit: 02:00:00 -> 03:00:00: {goes_by_it}")
    assert "run.seed: 8 -> 42" in edited(longer)[0][1]


def test_a_resume_tells_what_a_person_changed_in_the_file_and_the_scale_that_stays(stage: Stage) -> None:
    first = changed_rate(stage.config, 300.0)
    made = RunCreated(run_id="r", config_digest="d", config=by_key(first), versions={})
    rolled = RolledBack(
        attempt=2, cause="spike", where="new_job", lr_scale=0.125, kind="spike", verdict_step=8, onset_step=6,
        from_step=8, to_step=0, skip_batches=(SkippedBatches(epoch=0, first=3, count=2),),
    )  # fmt: skip
    events: list[Event] = [made, Continued(attempt=1, cause="first", where="new_job"), rolled]
    now = changed_rate(stage.config, 0.5)
    found = changes(events, now)
    assert found == {"training.optimizer.learning_rate": (300.0, 0.5)}
    assert told_of_changes(found) == ", with training.optimizer.learning_rate: 300 -> 0.5"
    whole = f"`higgsfield rollback {stage.run_dir.path} --to STEP --lr-scale 1` begins at the whole rate"
    since = "since the rollback at step 8: a peak of 0.0625; 2 batches stay left out"
    run = replay(events)
    assert told_of_scale(run, 0.125, events, now) == f"the rate stays at 0.125 x the configured one {since}; {whole}"
    verdict = VerdictSeen(kind="spike", step=9, onset_step=8)
    over = [*events, verdict, GaveUp(reason="5 rollbacks")]
    assert told_of_scale(replay(over), 0.0625, over, now) == (
        "the verdict at step 9 is answered first, at 0.0625 x the configured rate: a peak of 0.03125; "
        f"2 batches stay left out; {whole.replace('STEP', '0')}"
    )
    assert told_of_scale(run, 1.0, events, now) == ""
    events = [*events, ResumeRequested(by="ada", changed=found), Continued(attempt=3, cause="resumed", where="new_job")]
    assert changes(events, now) == {}
    assert [rate_of_attempt(events, now, attempt) for attempt in (1, 2, 3)] == [300.0, 300.0, 0.5]
    back = [*events[:3], RollbackRequested(by="ada", to=0, changed=found), events[-1]]
    assert [rate_of_attempt(back, now, attempt) for attempt in (2, 3)] == [300.0, 0.5]
    old = [made.model_copy(update={"config": None}), *events[1:3], ResumeRequested(by="ada"), events[-1]]
    assert [rate_of_attempt(old, now, attempt) for attempt in (2, 3)] == [None, 0.5]


@pytest.mark.parametrize("verb", ["submit", "resume"])
def test_who_lets_a_run_go_on_is_warned_that_its_rate_stays_low_before_its_job_starts(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    stage.config = stage.config.model_copy(update={"recovery": RecoveryConfig.model_validate({"spike": NO_ROLLBACK})})
    write(stage.run_dir.config, stage.config)
    stage.start_supervisor()
    stage.spike(38, onset=36)
    stage.settle()
    assert stage.state == "gave_up"
    stage._forget_lease()
    monkeypatch.setattr(going, "supervise", lambda *_, **__: supervise.read_state(stage.run_dir))
    cli.main([verb, str(other_file(stage) if verb == "submit" else stage.run_dir.path)])
    said = capsys.readouterr().err
    assert "warning: r: the verdict at step 38 is answered first, at 0.5 x the configured rate" in said


NO_ROLLBACK = {"max_rollbacks": 0}


def changed_rate(config: Config, rate: float) -> Config:
    optimizer = config.training.optimizer.model_copy(update={"learning_rate": rate})
    return config.model_copy(update={"training": config.training.model_copy(update={"optimizer": optimizer})})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"training": {"max_steps": 200}},
            "another run has this name (it differs in training.max_steps); the number of steps of a run cannot change; "
            "choose another run.name, or remove RUN to begin anew\n",
        ),
        (
            {"training": {"batch_size": 2}, "data": {"max_tokens": 9}},
            "differs in data.max_tokens, training.batch_size); the global batch and the data of a run cannot change",
        ),
        (
            {"training": {"max_grad_norm": 3.0}, "data": {"workers": 2}},
            "has this name (it differs in data.workers, training.max_grad_norm); choose another run.name, or "
            "remove RUN to begin anew; or let that run go on by RUN/config.yaml, which may be changed: "
            "higgsfield submit RUN/config.yaml (a job), or higgsfield resume RUN (here)",
        ),
        (
            {"cluster": {"nodes": 2}},
            "another run has this name (it differs in cluster.nodes); the global batch of a run cannot change; choose",
        ),
        (
            {"cluster": {"nodes": 2, "partition": "long"}},
            "another run has this name (it differs in cluster.partition, cluster.nodes)",
        ),
    ],
)
def test_what_changes_the_training_is_another_run(
    stage: Stage, capsys: pytest.CaptureFixture[str], sections: dict[str, dict[str, Any]], said: str
) -> None:
    before = stopped(stage).run_dir.config.read_bytes()
    assert cli.main(["submit", str(other_file(stage, **sections))]) == cli.WRONG_INPUT
    assert said.replace("RUN", str(stage.run_dir.path)) in capsys.readouterr().err
    assert stage.run_dir.config.read_bytes() == before
    assert stage.state == "stopped"


def test_other_ranks_and_as_many_sequences_a_step_are_the_same_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path, training={"max_steps": 100, "batch_size": 4}, cluster={"tasks_per_node": 2})
    monkeypatch.setattr(going, "choose", lambda *_: stage.scheduler)
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    other = other_file(stopped(stage), training={"batch_size": 8}, cluster={"tasks_per_node": 1})
    assert cli.main(["submit", str(other)]) == cli.WRONG_INPUT
    said = capsys.readouterr().err
    assert "it differs in training.batch_size, cluster.tasks_per_node); choose another run.name, or remove" in said
    assert f"; or let that run go on by {stage.run_dir.config}, which may be changed: {by_config(stage)}" in said
    assert "the global batch" not in said


@pytest.mark.parametrize("verb", ["submit", "resume", "run"])
def test_a_finished_run_says_that_an_edit_has_no_effect(
    stage: Stage, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    stage.start_supervisor()
    stage.leave(Outcome.DONE, step=100)
    stage.settle()
    assert stage.state == "finished"
    stage._forget_lease()
    run, config = stage.run_dir, stage.run_dir.config
    asked = [verb, str(run.path if verb == "resume" else config)]
    assert told(capsys, *asked).endswith(f"r is finished already: {run.path}")
    config.write_text(other_file(stage, training={"max_steps": 200}).read_text())
    edit = "training.max_steps: 100 -> 200: without effect"
    assert told(capsys, *asked).endswith(
        f"finished already: {run.path}; {edit}, for that another run is needed, whose model.path is {run.final}"
    )


def test_run_leaves_a_run_alone_that_was_stopped_and_says_how_it_goes_on(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    file = other_file(stopped(stage))
    assert cli.main(["run", str(file)]) == STOPPED
    left = f"r was stopped before, and is left alone; go on: {by_config(stage)}"
    assert capsys.readouterr().out.splitlines()[-1] == left


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"training": {"batch_size": 2}},
            "the global batch of a run cannot change: a step took 1 sequence, and would take 2 "
            "(training.batch_size 2 x training.gradient_accumulation 1 x 1 rank)",
        ),
        ({"run": {"seed": 8}}, "the seed of a run cannot change (run.seed: 42 -> 8)"),
        (
            {"training": {"optimizer": OptimizerConfig(name="lion")}},
            "the optimizer of a run cannot change (training.optimizer.name: adamw -> lion)",
        ),
        ({"data": {"shuffle": False}}, "the data of a run cannot change (data.shuffle: True -> False)"),
    ],
)
@pytest.mark.parametrize("verb", ["submit", "resume"])
def test_what_no_resume_can_change_is_refused_before_a_job_is_spent(
    stage: Stage, capsys: pytest.CaptureFixture[str], verb: str, sections: dict[str, dict[str, Any]], said: str
) -> None:
    file = other_file(stopped(stage), **sections)
    stage.run_dir.config.write_text(file.read_text())
    before, events = stage.submissions, stage.events
    assert cli.main([verb, str(file if verb == "submit" else stage.run_dir.path)]) == cli.WRONG_INPUT
    assert f"{said}; put it back in {stage.run_dir.config}" in capsys.readouterr().err
    assert (stage.submissions, stage.events) == (before, events)


@pytest.mark.parametrize(("steps", "is_refused"), [(None, True), (100, False)])
def test_epochs_cannot_change_where_they_make_the_steps(stage: Stage, steps: int | None, is_refused: bool) -> None:
    training = stage.config.training
    stage.config = stage.config.model_copy(
        update={"training": training.model_copy(update={"max_steps": steps, "epochs": 1.0})}
    )
    run_dir = stopped(stage).run_dir
    first, *others = run_dir.journal.read_text().splitlines(keepends=True)
    made = json.loads(first) | {"config": by_key(stage.config)}
    run_dir.journal.write_text("".join([json.dumps(made) + "\n", *others]))
    run_dir.config.write_text(other_file(stage, training={"epochs": 2.0}).read_text())
    what = r"the number of steps of a run cannot change \(training.epochs: 1 -> 2\)"
    with pytest.raises(RunError, match=what) if is_refused else nullcontext():
        assert refuse_other_training(run_dir) == ""


@pytest.mark.parametrize("verb", ["submit", "resume"])
def test_what_only_the_worker_can_refuse_is_warned_of(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    other = str(stage.run_dir.config)  # a file that is there
    file = other_file(stopped(stage), data={"train": other})
    stage.run_dir.config.write_text(file.read_text())
    monkeypatch.setattr(going, "supervise", lambda *_, **__: supervise.read_state(stage.run_dir))
    cli.main([verb, str(file if verb == "submit" else stage.run_dir.path)])
    assert (
        f"warning: r: the data of a run cannot change (data.train: {stage.config.data.train} -> {other}): the worker "
        "looks, and refuses to resume with others\n"
    ) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "mend"),
    [
        ({"training": {"batch_size": 2}}, "training.gradient_accumulation: 2 makes it 8 again"),
        ({"cluster": {"tasks_per_node": 1}}, "training.gradient_accumulation: 8 makes it 8 again"),
        ({"cluster": {"nodes": 3}}, "put it back"),
        ({"training": {"batch_size": 2, "gradient_accumulation": 2}}, None),
        ({"cluster": {"nodes": 2}, "training": {"gradient_accumulation": 2}}, None),
        ({"data": {"train": "elsewhere.txt"}}, None),
        ({"training": {"max_grad_norm": 3.0}}, None),
        ({"training": {"batch_size": 2, "entrypoint": "mine:main"}}, None),
    ],
)
@pytest.mark.parametrize("is_adopted", [False, True])
def test_ranks_may_change_where_the_batch_stays(
    stage: Stage, is_adopted: bool, changed: dict[str, dict[str, Any]], mend: str | None
) -> None:
    run_dir = stopped(stage).run_dir
    run_dir.config.write_text(other_file(stage, **together(BATCH_OF_8, changed)).read_text())
    stage.save(9_000, world_size=2, gradient_accumulation=4, adopted=is_adopted)
    refusal = pytest.raises(RunError, match=f"a step took 8 sequences, .*; {mend} in ") if mend else nullcontext()
    with refusal:
        refuse_other_training(run_dir)


BATCH_OF_8 = {"training": {"gradient_accumulation": 4}, "cluster": {"tasks_per_node": 2}}


def together(below: dict[str, dict[str, Any]], above: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: below.get(name, {}) | above.get(name, {}) for name in below | above}


@pytest.mark.parametrize("verb", ["submit", "run"])
def test_a_run_under_way_is_stopped_first_and_the_message_names_the_way(
    stage: Stage, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    before = stage.run_dir.config.read_bytes()
    assert cli.main([verb, str(other_file(stage, cluster={"time_limit": "02:00:00"}))]) == cli.WRONG_INPUT
    said = capsys.readouterr().err
    assert f"`higgsfield stop {stage.run_dir.path}` first, then submit this file" in said
    assert f"or change {stage.run_dir.config}, by which it goes on: {by_config(stage)}" in said
    assert "remove" not in said
    assert stage.run_dir.config.read_bytes() == before
