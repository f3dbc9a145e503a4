"""A worker that hangs: its agents notice, and this supervisor where they do not.  Pure."""

from collections.abc import Iterator
from typing import Final

from supervisor.attempts import Rules, continue_run
from supervisor.decision import Decision, Wait
from supervisor.journal import HangSeen
from supervisor.observation import Observation
from supervisor.run_state import RunState
from worker.contract.exit_report import Outcome
from worker.contract.pulse import hang_limit_s, state_in_words

_LATE_PULSE_S: Final = 15.0
"""Pulses come every 5 s, and between two steps."""
_LATE_STEPS: Final = 3.0
AGENTS_TURN_S: Final = 180.0
"""What the agents get beyond the limit: they notice first, take the stacks, and may need a minute to end a trainer."""


def unusual_silence_s(seen: Observation) -> float:
    """For how long rank 0 has given no sign of life while it trains; 0 where its steps may take as long.

    Long before this is a hang it is a reason to ask how the job and its nodes are: a dead node says nothing either.
    """
    pulse, step_s = seen.pulses.get(0), (seen.last.step_s if seen.last is not None else None) or 0.0
    if pulse is None or pulse.phase != "training" or seen.quiet_s <= max(_LATE_PULSE_S, _LATE_STEPS * step_s):
        return 0.0
    return seen.quiet_s


def hang_news(run: RunState, seen: Observation, timeout_s: float) -> Iterator[HangSeen]:
    """The hang that an agent reported, or that nobody but the supervisor can have noticed; once an attempt."""
    if run.hang is not None or run.attempt == 0 or run.is_over:
        return
    restart = seen.claim.restart if seen.claim is not None else 0
    stacks = f"attempts/{run.attempt:04d}/r{restart}"
    for report in seen.reports.values():
        hang = report.hang
        if hang is not None and report.attempt == run.attempt:
            what = f"rank {report.rank} on {report.host} made no progress for {hang.quiet_s:.0f} s"
            reason = f"{what} while {hang.phase} after step {hang.step} ({hang.limit_s:.0f} s are allowed)"
            state = f"; its process was {state_in_words(hang.process)}" if hang.process else ""
            facts = {"phase": hang.phase, "quiet_s": hang.quiet_s, "limit_s": hang.limit_s}
            yield HangSeen(**facts, stacks=stacks, reason=f"{reason}{state}; all stacks: {stacks}")
            return
    pulse = seen.pulses.get(0)
    limit_s = pulse.limit_s if pulse is not None else hang_limit_s("starting", timeout_s)
    if seen.quiet_s > limit_s + AGENTS_TURN_S and run.left is None:
        phase = pulse.phase if pulse is not None else "starting"
        silent = f"no sign of life for {seen.quiet_s:.0f} s while {phase} ({limit_s:.0f} s are allowed)"
        reason = f"{silent}, and none of the agents either; look at: {stacks}"
        yield HangSeen(phase=phase, quiet_s=round(seen.quiet_s, 1), limit_s=limit_s, stacks=stacks, reason=reason)


def answer_hang(run: RunState, seen: Observation, rules: Rules, hang: HangSeen) -> Decision | None:
    """Go on from the newest checkpoint once the worker has ended; None where its own word counts for more."""
    if run.left is not None and run.left.outcome not in (Outcome.ENDED, Outcome.CRASHED):
        return None
    if run.left is None and seen.reports:
        return Wait("the agents end a worker that hangs")
    return continue_run(run, seen, rules, "hang", hang.reason)
