"""The loop: observe, decide, act, sleep; for one run or for many with one scheduler query for all."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from slurm.job import JobState, JobStatus
from slurm.scheduler import SchedulerError
from supervisor.actions import carry_out, finish_open_intent
from supervisor.attempt_actions import publish_pins
from supervisor.attempts import Rules, rules_of
from supervisor.bad_nodes import strikes
from supervisor.config_history import changes, fixed_since, told, what_comes_of
from supervisor.decision import Begin, Decision, Exclude, Wait
from supervisor.disk import stat_for
from supervisor.hangs import hang_news, unusual_silence_s
from supervisor.job_looks import JobLooks, is_about_to_change
from supervisor.journal import ConfigEdited, Event, LookFailed, LookRecovered, RollbackRequested, read_journal
from supervisor.lease import BEAT_EVERY_S, LostError, OwnJob
from supervisor.news import news
from supervisor.observation import Observation
from supervisor.observer import Glance, Observer
from supervisor.policy import decide
from supervisor.requests import clear_request, request_news
from supervisor.run_state import RunState
from supervisor.supervised_run import SupervisedRun
from worker.contract import config as contract_config
from worker.contract.files import UnusableFileError, remove_left

REST_S: Final = 2.0
"""How long a run is left in peace while nothing happens in its files: what is due by the clock comes so late."""
LONG_REST_S: Final = 10.0
"""And one that trains, or waits in the queue, and has hours for what is due."""
_HALF_THE_WAY: Final = (Begin, Exclude)
"""What is followed by a submission, or by the attempt that the excluded node was in the way of."""


class Ears(Protocol):
    """Who is told how a run goes on, beside its events."""

    def progress(self, run: RunState, seen: Observation) -> None:
        """After each pass."""
        ...

    def trouble(self, message: str) -> None:
        """Something that will be tried again."""
        ...

    def close(self, run: RunState) -> None:
        """This supervisor leaves the run, over or not."""
        ...


@dataclass(frozen=True)
class Rest:
    """There was nothing to do, and nothing to wait for but time, the scheduler and files."""

    until: float
    """On the monotonic clock."""
    answer: object
    """What the scheduler had said."""
    seen: Observation


@dataclass
class Watched:
    """A supervised run together with what the loop keeps about it between two passes."""

    run: SupervisedRun
    ears: Ears
    observer: Observer = field(init=False)
    rules: Rules = field(init=False)
    rest: Rest | None = None
    """None = the next pass is due at once."""
    config_stamp: tuple[int, int] = field(init=False)
    """Of config.yaml as it was last heard of."""
    new_stamp: tuple[int, int] | None = None
    """What it was in the pass before, where that was another one: by now it is whole."""

    def __post_init__(self) -> None:
        self.config_stamp = _stamp(self.run.run_dir.config)
        self.observer = Observer(self.run.run_dir, stat_for(self.run.run_dir.path))
        self.rules = rules_of(self.run.config)


def watch(runs: Sequence[Watched], sleep: Callable[[float], None], looks: JobLooks, pass_s: float) -> None:
    """Supervise until every run is over; LostError when one of them belongs to another supervisor by now."""
    while remaining := [each for each in runs if not each.run.state.is_over]:
        looks.look_if_due([each.run for each in remaining])
        made = [one_pass(each, looks, remaining) for each in remaining if is_due(each, looks)]
        is_half_done = any(isinstance(decision, _HALF_THE_WAY) for decision in made)
        if not is_half_done and not all(each.run.state.is_over for each in runs):
            sleep(pass_s)


def is_due(watched: Watched, looks: JobLooks) -> bool:
    """Whether a pass may find something to do: by the clock, the scheduler's answer and a glance at the files."""
    rest, run = watched.rest, watched.run
    if rest is None:
        return True
    glance = watched.observer.glance()  # also where a pass is due anyway: it tells who is to have his turn first
    if glance is Glance.NEWS or time.monotonic() >= rest.until or looks.answer(run.state.job_id) != rest.answer:
        return True
    if run.own.has_lost_its_worker(run.state.job_id):
        return True
    if glance is Glance.STEPS:
        rest = watched.rest = replace(rest, seen=replace(rest.seen, branch=watched.observer.branch))
    watched.ears.progress(run.state, rest.seen)
    return False


def one_pass(watched: Watched, looks: JobLooks, together: Sequence[Watched]) -> Decision:
    """One look at one run, and what follows from it; a full disk or a silent scheduler is waited out."""
    run, before = watched.run, watched.run.state
    watched.rest = None
    try:
        run.lease.beat()
        if run.state.open_intent is not None:
            finish_open_intent(run)
        if run.state.job_id is not None and run.state.job_id not in looks.asked:
            looks.refresh(each.run for each in together)
            if run.state.job_id not in looks.asked:
                return Wait("the scheduler is asked about the job with the next look")
        decision, seen = _look_and_decide(watched, looks)
        if not isinstance(decision, Wait) and run.state.job_id is not None:
            looks.refresh(each.run for each in together)  # act on what is, not on what was seen a while ago
            decision, seen = _look_and_decide(watched, looks)
        carry_out(run, decision)
        watched.ears.progress(run.state, seen)
        if isinstance(decision, Wait) and run.state is before:
            watched.rest = Rest(_rest_until(run, seen), looks.answer(run.state.job_id), seen)
    except SchedulerError as error:
        watched.ears.trouble(f"the scheduler does not answer: {error}")
        return Wait(f"the scheduler does not answer: {error}")
    except UnusableFileError as error:
        watched.ears.trouble(str(error))
        return Wait(str(error))
    except OSError as error:
        watched.ears.trouble(
            f"{run.run_dir.path}: {error.strerror or error}; nothing is done before it can be written down"
        )
        return Wait(str(error))
    return decision


def _rest_until(run: SupervisedRun, seen: Observation) -> float:
    """When the next pass is due where nothing happens: with the next beat at the latest."""
    is_queued = seen.job is not None and seen.job.state is JobState.PENDING
    is_long = is_queued or (not is_about_to_change(run) and not seen.reports)
    return min(time.monotonic() + (LONG_REST_S if is_long else REST_S), run.lease.beaten_at + BEAT_EVERY_S)


def _look_and_decide(watched: Watched, looks: JobLooks) -> tuple[Decision, Observation]:
    run = watched.run
    job_id = run.state.job_id
    job = looks.found.get(job_id) if job_id is not None else None
    if job is not None and job.name != run.state.job_name:
        job = None  # a controller that lost its memory gives an id out again
    nodes = looks.nodes
    if job is not None and run.own.is_workers(job_id) and not run.has_next_job:
        job = _from_within(run.own, job)
        nodes = {name: node for name, node in nodes.items() if not node.is_down}  # Slurm itself puts the job back
    seen = watched.observer.look(run.state, run.clock(), job, looks.error)
    seen = replace(seen, nodes=nodes, reservations=looks.reservations)
    run.silent_s = unusual_silence_s(seen)
    if run.state.is_over:
        return _hear(watched, seen), seen
    _note_silence(run, seen)
    for event in news(run.state, seen, run.config.checkpoint.healthy_after):
        run.record(_with_changes(run, event))
    for hang in hang_news(run.state, seen, run.config.recovery.hang_timeout_s):
        run.record(hang)
    for strike in strikes(run.state, seen):
        run.record(strike)
    _note_edit(watched)
    _clear_request(watched, seen)
    return decide(run.state, seen, watched.rules), seen


def _from_within(own: OwnJob, job: JobStatus) -> JobStatus:
    """The job that this supervisor shares with the worker: it is over with the worker's tasks.

    LostError where Slurm has given this start of it up, with its node, on which this process may live on.
    """
    if job.restarts > own.restart or job.state in (JobState.PENDING, JobState.REQUEUED):
        raise LostError(f"job {job.job_id} was put back into the queue")
    is_over = job.state is JobState.RUNNING and own.has_lost_its_worker(job.job_id)
    return replace(job, state=JobState.COMPLETED) if is_over else job


def _hear(watched: Watched, seen: Observation) -> Decision:
    """Write down what is asked of a run that is over; it may be open then, and an answered STOP must not end it."""
    for event in request_news(watched.run.state, seen.request, seen.steps):
        if isinstance(event, RollbackRequested):
            remove_left(watched.run.run_dir.stop_file)
        watched.run.record(_with_changes(watched.run, event))
    _clear_request(watched, seen)
    return Wait("the run is over")


def _note_edit(watched: Watched) -> None:
    """Write down that somebody edited config.yaml, once the file stays as it is."""
    run, stamp = watched.run, _stamp(watched.run.run_dir.config)
    if stamp == watched.config_stamp:
        return
    if stamp != watched.new_stamp:
        watched.new_stamp = stamp
        return
    events = read_journal(run.run_dir.journal)
    told_last = next((event for event in reversed(events) if isinstance(event, ConfigEdited)), None)
    was_readable = told_last is None or told_last.changed is not None
    try:
        config = contract_config.read(run.run_dir.config)
    except UnusableFileError as error:
        run.record(ConfigEdited(reason=f"{error}: the worker's next start is refused; mend it"))
    else:
        changed = changes(events, config)
        stays = fixed_since(events, config, run.state.attempt)
        if changed:
            run.record(ConfigEdited(changed=changed, reason=f"config.yaml: {what_comes_of(changed, stays)}"))
        elif not was_readable:
            run.record(ConfigEdited(changed={}, reason="config.yaml can be read again, and is what it was"))
    watched.config_stamp, watched.new_stamp = stamp, None


def _stamp(path: Path) -> tuple[int, int]:
    """What changes whenever a file is written; that of no file is zero."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _with_changes(run: SupervisedRun, event: Event) -> Event:
    """A person's rollback with what changed in config.yaml, by which the next attempt trains."""
    if not isinstance(event, RollbackRequested):
        return event
    try:
        changed = changes(read_journal(run.run_dir.journal), contract_config.read(run.run_dir.config))
    except UnusableFileError:
        return event
    return event.model_copy(update={"changed": changed, "reason": f"{event.reason}{told(changed or {})}"})


def _clear_request(watched: Watched, seen: Observation) -> None:
    """Remove a request that is in the journal by now, or that nobody can understand."""
    if seen.request is not None and seen.request.verb != "stop":
        publish_pins(watched.run)
    path = watched.run.run_dir.request
    if not clear_request(path, seen.request):
        watched.ears.trouble(f"{path}: is no request that this version knows; removed")


def _note_silence(run: SupervisedRun, seen: Observation) -> None:
    """The first and the last of a streak of failed looks go into the journal."""
    since = run.state.look_failed_at
    if seen.look_error is not None and since is None:
        run.record(LookFailed(error=seen.look_error, reason="the scheduler does not answer; silence is not an ending"))
    elif seen.look_error is None and since is not None:
        run.record(LookRecovered(quiet_s=seen.now - since, reason="the scheduler answers again"))
