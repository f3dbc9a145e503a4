"""What a run was configured with over time, by its journal: what changed, and the rate of an attempt.  Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from supervisor.journal import Continued, Event, ResumeRequested, RolledBack, RunCreated
from supervisor.run_state import RunState
from worker.contract.config import Config, without_secrets

_RATE = "training.optimizer.learning_rate"


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
    """What ``config`` has changed since the run was made, or was last resumed; None where that is not known."""
    known: dict[str, Any] | None = None
    for event in events:
        if isinstance(event, RunCreated) and event.config is not None:
            known = dict(event.config)
        elif isinstance(event, ResumeRequested) and known is not None:
            known |= {key: new for key, (_, new) in (event.changed or {}).items()}
    if known is None:
        return None
    now = by_key(config)
    keys = [*now, *(key for key in known if key not in now)]
    return {key: (known.get(key), now.get(key)) for key in keys if known.get(key) != now.get(key)}


def rate_of_attempt(events: Sequence[Event], config: Config, attempt: int) -> float | None:
    """The learning rate that ``attempt`` was configured with; None where it had none, or it is not known.

    ``config`` is today's: what was changed at later resumes is taken back.
    """
    rate = config.training.optimizer.learning_rate
    for event in reversed(events):
        if isinstance(event, RolledBack | Continued) and event.attempt <= attempt:
            break
        if isinstance(event, ResumeRequested):
            if event.changed is None:
                return None
            rate = event.changed.get(_RATE, (rate,))[0]
    return rate


def told(changed: dict[str, tuple[Any, Any]]) -> str:
    """``, with training.optimizer.learning_rate: 0.3 -> 0.1``; empty where nothing changed."""
    named = [f"{key}: {_value(old)} -> {_value(new)}" for key, (old, new) in changed.items()]
    return f", with {'; '.join(named)}" if named else ""


def _value(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def told_of_scale(run: RunState, events: Sequence[Event], config: Config) -> str:
    """That rollbacks lowered the rate, and by what that stays below the configured one; empty where it is whole."""
    plan, rate = run.plan, config.training.optimizer.learning_rate
    if plan is None or plan.lr_scale == 1 or plan.lr_ramp is not None:
        return ""
    steps = [event.verdict_step for event in events if isinstance(event, RolledBack)]
    since = f" since the rollback at step {steps[-1]}" if steps else ""
    peak = f": a peak of {rate * plan.lr_scale:.4g}" if rate is not None else ""
    less = ", and less once the last verdict is answered" if run.verdict is not None else ""
    whole = f"`higgsfield rollback {config.run.name} --to STEP --lr-scale 1` takes the whole"
    return f"; the rate stays at {plan.lr_scale:g} of the configured one{since}{peak}{less}; {whole}"
