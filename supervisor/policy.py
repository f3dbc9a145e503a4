"""What to do next, and why.  Pure: values in, one decision out."""

from typing import Final

from slurm.job import JobState
from supervisor.attempts import Rules, begin, continue_run, job_is_over, last_step, plan_attempt, run_scale
from supervisor.bad_nodes import node_to_exclude
from supervisor.budget import spent_gpu_hours
from supervisor.decision import AskToStop, Begin, Cancel, Decision, EndStopped, Finish, GiveUp, Wait
from supervisor.hangs import answer_hang
from supervisor.job_policy import after_out_of_memory, fate_of_lost_nodes, follow_job
from supervisor.journal import AttemptDecided, WorkerLeft
from supervisor.observation import STOP_FILE, Observation
from supervisor.observe_policy import hold_back
from supervisor.person_policy import roll_back_as_asked
from supervisor.ruined import ruin
from supervisor.run_state import RunState
from supervisor.spike_policy import answer_verdict
from worker.contract.exit_report import PROOF_ERROR, Outcome


def decide(run: RunState, seen: Observation, rules: Rules) -> Decision:
    """The one next thing to do for a run that is not over; ``seen`` is already in the journal."""
    decision = _decide(run, seen, rules)
    return hold_back(run, seen, rules, decision) if rules.recovery.mode == "observe" else decision


def _decide(run: RunState, seen: Observation, rules: Rules) -> Decision:
    left = run.left
    if left is not None and left.outcome is Outcome.DONE:
        step = left.step if left.step is not None else last_step(seen)
        but = ruin(seen.branch, seen.manifests, rules.checkpoint.healthy_after, rules.run)
        done = "its only step is done" if step == 1 else f"all {step} steps are done"
        return Finish(step, f"{done}{f'; {but}' if but else ''}")
    again = _cancel_again(run, seen)
    if again is not None:
        return again
    if run.stop_by is not None:
        return _stop(run, seen, rules, run.stop_by)
    spent = spent_gpu_hours(run, seen, rules)
    if spent is not None:
        return spent
    if _was_stopped_by_file(left):
        return _end_stopped(run, seen, rules, STOP_FILE, f"{STOP_FILE} asked the worker to stop")
    if _was_cancelled_by_a_person(run, seen):
        return EndStopped(_newest_step(seen), None, f"job {run.job_id} was CANCELLED")
    if run.rollback_asked is not None:
        return roll_back_as_asked(run, seen, rules, run.rollback_asked)
    exclusion = node_to_exclude(run, seen.now, rules.recovery)
    if exclusion is not None:
        return exclusion
    if run.verdict is not None:
        return answer_verdict(run, seen, rules, run.verdict)
    if run.awaits_attempt:
        return _first_attempt(run, seen)
    lost = _lost_nodes_that_ended_it(run, seen)
    if lost is not None:
        return continue_run(run, seen, rules, "node_failed", lost)
    if run.hang is not None and (answer := answer_hang(run, seen, rules, run.hang)) is not None:
        return answer
    if left is not None and left.outcome in _ANSWERS:
        return _ANSWERS[left.outcome](run, seen, rules, left)
    return follow_job(run, seen, rules)


def _cancel_again(run: RunState, seen: Observation) -> Cancel | None:
    """A cancelled job may go back into the queue all the same, where its node failed or it was requeued just then."""
    job, before = seen.job, run.memory.cancelled_restart
    if job is None or before is None or job.job_id != run.job_id or job.restarts <= before:
        return None
    is_ending = job.state.is_over or job.state is JobState.COMPLETING
    return None if is_ending else Cancel(job.job_id, "it was put back into the queue just as it was cancelled")


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
    return EndStopped(_newest_step(seen), by, reason + _all_done(run, seen))


def _was_cancelled_by_a_person(run: RunState, seen: Observation) -> bool:
    is_cancelled = seen.job is not None and seen.job.state is JobState.CANCELLED and seen.job.job_id == run.job_id
    is_answered = run.awaits_attempt  # somebody has asked for the run to go on since
    return is_cancelled and not is_answered and run.job_id not in run.cancelled_by_us


def _newest_step(seen: Observation) -> int | None:
    return seen.manifests[-1].step if seen.manifests else None


def _all_done(run: RunState, seen: Observation) -> str:
    """What is to be said of a run whose last step is saved and whose weights are not published; empty of others."""
    start = run.segment_started.start if run.segment_started is not None else None
    is_done = start is not None and _newest_step(seen) == start.max_steps
    return "; all steps are done, a resume only writes final/" if is_done else ""


def _lost_nodes_that_ended_it(run: RunState, seen: Observation) -> str | None:
    """Of a worker that crashed, hung or was ended: the nodes lost under it, with which its ranks cannot but fail."""
    has_failed = run.hang is not None if run.left is None else run.left.outcome in (Outcome.CRASHED, Outcome.ENDED)
    if not has_failed:
        return None
    is_node_fail = seen.job is not None and seen.job.state is JobState.NODE_FAIL
    return fate_of_lost_nodes(run, seen) or (f"Slurm says {JobState.NODE_FAIL.value}" if is_node_fail else None)


def _answer_refused(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    error = left.error
    message = error.message if error else "no reason given"
    if error is not None and error.points_at_disk and error.type != PROOF_ERROR:
        return continue_run(run, seen, rules, "crash", left.reason)
    if error is None or error.type != PROOF_ERROR or run.plan is None or run.plan.resume_step == 0:
        return GiveUp(f"the worker will not train: {message}", error=message)
    older = [m for m in seen.manifests if m.step < run.plan.resume_step]
    if not older:
        return GiveUp(f"no older checkpoint is left to try: {message}", error=message)
    reason = f"checkpoint-{run.plan.resume_step} does not restore ({message}): the next older one, at the same rate"
    plan = plan_attempt(run, seen, "refused", older[-1], run_scale(run), reason, run.plan.resume_step - 1)
    return begin(run, seen, rules, plan)


def _answer_crash(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    by_slurm = seen.job is not None and seen.job.state is JobState.OUT_OF_MEMORY
    if by_slurm and left.error is not None and left.error.type == "Signal":
        return after_out_of_memory(run, seen, rules, f"Slurm says OUT_OF_MEMORY, and {left.error.message}")
    same_twice = run.crash_signature is not None and run.crash_signature == run.previous_crash_signature
    if same_twice and left.error is not None:
        reason = f"the same crash twice before any step: {left.error.type}: {left.error.message}"
        return GiveUp(reason, error=left.error.traceback or left.error.message)
    return continue_run(run, seen, rules, "crash", left.reason)


def _answer_out_of_memory(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    return after_out_of_memory(run, seen, rules, left.reason)


def _answer_ended(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    return continue_run(run, seen, rules, "crash", left.reason)


def _answer_verdict_without_record(run: RunState, seen: Observation, rules: Rules, left: WorkerLeft) -> Decision:
    return Wait("the worker stopped on a verdict; its record is not visible here yet")


_ANSWERS: Final = {
    Outcome.REFUSED: _answer_refused,
    Outcome.OUT_OF_MEMORY: _answer_out_of_memory,
    Outcome.CRASHED: _answer_crash,
    Outcome.ENDED: _answer_ended,
    Outcome.VERDICT: _answer_verdict_without_record,
}


def _first_attempt(run: RunState, seen: Observation) -> Decision:
    """The first attempt ever, or the first after a person's resume."""
    newest = seen.manifests[-1] if seen.manifests else None
    if run.attempt == 0 and newest is not None and newest.adopted:
        reason = f"the run goes on from checkpoint-{newest.step}, which it has adopted"
        return Begin(plan_attempt(run, seen, "adopted", newest, 1.0, reason))
    if run.attempt == 0:
        return Begin(AttemptDecided(attempt=1, cause="first", where="new_job", reason="the run begins"))
    return Begin(plan_attempt(run, seen, "resumed", newest, run_scale(run), "a person asked for the run to go on"))
