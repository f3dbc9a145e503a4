"""What a run was configured with over time, by its journal: what changed, and the rate of an attempt.  Pure."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from supervisor.fold import ending_of
from supervisor.journal import (
    ConfigEdited,
    Continued,
    Event,
    GaveUp,
    ResumeRequested,
    RollbackRequested,
    RolledBack,
    RunCreated,
    Stopped,
    SupervisorStarted,
)
from supervisor.run_state import RunState
from worker.contract.config import Config, without_secrets
from worker.contract.words import count

_RATE: Final = "training.optimizer.learning_rate"
_ADVISED: Final = (
    "training.optimizer.",
    "training.schedule.",
    "training.max_grad_norm",
    "training.precision",
    "training.pure_bf16",
    "training.batch_size",
    "training.gradient_accumulation",
    "model.dtype",
)
"""How keys begin that a diagnosis names, or that do the same."""
BATCH: Final = "the global batch"
_FIXED: Final = {
    "training.batch_size": BATCH,
    "training.gradient_accumulation": BATCH,
    "cluster.nodes": BATCH,
    "cluster.tasks_per_node": BATCH,
    "cluster.gpus_per_node": BATCH,
    "training.max_steps": "the number of steps",
    "training.epochs": "the number of steps",
    "training.optimizer.name": "the optimizer",
    "run.seed": "the seed",
    "data.": "the data",
    "model.": "the model",
}
"""How keys begin by which a resume would be another training than the checkpoint's, and what that changes."""
_SURE: Final = frozenset(
    {
        "training.max_steps",
        "training.epochs",
        "training.optimizer.name",
        "run.seed",
        "data.max_tokens",
        "data.pack",
        "data.shuffle",
    }
)
_TELLING: Final = (ResumeRequested, RollbackRequested, SupervisorStarted, ConfigEdited)
"""Events that tell what was changed in config.yaml."""
_NOT_FIXED: Final = frozenset({"data.eval", "data.max_bad_rows", "data.workers", "model.attention"})


def by_key(config: Config) -> dict[str, Any]:
    """Every value by its dotted key, without what may hold a password."""
    return dict(_flat(without_secrets(config).model_dump(mode="json"), ""))


def _flat(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def changes(events: Sequence[Event], config: Config) -> dict[str, tuple[Any, Any]] | None:
    """What ``config`` has changed since an event told of changes last; None where that is not known."""
    known = values_of(events)
    return None if known is None else _differences(known, by_key(config))


def values_of(events: Sequence[Event], attempt: int | None = None) -> dict[str, Any] | None:
    """Every value that ``attempt`` was begun with, or the last that are known; None where they are not known."""
    known: dict[str, Any] | None = None
    for event in events:
        if isinstance(event, RunCreated) and event.config is not None:
            known = dict(event.config)
        elif isinstance(event, _TELLING) and known is not None:
            known |= {key: new for key, (_, new) in (event.changed or {}).items()}
        elif isinstance(event, RolledBack | Continued) and attempt is not None and event.attempt >= attempt:
            break
    return known


def _differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [*new, *(key for key in old if key not in new)]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def changed_since(events: Sequence[Event], config: Config, attempt: int) -> dict[str, tuple[Any, Any]]:
    """What a diagnosis could have advised and a person has changed since ``attempt`` began, as far as it is known."""
    known = values_of(events, attempt)
    found = {} if known is None else _differences(known, by_key(config))
    return {key: values for key, values in found.items() if key.startswith(_ADVISED)}


def fixed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, dict[str, tuple[Any, Any]]]:
    """What of the training two configurations differ in that no resume can change, each with its keys."""
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    is_same_batch = global_batch(old) == global_batch(new)
    changed = _differences(old, new)
    if new["training.max_steps"] is not None:
        changed.pop("training.epochs", None)  # of which nobody asks then
    for prefix, what in _FIXED.items():
        for key in changed:
            if key.startswith(prefix) and key not in _NOT_FIXED and not (what == BATCH and is_same_batch):
                found.setdefault(what, {})[key] = changed[key]
    return found


def global_batch(values: dict[str, Any]) -> int:
    """Sequences of an optimizer step on all ranks."""
    on_each_node = values.get("cluster.tasks_per_node") or max(1, values.get("cluster.gpus_per_node") or 1)
    ranks = values.get("cluster.nodes", 1) * on_each_node
    return int(values.get("training.batch_size", 1) * values.get("training.gradient_accumulation", 1) * ranks)


def fixed_since(events: Sequence[Event], config: Config, attempt: int) -> dict[str, dict[str, tuple[Any, Any]]]:
    """The same of ``config`` and what ``attempt`` was begun with, as far as that is known."""
    known = values_of(events, attempt)
    return {} if known is None else fixed(known, by_key(config))


def surely_fixed(events: Sequence[Event], config: Config, attempt: int) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Those of them, but for the batch, that are refused whatever the files of the data hold."""
    found = {
        what: {key: values for key, values in keys.items() if key in _SURE and None not in values}
        for what, keys in fixed_since(events, config, attempt).items()
    }
    return {what: keys for what, keys in found.items() if keys}


def what_comes_of(edited: dict[str, tuple[Any, Any]], stays: dict[str, dict[str, tuple[Any, Any]]]) -> str:
    """What follows from an edit of config.yaml under way; ``stays`` is what of it no resume can change."""
    told = []
    for what, keys in stays.items():
        refused = {key: edited[key] for key in keys if key in edited}
        edited = {key: values for key, values in edited.items() if key not in refused}
        if refused:
            told.append(
                f"{what} of a run cannot change ({named(refused)}): the worker refuses to resume by it; put it back"
            )
    if edited:
        told.append(f"{named(edited)}: the worker goes by it from its next start on, the supervisor from its own")
    return "; ".join(told)


def rate_of_attempt(events: Sequence[Event], config: Config, attempt: int) -> float | None:
    """The learning rate that ``attempt`` was configured with; None where it had none, or it is not known."""
    known = values_of(events, attempt)
    if known is not None:
        rate: float | None = known.get(_RATE)
        return rate
    for event in reversed(events):
        if isinstance(event, RolledBack | Continued) and event.attempt <= attempt:
            break
        if isinstance(event, ResumeRequested):
            return None
    return config.training.optimizer.learning_rate


def told(changed: dict[str, tuple[Any, Any]]) -> str:
    """``, with training.optimizer.learning_rate: 0.3 -> 0.1``; empty where nothing changed."""
    return f", with {named(changed)}" if changed else ""


def named(changed: dict[str, tuple[Any, Any]]) -> str:
    """``training.optimizer.learning_rate: 0.3 -> 0.1``."""
    return "; ".join(f"{key}: {_value(old)} -> {_value(new)}" for key, (old, new) in changed.items())


def _value(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def told_of_scale(run: RunState, scale: float, events: Sequence[Event], config: Config) -> str:
    """That the next attempt begins at ``scale`` of the configured rate, and what of its data stays left out; empty
    where it begins at the whole of it, or comes back to it."""
    plan, rate = run.plan, config.training.optimizer.learning_rate
    if plan is None or scale == 1 or plan.lr_ramp is not None or config.recovery.spike.ramp_steps is not None:
        return ""
    steps = [event.verdict_step for event in events if isinstance(event, RolledBack)]
    since = f" since the rollback at step {steps[-1]}" if steps else ""
    stays = f"the rate stays at {scale:g} x the configured one{since}"
    if run.verdict is not None:
        stays = f"the verdict at step {run.verdict.step} is answered first, at {scale:g} x the configured rate"
    peak = f": a peak of {rate * scale:.4g}" if rate is not None else ""
    number = sum(one.count for one in plan.skip_batches)
    skipped = f"; {count(number, 'batch', 'batches')} {'stays' if number == 1 else 'stay'} left out" if number else ""
    ending = ending_of(events)
    to = "0" if isinstance(ending, GaveUp | Stopped) and ending.saved_step is None else "STEP"
    whole = f"`higgsfield rollback {config.run.dir}/{config.run.name} --to {to} --lr-scale 1` begins at the whole rate"
    return f"{stays}{peak}{skipped}; {whole}"
