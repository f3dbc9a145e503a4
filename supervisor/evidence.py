"""What a diagnosis goes by: a run's history, journal, configuration and data, and each verdict with what led to it.

Pure.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any, Final

from supervisor.config_history import by_key, changed_since, rate_of_attempt, values_of
from supervisor.how_it_left import cause_of
from supervisor.journal import Continued, Event, GaveUp, HangSeen, Plan, RolledBack, WorkerLeft, WouldHaveDone
from worker.contract.config import Config
from worker.contract.data_report import DataReport
from worker.contract.exit_report import Outcome
from worker.contract.loss_history import ACTED, BatchPosition, Record, surviving

WINDOW: Final = 50
"""Records that say what was usual before an onset."""
_IN_ORDER: Final = frozenset(
    {"first", "resumed", "rollback", "stopped", "preempted", "drained", "time_limit", "requeued"}
)
"""Why an attempt is begun without that anything went wrong."""
_SCALER_SAID: Final = "fp16 scaler skipped"


@dataclass(frozen=True)
class Evidence:
    """All that is known of a run, as far as its files can be read; records in file order."""

    config: Config
    records: Sequence[Record] = ()
    events: Sequence[Event] = ()
    data: DataReport | None = None

    @cached_property
    def branch(self) -> list[Record]:
        """The records that count."""
        return surviving(self.records)

    @cached_property
    def verdicts(self) -> list["Incident"]:
        """Every verdict with what led to it, the oldest first; one that is only observed is told once a streak."""
        return list(_incidents(self))

    @cached_property
    def plans(self) -> dict[int, Plan]:
        """What each attempt was begun with."""
        return {event.attempt: event for event in self.events if isinstance(event, RolledBack | Continued)}

    @cached_property
    def refusals(self) -> list[WorkerLeft]:
        """Starts that refused a checkpoint because what it holds came out differently, or what is set does."""
        left = [event for event in self.events if isinstance(event, WorkerLeft)]
        return [one for one in left if one.outcome is Outcome.REFUSED and one.error and one.error.expected is not None]

    @property
    def last_trained(self) -> int:
        """The newest attempt that made a step; 0 where none did."""
        return self.records[-1].attempt if self.records else 0

    @property
    def last_end(self) -> WorkerLeft | HangSeen | None:
        """How the newest start ended; None where none has."""
        ends = (event for event in reversed(self.events) if isinstance(event, WorkerLeft | HangSeen))
        return next(ends, None)

    @property
    def interrupted_by(self) -> list[str]:
        """What went wrong and was answered, each with how often: ``crash 4 times``."""
        begun = (event for event in self.events if isinstance(event, RolledBack | Continued | WouldHaveDone))
        causes = Counter(cause_of(event) for event in begun if event.cause not in _IN_ORDER)
        causes.update("gave up" for event in self.events if isinstance(event, GaveUp))
        return [cause if number == 1 else f"{cause} {number} times" for cause, number in causes.items()]

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps of the whole run, None where neither the history nor the configuration says."""
        starts = [record.start.max_steps for record in self.records if record.start is not None]
        return starts[-1] if starts else self.config.training.max_steps

    @property
    def warmup_steps(self) -> float | None:
        """Steps of the warmup; None where it is a share of an unknown number of steps."""
        warmup = self.config.training.schedule.warmup
        if warmup >= 1 or warmup == 0:
            return warmup
        return warmup * self.max_steps if self.max_steps is not None else None

    @property
    def global_batch(self) -> int:
        """Sequences an optimizer step."""
        training = self.config.training
        return training.batch_size * training.gradient_accumulation * self.config.cluster.world_size


@dataclass(frozen=True)
class Incident:
    """One verdict: the records of its streak, and those of the branch before its onset, the newest last."""

    evidence: Evidence
    streak: Sequence[Record]
    before: Sequence[Record]
    begun: Record | None
    """The first record of the verdict's segment."""
    earlier: Sequence["Incident"]

    @property
    def verdict(self) -> Record:
        """The record that says it."""
        return self.streak[-1]

    @property
    def kind(self) -> str:
        return self.verdict.verdict

    @property
    def onset(self) -> int:
        """The first step of the streak."""
        return self.streak[0].step

    @property
    def failed(self) -> Record:
        """The first record of the streak whose numbers are not finite: the loss may have left its level before."""
        return next((one for one in self.streak if is_nonfinite(one)), self.streak[0])

    @property
    def is_nonfinite(self) -> bool:
        """Whether numbers stopped being finite, and not only rose."""
        return self.kind == "nonfinite"

    @property
    def batches(self) -> list[BatchPosition]:
        """What the streak was trained on, as far as that is known."""
        return [record.data for record in self.streak if record.data is not None]

    @property
    def usual(self) -> Sequence[Record]:
        """The last records before the onset."""
        return self.before[-WINDOW:]

    @cached_property
    def usual_loss(self) -> float | None:
        """Median loss before the onset; None where nothing is known of it."""
        return median_of(record.loss for record in self.usual)

    @cached_property
    def usual_norm(self) -> float | None:
        """Median gradient norm before the onset, but for its last steps."""
        return median_of(record.grad_norm for record in self.usual[:-5]) or median_of(r.grad_norm for r in self.usual)

    @property
    def lr(self) -> float | None:
        """The rate applied at the onset."""
        return self.streak[0].lr

    @property
    def configured_rate(self) -> float | None:
        """The peak that the verdict's attempt was configured with; None where it had none, or it is not known."""
        return rate_of_attempt(self.evidence.events, self.evidence.config, self.verdict.attempt)

    @property
    def peak(self) -> float | None:
        """The peak of the rate in the verdict's attempt: as configured, times the scale; None where none is given."""
        rate, plan = self.configured_rate, self.evidence.plans.get(self.verdict.attempt)
        return rate if rate is None or plan is None else rate * plan.lr_scale

    @cached_property
    def changed(self) -> dict[str, tuple[Any, Any]]:
        """What of that may matter a person has changed since its attempt began, old and new."""
        return changed_since(self.evidence.events, self.evidence.config, self.verdict.attempt)

    @property
    def steps_since_change(self) -> int:
        """How many steps that change has trained without a verdict, past this one's; 0 = it has not shown itself."""
        known, now = self.evidence, by_key(self.evidence.config)
        later = [attempt for attempt in known.plans if self.changed and attempt > self.verdict.attempt]
        begun = {attempt: values_of(known.events, attempt) or {} for attempt in later}
        by_it = {a for a, values in begun.items() if all(values.get(key) == now.get(key) for key in self.changed)}
        steps = [record.step for record in known.branch if record.attempt in by_it]
        is_again = any(one.verdict.attempt in by_it for one in known.verdicts)
        return len(steps) if steps and steps[-1] > self.verdict.step and not is_again else 0

    @property
    def resumed_from(self) -> str | None:
        """The checkpoint that the verdict's segment began from; None = from scratch, or not known."""
        return self.begun.start.checkpoint if self.begun is not None and self.begun.start is not None else None

    @property
    def cause_of_attempt(self) -> str:
        """Why the verdict's attempt was begun; empty where the journal does not say."""
        plan = self.evidence.plans.get(self.verdict.attempt)
        return plan.cause if plan is not None else ""


def is_scaler_skip(record: Record) -> bool:
    """Whether the fp16 scaler skipped this step, as is its way."""
    return any(_SCALER_SAID in warning for warning in record.warnings or ())


def is_nonfinite(record: Record) -> bool:
    """Whether this step's numbers were not finite, no scaler took care of it, and there was something to learn."""
    return record.verdict in ("skipped", "nonfinite") and not is_scaler_skip(record) and not is_unlearned(record)


def is_unlearned(record: Record) -> bool:
    """Whether nothing was learned in this step: no loss, and a gradient of exactly 0."""
    return record.loss is None and record.grad_norm == 0


def median_of(numbers: Iterable[float | None]) -> float | None:
    """The median of the known ones; None where there is none."""
    known = [number for number in numbers if number is not None]
    return median(known) if known else None


def onset_of(record: Record) -> int:
    """The first step of the streak that led to a verdict."""
    return record.onset_step if record.onset_step is not None else record.step


def first_verdicts(records: Iterable[Record]) -> Iterator[Record]:
    """Every verdict, of those that are only observed the first of each streak.

    Training goes on past those, and several rules speak of one rise in turn, each with an onset of its own: streaks
    that overlap are one.
    """
    attempt, reached = 0, 0
    for record in records:
        if record.verdict in ACTED:
            goes_on = record.observed and record.attempt == attempt and onset_of(record) <= reached
            attempt, reached = record.attempt, record.step
            if not goes_on:
                yield record


def _incidents(evidence: Evidence) -> Iterator[Incident]:
    verdicts = {id(record) for record in first_verdicts(evidence.records)}
    branch: list[Record] = []
    begun: Record | None = None
    found: list[Incident] = []
    for record in evidence.records:
        while branch and branch[-1].step >= record.step:
            branch.pop()
        branch.append(record)
        begun = record if record.start is not None else begun
        if id(record) not in verdicts:
            continue
        onset = onset_of(record)
        streak = [one for one in branch[-max(1, record.step - onset + 1) :] if one.step >= onset] or [record]
        found.append(Incident(evidence, streak, branch[: -len(streak)], begun, tuple(found)))
        yield found[-1]
