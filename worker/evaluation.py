"""An evaluation: of the weights and, beside it, of their average; without a trace in the random states."""

from collections.abc import Mapping
from typing import Any

from transformers import TrainerState, TrainingArguments

from worker.attached import Attached
from worker.randomness import random_states_aside

EMA_PREFIX = "eval_ema"
_FIELD_OF_METRIC = {"eval_loss": "eval_loss", f"{EMA_PREFIX}_loss": "ema_eval_loss"}


def evaluate_both(attached: Attached, original: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
    """In place of the Trainer's ``evaluate``: the metrics of the weights. Those of the average are logged beside them.

    The weights are bitwise themselves again when it returns.
    """
    attached.heart.beat("evaluating", attached.step)
    with random_states_aside():
        metrics: dict[str, float] = original(*args, **kwargs)
        if attached.average is not None and "metric_key_prefix" not in kwargs:
            with attached.average.swapped_into(attached.model):
                original(*args, **kwargs, metric_key_prefix=EMA_PREFIX)
    attached.heart.beat("training", attached.step)
    return metrics


def evaluated(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The evaluation losses among ``metrics``, under the names of a record's fields."""
    found = {field: metrics.get(name) for name, field in _FIELD_OF_METRIC.items()}
    return {field: float(loss) for field, loss in found.items() if loss is not None}


def evaluation_is_missing(args: TrainingArguments, state: TrainerState) -> bool:
    """Whether the step that was resumed from is to be evaluated and is not: one that is asked to leave has no time."""
    lines = [one for one in state.log_history if one.get("step") == state.global_step]
    return _is_due(args, state) and not any(evaluated(one) for one in lines)


def _is_due(args: TrainingArguments, state: TrainerState) -> bool:
    if state.global_step == 0:
        return False
    if args.eval_strategy == "epoch":
        epoch = state.epoch or 0.0
        return epoch.is_integer() and epoch >= args.eval_delay
    is_due = args.eval_strategy == "steps" and state.global_step % int(state.eval_steps) == 0
    return is_due and state.global_step >= args.eval_delay
