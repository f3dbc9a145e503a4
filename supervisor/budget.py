"""What a run may spend of the GPUs.  Pure."""

from typing import Final

from supervisor.attempts import Rules, job_is_over
from supervisor.decision import AskToStop, Decision, GiveUp
from supervisor.observation import Observation
from supervisor.run_state import RunState

_HOUR_S: Final = 3600.0
_SAVE_S: Final = 600.0
"""What a worker gets to save and leave, beyond the budget."""


def gpu_hours(run: RunState, now: float, gpus: int) -> float:
    """GPU hours that the run's jobs held until ``now``, as far as they were seen, since the last resume."""
    return run.busy_until(now) * gpus / _HOUR_S


def spent_gpu_hours(run: RunState, seen: Observation, rules: Rules) -> Decision | None:
    """Save, leave and give up where ``recovery.max_gpu_hours`` is spent; None where it is not."""
    limit = rules.recovery.max_gpu_hours
    used = gpu_hours(run, seen.now, rules.cluster.gpus)
    if limit is None or used < limit:
        return None
    reason = f"{used:.2f} GPU hours are used up, {limit:g} were allowed (recovery.max_gpu_hours)"
    is_saving = run.busy_until(seen.now) * rules.cluster.gpus < limit * _HOUR_S + _SAVE_S * rules.cluster.gpus
    if is_saving and run.has_stepped and not job_is_over(run, seen, rules):
        return AskToStop(reason)
    return GiveUp(reason)
