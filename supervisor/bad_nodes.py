"""Which nodes there is evidence against, and when one of them is left out.  Pure.

A strike needs evidence that points at a node: the trainer there died of a signal, the device or a disk failed under
it, or the job ended there without a word before it had begun.  A traceback of the person's own code is no such thing.
"""

import signal
from collections.abc import Iterator
from typing import Final

from slurm.job import JobState, JobStatus
from supervisor.attempts import lost_nodes
from supervisor.decision import Exclude
from supervisor.journal import NodeStruck
from supervisor.observation import Observation
from supervisor.run_state import RunState
from supervisor.spike_policy import is_at_same_batches
from worker.contract.exit_report import ExitReport, Outcome
from worker.contract.pulse import state_in_words
from worker.contract.recovery_config import RecoveryConfig
from worker.contract.words import count

MAX_EXCLUSIONS: Final = 3
"""Nodes that are excluded without progress in between; then it is not the nodes."""
_HOUR_S: Final = 3600.0
_ENDED_BY_ITSELF = frozenset({JobState.FAILED, JobState.BOOT_FAIL, JobState.NODE_FAIL})


def strikes(run: RunState, seen: Observation) -> Iterator[NodeStruck]:
    """The evidence that is not in the journal yet, at most one strike a node and attempt."""
    told = {strike.node for strike in run.strikes if strike.attempt == run.attempt}
    told |= {each.node for each in run.exclusions if each.attempt == run.attempt}
    for node, evidence in _evidence(run, seen):
        if node not in told:
            told.add(node)
            yield NodeStruck(node=node, evidence=evidence, reason=_struck(run, node, evidence))


def _struck(run: RunState, node: str, evidence: str) -> str:
    """That a strike counts against a node, and why, unless it is what was just told of the worker or its hang."""
    just_told = [each.reason for each in (run.left, run.hang) if each is not None]
    is_told = any(f" on {node} " in reason or f" on {node}: " in reason for reason in just_told)
    return f"a strike against {node}{'' if is_told else f': {evidence}'}"


def _evidence(run: RunState, seen: Observation) -> Iterator[tuple[str, str]]:
    reports = [report for report in seen.reports.values() if report.attempt == run.attempt]
    is_one_node = run.job is not None and len(run.job.nodes) == 1
    for report in reports:
        found = _of_report(report) or _of_hang(report, is_one_node)
        if found is not None:
            yield report.host, found
    if run.has_live_job:
        for name in lost_nodes(run, seen):
            node = seen.nodes.get(name)
            why = (node.why or node.state) if node is not None and node.is_down else "taken off it while it ran"
            yield name, f"Slurm gave it up under job {run.job_id}: {why}"
    yield from _of_verdict(run, seen)
    if seen.job is not None and seen.job.job_id == run.job_id and not seen.reports:
        yield from _of_job(run, seen.job)


def _of_report(report: ExitReport) -> str | None:
    """What a rank's exit says against its node."""
    if report.outcome is not Outcome.CRASHED:
        return None
    if report.error is not None and report.error.points_at_node:
        return f"rank {report.rank} failed there: {report.error.message.splitlines()[0]}"
    if report.signal is not None:
        return f"the trainer of rank {report.rank} was killed there by {signal.Signals(report.signal).name}"
    return None


def _of_hang(report: ExitReport, is_one_node: bool) -> str | None:
    """A hang points at a node where there is no other, or where the kernel itself waits for something there."""
    hang = report.hang
    if hang is None or not (is_one_node or hang.process.startswith("D")):
        return None
    return f"rank {report.rank} hung there while {hang.phase} after step {hang.step}: {state_in_words(hang.process)}"


def _of_verdict(run: RunState, seen: Observation) -> Iterator[tuple[str, str]]:
    """Numbers that were not finite on one rank alone, of several, and not at the same batches again: that is data."""
    verdict, begun = run.verdict, run.segment_started
    world = len(begun.start.rng_digests) if begun is not None and begun.start is not None else 1
    if verdict is None or len(verdict.nonfinite_ranks) != 1 or world == 1 or is_at_same_batches(run, verdict):
        return
    [rank] = verdict.nonfinite_ranks
    if rank in seen.pulses:
        yield seen.pulses[rank].host, f"rank {rank} alone saw numbers that are not finite at step {verdict.step}"


def _of_job(run: RunState, job: JobStatus) -> Iterator[tuple[str, str]]:
    """A job that is over without a report and before any step says something where it had one node only."""
    nodes = job.nodes or (run.job.nodes if run.job is not None else ())
    if job.state in _ENDED_BY_ITSELF and not run.has_stepped and len(nodes) == 1:
        yield nodes[0], f"job {job.job_id} was {job.state.value} there before its first step, without a report"


def node_to_exclude(run: RunState, now: float, recovery: RecoveryConfig) -> Exclude | None:
    """The node that was struck often enough within ``recovery.node_ban_h``; None where there is none."""
    ban_s = recovery.node_ban_h * _HOUR_S
    counted: dict[str, list[str]] = {}
    for strike in run.strikes:
        if now - strike.time < ban_s:
            counted.setdefault(strike.node, []).append(strike.evidence)
    for node, evidence in counted.items():
        if len(evidence) >= recovery.node_strikes and run.exclusions_since_progress < MAX_EXCLUSIONS:
            reason = f"{count(len(evidence), 'strike')} against {node} (recovery.node_strikes)"
            return Exclude(node, now + ban_s, "; ".join(evidence), reason)
    return None
