"""A replay as a person reads it: a table of the changes, and what to try.  Pure."""

from collections.abc import Sequence
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


def advice(replay: Replay, tried: Sequence[Tried], run: str) -> str:
    """The one thing to try next."""
    cures = {one.change: one for one in tried if one.cured}
    best = next((change for change in _TELLING if change in cures), None)
    back = f"`higgsfield rollback {run} --to {replay.begin_step}"
    match best:
        case None:
            return "none of these changes cures it: look at the model's initialisation and code, or go further back"
        case "again":
            return (
                "from the same state it does not come again: neither data nor rate are at fault, so look at the node "
                "and at what was restored, and let the run go on as it is"
            )
        case "smallest-batch":
            return (
                f"it is the data: {cures[best].said}; mend or remove that, or leave the batches out with {back} --skip`"
            )
        case "without-batches":
            return f"it is the data of these batches: look at it, and leave it out with {back} --skip`"
        case "fp32":
            return "it is the precision: set training.precision to bf16 where it was fp16, else to fp32"
        case "tenth-rate":
            return f"it is the rate: go on with a lower one, {back} --lr-scale 0.5` first"
        case _:
            return "it is the optimizer: AdamW takes these steps; use it, or the other one at a lower rate"


def as_json(tried: Sequence[Tried]) -> list[dict[str, Any]]:
    """As ``--json`` prints it."""
    return [{"change": one.change, "cured": one.cured, "loss": one.loss, "said": one.said} for one in tried]
