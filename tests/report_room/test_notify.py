"""A word when it matters: once, to everybody named, and never to the harm of the run."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState, JobStatus
from supervisor import cli, doctor, notify
from supervisor.audience import Audience
from supervisor.job_request import supervisor_request, worker_request
from supervisor.journal import Continued, Event, Finished, GaveUp, JobSeen, ProgressMade, RolledBack
from supervisor.notify import DIGEST_EVERY_S, Notifier, NotSentError, ask_targets, is_worth_a_word
from supervisor.observation import Observation
from supervisor.report.screen import Screen
from supervisor.run_state import RunState
from tests.supervisor_room.stage import BEGIN, config
from tests.waiting import eventually
from worker.contract.config import Config
from worker.contract.run_dir import RunDir

ROLLED = RolledBack(
    cause="spike", kind="spike", verdict_step=94, onset_step=92, from_step=94, to_step=80, resume_from="checkpoint-80",
    resume_step=80, lr_scale=0.5, where="same_allocation", attempt=2, time=BEGIN, reason="loss 1249 at step 94",
)  # fmt: skip
QUIET = Observation(now=BEGIN)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def settings(folder: Path, *targets: str) -> Config:
    return config(folder).model_copy(update={"notify": targets})


def told(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def into(path: Path) -> str:
    return f"command: cat >>'{path}'"


def test_the_first_word_comes_at_once_and_a_storm_as_one_digest(tmp_path: Path) -> None:
    heard, clock = tmp_path / "heard it's", Clock()
    notifier = Notifier(RunDir(tmp_path), settings(tmp_path, f'command: cat >>"{heard}"'), clock)
    notifier.event(ROLLED)
    notifier.event(ProgressMade(healthy_step=80))
    notifier.progress(RunState(), QUIET)
    [first] = eventually(lambda: told(heard))
    assert first["title"] == "r: rolled back"
    assert (
        first["body"]
        .splitlines()[0]
        .endswith("ROLLED BACK: from step 94 back to checkpoint-80, at 0.5 of the configured rate")
    )
    assert "believed: " in first["body"]
    assert [event["event"] for event in first["events"]] == ["RolledBack"]
    for _ in range(50):
        notifier.event(ROLLED)
        clock.now += 1
        notifier.progress(RunState(), QUIET)
    clock.now += DIGEST_EVERY_S
    notifier.progress(RunState(), QUIET)
    second = eventually(lambda: told(heard)[1:])
    assert [len(message["events"]) for message in second] == [50]
    assert second[0]["title"] == "r: 50 events, the last: rolled back"
    notifier.close(RunState())


def test_a_supervisor_that_leaves_says_its_last_word_first(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    notifier = Notifier(RunDir(tmp_path), settings(tmp_path, into(heard)), Clock())
    notifier.event(ROLLED)
    notifier.progress(RunState(), QUIET)
    notifier.event(Finished(final_step=260, time=BEGIN, reason="all 260 steps are done"))
    notifier.close(RunState(state="finished"))
    assert sorted(message["title"] for message in told(heard)) == ["r: finished", "r: rolled back"]
    [finished] = [message["body"] for message in told(heard) if message["title"] == "r: finished"]
    assert f"\nmodel: {tmp_path}/final\nreport: {tmp_path}/report.html\n" in finished


def test_what_is_worth_a_word() -> None:
    worth: list[Event] = [ROLLED, Finished(final_step=1), GaveUp()]
    assert all(map(is_worth_a_word, worth))
    assert not is_worth_a_word(Continued(cause="preempted", where="requeued"))


@pytest.mark.parametrize("command", ["exit 7", "no-such-program-here", "exec sleep 1000 # dead"])
def test_a_dead_target_is_said_once_and_changes_nothing(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setattr(notify, "SEND_WITHIN_S", 0.2)
    monkeypatch.setattr(notify, "LEAVE_WITHIN_S", 0.2)
    heard = tmp_path / "heard"
    notifier = Notifier(RunDir(tmp_path), settings(tmp_path, f"command:{command}", into(heard)), Clock())
    audience = Audience(Screen(sys.stdout, "r", None), (notifier,))
    audience.event(ROLLED)
    audience.progress(RunState(), QUIET)
    eventually(lambda: told(heard))
    processes = [each.process for each in notifier._sending]
    eventually(lambda: audience.progress(RunState(), QUIET) or not notifier._sending)
    audience.progress(RunState(), QUIET)
    audience.close(RunState())
    assert all(process.returncode is not None for process in processes)
    said = capsys.readouterr().out
    assert said.count(f"notify target 1 (command {command.split()[0]})") == 1
    assert "Error" not in said


def test_an_address_is_never_shown(tmp_path: Path) -> None:
    notifier = Notifier(RunDir(tmp_path), settings(tmp_path, "nonsense://secret-token@host"), Clock())
    notifier.event(ROLLED)
    notifier._send()
    argv = notifier._sending[0].process.args
    with pytest.raises(NotSentError, match=r"^notify target 1 \(nonsense\) is no address that apprise knows$"):
        eventually(lambda: notifier.progress(RunState(), QUIET))
    assert "secret-token" not in str(argv)


class Ear(http.server.BaseHTTPRequestHandler):
    """Takes JSON, as apprise's own json:// target sends it."""

    heard: list[dict[str, Any]] = []  # noqa: RUF012 - one server a test

    def do_POST(self) -> None:
        self.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def ear() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ear)
    Ear.heard = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"json://127.0.0.1:{server.server_port}", Ear.heard
    server.shutdown()
    thread.join()
    server.server_close()


def test_apprise_gets_title_and_body(ear: tuple[str, list[dict[str, Any]]], tmp_path: Path) -> None:
    pytest.importorskip("apprise")
    address, heard = ear
    notifier = Notifier(RunDir(tmp_path), settings(tmp_path, address), Clock())
    notifier.event(GaveUp(reason="3 rollbacks brought no new healthy checkpoint", time=BEGIN))
    notifier.progress(RunState(), QUIET)
    [message] = eventually(lambda: heard)
    assert message["title"] == "r: gave up"
    assert "3 rollbacks brought no new healthy checkpoint" in message["message"]
    notifier.close(RunState())


def test_doctor_needs_nothing_of_a_configuration_but_who_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda _: [])
    file = tmp_path / "my-run.yaml"
    file.write_text("extends: base.yaml\nrun: {name: r}\nmodel: {path: /not/here}\nnotify: [{command: cat > heard}]\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", "--notify", str(file)]) == cli.OK
    assert "notify target 1 (command cat) took a test" in capsys.readouterr().out
    [message] = told(tmp_path / "heard")
    assert message["title"] == "r: test"
    assert message["body"] == "this is a test of higgsfield doctor --notify; nothing happened"
    assert message["dir"].endswith("/r")
    file.write_text("run: {name: r}\nnotify: 3\n")
    assert cli.main(["doctor", "--notify", str(file)]) == cli.WRONG_INPUT
    assert "notify" in capsys.readouterr().err


def test_doctor_sends_a_test_to_each(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    items = ask_targets(settings(tmp_path, into(heard), "command: exit 1"))
    assert [(item.ok, item.message) for item in items] == [
        (True, "notify target 1 (command cat) took a test"),
        (False, "notify target 2 (command exit) did not take a message (exit code 1)"),
    ]
    [gone] = ask_targets(settings(tmp_path, "command: TOKEN=secret /nope/tell --loud"))
    assert "(command tell) did not take a message (exit code 127: there is no such program)" in gone.message
    assert "by hand" in str(gone.mend)
    assert told(heard)[0]["title"] == "r: test"
    assert [item.ok for item in ask_targets(settings(tmp_path))] == [False]


# -- waiting -----------------------------------------------------------------------------------------------------------


def waiting(now: float, restarts: int = 0, starts_at: float | None = None) -> Observation:
    job = JobStatus("7", "hf", JobState.PENDING, "Priority", restarts=restarts, starts_at=starts_at)
    return Observation(now=now, job=job)


def test_a_long_wait_is_told_once_for_each_wait(tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    notifier = Notifier(RunDir(tmp_path), settings(tmp_path, into(heard)), clock := Clock())
    run = RunState(job=JobSeen(job_id="7", state="PENDING", time=BEGIN))
    for minutes in (0, 59, 61, 62, 300):
        clock.now += DIGEST_EVERY_S
        notifier.progress(run, waiting(BEGIN + 60 * minutes))
    notifier.progress(run, replace(QUIET, job=replace(waiting(0.0).job, state=JobState.RUNNING)))  # type: ignore[type-var]
    again = RunState(job=JobSeen(job_id="7", state="PENDING", time=BEGIN + 90_000, restarts=1))
    for minutes in (0, 61):
        clock.now += DIGEST_EVERY_S
        notifier.progress(again, waiting(BEGIN + 90_000 + 60 * minutes, restarts=1))
    notifier.close(run)
    assert [message["title"] for message in told(heard)] == ["r: still waiting"] * 2
    assert (
        "job 7 waits longer than expected, for 1 h 1 min by now (other jobs come first: Priority)"
        in told(heard)[0]["body"]
    )


def test_a_wait_that_slurm_foretold_is_no_news(tmp_path: Path) -> None:
    notifier = Notifier(RunDir(tmp_path), settings(tmp_path, into(tmp_path / "heard")), Clock())
    run = RunState(job=JobSeen(job_id="7", state="PENDING", time=BEGIN))
    for hours in (0, 2, 4.5):
        notifier.progress(run, waiting(BEGIN + 3600 * hours, starts_at=BEGIN + 4 * 3600))
    notifier.close(run)
    assert told(tmp_path / "heard") == []


# -- Slurm's own mail --------------------------------------------------------------------------------------------------


def test_slurm_mails_where_there_is_somebody_to_mail(tmp_path: Path) -> None:
    named = config(tmp_path, cluster={"mail_user": "me@example.org"})
    run_dir = RunDir(tmp_path / "r")
    worker, own = worker_request(named, run_dir, "hf-1", 1).flags(), supervisor_request(named, run_dir, "hs-1").flags()
    assert (worker["mail-user"], worker["mail-type"]) == ("me@example.org", "END,FAIL,REQUEUE")
    assert (own["mail-user"], own["mail-type"]) == ("me@example.org", "END,FAIL")
    assert "mail-user" not in worker_request(config(tmp_path), run_dir, "hf-1", 1).flags()


def test_a_command_may_be_written_as_yaml_reads_it(tmp_path: Path) -> None:
    fields = config(tmp_path).model_dump(mode="json") | {"notify": [{"command": "say it"}, "mailto://me@host"]}
    assert Config.model_validate(fields).notify == ("command: say it", "mailto://me@host")
