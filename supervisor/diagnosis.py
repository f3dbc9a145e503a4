"""What went wrong in a run, and why: a table of symptoms, each a row of test, cause and next step.  Pure.

The rows are those of two articles on training that diverges.  The first that fits a verdict is its diagnosis, so the
most specific come first; what is to be tried is one change at a time, and the next one only after it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from supervisor.batches import are_near
from supervisor.blow_ups import (
    above_rate_of_batch,
    above_rate_of_optimizer,
    after_another_probe,
    after_short_warmup,
    at_once_after_resume,
    at_the_same_batch,
    before_any_update,
    jumped,
    late_and_growing,
    norm_left_first,
    not_finite,
    nothing_learned,
    on_one_rank,
    rose,
    suddenly_infinite,
    within_first_steps,
)
from supervisor.config_history import fixed_since, named
from supervisor.curve_shapes import (
    at_regular_distances,
    ended_badly,
    evaluates_worse,
    no_finite_loss,
    proof_failed,
    proof_failed_before,
    rebound,
    scale_only_falls,
    scaler_at_work,
    settings_changed,
    slowed_down,
    stuck_high,
    waits_for_data,
)
from supervisor.evidence import Evidence, Incident
from supervisor.fold import ending_of
from supervisor.journal import Diagnosis, GaveUp
from supervisor.rate_rules import by_batch, rates_from_scratch
from supervisor.report.advice import after_bad_end, after_giving_up
from worker.contract.config import Config
from worker.contract.recipe_config import STARTING_RATES
from worker.contract.replay import Change
from worker.contract.words import count

STARTING_OF_ADAPTERS: Final = 1e-4
_SETTING: Final = re.compile(r"training\.[a-z_.]*[a-z]|model\.dtype")
_SHOWN_BY_SETTINGS: Final = ("tenth-rate", "fp32")
"""Cures by a setting of the training, and not by other data or by the same once more."""
Subject = TypeVar("Subject", Evidence, Incident)


@dataclass(frozen=True)
class Row(Generic[Subject]):
    """A symptom: what shows it, what it comes from, and what to try, by the configuration."""

    symptom: str
    cause: str
    confidence: Literal["sure", "likely", "possible"]
    test: Callable[[Subject], Sequence[str]]
    """The evidence, with its figures; nothing where there is no such symptom."""
    next: Callable[[Subject], str]
    cure: Change | None = None

    def asked(self, subject: Subject) -> Diagnosis | None:
        """What this row says of ``subject``; None where it does not fit."""
        evidence = tuple(self.test(subject))
        if not evidence:
            return None
        return Diagnosis(
            symptom=self.symptom,
            cause=self.cause,
            confidence=self.confidence,
            evidence=evidence,
            next=self.next(subject),
            cure=self.cure,
        )


# -- what to try -------------------------------------------------------------------------------------------------------


def _say(text: str) -> Callable[[object], str]:
    return lambda subject: text


def _by(setting: Callable[[Config], str]) -> Callable[[Evidence | Incident], str]:
    """What to set, by the configuration."""
    return lambda subject: setting((subject.evidence if isinstance(subject, Incident) else subject).config)


def _older_checkpoint(incident: Incident) -> str:
    name = incident.evidence.config.run.name
    return f"begin before {incident.resumed_from}: higgsfield rollback {name} --to STEP --lr-scale 1"


def _put_back(evidence: Evidence) -> str:
    changed = fixed_since(evidence.events, evidence.config, max(1, evidence.last_trained))
    keys = {key: values for of_what in changed.values() for key, values in of_what.items()}
    what = (
        f"put back what was changed ({named(keys)})" if keys else "put it back (in the config, the data or the script)"
    )
    return f"{what} and resume, or begin a new run under another run.name"


def _after_its_end(evidence: Evidence) -> str:
    """What the log says is to be tried, where it knows that."""
    ending, end = ending_of(evidence.events), evidence.last_end
    found = after_giving_up(ending) if isinstance(ending, GaveUp) else []
    advised = found[0] if found else after_bad_end(end) if end is not None else None
    if advised is None:
        return "logs/train.log has the whole of it; higgsfield log says what was done about it"
    return f"{advised}; then higgsfield resume {evidence.config.run.name}" if isinstance(ending, GaveUp) else advised


def _half_the_rate(config: Config) -> str:
    rate = config.training.optimizer.learning_rate
    return f"training.optimizer.learning_rate: {rate / 2:.2g}, half of it" if rate else "half the learning rate"


def _start_of_optimizer(config: Config) -> str:
    rules = config.training.optimizer
    start = STARTING_RATES.get(rules.name, STARTING_RATES["adamw"])
    if config.model.path is None:
        start, _ = rates_from_scratch(rules.name) or (start, start)
    return f"training.optimizer.learning_rate: {start:g}, where {rules.name} begins"


def _rate_of_batch(config: Config) -> str:
    global_batch = config.training.batch_size * config.training.gradient_accumulation * config.cluster.world_size
    rate = STARTING_OF_ADAPTERS if config.model.lora is not None else by_batch(global_batch)
    return f"training.optimizer.learning_rate: {rate:.2g}"


def _clip_or_lower(config: Config) -> str:
    if config.training.max_grad_norm is None:
        return "training.max_grad_norm: 1.0; clipping is off"
    return _half_the_rate(config)


def _longer_warmup(config: Config) -> str:
    return "training.schedule.warmup: 0.05, at the same rate"


def _finer_numbers(config: Config) -> str:
    return {
        "fp16": "training.precision: bf16, which has the range of fp32; where the hardware has none, fp32",
        "bf16": "training.precision: fp32",
        "fp32": _half_the_rate(config),
    }[config.training.precision]


def _learn_at_all(config: Config) -> str:
    rules = config.training.optimizer
    start = STARTING_RATES.get(rules.name, STARTING_RATES["adamw"])
    if rules.learning_rate is not None and rules.learning_rate < start / 2:
        return f"training.optimizer.learning_rate: {start:g}; {rules.name} at {rules.learning_rate:g} hardly moves"
    if config.training.pure_bf16:
        return "model.dtype: float32 with training.precision: bf16; weights in bfloat16 do not take small updates"
    return "ten times the learning rate, for some hundred steps; if nothing moves, look at what of the data is learned"


def _other_schedule(config: Config) -> str:
    if config.training.schedule.name == "constant":
        return "training.schedule.name: cosine; a rate that stays high lets the loss rise late"
    return _half_the_rate(config)


def _more_workers(config: Config) -> str:
    if config.training.entrypoint is not None:
        return "more dataloader_num_workers in the script (data.workers, where it takes context.training_fields())"
    return f"data.workers: {max(4, 2 * config.data.workers)}"


_LOOK_AT_BATCH: Final = (
    "look at the rows of that batch, or leave them out: recovery.spike.skip repeat does so when it comes again, always "
    "at once"
)
_LOOK_AT_LABELS: Final = "look at the labels of those batches: where all of them are -100, there is no token to learn"

# -- the table ---------------------------------------------------------------------------------------------------------

OF_VERDICTS: Final[Sequence[Row[Incident]]] = (
    Row(
        "nothing is learned", "the labels of those batches", "likely", nothing_learned, _say(_LOOK_AT_LABELS),
    ),
    Row(
        "at the same batch", "the data", "likely", at_the_same_batch, _say(_LOOK_AT_BATCH), "without-batches",
    ),
    Row(
        "on one rank alone", "the node of that rank", "likely", on_one_rank,
        _say("leave its node out: cluster.exclude; recovery.node_strikes does so by itself"), "again",
    ),
    Row(
        "after a resume that came out differently", "the restore", "likely", after_another_probe,
        _older_checkpoint, "again",
    ),
    Row(
        "at once after a resume", "the restore", "likely", at_once_after_resume, _older_checkpoint, "again",
    ),
    Row(
        "before any update", "the initial weights or the input", "sure", before_any_update,
        _say("look at the weights it begins from and at the first rows: no setting of the training was in force yet"),
    ),
    Row(
        "infinite from one step to the next", "the data of that batch", "possible", suddenly_infinite,
        _say(_LOOK_AT_BATCH), "without-batches",
    ),
    Row(
        "another level from one step to the next", "the data of those batches", "possible", jumped,
        _say(_LOOK_AT_BATCH), "without-batches",
    ),
    Row(
        "above the optimizer's rate", "the learning rate is too high for the optimizer", "likely",
        above_rate_of_optimizer, _by(_start_of_optimizer), "tenth-rate",
    ),
    Row(
        "above the rate of the batch", "the learning rate is too high for the global batch", "likely",
        above_rate_of_batch, _by(_rate_of_batch), "tenth-rate",
    ),
    Row(
        "soon after a short warmup", "the warmup is too short", "likely", after_short_warmup, _by(_longer_warmup),
        "tenth-rate",
    ),
    Row(
        "not finite from the first steps", "the learning rate, or the input", "likely", within_first_steps,
        _by(_half_the_rate), "tenth-rate",
    ),
    Row(
        "the gradient norm first", "the updates are too large", "likely", norm_left_first, _by(_clip_or_lower),
        "tenth-rate",
    ),
    Row(
        "not finite after hours", "the precision, the optimizer's state or the learning rate", "possible",
        late_and_growing, _by(_finer_numbers), "fp32",
    ),
    Row("the loss left its band", "the learning rate", "possible", rose, _by(_clip_or_lower), "tenth-rate"),
    Row("not finite", "the precision or the learning rate", "possible", not_finite, _by(_finer_numbers), "fp32"),
)  # fmt: skip
"""Of a verdict; the first that fits is its diagnosis."""

SPECIFIC: Final[Sequence[Row[Evidence]]] = (
    Row(
        "not finite at regular distances", "the data", "likely", at_regular_distances, _say(_LOOK_AT_BATCH),
        "without-batches",
    ),
    Row(
        "the loss scale only falls", "fp16 cannot hold these numbers", "likely", scale_only_falls, _by(_finer_numbers),
        "fp32",
    ),
    Row(
        "a proof that failed", "the restore", "sure", proof_failed,
        _say("look at the disk that holds the checkpoints; higgsfield doctor checks it"), "again",
    ),
    Row(
        "other settings than the checkpoint's", "the config, the data or the script were changed", "sure",
        settings_changed, _put_back,
    ),
)  # fmt: skip
"""Of the run, and more telling than any verdict."""

SHAPES: Final[Sequence[Row[Evidence]]] = (
    Row(
        "its last start ended badly", "the program, its settings or its machine", "sure", ended_badly,
        _after_its_end,
    ),
    Row("no finite loss", "the labels of those batches", "likely", no_finite_loss, _say(_LOOK_AT_LABELS)),
    Row("stuck high", "it does not learn", "likely", stuck_high, _by(_learn_at_all)),
    Row(
        "a rebound", "the rate stays high for too long, or the data changed", "possible", rebound, _by(_other_schedule),
    ),
    Row(
        "the evaluation gets worse", "it overfits the training data", "likely", evaluates_worse,
        _say(
            "take the weights in best/, which are those of the lowest evaluation; for another run fewer epochs, more "
            "data or more regularisation"
        ),
    ),
)  # fmt: skip
"""Of the curves, the training's where it has no verdict."""

HARMLESS: Final[Sequence[Row[Evidence]]] = (
    Row(
        "slow: waiting for data", "the data come more slowly than they are trained on", "sure", waits_for_data,
        _by(_more_workers),
    ),
    Row(
        "slower than before", "a node, a disk or a neighbour", "possible", slowed_down,
        _say("compare step_s in loss_history.json by segment, and look at the node's clocks and disks"),
    ),
    Row(
        "fp16 overflows that the scaler caught", "a false alarm: so it finds its scale", "sure", scaler_at_work,
        _say("nothing"),
    ),
    Row(
        "a proof that had failed", "a restore, after which the run went on", "sure", proof_failed_before,
        _say("nothing"),
    ),
)  # fmt: skip
"""What a healthy run may have as well."""


# -- the diagnosis -----------------------------------------------------------------------------------------------------


def diagnose(evidence: Evidence) -> list[Diagnosis]:
    """Everything that is known of what went wrong, the most telling first; a healthy run is called healthy."""
    troubles = [*_asked(SPECIFIC, evidence), *_of_verdicts(evidence), *_asked(SHAPES, evidence)]
    harmless = list(_asked(HARMLESS, evidence))
    return [*troubles, *harmless] if troubles else [_healthy(evidence, is_alone=not harmless), *harmless]


def explain(evidence: Evidence, attempt: int) -> Diagnosis | None:
    """Why ``attempt`` ended with a verdict or a proof that failed; None where nothing of it is known."""
    of_attempt = [one for one in evidence.verdicts if one.verdict.attempt == attempt]
    if not of_attempt:
        refused = [one for one in evidence.refusals if one.attempt == attempt]
        return next(_asked(SPECIFIC[-2:], evidence), None) if refused else None
    last = of_attempt[-1]
    regular = SPECIFIC[0].asked(evidence) if last.is_nonfinite else None
    return regular or _first(last)


def _asked(rows: Sequence[Row[Evidence]], evidence: Evidence) -> Iterator[Diagnosis]:
    said = (row.asked(evidence) for row in rows)
    return (one for one in said if one is not None)


def _first(incident: Incident) -> Diagnosis | None:
    said = (row.asked(incident) for row in OF_VERDICTS)
    first = next((one for one in said if one is not None), None)
    return first and _after_changes(first, incident)


def _after_changes(said: Diagnosis, incident: Incident) -> Diagnosis:
    """The same where a person has changed since what is advised, or what has cured it: that is not advised again."""
    advised, steps = _SETTING.search(said.next), incident.steps_since_change
    if said.cure not in _SHOWN_BY_SETTINGS or not (steps or (advised and advised[0] in incident.changed)):
        return said
    what = f"cured by {named(incident.changed)}" if steps else f"changed since: {named(incident.changed)}"
    shown = (f"{count(steps, 'step')} without a verdict since that was changed",) if steps else ()
    cause, evidence = f"{said.cause}; {what}", (*said.evidence, *shown)
    return said.model_copy(update={"cause": cause, "evidence": evidence, "next": "nothing", "cure": None})


def _of_verdicts(evidence: Evidence) -> Iterator[Diagnosis]:
    """The newest verdict of each symptom; those that are not finite only where nothing regular explains them."""
    is_regular = bool(at_regular_distances(evidence))
    told: dict[str, Incident] = {}
    for incident in reversed(evidence.verdicts):
        is_told = any(_are_at_one_batch(incident, later) for later in told.values())
        said = None if is_told or (incident.is_nonfinite and is_regular) else _first(incident)
        if said is not None and said.symptom not in told:
            told[said.symptom] = incident
            yield said


def _are_at_one_batch(one: Incident, later: Incident) -> bool:
    """Whether the later one is the data's fault, and has named this one as its first time."""
    return bool(at_the_same_batch(later)) and are_near(one.batches[:1], later.batches[:1])


def _healthy(evidence: Evidence, *, is_alone: bool) -> Diagnosis:
    branch = evidence.branch
    if not branch:
        return Diagnosis(
            symptom="nothing yet", cause="no step was trained", confidence="sure",
            evidence=("loss_history.json has no record",),
            next=f"higgsfield status {evidence.config.run.name} says what it waits for",
        )  # fmt: skip
    losses = [record.loss for record in branch if record.loss is not None]
    fell = f", loss {losses[0]:.4g} at first and {losses[-1]:.4g} now" if losses else ""
    sound = "nothing is wrong" if len(branch) >= 100 else "nothing is wrong so far"
    troubles = evidence.interrupted_by
    told = sound if is_alone and not troubles else "the loss is healthy"
    others = (f"the run was interrupted by other things than its loss: {', '.join(troubles)}",) if troubles else ()
    return Diagnosis(
        symptom="healthy", cause=told, confidence="sure",
        evidence=(f"{count(len(branch), 'step')} without a verdict{fell}", *others), next="nothing",
    )  # fmt: skip
