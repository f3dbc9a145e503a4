"""What the run's job calls for: submit, follow, start, cancel, go on after its end.  Pure."""

import math
import signal
from typing import Final

from slurm.job import JobState
from supervisor.attempts import Rules, continue_run, job_is_over, lost_nodes
from supervisor.decision import Cancel, Decision, GiveUp, Submit, Wait
from supervisor.job_request import warning_s
from supervisor.journal import SubmitIntended
from supervisor.observation import Observation
from supervisor.queue_policy import follow_queue
from supervisor.run_state import RunState
from worker.contract.directive import Cause
from worker.contract.recovery_config import RecoveryConfig
from worker.contract.words import count

CLAIM_WAIT_S: Final = 60.0
"""How long a running job may take to claim an attempt that was published for it."""
_HOUR_S: Final = 3600.0
_SUBMIT_RETRY_S: Final = 60.0
"""After a submission that was refused; twice as long after each further one in a row."""
_UNANSWERED_RETRY_S: Final = 10.0
"""After one without an answer: its job is looked for first, and may be there already."""
_MAX_FAILED_SUBMISSIONS: Final = 5
_ENDED_BY_THE_WARNING: Final = 128 + signal.SIGUSR2


def waits_after_requeue(recovery: RecoveryConfig) -> bool:
    """Whether a worker that Slurm restarts has to wait for a new attempt, because its rate changes."""
    return recovery.preemption.lr_factor != 1.0 and recovery.mode == "act"


def follow_job(run: RunState, seen: Observation, rules: Rules) -> Decision:
    """What the job calls for when neither a person, a verdict nor the worker itself does."""
    if not run.has_live_job and (run.job_id is None or (run.job_id in run.cancelled_by_us and seen.claim is None)):
        return _submit(run, seen, rules)
    if job_is_over(run, seen, rules):
        return _after_the_job(run, seen, rules)
    if waits_after_requeue(rules.recovery) and run.job is not None and run.job.restarts > run.restarts_at_begin:
        return continue_run(run, seen, rules, *_cause_of_requeue(run, seen))
    job = seen.job
    if job is None:
        return Wait("the scheduler does not answer" if seen.look_error else "the scheduler does not show the job")
    if job.state in (JobState.PENDING, JobState.HELD):
        return follow_queue(run, seen, rules, job)
    lost = lost_nodes(run, seen)
    if job.state is JobState.RUNNING and lost:
        return continue_run(run, seen, rules, "node_failed", f"the job runs on without {', '.join(lost)}")
    if _is_unclaimed(run, seen):
        return Cancel(job.job_id, f"nobody in it took up attempt {run.attempt} for {CLAIM_WAIT_S:.0f} s")
    return Wait("the job runs")


def _cause_of_requeue(run: RunState, seen: Observation) -> tuple[Cause, str]:
    """Why Slurm put the job back into the queue."""
    lost = fate_of_lost_nodes(run, seen)
    if lost:
        return "node_failed", f"{lost}; the job was put back into the queue"
    if run.memory.draining:
        return "drained", f"{', '.join(sorted(run.memory.draining))} drains; the job was put back into the queue"
    return "preempted", "the job was put back into the queue"


def fate_of_lost_nodes(run: RunState, seen: Observation) -> str:
    """Which nodes Slurm has given up under the job, and why; empty where it has given up none."""
    return ", ".join(f"{name} {_fate(name, seen)}" for name in lost_nodes(run, seen))


def _fate(name: str, seen: Observation) -> str:
    """What became of a lost node."""
    node = seen.nodes.get(name)
    if node is None or not (node.is_down or node.is_silent):
        return "was taken off the job, and may be back since"
    return f"is {node.state} ({node.why or 'no reason given'})"


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
    if wait is not None:
        return Wait(wait)
    if isinstance(run.open_intent, SubmitIntended):
        return Wait("a submission got no answer: its job may still show up")
    warning = warning_s(rules.cluster.time_limit, seen.save_s)
    return Submit(f"attempt {run.attempt} needs a job", None if seen.save_s is None else warning)


def why_not_submitted(run: RunState, now: float, recovery: RecoveryConfig) -> str | None:
    """Why a run without a job is not given one now; None = it is."""
    limit = recovery.max_submissions_per_hour
    recent = [time for time in run.submitted_times if now - time < _HOUR_S]
    if len(recent) >= limit:
        minutes = math.ceil((recent[-limit] + _HOUR_S - now) / 60)
        return f"{count(limit, 'job')} within an hour (recovery.max_submissions_per_hour); the next in {minutes} min"
    is_unanswered = run.unanswered_since is not None
    retry_s = _UNANSWERED_RETRY_S if is_unanswered else _SUBMIT_RETRY_S * 2**run.failed_submissions
    if now - run.last_submit_failed_at < retry_s:
        return f"tried again in a while: {run.reason}"
    return None


def _after_the_job(run: RunState, seen: Observation, rules: Rules) -> Decision:
    """The job is over: why, and what follows."""
    cause, reason = _cause_of_end(run, seen)
    if cause == "out_of_memory":
        return after_out_of_memory(run, seen, rules, reason)
    return continue_run(run, seen, rules, cause, reason)


def after_out_of_memory(run: RunState, seen: Observation, rules: Rules, reason: str) -> Decision:
    """Once more; a second time without a new healthy checkpoint, it needs less memory or more devices."""
    if run.out_of_memory_since_progress:
        return GiveUp(f"out of memory again, without a new healthy checkpoint: {reason}", (rules.memory,), reason)
    return continue_run(run, seen, rules, "out_of_memory", reason)


_CAUSE_OF_STATE: Final[dict[JobState, Cause]] = {
    JobState.PREEMPTED: "preempted",
    JobState.NODE_FAIL: "node_failed",
    JobState.TIMEOUT: "time_limit",
    JobState.OUT_OF_MEMORY: "out_of_memory",
}


def _cause_of_end(run: RunState, seen: Observation) -> tuple[Cause, str]:
    state = seen.job.state if seen.job is not None else None
    what = run.left.error.what if run.left is not None and run.left.error is not None else None
    lost = fate_of_lost_nodes(run, seen)
    if lost:
        return "node_failed", lost
    if what == "time_limit":
        return "time_limit", "the time limit came"
    if run.memory.draining and what in (None, "preempted"):
        return "drained", f"{', '.join(sorted(run.memory.draining))} drains, and the job there ended"
    if what == "preempted":
        return "preempted", "the job was preempted and did not come back"
    if state is not None and state in _CAUSE_OF_STATE:
        return _CAUSE_OF_STATE[state], f"Slurm says {state.value}"
    if run.left is not None:
        return "crash", run.left.reason
    if seen.job is not None and seen.job.exit_code == _ENDED_BY_THE_WARNING:
        return "time_limit", "the warning of its time limit came before its worker could answer, and ended the job"
    return "vanished", f"job {run.job_id} is over and left no report"
