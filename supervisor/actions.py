"""Carries a decision out: the intent on disk, then the effect, then the outcome.

Whoever is killed in between leaves an open intent; its successor does the rest.  Every effect is therefore either
idempotent (quarantine moves, publishing a directive, cancelling) or findable (a job by its name).
"""

import contextlib
import pwd

from slurm.job import JobState
from slurm.scheduler import LocalScheduler, SchedulerError
from supervisor.attempt_actions import begin_attempt, diagnosis_of, directive_of, published_directive
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
    Refuse,
    StartNow,
    Submit,
    Wait,
    WouldDo,
)
from supervisor.job_actions import cancel, change_job, end_job, exclude, finish_change, start_now, submit
from supervisor.journal import (
    AttemptDecided,
    CancelIntended,
    Cancelled,
    ChangeIntended,
    Finished,
    GaveUp,
    Stopped,
    SubmitIntended,
    WouldHaveDone,
)
from supervisor.report.history_csv import write_history_csv
from supervisor.supervised_run import SupervisedRun
from worker.contract.directive import publish_directive
from worker.contract.manifest import complete_checkpoints


def carry_out(run: SupervisedRun, decision: Decision) -> None:
    """Do what was decided; SchedulerError and OSError leave an open intent that is finished later."""
    match decision:
        case Wait():
            return
        case Begin():
            run.record(decision.plan, attempt=run.state.attempt + 1)
            begin_attempt(run, decision.plan)
        case WouldDo():
            fields = decision.plan.model_dump(exclude={"event", "time", "attempt", "term", "reason"})
            reason = f"not done, for recovery.mode is observe: {decision.plan.reason}"
            run.record(WouldHaveDone(**fields, diagnosis=diagnosis_of(run, decision.plan), reason=reason))
        case Refuse():
            run.record(decision.event)
        case Submit():
            intent = SubmitIntended(name=run.state.job_name, warning_s=decision.warning_s, reason=decision.reason)
            run.record(intent)
            submit(run)
        case Cancel():
            cancel(run, decision.job_id, decision.reason)
        case StartNow():
            start_now(run, decision)
        case ChangeJob():
            change_job(run, decision)
        case Exclude():
            exclude(run, decision)
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
            begin_attempt(run, intent)
        case SubmitIntended():
            submit(run)
        case CancelIntended():
            end_job(run, intent.job_id)
            run.record(Cancelled(job_id=intent.job_id, reason=f"job {intent.job_id}"))
        case ChangeIntended():
            finish_change(run, intent)
        case None:
            return


def _publish_stop(run: SupervisedRun, how: str) -> None:
    """Republish the attempt's directive with a stop, so that no agent trains or waits on; never weaken one."""
    directive = published_directive(run)
    if directive is None and run.state.plan is not None:
        directive = directive_of(run, run.state.plan, run.state.attempt)
    if directive is None or directive.stop in (how, "now"):
        return
    publish_directive(run.run_dir.directive, directive.model_copy(update={"stop": how}))


def _end_stopped(run: SupervisedRun, decision: EndStopped) -> None:
    _publish_stop(run, "now")
    by, reason = decision.by, decision.reason
    if by is None and run.state.job_id is not None:
        with contextlib.suppress(SchedulerError):
            by = _user_name(run.scheduler.cancelled_by(run.state.job_id))
        if by is None and isinstance(run.scheduler, LocalScheduler):
            by = "a signal from outside"
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
        cancel(run, state.job_id, "the run gives up")
    newest = max((each.step for each in complete_checkpoints(run.run_dir)), default=None)
    verdict = state.verdict
    diagnosis = believed(run.run_dir, state.attempt, verdict.step) if verdict is not None else None
    told = {"tried": decision.tried, "error": decision.error, "reason": decision.reason}
    run.record(GaveUp(**told, saved_step=newest, diagnosis=diagnosis))
