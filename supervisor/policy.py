"""What to do next, and why.  Pure: values in, one decision out."""

import math
from dataclasses import dataclass
from typing import Final

from slurm.job import JobState
from supervisor.decision import AskToStop, Begin, Cancel, Decision, EndStopped, Finish, GiveUp, StartNow, Submit, Wait
from supervisor.journal import AttemptDecided, Cost, Rollback, VerdictSeen, Where, WorkerLeft
from supervisor.observation import Observation
from supervisor.run_state import MAY_COME_BACK, RunState
from worker.contract.config import CheckpointConfig, RecoveryConfig
from worker.contract.directive import Cause, Directive, LearningRateRamp, scale_at
from worker.contract.exit_report import PROOF_ERROR, Outcome
from worker.contract.manifest import Manifest, rollback_target
from worker.contract.run_dir import checkpoint_name

CLAIM_WAIT_S: Final = 60.0
"""How long a running job may take to claim an attempt that was published for it."""
_HOUR_S: Final = 3600.0
_SUBMIT_RETRY_S: Final = 60.0
_MAX_FAILED_SUBMISSIONS: Final = 5


@dataclass(frozen=True)
class Rules:
    """The parts of a run's configuration that decide."""

    recovery: RecoveryConfig
    checkpoint: CheckpointConfig


def decide(run: RunState, seen: Observation, rules: Rules) -> Decision:
    """The one next thing to do for a run that is not over; ``seen`` is already in the journal."""
    left = run.left
    if left is not None and left.outcome is Outcome.DONE:
        step = left.step if left.step is not None else _last_step(seen)
        return Finish(step, f"all {step} steps are done")
    if run.stop_by is not None:
        return _stop(run, seen, rules, run.stop_by)
    if _was_stopped_by_file(left):
        return _end_stopped(run, seen, rules, "a STOP file", "a STOP file asked the worker to stop")
    if _was_cancelled_by_a_person(run, seen):
        return EndStopped(_newest_step(seen), None, f"job {run.job_id} was cancelled, and not by this supervisor")
    if run.verdict is not None:
        return _answer_verdict(run, seen, rules, run.verdict)
    if run.awaits_attempt:
        return _first_attempt(run, seen)
    if left is not None and left.outcome in _ANSWERS:
        return _ANSWERS[left.outcome](run, seen, rules, left)
    return _follow_job(run, seen, rules)


# -- a person's word ---------------------------------------------------------------------------------------------------


def _was_stopped_by_file(left: WorkerLeft | None) -> bool:
    return left is not None and left.outcome is Outcome.LEFT and left.error is not None and left.error.what == "stop"


def _stop(run: RunState, seen: Observation, rules: Rules, by: str) -> Decision:
    job = seen.job
    if job is not None and job.state in (JobState.PENDING, JobState.HELD) and run.job_id not in run.cancelled_by_us:
        return Cancel(job.job_id, "it was not running yet when the stop came")
    return _end_stopped(run, seen, rules, by, f"stopped by {by}")


def _end_stopped(run: RunState, seen: Observation, rules: Rules, by: str, reason: str) -> Decision:
    if run.has_live_job and not job_is_over(run, seen, rules):
        return AskToStop("the worker is to save and leave")
    return EndStopped(_newest_step(seen), by, reason)


def _was_cancelled_by_a_person(run: RunState, seen: Observation) -> bool:
    is_cancelled = seen.job is not None and seen.job.state is JobState.CANCELLED and seen.job.job_id == run.job_id
    is_answered = run.awaits_attempt  # somebody has asked for the run to go on since
    return is_cancelled and not is_answered and run.job_id not in run.cancelled_by_us


def _last_step(seen: Observation) -> int:
    return seen.last.step if seen.last is not None else 0


def _newest_step(seen: Observation) -> int | None:
    return seen.manifests[-1].step if seen.manifests else None


def waits_after_requeue(recovery: RecoveryConfig) -> bool:
    """Whether a worker that Slurm restarts has to wait for a new attempt, because its rate changes."""
    return recovery.preemption.lr_factor != 1.0


# -- the job -----------------------------------------------------------------------------------------------------------


def job_is_over(run: RunState, seen: Observation, rules: Rules) -> bool:
    """Whether the run's job is over for good; silence of the scheduler never says so."""
    if not run.has_live_job:
        return True
    if seen.look_error is not None:
        return False
    if seen.job is None or seen.job.state in MAY_COME_BACK:
        return run.job is not None and seen.now - run.job.time >= rules.recovery.absent_grace_s
    return seen.job.state.is_over


def _follow_job(run: RunState, seen: Observation, rules: Rules) -> Decision:
    if not run.has_live_job and (run.job_id is None or (run.job_id in run.cancelled_by_us and seen.claim is None)):
        return _submit(run, seen, rules)
    if job_is_over(run, seen, rules):
        return _after_the_job(run, seen, rules)
    if waits_after_requeue(rules.recovery) and run.job is not None and run.job.restarts > run.restarts_at_begin:
        return _continue(run, seen, rules, "preempted", "the job was put back into the queue")
    job = seen.job
    if job is None:
        return Wait("the scheduler does not answer" if seen.look_error else "the scheduler does not show the job")
    if job.state is JobState.PENDING and job.restarts > 0 and job.why == "BeginTime":
        return StartNow(job.job_id, "it was requeued; its start need not wait")
    if _is_unclaimed(run, seen):
        return Cancel(job.job_id, f"nobody in it took up attempt {run.attempt} for {CLAIM_WAIT_S:.0f} s")
    return Wait(job.why if job.state is JobState.PENDING else "the job runs")


def _is_unclaimed(run: RunState, seen: Observation) -> bool:
    """The attempt was published for agents that wait in a running job, and none of them took it up.

    A job that was submitted for the attempt itself has all the time it needs to start.
    """
    was_waiting = run.plan is not None and run.plan.where == "same_allocation" and run.job_since <= run.decided_at
    if not was_waiting or seen.claim is not None or seen.job is None:
        return False
    return seen.job.state is JobState.RUNNING and seen.now - run.decided_at > CLAIM_WAIT_S


def _submit(run: RunState, seen: Observation, rules: Rules) -> Decision:
    if run.failed_submissions >= _MAX_FAILED_SUBMISSIONS:
        return GiveUp(f"{run.failed_submissions} submissions in a row were refused", error=run.reason)
    wait = why_not_submitted(run, seen.now, rules.recovery)
    return Wait(wait) if wait is not None else Submit(f"attempt {run.attempt} needs a job")


def why_not_submitted(run: RunState, now: float, recovery: RecoveryConfig) -> str | None:
    """Why a run without a job is not given one now; None = it is."""
    limit = recovery.max_submissions_per_hour
    recent = [time for time in run.submitted_times if now - time < _HOUR_S]
    if len(recent) >= limit:
        minutes = math.ceil((recent[-limit] + _HOUR_S - now) / 60)
        return f"{limit} jobs within an hour (recovery.max_submissions_per_hour); the next in {minutes} min"
    if now - run.last_submit_failed_at < _SUBMIT_RETRY_S * 2**run.failed_submissions:
        return f"tried again in a while: {run.reason}"
    return None


def _after_the_job(run: RunState, seen: Observation, rules: Rules) -> Decision:
    """The job is over: why, and what follows."""
    cause, reason = _cause_of_end(run, seen.job.state if seen.job is not None else None)
    if cause == "out_of_memory":
        return _after_out_of_memory(run, seen, rules, reason)
    return _continue(run, seen, rules, cause, reason)


_CAUSE_OF_STATE: Final[dict[JobState, Cause]] = {
    JobState.PREEMPTED: "preempted",
    JobState.NODE_FAIL: "node_failed",
    JobState.TIMEOUT: "time_limit",
    JobState.OUT_OF_MEMORY: "out_of_memory",
}


def _cause_of_end(run: RunState, state: JobState | None) -> tuple[Cause, str]:
    what = run.left.error.what if run.left is not None and run.left.error is not None else None
    if what == "time_limit":
        return "time_limit", "the time limit came"
    if what == "preempted":
        return "preempted", "the job was preempted and did not come back"
    if state is not None and state in _CAUSE_OF_STATE:
        return _CAUSE_OF_STATE[state], f"Slurm says {state.value}"
    if run.left is not None:
        return "crash", run.left.reason
    return "vanished", f"job {run.job_id} is over and left no report"


# -- the worker's own ending -------------------------------------------------------------------------------------------


def _answer_refused(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    error = left.error
    message = error.message if error else "no reason given"
    if error is None or error.type != PROOF_ERROR or run.plan is None or run.plan.resume_step == 0:
        return GiveUp(f"the worker will not train: {message}", error=message)
    older = [m for m in seen.manifests if m.step < run.plan.resume_step]
    if not older:
        return GiveUp(f"no older checkpoint is left to try: {message}", error=message)
    reason = f"checkpoint-{run.plan.resume_step} does not restore ({message}): the next older one, at the same rate"
    return _begin(run, seen, rules, "refused", older[-1], run_scale(run), reason)


def _answer_crash(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    same_twice = run.crash_signature is not None and run.crash_signature == run.previous_crash_signature
    if same_twice and left.error is not None:
        reason = f"the same crash twice before any step: {left.error.type}: {left.error.message}"
        return GiveUp(reason, error=left.error.traceback or left.error.message)
    return _continue(run, seen, rules, "crash", left.reason)


def _answer_out_of_memory(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    return _after_out_of_memory(run, seen, rules, left.error.message if left.error else left.reason)


def _after_out_of_memory(run: RunState, seen: Observation, rules: Rules, reason: str) -> Decision:
    """Once more where the attempt made steps, never twice in a row without progress."""
    before = run.plan is not None and run.plan.cause == "out_of_memory" and run.attempts_since_progress > 1
    if before or not run.has_stepped:
        return GiveUp(f"out of memory, and nothing speaks for another try: {reason}", error=reason)
    return _continue(run, seen, rules, "out_of_memory", f"out of memory: {reason}")


def _answer_ended(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    return _continue(run, seen, rules, "crash", left.reason)


def _answer_verdict_without_record(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    return Wait("the worker stopped on a verdict; its record is not visible here yet")


_ANSWERS: Final = {
    Outcome.REFUSED: _answer_refused,
    Outcome.OUT_OF_MEMORY: _answer_out_of_memory,
    Outcome.CRASHED: _answer_crash,
    Outcome.ENDED: _answer_ended,
    Outcome.VERDICT: _answer_verdict_without_record,
}


# -- attempts ----------------------------------------------------------------------------------------------------------


def run_scale(run: RunState) -> float:
    """The rate scale of the present attempt."""
    return run.plan.lr_scale if run.plan is not None else 1.0


def _first_attempt(run: RunState, seen: Observation) -> Decision:
    """The first attempt ever, or the first after a person's resume."""
    if run.attempt == 0:
        return Begin(AttemptDecided(attempt=1, cause="first", where="new_job", reason="the run begins"))
    newest = seen.manifests[-1] if seen.manifests else None
    plan = _plan(run, seen, "resumed", newest, run_scale(run), "new_job", "a person asked for the run to go on")
    return Begin(plan.model_copy(update={"lr_ramp": run.plan.lr_ramp if run.plan is not None else None}))


def _continue(run: RunState, seen: Observation, rules: Rules, cause: Cause, reason: str) -> Decision:
    """Go on from the newest complete checkpoint, at the rate the cause calls for."""
    factor = (
        rules.recovery.preemption.lr_factor if cause in ("preempted", "drained", "node_failed", "time_limit") else 1.0
    )
    newest = seen.manifests[-1] if seen.manifests else None
    scale = run_scale(run) * factor
    return _begin(run, seen, rules, cause, newest, scale, reason)


def _answer_verdict(run: RunState, seen: Observation, rules: Rules, verdict: VerdictSeen) -> Decision:
    limit = rules.recovery.spike.max_rollbacks
    if run.rollbacks_since_progress >= limit:
        tried = f"rolled back {run.rollbacks_since_progress} times, down to {run_scale(run):g} of the rate"
        return GiveUp(f"{limit} rollbacks brought no new healthy checkpoint (recovery.spike.max_rollbacks)", (tried,))
    target = rollback_target(seen.manifests, seen.branch, verdict.onset_step, rules.checkpoint.healthy_after)
    manifest = next((m for m in seen.manifests if m.step == target.step), None)
    scale = _lowered(run, rules, verdict)
    state = (
        f"the newest {target.health} one before the onset" if target.health else "no checkpoint from before the onset"
    )
    place = checkpoint_name(target.step) if manifest else "scratch"
    reason = f"{verdict.reason}; back to {place} ({state}) at {scale:g} of the rate"
    rollback = Rollback(
        kind=verdict.kind,
        verdict_step=verdict.step,
        onset_step=verdict.onset_step,
        batches=verdict.batches,
        from_step=verdict.step,
        to_step=target.step if manifest else 0,
    )
    cause: Cause = (
        "nonfinite" if verdict.kind == "nonfinite" else "divergence" if verdict.kind == "divergence" else "spike"
    )
    return _begin(run, seen, rules, cause, manifest, scale, reason, rollback)


def _lowered(run: RunState, rules: Rules, verdict: VerdictSeen) -> float:
    """The rate scale after a verdict: what was applied when it happened, times the factor, never below the floor."""
    spike = rules.recovery.spike
    factor = rules.recovery.nonfinite.lr_factor if verdict.kind == "nonfinite" else spike.lr_factor
    applied = _applied_scale(run, verdict.step)
    return min(applied, max(spike.min_lr_scale, applied * factor))


def _applied_scale(run: RunState, step: int) -> float:
    if run.plan is None:
        return 1.0
    plan = run.plan
    as_published = Directive(
        attempt=run.attempt, cause=plan.cause, reason="", time=0.0, lr_scale=plan.lr_scale, lr_ramp=plan.lr_ramp
    )
    return scale_at(as_published, step)


def _begin(
    run: RunState,
    seen: Observation,
    rules: Rules,
    cause: Cause,
    start: Manifest | None,
    scale: float,
    reason: str,
    rollback: Rollback | None = None,
) -> Decision:
    """Begin the next attempt, after what must come before it: a budget that lasts, and an old job that is over."""
    limit = rules.recovery.max_attempts_without_progress
    if run.attempts_since_progress >= limit:
        return GiveUp(f"{limit} attempts without a new healthy checkpoint; the last: {reason}", error=reason)
    where = _where(run, seen, rules)
    if where == "new_job" and not job_is_over(run, seen, rules):
        return _part_from_job(run, seen, reason)
    plan = _plan(run, seen, cause, start, scale, where, reason)
    return Begin(plan.model_copy(update={"rollback": rollback, "lr_ramp": _ramp(run, rules, plan, rollback)}))


def _where(run: RunState, seen: Observation, rules: Rules) -> Where:
    """The same job while it waits in the queue or its agents wait in it, and relaunching there is not exhausted."""
    if job_is_over(run, seen, rules) or run.job_id in run.cancelled_by_us:
        return "new_job"
    if seen.job is not None and seen.job.state in (JobState.PENDING, JobState.CONFIGURING, JobState.REQUEUED):
        return "requeued"
    if seen.job is not None and seen.job.state not in (JobState.RUNNING, JobState.SUSPENDED):
        return "new_job"
    return "same_allocation" if run.relaunches_in_job < rules.recovery.relaunches_in_allocation else "new_job"


def _part_from_job(run: RunState, seen: Observation, reason: str) -> Decision:
    assert run.job_id is not None  # job_is_over is true without one
    if run.job_id in run.cancelled_by_us:
        return Wait("the cancelled job is about to end")
    if seen.job is not None and seen.job.state is JobState.COMPLETING:
        return Wait("the job is about to end")
    return Cancel(run.job_id, f"a fresh job is needed: {reason}")


def _ramp(run: RunState, rules: Rules, plan: AttemptDecided, rollback: Rollback | None) -> LearningRateRamp | None:
    """The way back to the full rate: begun anew by a rollback, carried on unchanged by everything else."""
    spike = rules.recovery.spike
    if rollback is None:
        return run.plan.lr_ramp if run.plan is not None else None
    if spike.ramp_steps is None or spike.hold_steps is None:
        return None
    to = max(spike.ramp_to, plan.lr_scale)
    return LearningRateRamp(from_step=plan.resume_step, hold_steps=spike.hold_steps, ramp_steps=spike.ramp_steps, to=to)


def _plan(
    run: RunState, seen: Observation, cause: Cause, start: Manifest | None, scale: float, where: Where, reason: str
) -> AttemptDecided:
    step = start.step if start is not None else 0
    return AttemptDecided(
        attempt=run.attempt + 1,
        cause=cause,
        resume_from=checkpoint_name(step) if start is not None else None,
        resume_step=step,
        lr_scale=scale,
        quarantine=tuple(checkpoint_name(m.step) for m in seen.manifests if m.step > step),
        where=where,
        cost=Cost(steps_repeated=max(0, _last_step(seen) - step)),
        reason=reason,
    )
