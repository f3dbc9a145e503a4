"""The loop: observe, decide, act, sleep; for one run or for many with one scheduler query for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from slurm.job import JobState, JobStatus
from slurm.scheduler import SchedulerError
from supervisor.actions import SupervisedRun, carry_out, finish_open_intent, publish_pins
from supervisor.attempts import Rules, rules_of
from supervisor.bad_nodes import strikes
from supervisor.decision import Decision, Wait
from supervisor.hangs import hang_news
from supervisor.job_looks import JobLooks
from supervisor.journal import LookFailed, LookRecovered, RollbackRequested
from supervisor.lease import LostError, OwnJob
from supervisor.observation import Observation, Observer, news
from supervisor.policy import decide
from supervisor.requests import clear_request, request_news
from supervisor.run_state import RunState
from worker.contract.files import UnusableFileError, remove_left
from worker.contract.run_dir import RunDir

LOCAL_PASS_S: Final = 0.3
REMOTE_PASS_S: Final = 2.0
_NETWORK_FILESYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "fuse.ceph", "fuse.sshfs", "9p", "afs"}
    | {"pvfs2", "orangefs", "wekafs", "panfs"}
)


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


@dataclass
class Watched:
    """A supervised run together with what the loop keeps about it between two passes."""

    run: SupervisedRun
    ears: Ears
    observer: Observer = field(init=False)
    rules: Rules = field(init=False)

    def __post_init__(self) -> None:
        self.observer = Observer(self.run.run_dir)
        self.rules = rules_of(self.run.config)


def watch(runs: Sequence[Watched], sleep: Callable[[float], None], looks: JobLooks, pass_s: float) -> None:
    """Supervise until every run is over; LostError when one of them belongs to another supervisor by now."""
    while remaining := [each for each in runs if not each.run.state.is_over]:
        looks.look_if_due([each.run for each in remaining])
        for each in remaining:
            one_pass(each, looks, remaining)
        if not all(each.run.state.is_over for each in runs):
            sleep(pass_s)


def one_pass(watched: Watched, looks: JobLooks, together: Sequence[Watched]) -> Decision:
    """One look at one run, and what follows from it; a full disk or a silent scheduler is waited out."""
    run = watched.run
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
    if run.state.is_over:
        return _hear(watched, seen), seen
    _note_silence(run, seen)
    for event in news(run.state, seen, run.config.checkpoint.healthy_after):
        run.record(event)
    for hang in hang_news(run.state, seen, run.config.recovery.hang_timeout_s):
        run.record(hang)
    for strike in strikes(run.state, seen):
        run.record(strike)
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
    for event in request_news(watched.run.state, seen.request):
        if isinstance(event, RollbackRequested):
            remove_left(watched.run.run_dir.stop_file)
        watched.run.record(event)
    _clear_request(watched, seen)
    return Wait("the run is over")


def _clear_request(watched: Watched, seen: Observation) -> None:
    """Remove a request that is in the journal by now, or that nobody can understand."""
    if seen.request is not None and seen.request.verb == "pin":
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


def seconds_between_passes(run_dir: RunDir, mounts: Path = Path("/proc/self/mountinfo")) -> float:
    """How often to look at a run's files: 0.3 s on a local disk, 2 s on one that other hosts share."""
    return REMOTE_PASS_S if _filesystem(run_dir.path, mounts) in _NETWORK_FILESYSTEMS else LOCAL_PASS_S


def _filesystem(path: Path, mounts: Path) -> str:
    """The type of the file system that ``path`` lies on; empty where that cannot be known."""
    best, kind = "", ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape")
        if len(point) >= len(best) and path.resolve().is_relative_to(point):
            best, kind = point, fields[fields.index("-") + 1]
    return kind
