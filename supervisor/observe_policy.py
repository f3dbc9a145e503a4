"""``recovery.mode: observe``: what would have been done is written down, and nothing is touched.  Pure.

A person's word is carried out all the same: the first attempt, a stop, a resume, a rollback.  A worker that ended by
itself is not started again; once its job is over, so is the run, until a person says resume.
"""

from typing import Final

from supervisor.attempts import Rules, job_is_over
from supervisor.decision import Begin, Cancel, ChangeJob, Decision, GiveUp, StartNow, Wait, WouldDo
from supervisor.observation import Observation
from supervisor.run_state import RunState

_BY_A_PERSON: Final = frozenset({"first", "resumed", "rollback", "adopted"})


def hold_back(run: RunState, seen: Observation, rules: Rules, decision: Decision) -> Decision:
    """``decision``, unless it would touch the run without a person's word: then a note of it, or waiting."""
    match decision:
        case Begin(plan=plan) if plan.cause not in _BY_A_PERSON:
            is_noted = run.end_noted and (run.verdict is None or not run.verdict.observed)
            return _at_the_end(run, seen, rules, plan.reason) if is_noted else WouldDo(plan)
        case Cancel(reason=reason) if run.stop_by is None and run.rollback_asked is None:
            return Wait(f"recovery.mode is observe, so the job is not cancelled: {reason}")
        case StartNow(reason=reason) | ChangeJob(reason=reason):
            return Wait(f"recovery.mode is observe, so the job is left as it is: {reason}")
        case GiveUp(reason=reason) if not job_is_over(run, seen, rules):
            return Wait(f"recovery.mode is observe, so nothing is ended: {reason}")
        case _:
            return decision


def _at_the_end(run: RunState, seen: Observation, rules: Rules, reason: str) -> Decision:
    if not job_is_over(run, seen, rules):
        return Wait(f"recovery.mode is observe, so nothing is done: {reason}")
    return GiveUp(f"the worker ended, and recovery.mode is observe; `higgsfield resume {rules.run}` goes on: {reason}")
