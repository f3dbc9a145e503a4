"""One run in the hands of this process, from the lease to the last event."""

import contextlib
import getpass
import os
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from slurm.job import JobStatus
from slurm.scheduler import LocalScheduler, Scheduler, SchedulerError, choose
from supervisor.attempts import rules_of, run_scale
from supervisor.audience import Audience
from supervisor.config_history import changes, told, told_of_scale
from supervisor.decision import Decision, Wait
from supervisor.disk import seconds_between_passes
from supervisor.fold import replay
from supervisor.job_looks import BUSY_LOOK_S, QUIET_LOOK_S, JobLooks
from supervisor.journal import Journal, ResumeRequested, SupervisorStarted, mend_journal, read_journal
from supervisor.lease import NO_JOB, Lease, LostError, OwnJob, take_lease
from supervisor.notify import Notifier
from supervisor.report.screen import Lines, Screen
from supervisor.report.tensorboard import TensorBoard
from supervisor.run_state import RunState
from supervisor.runs import changed_keys, refuse_spoilt
from supervisor.spike_policy import lowered_scale
from supervisor.supervised_run import SupervisedRun
from supervisor.views import ReportAtTheEnd
from supervisor.watch import Watched, one_pass, watch
from worker.contract import config as contract_config
from worker.contract.config import Config
from worker.contract.files import is_left, remove_left
from worker.contract.run_dir import RunDir


def read_state(run_dir: RunDir) -> RunState:
    """Where the run stands by its journal."""
    return replay(read_journal(run_dir.journal))


class JobEndsError(Exception):
    """The supervisor's own job is about to end; the run goes on."""


def supervise(
    run_dir: RunDir,
    out: TextIO,
    *,
    is_asked: bool = False,
    own: OwnJob = NO_JOB,
    leaves: Callable[[SupervisedRun], bool] = lambda run: False,
) -> RunState:
    """Take the run's lease and supervise it to its end; a run that is over goes on only when a person asked.

    HeldError where another supervisor lives, LostError where one took over; JobEndsError where, between two passes,
    this supervisor ``leaves`` the ``own`` job that it runs in.
    """
    if read_state(run_dir).is_over and not is_asked:
        return read_state(run_dir)
    watched, looks, lease = _begin(run_dir, out, own)
    run, pass_s = watched.run, seconds_between_passes(run_dir.path)

    def rest(seconds: float) -> None:
        if leaves(run):
            raise JobEndsError
        time.sleep(seconds)

    with _in_hand(watched, lease):
        run.introduce()
        if is_asked and not run.state.is_over and is_left(run_dir.stop_file):
            watch([watched], rest, looks, pass_s)  # it may be half obeyed by now
        if is_asked and run.state.is_over and run.state.state != "finished":
            remove_left(run_dir.stop_file)
            run.record(_asked(run_dir, run.config, run.state))
        watch([watched], rest, looks, pass_s)
        return run.state


def supervise_once(run_dir: RunDir, out: TextIO) -> RunState:
    """Take the run's lease, do what there is to do now, and leave; a pass without news leaves no line."""
    if read_state(run_dir).is_over:
        return read_state(run_dir)
    watched, looks, lease = _begin(run_dir, out)
    with _in_hand(watched, lease):
        looks.look([watched.run])
        while not isinstance(one_pass(watched, looks, [watched]), Wait) and not watched.run.state.is_over:
            looks.look([watched.run])
        return watched.run.state


def carry_out_request(run_dir: RunDir, out: TextIO) -> None:
    """Take the run's lease and supervise it until what a person asked for is carried out; also where it was over."""
    watched, looks, lease = _begin(run_dir, out)
    with _in_hand(watched, lease):
        decision: Decision | None = None
        while _is_asked(watched) or not (isinstance(decision, Wait) or watched.run.state.is_over):
            if decision is not None:
                time.sleep(seconds_between_passes(run_dir.path))
            looks.look([watched.run])
            decision = one_pass(watched, looks, [watched])


def _is_asked(watched: Watched) -> bool:
    return watched.run.run_dir.request.exists() or watched.run.state.rollback_asked is not None


@contextlib.contextmanager
def _in_hand(watched: Watched, lease: Lease) -> Iterator[None]:
    """Leave the run in order, however this ends; what comes after a lost lease is its new holder's to write."""
    is_ours = True
    try:
        yield
    except LostError:
        is_ours = False
        raise
    finally:
        if is_ours:
            watched.ears.close(watched.run.state)
        lease.give_up()


def reopen(run_dir: RunDir, config: Config) -> RunState:
    """Make sure that nobody supervises the run, and that it is not over, before a supervisor is started for it.

    A run that was over goes on by ``config``, as ``open_or_create`` allowed it.
    """
    refuse_spoilt(run_dir)
    lease = take_lease(run_dir)
    try:
        mend_journal(run_dir.journal)
        state = read_state(run_dir)
        if not state.is_over:
            lease.give_back()  # its next supervisor tells for how long nobody was there
            return state
        if changed_keys(contract_config.read(run_dir.config), config):
            contract_config.write(run_dir.config, config)
        remove_left(run_dir.stop_file)
        Journal(run_dir.journal, time.time, lease.check).record(
            _asked(run_dir, config, state), state.attempt, lease.term
        )
        return state
    finally:
        lease.give_up()


def _begin(run_dir: RunDir, out: TextIO, own: OwnJob = NO_JOB) -> tuple[Watched, JobLooks, Lease]:
    refuse_spoilt(run_dir)
    config = contract_config.read(run_dir.config)
    scheduler = choose(config.cluster.kind, run_dir.jobs)
    lease = take_lease(run_dir, job_is_over=_is_over(scheduler), own=own)
    watched = take_up(run_dir, config, scheduler, lease, Screen(out, config.run.name, config.training.max_steps))
    return watched, _looks(scheduler, run_dir), lease


def take_up(run_dir: RunDir, config: Config, scheduler: Scheduler, lease: Lease, screen: Screen | Lines) -> Watched:
    """The run as its new supervisor finds it, mended where the last one was killed; who listens to it beside."""
    mend_journal(run_dir.journal)
    _clear_leftovers(run_dir)
    listeners = TensorBoard(run_dir, lease.check), ReportAtTheEnd(run_dir), Notifier(run_dir, config)
    audience = Audience(screen, listeners)
    state = read_state(run_dir)
    started = SupervisorStarted(
        host=lease.file.host,
        pid=os.getpid(),
        job_id=lease.own.job_id or None,
        free_since=None if state.is_over else lease.free_since,
        changed=None if state.is_over else changes(read_journal(run_dir.journal), config) or None,
    )
    run = SupervisedRun(config, run_dir, scheduler, lease, time.time, audience.event, state, introduction=started)
    return Watched(run, audience)


def _clear_leftovers(run_dir: RunDir) -> None:
    """Remove what a predecessor was about to publish when it was killed."""
    for path in (run_dir.directive, run_dir.history_csv, run_dir.lease, run_dir.report):
        for leftover in path.parent.glob(f".tmp-{path.name}-*"):
            leftover.unlink(missing_ok=True)


def _looks(scheduler: Scheduler, run_dir: RunDir) -> JobLooks:
    """The stand-in is asked at each pass, because it costs nothing; a cluster as seldom as can be."""
    if isinstance(scheduler, LocalScheduler):
        return JobLooks(scheduler, quiet_s=seconds_between_passes(run_dir.path), busy_s=0.0)
    return JobLooks(scheduler, quiet_s=QUIET_LOOK_S, busy_s=BUSY_LOOK_S)


def _is_over(scheduler: Scheduler) -> Callable[[str], bool]:
    def ask(job_id: str) -> bool:
        try:
            status = scheduler.look([job_id]).get(job_id)
        except SchedulerError:
            return False
        return status is not None and status.state.is_over

    return ask


def own_job(run_dir: RunDir) -> JobStatus | None:
    """The job that the supervisor lives in or comes with, waiting or running: its own, or where it is embedded the
    worker's; None where there is none. SchedulerError where nobody can say."""
    config, state = contract_config.read(run_dir.config), read_state(run_dir)
    scheduler = choose(config.cluster.kind, run_dir.jobs)
    is_embedded = config.supervisor.place == "embedded" and not isinstance(scheduler, LocalScheduler)
    names = [own_job_name(state), *([state.job_name] if is_embedded else [])]
    return next((job for name in names for job in scheduler.find(name)), None)


def own_job_name(run: RunState) -> str:
    """What the supervisor's own job is called, and found by."""
    return f"hs-{run.run_id[:8]}"


def _asked(run_dir: RunDir, config: Config, state: RunState) -> ResumeRequested:
    user, events = getpass.getuser(), read_journal(run_dir.journal)
    changed = changes(events, config)
    stays = rate_that_stays(run_dir, config)
    reason = f"{user} asked for the run to go on{told(changed or {})}{f'; {stays}' if stays else ''}"
    return ResumeRequested(by=user, changed=changed, reason=reason)


def rate_that_stays(run_dir: RunDir, config: Config) -> str:
    """That a run which is over and goes on by ``config`` does so at less than its rate; empty where it does not."""
    events = read_journal(run_dir.journal)
    state, rules = replay(events), rules_of(config)
    scale = run_scale(state) if state.verdict is None else lowered_scale(state, rules, state.verdict)
    return told_of_scale(state, scale, events, config) if state.is_over else ""
