"""One suite over everything that calls itself a Scheduler: the fake, the local stand-in, and the real Slurm.

What the fake promises to the supervisor's tests is held here against the two that run real processes.
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.job import JobRequest, JobState, JobStatus, Resources
from slurm.scheduler import LocalScheduler, Scheduler, SchedulerError, SlurmScheduler
from tests.fakes import FakeScheduler
from tests.waiting import eventually


class Backend:
    """A scheduler, and the means to end its jobs from outside."""

    def __init__(self, kind: str, make: Callable[[], Scheduler], folder: Path) -> None:
        self.kind, self.make, self.folder = kind, make, folder
        self.scheduler = make()
        self.submitted: list[str] = []
        self.names: list[str] = []

    def request(self, **changes: object) -> JobRequest:
        name = f"hf-{uuid.uuid4().hex[:8]}"
        here = Resources(time_limit="5", environment={"PYTHONPATH": str(Path(__file__).parent)})
        request = JobRequest(name, "job_entries:obey", (str(self.folder),), self.folder / "jobs", here, comment="a0001")
        return replace(request, **changes)  # type: ignore[arg-type]

    def submit(self, request: JobRequest) -> str:
        job_id = self.scheduler.submit(request)
        self.submitted.append(job_id)
        self.names.append(request.name)
        return job_id

    def look(self, job_id: str) -> JobStatus | None:
        return self.scheduler.look([job_id]).get(job_id)

    def until(self, job_id: str, *states: JobState) -> JobStatus:
        def reached() -> JobStatus | None:
            status = self.look(job_id)
            return status if status and status.state in states else None

        return eventually(reached)

    def running(self, job_id: str) -> JobStatus:
        """Until its program runs, and not its node alone."""
        if isinstance(self.scheduler, FakeScheduler):
            self.scheduler.set_state(job_id, JobState.RUNNING, nodes=("n1",), starts_at=1.0)
            return self.scheduler.jobs[job_id]
        eventually(lambda: list(self.folder.glob(f"started-{job_id}-*")))
        return self.until(job_id, JobState.RUNNING)

    def let_end(self, job_id: str, request: JobRequest, code: int) -> None:
        if isinstance(self.scheduler, FakeScheduler):
            state = JobState.FAILED if code else JobState.COMPLETED
            self.scheduler.set_state(job_id, state, exit_code=code)
        (self.folder / f"go-{request.name}").write_text(str(code))

    def kill(self, job_id: str) -> None:
        if isinstance(self.scheduler, FakeScheduler):
            self.scheduler.set_state(job_id, JobState.FAILED, exit_code=137)
            return
        text = (self.folder / f"started-{job_id}-0-0").read_text()
        os.kill(int(text.partition('"pid": ')[2].rstrip("}")), signal.SIGKILL)

    def end_all(self) -> None:
        for name in self.names:
            (self.folder / f"go-{name}").write_text("0")
        for job_id in self.submitted:
            self.scheduler.cancel(job_id)
        for job_id in self.submitted:
            eventually(lambda job_id=job_id: (status := self.look(job_id)) is None or status.state.is_over)


@pytest.fixture(params=["fake", "local", pytest.param("slurm", marks=pytest.mark.slurm)])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    if request.param == "slurm":
        request.getfixturevalue("on_slurm")
    fake = FakeScheduler()
    makes: dict[str, Callable[[], Scheduler]] = {
        "fake": lambda: fake,
        "local": lambda: LocalScheduler(tmp_path / "jobs", kill_wait_s=1),
        "slurm": SlurmScheduler,
    }
    backend = Backend(request.param, makes[request.param], tmp_path)
    yield backend
    backend.end_all()


def test_a_submitted_job_is_found_by_name_and_by_id(backend: Backend) -> None:
    request = backend.request()
    assert backend.scheduler.find(request.name) == []
    job_id = backend.submit(request)
    assert isinstance(job_id, str)
    found = backend.scheduler.find(request.name)
    assert [job.job_id for job in found] == [job_id]
    status = backend.look(job_id)
    assert status is not None
    assert (status.job_id, status.name, status.restarts) == (job_id, request.name, 0)
    assert not status.state.is_over


def test_a_running_job_has_a_node_and_a_start(backend: Backend) -> None:
    status = backend.running(backend.submit(backend.request()))
    assert status.state is JobState.RUNNING
    assert len(status.nodes) == 1
    assert status.starts_at is not None
    assert status.exit_code is None


@pytest.mark.parametrize(("code", "state"), [(0, JobState.COMPLETED), (3, JobState.FAILED)])
def test_how_a_job_ended_is_known(backend: Backend, code: int, state: JobState) -> None:
    request = backend.request()
    job_id = backend.submit(request)
    backend.running(job_id)
    backend.let_end(job_id, request, code)
    status = backend.until(job_id, state)
    assert status.state.is_over
    assert status.exit_code == code
    assert backend.scheduler.find(request.name) == []


def test_a_killed_program_is_a_failed_job(backend: Backend) -> None:
    job_id = backend.submit(backend.request())
    backend.running(job_id)
    backend.kill(job_id)
    assert backend.until(job_id, JobState.FAILED).exit_code == 137


def test_cancel_ends_a_job_and_may_be_said_twice(backend: Backend) -> None:
    request = backend.request()
    job_id = backend.submit(request)
    backend.running(job_id)
    backend.scheduler.cancel(job_id)
    backend.scheduler.cancel(job_id)
    backend.until(job_id, JobState.CANCELLED)
    backend.scheduler.cancel(job_id)
    assert backend.scheduler.find(request.name) == []


def test_a_job_that_nobody_knows_is_absent_and_no_error(backend: Backend) -> None:
    assert backend.scheduler.look([]) == {}
    assert backend.scheduler.look(["987654321"]) == {}
    assert backend.scheduler.find("hf-nobody") == []
    backend.scheduler.cancel("987654321")
    backend.scheduler.start_now("987654321")
    assert backend.scheduler.cancelled_by("987654321") is None


@pytest.mark.parametrize("verb", ["requeue", "release", "change"])
def test_what_needs_a_job_says_that_there_is_none(backend: Backend, verb: str) -> None:
    if backend.kind == "local":
        pytest.skip("without effect on the stand-in, for every job")
    arguments = {"time_limit": "3"} if verb == "change" else {}
    with pytest.raises(SchedulerError) as caught:
        getattr(backend.scheduler, verb)("987654321", **arguments)
    assert caught.value.answered


def test_two_jobs_of_one_name_never_run_at_once(backend: Backend) -> None:
    request = backend.request()
    first = backend.submit(request)
    backend.running(first)
    second = backend.submit(request)
    eventually(lambda: (status := backend.look(second)) and status.why == "Dependency")
    assert backend.until(second, JobState.PENDING).why == "Dependency"
    assert {job.job_id for job in backend.scheduler.find(request.name)} == {first, second}
    backend.scheduler.cancel(first)
    backend.until(first, JobState.CANCELLED)
    backend.running(second)


def test_a_waiting_job_can_be_changed_and_cancelled(backend: Backend) -> None:
    request = backend.request()
    backend.running(backend.submit(request))
    second = backend.submit(request)
    backend.scheduler.change(second, exclude_nodes=["n3"], time_limit="3")
    backend.scheduler.change(second, exclude_nodes=[])
    backend.scheduler.cancel(second)
    backend.until(second, JobState.CANCELLED)


def test_one_look_at_several_jobs(backend: Backend) -> None:
    requests = [backend.request() for _ in range(2)]
    ids = [backend.submit(request) for request in requests]
    looked = backend.scheduler.look([*ids, "987654321"])
    assert {job_id: status.name for job_id, status in looked.items()} == {
        job_id: request.name for job_id, request in zip(ids, requests, strict=True)
    }


def test_another_supervisor_sees_and_ends_the_same_jobs(backend: Backend) -> None:
    request = backend.request()
    job_id = backend.submit(request)
    backend.running(job_id)
    other = backend.make()
    assert [job.job_id for job in other.find(request.name)] == [job_id]
    other.cancel(job_id)
    backend.until(job_id, JobState.CANCELLED)


def test_an_opinion_submits_nothing(backend: Backend) -> None:
    request = backend.request()
    assert backend.scheduler.test_only(request)
    assert backend.scheduler.find(request.name) == []


def test_nothing_is_reserved(backend: Backend) -> None:
    assert backend.scheduler.reservations() == []


def test_requeue_puts_a_job_back_and_start_now_starts_it(backend: Backend) -> None:
    if backend.kind == "local":
        pytest.skip("the stand-in starts a job once: this ends it")
    job_id = backend.submit(backend.request())
    backend.running(job_id)
    backend.scheduler.requeue(job_id)
    eventually(lambda: (status := backend.look(job_id)) and status.why == "BeginTime")
    status = backend.look(job_id)
    assert status is not None
    assert (status.state, status.restarts, status.nodes) == (JobState.PENDING, 1, ())

    def hurried() -> bool:
        backend.scheduler.start_now(job_id)
        looked = backend.look(job_id)
        return looked is not None and looked.why != "BeginTime"

    eventually(hurried)


def test_a_scheduler_that_does_not_answer_raises(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend.kind == "local":
        pytest.skip("the stand-in has nobody to ask")
    job_id = backend.submit(backend.request())
    with monkeypatch.context() as silenced:
        if isinstance(backend.scheduler, FakeScheduler):
            backend.scheduler.fail("look")
            backend.scheduler.fail("find")
        silenced.setenv("PATH", "/nonexistent")
        with pytest.raises(SchedulerError):
            backend.scheduler.look([job_id])
        with pytest.raises(SchedulerError):
            backend.scheduler.find("hf-any")
    assert backend.look(job_id) is not None
