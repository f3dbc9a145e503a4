"""Which steps of a run are replayed, from which checkpoint, and with which changes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.batches import as_skips, positions_of
from supervisor.evidence import first_verdicts
from supervisor.journal import Continued, Event, Plan, RolledBack
from supervisor.runs import RunError
from worker.contract.config import Config
from worker.contract.directive import Directive
from worker.contract.loss_history import Record, surviving
from worker.contract.manifest import Health, Manifest, UnusableCheckpointError, complete_manifest, health
from worker.contract.recipe_config import STARTING_RATES
from worker.contract.replay import BadSteps, Change, Replay, Trial
from worker.contract.run_dir import RunDir
from worker.contract.words import count

_CHECKPOINT: Final = re.compile(r"(?:a\d+-)?checkpoint-\d+")
_TENTH: Final = 0.1
_NOT_FINITE: Final = ("skipped", "nonfinite")
_NEVER: Final = 10**9


@dataclass(frozen=True)
class Found:
    """A checkpoint of the run, wherever it lies now."""

    folder: Path
    manifest: Manifest


@dataclass(frozen=True)
class Planned:
    """A replay: the plan for the worker's program, and the small run of each trial."""

    replay: Replay
    configs: Mapping[Change, Config]
    directives: Mapping[Change, Directive]


def checkpoints_of(run_dir: RunDir) -> list[Found]:
    """The complete checkpoints of a run, quarantined ones too."""
    found = []
    for parent in (run_dir.checkpoints, run_dir.quarantine):
        for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
            try:
                if _CHECKPOINT.fullmatch(folder.name):
                    found.append(Found(folder, complete_manifest(folder)))
            except UnusableCheckpointError:
                continue
    return found


def plan_replay(
    run: Path, config: Config, records: Sequence[Record], events: Iterable[Event], checkpoints: Sequence[Found],
    is_alone: bool,
) -> Planned:  # fmt: skip
    """The newest bad steps that can be replayed; RunError where there are none. ``is_alone``: by one rank.

    Bad steps are those of a verdict, else a step whose update was withheld. They are replayed from the newest healthy
    checkpoint before the onset that lies on their own branch, at the same rate and without the same batches.
    """
    attempts = {one.attempt: one for one in events if isinstance(one, RolledBack | Continued)}
    bad = _bad_steps(records)
    if not bad:
        raise RunError(f"{run}: no step of this run was judged bad, so there is nothing to replay")
    for each in bad:
        branch = surviving(records[: each.num_records])
        start = _start(config, branch, each, attempts, checkpoints)
        if start is not None or _is_near_scratch(config, branch, each, attempts):
            return _planned(run, config, branch, each, attempts, start, is_alone)
    kept = "keep more of them (checkpoint.keep, checkpoint.keep_quarantined, `higgsfield pin`)"
    raise RunError(f"{run}: no checkpoint is left from before step {bad[0].onset_step}, where it went wrong; {kept}")


def _bad_steps(records: Sequence[Record]) -> list[BadSteps]:
    """The newest first."""
    verdicts = {id(one) for one in first_verdicts(records)}
    acted = [index for index, one in enumerate(records) if id(one) in verdicts]
    skipped = [index for index, one in enumerate(records) if one.verdict == "skipped"]
    return [_bad(records, index) for index in reversed(acted or skipped)]


def _bad(records: Sequence[Record], index: int) -> BadSteps:
    """The steps of the verdict in the record at ``index``; those that were skipped in a row belong together."""
    record, first = records[index], index
    while record.verdict == "skipped" and first > 0 and records[first - 1].verdict == "skipped":
        first -= 1
    onset = records[first].step if first < index or record.onset_step is None else record.onset_step
    return BadSteps(kind=record.verdict, onset_step=onset, verdict_step=record.step, num_records=index + 1)


# -- where it begins ---------------------------------------------------------------------------------------------------


def _start(
    config: Config, branch: Sequence[Record], bad: BadSteps, attempts: Mapping[int, Plan], checkpoints: Sequence[Found]
) -> Found | None:
    """The newest healthy checkpoint before the onset, else the newest that nothing speaks against; None = none."""
    record_at = {one.step: one for one in branch}
    own = [
        one
        for one in checkpoints
        if one.manifest.step < bad.onset_step
        and one.manifest.step in record_at
        and record_at[one.manifest.step].segment == one.manifest.segment
        and _is_one_way(branch, one.manifest.step, attempts)
    ]
    graded = [(health(one.manifest, branch, config.checkpoint.healthy_after), one) for one in own]
    for wanted in (Health.HEALTHY, Health.UNTESTED):
        fit = [one for grade, one in graded if grade is wanted]
        if fit:
            return max(fit, key=lambda one: one.manifest.step)
    return None


def _is_near_scratch(config: Config, branch: Sequence[Record], bad: BadSteps, attempts: Mapping[int, Plan]) -> bool:
    """Whether nothing before the onset was to be saved yet, so that the run itself would begin anew."""
    is_soon = bad.onset_step <= config.checkpoint.every_steps + config.checkpoint.healthy_after
    return is_soon and branch[0].step == 1 and _is_one_way(branch, 0, attempts)


def _is_one_way(branch: Sequence[Record], step: int, attempts: Mapping[int, Plan]) -> bool:
    """Whether all that was trained after ``step`` was trained at one rate and without the same batches."""
    numbers = {one.attempt for one in branch if one.step > step}
    return len({_way(attempts[number]) for number in numbers if number in attempts}) <= 1


def _way(plan: Plan) -> str:
    names = {"lr_scale", "lr_ramp", "skip_batches", "accept_level", "reset_moments", "rewarm_steps", "reset_from"}
    return plan.model_dump_json(include=names)


# -- what is tried -----------------------------------------------------------------------------------------------------


def _planned(
    run: Path, config: Config, branch: Sequence[Record], bad: BadSteps, attempts: Mapping[int, Plan],
    start: Found | None, is_alone: bool,
) -> Planned:  # fmt: skip
    begin = start.manifest.step if start is not None else 0
    as_it_was = _directive(attempts.get(branch[-1].attempt), start)
    base = _alike(config, {"training.gradient_accumulation": _accumulation(config)} if is_alone else {})
    configs: dict[Change, Config] = {"fp32": _alike(base, {"training.precision": "fp32"}), "adamw": _with_adamw(base)}
    suspects = _suspects(config, branch, bad, begin)
    skips = as_skips([*positions_of(as_it_was.skip_batches), *positions_of(suspects)])
    ramp = as_it_was.lr_ramp
    slow = {
        "lr_scale": as_it_was.lr_scale * _TENTH,
        "lr_ramp": ramp and ramp.model_copy(update={"to": ramp.to * _TENTH}),
    }
    directives: dict[Change, Directive] = {
        "tenth-rate": as_it_was.model_copy(update=slow),
        "without-batches": as_it_was.model_copy(update={"skip_batches": skips}),
    }
    trials = _trials(config, configs["adamw"], bad, sum(one.count for one in suspects))
    return Planned(
        replay=Replay(
            run=run,
            checkpoint=start.folder if start is not None else None,
            begin_step=begin,
            ratio=config.spike.ratio,
            bad=bad,
            trials=trials,
        ),
        configs={one.change: configs.get(one.change, base) for one in trials},
        directives={one.change: directives.get(one.change, as_it_was) for one in trials},
    )


def _directive(plan: Plan | None, start: Found | None) -> Directive:
    """What the attempt was told, begun at another checkpoint of its branch."""
    told = {} if plan is None else plan.model_dump(include=set(Directive.model_fields) & set(type(plan).model_fields))
    reset_from = plan.reset_from if plan is not None else None
    if plan is not None and plan.reset_moments and reset_from is None:
        reset_from = plan.resume_step
    name = f"checkpoint-{start.manifest.step}" if start is not None else None
    own = {
        "attempt": 1,
        "resume_from": name,
        "reset_from": reset_from,
        "cause": "first",
        "reason": "a replay",
        "time": 0.0,
    }
    return Directive(**told | own)


def _trials(config: Config, with_adamw: Config, bad: BadSteps, num_suspects: int) -> tuple[Trial, ...]:
    beyond = 0 if bad.kind in _NOT_FINITE else config.checkpoint.healthy_after
    end = bad.verdict_step + beyond
    rate = with_adamw.training.optimizer.learning_rate
    return (
        Trial(change="again", what="as it was", end_step=bad.verdict_step),
        Trial(change="smallest-batch", what="each row of the batch alone", end_step=end),
        Trial(change="fp32", what="training.precision fp32", end_step=end, why_not=_why_not_fp32(config)),
        Trial(change="adamw", what=f"AdamW at {rate:g}", end_step=end, why_not=_why_not_adamw(config)),
        Trial(change="tenth-rate", what="a tenth of the rate", end_step=end),
        Trial(
            change="without-batches",
            what=f"without {count(num_suspects, 'batch', 'batches')}",
            end_step=end,
            why_not=None if num_suspects else "the history does not say which batches they are",
        ),
    )


def _why_not_fp32(config: Config) -> str | None:
    if config.training.entrypoint is not None:
        return "a script of your own says the precision"
    if config.training.precision == "fp32":
        return "it trains in fp32"
    return None if config.model.dtype == "float32" else f"the weights themselves are {config.model.dtype}"


def _why_not_adamw(config: Config) -> str | None:
    if config.training.entrypoint is not None:
        return "a script of your own makes the optimizer"
    if "deepspeed" in config.training.extra:
        return "DeepSpeed would load the other optimizer's state"
    return "it is AdamW" if config.training.optimizer.name == "adamw" else None


def _with_adamw(config: Config) -> Config:
    """AdamW at the same rate; where the optimizer's own rates are customarily higher, at as much less."""
    optimizer = config.training.optimizer
    share = min(1.0, STARTING_RATES["adamw"] / STARTING_RATES.get(optimizer.name, STARTING_RATES["adamw"]))
    rate = (optimizer.learning_rate or STARTING_RATES["adamw"]) * share
    changed = {"name": "adamw", "learning_rate": rate, "weight_decay": optimizer.weight_decay}
    return _alike(config, {"training.optimizer": changed})


def _accumulation(config: Config) -> int:
    """As many micro-steps as make the same global batch on one rank."""
    return config.training.gradient_accumulation * config.cluster.world_size


def _alike(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with other values, and without what a replay has no use for."""
    unused = {
        "recovery.mode": "act",
        "checkpoint.every_steps": _NEVER,
        "training.eval_every": None,
        "training.report_to": [],
        "data.eval": None,
        "notify": [],
    }
    fields = config.model_dump(mode="json")
    for key, value in {**unused, **changes}.items():
        section, _, name = key.partition(".")
        if name:
            fields[section][name] = value
        else:
            fields[section] = value
    return Config.model_validate(fields)


def _suspects(config: Config, branch: Sequence[Record], bad: BadSteps, begin: int) -> tuple[Any, ...]:
    """The batches from ``recovery.spike.skip_before`` ahead of the onset to the verdict."""
    first = max(begin + 1, bad.onset_step - config.recovery.spike.skip_before)
    within = [one for one in branch if first <= one.step <= bad.verdict_step]
    return as_skips([one.data for one in within if one.data is not None])
