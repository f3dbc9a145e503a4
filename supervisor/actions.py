"""Carries a decision out: the intent on disk, then the effect, then the outcome.

Whoever is killed in between leaves an open intent; its successor does the rest.  Every effect is therefore either
idempotent (quarantine moves, publishing a directive, cancelling) or findable (a job by its name).
"""

import contextlib
import pwd
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from slurm.job import JobRequest, JobState, JobStatus, RequestError
from slurm.scheduler import Scheduler, SchedulerError
from supervisor.believed import believed
from supervisor.decision import (
    AskToStop,
    Begin,
    Cancel,
    ChangeJob,
    Decision,
    EndStopped,
    Exclude,
    Finish,
    GiveUp,
    StartNow,
    Submit,
    Wait,
    WouldDo,
)
from supervisor.exclusion import can_spare, fits, fitting
from supervisor.job_policy import waits_after_requeue
from supervisor.job_request import worker_request
from supervisor.journal import (
    AttemptDecided,
    CancelIntended,
    Cancelled,
    ChangeIntended,
    Continued,
    Diagnosis,
    Event,
    Finished,
    GaveUp,
    JobChanged,
    Journal,
    NodeExcluded,
    Plan,
    RolledBack,
    StartMoved,
    Stopped,
    SubmitFailed,
    SubmitIntended,
    Submitted,
    SupervisorStarted,
    WouldHaveDone,
)
from supervisor.lease import Lease, OwnJob
from supervisor.report.history_csv import write_history_csv
from supervisor.run_state import RunState, apply
from worker.contract.config import Config
from worker.contract.directive import Directive, publish_directive, read_directive
from worker.contract.files import UnusableFileError, sync_folder
from worker.contract.manifest import complete_checkpoints
from worker.contract.run_dir import RunDir, checkpoint_step

_LOOKS_APART_S: Final = 1.0
"""Between two looks for a job that a predecessor may have submitted before it died."""
_UNANSWERED_LOOKS_APART_S: Final = 10.0
"""Between two looks for one that a loaded controller may have queued without saying so."""


@dataclass
class SupervisedRun:
    """One run in the hands of this process: its folder, its lease, its scheduler, and its state so far."""

    config: Config
    run_dir: RunDir
    scheduler: Scheduler
    lease: Lease
    clock: Callable[[], float]
    tell: Callable[[Event], None]
    state: RunState
    has_next_job: bool = False
    """Whether this process has queued the job after the one that it shares with the worker."""
    introduction: SupervisorStarted | None = None
    """Written ahead of the first other event, so that a pass in which nothing happens leaves no line."""
    looked_at: float = 0.0
    """When this process last asked the scheduler for a job by the run's name, whether that answered or not."""
    looked_in_vain_at: float | None = None
    """When it last answered, and had none, though a submission without an answer may have made one."""
    journal: Journal = field(init=False)
    inherited: SubmitIntended | None = field(init=False)
    """The submission that a predecessor died over: nobody knows whether it was made."""

    def __post_init__(self) -> None:
        self.journal = Journal(self.run_dir.journal, self.clock, self.lease.check)
        intent = self.state.open_intent
        self.inherited = intent if isinstance(intent, SubmitIntended) else None

    @property
    def own(self) -> OwnJob:
        """The job that this process runs in, if any."""
        return self.lease.own

    def introduce(self) -> None:
        """Write down who supervises, once."""
        if self.introduction is not None:
            introduction, self.introduction = self.introduction, None
            self.record(introduction)

    def record(self, event: Event, attempt: int | None = None) -> None:
        """Write an event, fold it into the state, show it."""
        self.introduce()
        number = self.state.attempt if attempt is None else attempt
        stamped = self.journal.record(event, number, self.lease.term)
        self.state = apply(self.state, stamped)
        self.tell(stamped)


def carry_out(run: SupervisedRun, decision: Decision) -> None:
    """Do what was decided; SchedulerError and OSError leave an open intent that is finished later."""
    match decision:
        case Wait():
            return
        case Begin():
            run.record(decision.plan, attempt=run.state.attempt + 1)
            _begin_attempt(run, decision.plan)
        case WouldDo():
            fields = decision.plan.model_dump(exclude={"event", "time", "attempt", "term", "reason"})
            reason = f"not done, for recovery.mode is observe: {decision.plan.reason}"
            run.record(WouldHaveDone(**fields, diagnosis=_diagnosis(run, decision.plan), reason=reason))
        case Submit():
            intent = SubmitIntended(name=run.state.job_name, warning_s=decision.warning_s, reason=decision.reason)
            run.record(intent)
            _submit(run)
        case Cancel():
            _cancel(run, decision.job_id, decision.reason)
        case StartNow():
            _start_now(run, decision)
        case ChangeJob():
            _change(run, decision)
        case Exclude():
            _exclude(run, decision)
        case AskToStop():
            _publish_stop(run, "save")
        case Finish():
            _publish_stop(run, "now")
            write_history_csv(run.run_dir)
            run.record(Finished(final_step=decision.final_step, reason=decision.reason))
        case EndStopped():
            _end_stopped(run, decision)
        case GiveUp():
            _give_up(run, decision)


def finish_open_intent(run: SupervisedRun) -> None:
    """Do the rest of what a predecessor, or a failed call, left half done."""
    intent = run.state.open_intent
    match intent:
        case AttemptDecided():
            _begin_attempt(run, intent)
        case SubmitIntended():
            _submit(run)
        case CancelIntended():
            _end_job(run, intent.job_id)
            run.record(Cancelled(job_id=intent.job_id, reason=f"job {intent.job_id}"))
        case ChangeIntended():
            _finish_change(run, intent)
        case None:
            return


# -- attempts ----------------------------------------------------------------------------------------------------------


def _begin_attempt(run: SupervisedRun, plan: AttemptDecided) -> None:
    number = run.state.attempt + 1
    for name in plan.quarantine:
        _quarantine(run.run_dir, name, run.state.attempt)
    _prune_quarantine(run.run_dir, run.config.checkpoint.keep_quarantined, run.state.pinned)
    published = _published(run)
    if published is None or published.attempt < number:
        publish_directive(run.run_dir.directive, _directive(run, plan, number))
    run.record(_outcome(plan, _diagnosis(run, plan)), attempt=number)


def _diagnosis(run: SupervisedRun, plan: AttemptDecided) -> Diagnosis | None:
    """What is believed of the verdict that ``plan`` answers; None where it answers none, or a person's word."""
    if plan.rollback is None or plan.cause == "rollback":
        return None
    return believed(run.run_dir, run.state.attempt, plan.rollback.verdict_step)


def _published(run: SupervisedRun) -> Directive | None:
    """The directive as it stands; None where there is none, or one that was spoilt and is to be written again."""
    try:
        return read_directive(run.run_dir.directive)
    except UnusableFileError:
        return None


def _directive(run: SupervisedRun, plan: Plan, number: int) -> Directive:
    return Directive(
        attempt=number,
        pinned=run.state.pinned,
        accept_level=plan.accept_level,
        resume_from=plan.resume_from,
        on_requeue="wait" if waits_after_requeue(run.config.recovery) else "continue",
        new_job=plan.where == "new_job",
        lr_scale=plan.lr_scale,
        lr_ramp=plan.lr_ramp,
        skip_batches=plan.skip_batches,
        reset_moments=plan.reset_moments,
        rewarm_steps=plan.rewarm_steps,
        reset_from=plan.reset_from,
        rehearse=run.state.rehearse,
        cause=plan.cause,
        reason=plan.reason,
        time=run.clock(),
    )


def _outcome(plan: AttemptDecided, diagnosis: Diagnosis | None = None) -> RolledBack | Continued:
    shared = plan.model_dump(exclude={"event", "rollback", "time", "attempt", "term"})
    if plan.rollback is not None:
        return RolledBack(**shared, **plan.rollback.model_dump(), diagnosis=diagnosis)
    return Continued(**shared)


def _quarantine(run_dir: RunDir, name: str, attempt: int) -> None:
    """Move a checkpoint of the abandoned branch aside; one that is gone was moved before."""
    source = run_dir.checkpoints / name
    run_dir.quarantine.mkdir(exist_ok=True)
    target = run_dir.quarantine / f"a{attempt}-{name}"
    if source.exists() and not target.exists():
        source.rename(target)
        sync_folder(run_dir.checkpoints)
        sync_folder(run_dir.quarantine)


def _prune_quarantine(run_dir: RunDir, keep: int, pinned: Collection[int]) -> None:
    """Remove all quarantined checkpoints but the ``keep`` newest (of the latest attempt, of the highest step) and the
    pinned."""
    if not run_dir.quarantine.exists():
        return
    ranked = []
    for folder in run_dir.quarantine.iterdir():
        attempt, _, name = folder.name.partition("-")
        step = checkpoint_step(name)
        if step is not None and step not in pinned and attempt[1:].isdigit():
            ranked.append((int(attempt[1:]), step, folder))
    for _, _, folder in sorted(ranked, reverse=True)[keep:]:
        shutil.rmtree(folder, ignore_errors=True)


# -- jobs --------------------------------------------------------------------------------------------------------------


def _submit(run: SupervisedRun) -> None:
    """Adopt the run's live job, or submit one; a refusal is an event, silence leaves the intent open."""
    name, asked_at = run.state.job_name, _asked_without_answer(run)
    if asked_at is not None and _looked_just_now(run):
        return
    run.looked_at = run.clock()
    ended = run.state.ended_or_cancelled | run.state.cancelled_by_us
    known = [job for job in run.scheduler.find(name) if _may_adopt(run, job, ended)]
    if known:
        _adopt(run, known[0])
        return
    if asked_at is not None and not _is_surely_absent(run, asked_at):
        return
    try:
        request, without = fitting(run.scheduler, partial(_request, run), list(run.state.excluded(run.clock())))
        job_id = run.scheduler.submit(request)
    except (SchedulerError, RequestError) as error:
        answered = not isinstance(error, SchedulerError) or error.answered
        if answered and run.own.tasks_over is not None:
            _put_back(run, error)
            return
        run.record(
            SubmitFailed(name=name, error=str(error), answered=answered, reason=f"the submission failed: {error}")
        )
        return
    run.has_next_job = True
    left_out = f", without {', '.join(without)}" if without else ""
    reason = f"job {job_id} is submitted for attempt {run.state.attempt}{left_out}"
    run.record(Submitted(name=name, job_id=job_id, reason=reason))


def _may_adopt(run: SupervisedRun, job: JobStatus, ended: Collection[str]) -> bool:
    """Whether a live job of the run's name is the one that its attempt is to have."""
    if run.own.is_workers(job.job_id):
        return not run.own.has_lost_its_worker(job.job_id)
    return job.job_id not in ended and not job.state.is_over


def _adopt(run: SupervisedRun, job: JobStatus) -> None:
    is_own = run.own.is_workers(job.job_id)
    restarts, reason = (run.own.restart, "it is the job that this runs in") if is_own else (0, "found by its name")
    run.has_next_job = not is_own
    run.record(Submitted(name=run.state.job_name, job_id=job.job_id, adopted=True, restarts=restarts, reason=reason))


def _put_back(run: SupervisedRun, refusal: Exception) -> None:
    """Give the attempt the job that this runs in once more, where no second one is allowed beside it."""
    own = run.own
    run.scheduler.requeue(own.job_id)
    run.has_next_job = True
    reason = f"job {own.job_id} is put back into the queue, for a second one is not allowed ({refusal})"
    run.record(Submitted(name=run.state.job_name, job_id=own.job_id, restarts=own.restart + 1, reason=reason))


def _asked_without_answer(run: SupervisedRun) -> float | None:
    """When a submission was asked for that may have made a job, as far as anybody knows; None = there was none."""
    inherited = run.inherited is not None and run.state.open_intent == run.inherited
    return run.state.open_intent.time if inherited and run.state.open_intent else run.state.unanswered_since


def _looked_just_now(run: SupervisedRun) -> bool:
    apart_s = _LOOKS_APART_S if run.state.unanswered_since is None else _UNANSWERED_LOOKS_APART_S
    return run.clock() - run.looked_at < apart_s


def _is_surely_absent(run: SupervisedRun, asked_at: float) -> bool:
    """Whether the job of a submission without an answer will not show up any more.

    One empty look proves nothing on a loaded controller: it takes two, and twice its MessageTimeout.
    """
    before, run.looked_in_vain_at = run.looked_in_vain_at, run.clock()
    was_looked_for = before is not None and before >= asked_at
    return was_looked_for and run.clock() - asked_at >= 2 * run.scheduler.message_timeout_s()


def _request(run: SupervisedRun, exclude: Collection[str]) -> JobRequest:
    intent = run.state.open_intent
    warning = intent.warning_s if isinstance(intent, SubmitIntended) else None
    return worker_request(run.config, run.run_dir, run.state.job_name, run.state.attempt, exclude, warning)


def _exclude(run: SupervisedRun, decision: Exclude) -> None:
    """Leave a node out of the jobs to come; where the request would not fit without it, say so and keep it."""
    nodes = {*run.state.excluded(run.clock()), decision.node}
    can_be_spared = decision.until is None or can_spare(run.scheduler, partial(_request, run), nodes)
    kept = "" if can_be_spared else "; it is kept, for the request would not fit without it"
    until = decision.until if can_be_spared else None
    reason = f"{decision.reason}{kept}"
    run.record(NodeExcluded(node=decision.node, until=until, evidence=decision.evidence, reason=reason))


def _cancel(run: SupervisedRun, job_id: str, reason: str) -> None:
    run.record(CancelIntended(job_id=job_id, reason=reason))
    _end_job(run, job_id)
    run.record(Cancelled(job_id=job_id, reason=f"job {job_id}: {reason}"))


def _end_job(run: SupervisedRun, job_id: str) -> None:
    """Cancel the job; of the one that this supervisor shares with the worker the tasks alone, which are its step 0."""
    run.scheduler.cancel(f"{job_id}.0" if run.own.is_workers(job_id) else job_id)


def _start_now(run: SupervisedRun, decision: StartNow) -> None:
    """Ask for it at each pass until it takes; told once, and before: a successor asks, too, while it has not taken."""
    restarts = run.state.job.restarts if run.state.job is not None else 0
    if run.state.start_moved != (decision.job_id, restarts):
        run.record(StartMoved(job_id=decision.job_id, reason=decision.reason))
    run.scheduler.start_now(decision.job_id)


def _change(run: SupervisedRun, decision: ChangeJob) -> None:
    intent = ChangeIntended(**vars(decision))
    run.record(intent)
    _finish_change(run, intent)


def _finish_change(run: SupervisedRun, intent: ChangeIntended) -> None:
    """Change a job in the queue; what the scheduler does not allow is an event too, and is not tried again."""
    error = None
    try:
        _apply_change(run, intent)
    except SchedulerError as refusal:
        if not refusal.answered:
            raise
        error = str(refusal)
    reason = intent.reason if error is None else f"not changed ({error}): {intent.reason}"
    changed = JobChanged(
        job_id=intent.job_id, what=intent.what, old=intent.old, new=intent.new, error=error, reason=reason
    )
    run.record(changed)


def _apply_change(run: SupervisedRun, change: ChangeIntended) -> None:
    match change.what:
        case "released":
            run.scheduler.release(change.job_id)
        case "exclude":
            nodes = (change.new or "").split(",")
            if not fits(run.scheduler, _request(run, nodes)):
                raise SchedulerError("the request would not fit without it", ["test_only"])
            own = run.config.cluster.exclude  # the scheduler keeps one list, and the person's own is in it
            run.scheduler.change(change.job_id, exclude_nodes=[*([own] if own else []), *nodes])
        case "time_limit":
            run.scheduler.change(change.job_id, time_limit=change.new)
        case "partition" | "qos":
            run.scheduler.change(change.job_id, partition=change.partition, qos=change.qos)


def publish_pins(run: SupervisedRun) -> None:
    """Let the worker's retention know which checkpoints are pinned; a directive to come says so by itself."""
    directive = _published(run)
    if directive is not None and directive.pinned != run.state.pinned:
        publish_directive(run.run_dir.directive, directive.model_copy(update={"pinned": run.state.pinned}))


# -- endings -----------------------------------------------------------------------------------------------------------


def _publish_stop(run: SupervisedRun, how: str) -> None:
    """Republish the attempt's directive with a stop, so that no agent trains or waits on; never weaken one."""
    directive = _published(run)
    if directive is None and run.state.plan is not None:
        directive = _directive(run, run.state.plan, run.state.attempt)
    if directive is None or directive.stop in (how, "now"):
        return
    publish_directive(run.run_dir.directive, directive.model_copy(update={"stop": how}))


def _end_stopped(run: SupervisedRun, decision: EndStopped) -> None:
    _publish_stop(run, "now")
    by, reason = decision.by, decision.reason
    if by is None and run.state.job_id is not None:
        with contextlib.suppress(SchedulerError):
            by = _user_name(run.scheduler.cancelled_by(run.state.job_id))
        reason = f"{reason} by {by or 'a person'}, not by this supervisor"
    run.record(Stopped(saved_step=decision.saved_step, by=by, reason=reason))


def _user_name(user: str | None) -> str | None:
    """A user's name where the scheduler gave a number that this host knows."""
    if user is None or not user.isdigit():
        return user
    try:
        return pwd.getpwuid(int(user)).pw_name
    except KeyError:
        return user


def _give_up(run: SupervisedRun, decision: GiveUp) -> None:
    _publish_stop(run, "now")
    state = run.state
    is_live = state.has_live_job and state.job_id not in state.cancelled_by_us
    if is_live and state.job_id is not None and not (state.job and JobState(state.job.state).is_over):
        _cancel(run, state.job_id, "the run gives up")
    newest = max((each.step for each in complete_checkpoints(run.run_dir)), default=None)
    run.record(GaveUp(tried=decision.tried, error=decision.error, saved_step=newest, reason=decision.reason))
