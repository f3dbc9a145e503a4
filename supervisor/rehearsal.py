"""A rehearsal as values: its faults, its configurations, and what became of each fault and of each rate.  Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, get_args

from supervisor.journal import Event, SupervisorStarted
from supervisor.run_state import State
from supervisor.runs import RunError
from worker.contract.config import Config
from worker.contract.loss_history import Record
from worker.contract.recipe_config import ScheduleConfig
from worker.contract.rehearsal import Fault, FaultKind, Inflicted

STANDARD: Final = ("spike@40", "preempt@60", "kill@80", "hang@100", "torn-save@120", "supervisor@140")
"""What is rehearsed where nothing is asked for."""
RATE_STEPS: Final = 100
_APART: Final = 10
"""The fewest steps between two faults: a checkpoint, its proof of health, and a verdict lie between them."""
_AFTER_LAST: Final = 2
_HANG_TIMEOUT_S: Final = 120.0
_LOCAL_ABSENT_GRACE_S: Final = 2.0
_KINDS: Final = ", ".join(get_args(FaultKind))
_AT_THE_END: Final = 10
"""Losses that the end of a comparison is the mean of; at its beginning half as many."""


# -- what is asked for -------------------------------------------------------------------------------------------------


def parse_faults(words: Iterable[str]) -> tuple[Fault, ...]:
    """The faults by step; RunError, one line, where a word is no fault."""
    return tuple(sorted(map(_parse_fault, words), key=lambda fault: fault.step))


def _parse_fault(word: str) -> Fault:
    kind, at, step = word.partition("@")
    if kind not in get_args(FaultKind):
        raise RunError(f"--fault {word}: is no fault; there are {_KINDS}, each with its step, as kill@80")
    if not at or not (step.isascii() and step.isdigit()) or len(step) > 12 or int(step) == 0:
        raise RunError(f"--fault {word}: says no step; write {kind}@80 for after step 80")
    return Fault(kind=kind, step=int(step))


def apart(config: Config) -> int:
    """How many steps there must be between two faults."""
    return max(_APART, config.spike.patience + 7)


def length(config: Config, faults: Sequence[Fault], steps: int | None) -> int:
    """How many steps the rehearsal makes; RunError, one line, where the faults do not fit into it."""
    gap = apart(config)
    if faults[0].step < gap:
        raise RunError(f"--fault {faults[0].name}: comes too early; give it step {gap} or later")
    for before, fault in pairwise(faults):
        if fault.step < before.step + gap:
            least = f"give it step {before.step + gap} or later"
            raise RunError(f"--fault {fault.name}: comes too soon after {before.name}; {least}")
    wanted = faults[-1].step + _AFTER_LAST * gap if steps is None else steps
    most = config.training.max_steps
    end = wanted if most is None else min(wanted, most)
    if faults[-1].step + gap > end:
        who = f"the run ends at step {end}" if end == most else f"the rehearsal ends at step {end}"
        raise RunError(f"--fault {faults[-1].name}: {who}, and {gap} steps have to come after the last fault")
    return end


def parse_rates(text: str) -> tuple[float, ...]:
    """The rates in ascending order; RunError, one line, where they are none."""
    try:
        rates = sorted({float(word) for word in text.split(",")})
    except ValueError:
        rates = []
    if len(rates) < 2 or not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise RunError(f"--learning-rate {text}: write two different rates or more, as 1e-5,2e-5,5e-5")
    return tuple(rates)


# -- its configurations ------------------------------------------------------------------------------------------------


def rehearsal_config(config: Config, name: str, faults: Sequence[Fault], steps: int, *, is_local: bool) -> Config:
    """The run in short: the same model, data, batch and cluster; what goes by steps or takes hours made to fit.

    Between two faults there are two checkpoints, the first of which is healthy before the second fault.
    """
    first = faults[0].step
    gap = min(after - before for before, after in pairwise((0, *(fault.step for fault in faults), steps)))
    every = gap // 2 - 1  # so that few faults come right after a save, where they would cost nothing
    spike, recovery = config.spike, config.recovery
    grace_s = _LOCAL_ABSENT_GRACE_S if is_local else recovery.absent_grace_s
    more = len(faults) + 1
    return _with(
        _short(config, name, steps),
        spike={"warmup": min(spike.warmup, max(spike.patience, first // 2))},
        checkpoint={"every_steps": every, "healthy_after": min(config.checkpoint.healthy_after, every // 2)},
        recovery={
            "mode": "act",
            "hang_timeout_s": min(recovery.hang_timeout_s, _HANG_TIMEOUT_S),
            "max_submissions_per_hour": recovery.max_submissions_per_hour + more,
            "node_strikes": recovery.node_strikes + more,  # no node is to blame for what we do
            "absent_grace_s": min(recovery.absent_grace_s, grace_s),
        },
    )


def rate_config(config: Config, name: str, rate: float, steps: int) -> Config:
    """The run in short at one rate, held after its warmup; the first verdict ends it."""
    recovery = config.recovery
    spike = recovery.spike.model_copy(update={"max_rollbacks": 0})
    training = _short(config, name, steps)
    warmup = training.training.schedule.warmup
    optimizer = config.training.optimizer.model_copy(update={"learning_rate": rate})
    schedule = ScheduleConfig(name="constant", warmup=warmup)
    return _with(
        training,
        training={"optimizer": optimizer, "schedule": schedule, "eval_every": None},
        data={"eval": None, "eval_share": None},
        checkpoint={"every_steps": steps},
        recovery={"mode": "act", "spike": spike},
    ).model_copy(update={"ema": None})


def _short(config: Config, name: str, steps: int) -> Config:
    """The run with another name and ``steps`` steps, which tells nobody of itself."""
    training = config.training
    schedule = {key: _scaled(getattr(training.schedule, key), training.max_steps, steps) for key in ("warmup", "decay")}
    return _with(
        config,
        run={"name": name},
        training={
            "epochs": None,
            "max_steps": steps,
            "report_to": (),
            "schedule": training.schedule.model_copy(update=schedule),
        },
        cluster={"mail_user": None},
        supervisor={"place": "foreground"},
    ).model_copy(update={"notify": ()})


def _scaled(length: float, whole: int | None, steps: int) -> float:
    """A stretch of the schedule in ``steps`` steps: shares stay, steps keep their share of the run, or a tenth."""
    if length < 1:
        return length
    return max(1.0, round(length * steps / whole) if whole else min(length, steps // 10))


def _with(config: Config, **sections: Mapping[str, Any]) -> Config:
    changed = {name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    return config.model_copy(update=changed)


# -- what became of it -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FaultRow:
    """What one fault did to the run. ``recovery_s``: until the next start had made a step, or, of a supervisor, until
    the next one was at work. ``cost_s``: until training was further than before."""

    kind: FaultKind
    step: int
    means: str
    survived: bool
    recovery_s: float | None
    steps_repeated: int | None
    cost_s: float | None
    why: str
    """Why it did not survive; empty where it did."""


def fault_rows(
    faults: Sequence[Fault],
    came: Mapping[Fault, Inflicted],
    events: Sequence[Event],
    records: Sequence[Record],
    end: str,
) -> list[FaultRow]:
    """What became of each fault, by the run's own files; ``end`` is where the run stands, in words."""
    times = [came[fault].time if fault in came else math.inf for fault in faults]
    return [
        _row(fault, came.get(fault), min(times[number + 1 :], default=math.inf), events, records, end)
        for number, fault in enumerate(faults)
    ]


def _row(
    fault: Fault, came: Inflicted | None, until: float, events: Sequence[Event], records: Sequence[Record], end: str
) -> FaultRow:
    if came is None or came.error is not None:
        why = f"it could not be done: {came.error}" if came is not None else f"it never came: {end}"
        return FaultRow(fault.kind, fault.step, came.means if came else "", False, None, None, None, why)
    find = _after_supervisor if fault.kind == "supervisor" else _after_interruption
    recovery_s, repeated, cost_s = find(came, until, events, records)
    is_answered = fault.kind != "spike" or _ended_by_verdict(came.time, until, records)
    why = "" if is_answered else "the noise led to no verdict"
    if is_answered and cost_s is None:
        why = f"the run did not get further: {end}"
    return FaultRow(fault.kind, fault.step, came.means, not why, recovery_s, repeated, cost_s, why)


def _after_interruption(
    came: Inflicted, until: float, events: Sequence[Event], records: Sequence[Record]
) -> tuple[float | None, int | None, float | None]:
    """Seconds to the next start's first step, steps made again, and seconds until training was further than before."""
    before = [record for record in records if record.time <= came.time]
    segment = before[-1].segment if before else 0
    furthest = max([came.at_step, *(record.step for record in records if record.segment == segment)])
    after = [record for record in records if record.segment > segment and record.time > came.time]
    if not after or after[0].time > until:
        return None, None, None
    further = next((record.time - came.time for record in after if record.step > furthest), None)
    return after[0].time - came.time, max(0, furthest - after[0].step + 1), further


def _after_supervisor(
    came: Inflicted, until: float, events: Sequence[Event], records: Sequence[Record]
) -> tuple[float | None, int | None, float | None]:
    """Seconds to the next supervisor; the worker did not wait for it."""
    started = next((e.time for e in events if isinstance(e, SupervisorStarted) and e.time > came.time), None)
    further = next((r.time - came.time for r in records if r.time > came.time and r.step > came.at_step), None)
    if started is None:
        return None, None, None
    return started - came.time, 0, further


def _ended_by_verdict(begin: float, until: float, records: Iterable[Record]) -> bool:
    return any(record.is_acted and begin < record.time < until for record in records)


@dataclass(frozen=True)
class RateRow:
    """How one rate did. Losses are means: of the first five steps, of the last ten."""

    learning_rate: float
    run: str
    dir: str
    state: State
    steps: int
    loss_start: float | None
    loss_end: float | None
    verdict: str | None
    """``spike at step 57``; None where there was none."""


def rate_row(rate: float, name: str, folder: str, state: State, records: Sequence[Record]) -> RateRow:
    """What the history of a run at one rate says."""
    acted = next((record for record in records if record.is_acted), None)
    verdict = None if acted is None else f"{acted.verdict} at step {acted.step}"
    losses = list(_losses(records))
    begin, end = losses[: _AT_THE_END // 2], losses[-_AT_THE_END:]
    steps = records[-1].step if records else 0
    return RateRow(rate, name, folder, state, steps, _mean(begin), _mean(end), verdict)


def _losses(records: Iterable[Record]) -> Iterator[float]:
    return (record.loss for record in records if record.loss is not None)


def _mean(losses: Sequence[float]) -> float | None:
    return sum(losses) / len(losses) if losses else None


def advice(rows: Sequence[RateRow]) -> str:
    """Which of the rates to take, in words, and how far that can be trusted."""
    sound = [row for row in rows if row.state == "finished" and row.verdict is None and row.loss_end is not None]
    if not sound:
        return "none of these rates got through; try a tenth of the lowest, and a longer warmup"
    best = min(sound, key=lambda row: row.loss_end or 0.0)
    wild = [row for row in rows if row.verdict is not None and row.learning_rate > best.learning_rate]
    text = f"{best.learning_rate:g} ends lowest of those that got through"
    if best is rows[-1]:
        return f"{text}, and it is the highest that was tried: a higher one may do better still"
    if wild:
        next_up = min(wild, key=lambda row: row.learning_rate)
        margin = next_up.learning_rate / best.learning_rate
        text += f"; {next_up.learning_rate:g} had a {next_up.verdict}"
        return f"{text}, only {margin:g} times as much: a long run is safer at half of it" if margin <= 3 else text
    if best is rows[0]:
        return f"{text}, and it is the lowest that was tried: a lower one may do better still"
    return f"{text}, between a lower and a higher one that end above it"
