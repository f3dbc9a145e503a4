"""A replay as a person reads it: a table of the changes, and what to try.  Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from worker.contract.replay import Change, Replay, Tried

_TELLING: Final[tuple[Change, ...]] = (
    "again",
    "fp32",
    "smallest-batch",
    "without-batches",
    "tenth-rate",
    "adamw",
)
"""Where several changes cure it, the first of these says most about the cause."""


@dataclass(frozen=True)
class Standing:
    """The run as it stands now, which decides what can still be done with it."""

    path: Path
    is_finished: bool
    lr_scale: float
    """The present one, absolute."""
    learning_rate: float | None
    """The configured peak."""


def about(replay: Replay) -> str:
    """What is replayed."""
    bad = replay.bad
    start = f"checkpoint-{replay.begin_step} ({replay.checkpoint})" if replay.checkpoint is not None else "scratch"
    return f"replaying {bad.kind} at step {bad.verdict_step}, since step {bad.onset_step}, from {start}"


def table(tried: Sequence[Tried]) -> list[str]:
    """A line for each change."""
    rows = [("change", "loss", "cured", "what came of it")]
    rows += [(one.what, _loss(one), _CURED[one.cured], one.said) for one in tried]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]


_CURED: Final = {True: "yes", False: "no", None: "-"}


def _loss(one: Tried) -> str:
    if one.cured is None:
        return "-"
    return "not finite" if one.loss is None else f"{one.loss:.4g}"


def advice(replay: Replay, tried: Sequence[Tried], run: Standing) -> str:
    """The one thing to try next, in a verb that the run as it stands does not refuse."""
    if not was_tried(tried):
        return "nothing could be tried, so this says nothing about the cause: each line says what is in its way"
    cures = {one.change: one for one in tried if one.cured}
    match next((change for change in _TELLING if change in cures), None):
        case None:
            return "none of these changes cures it: look at the model's initialisation and code, or go further back"
        case "again":
            let_go = "" if run.is_finished else ", and let the run go on as it is"
            return (
                "from the same state it does not come again: neither data nor rate are at fault, so look at the node "
                f"and at what was restored{let_go}"
            )
        case "smallest-batch":
            return (
                f"it is the data: {cures['smallest-batch'].said}; mend or remove that, {_without_batches(replay, run)}"
            )
        case "without-batches":
            return f"it is the data of these batches: look at it, {_without_batches(replay, run)}"
        case "fp32":
            return "it is the precision: set training.precision to bf16 where it was fp16, else to fp32"
        case "tenth-rate":
            return f"it is the rate: {_lower_rate(replay, run)}"
        case _:
            return "it is the optimizer: AdamW takes these steps; use it, or the other one at a lower rate"


def was_tried(tried: Sequence[Tried]) -> bool:
    """Whether any change was trained to an answer."""
    return any(one.cured is not None for one in tried)


def _without_batches(replay: Replay, run: Standing) -> str:
    if run.is_finished:
        return "and train another run (another run.name): this one is finished"
    return f"or leave the batches out: `higgsfield rollback {run.path} --to {replay.begin_step} --skip`"


def _lower_rate(replay: Replay, run: Standing) -> str:
    scale = run.lr_scale / 2
    if not run.is_finished:
        lower = f"`higgsfield rollback {run.path} --to {replay.begin_step} --lr-scale {scale:g}`"
        return f"go on with a lower one, {lower} first, half of what it is now"
    half = "half of the peak that it ended with"
    rate = half if run.learning_rate is None else f"{run.learning_rate * scale:g}, {half}"
    return f"this run is finished; train another (another run.name) with training.optimizer.learning_rate: {rate}"


def as_json(tried: Sequence[Tried]) -> list[dict[str, Any]]:
    """As ``--json`` prints it."""
    return [{"change": one.change, "cured": one.cured, "loss": one.loss, "said": one.said} for one in tried]
