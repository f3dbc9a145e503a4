"""The losses on held-out text: the newest, and the best.  Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from worker.contract.loss_history import Record


def evaluations(branch: Sequence[Record]) -> dict[str, Any] | None:
    """The newest and the lowest of the records that count, with the steps that were evaluated; None = there is none."""
    found = [one for one in branch if one.eval_loss is not None]
    if not found:
        return None
    newest, best = found[-1], min(found, key=lambda one: one.eval_loss or 0.0)
    return {
        "step": newest.evaluated_step,
        "eval_loss": newest.eval_loss,
        "ema_eval_loss": newest.ema_eval_loss,
        "best_step": best.evaluated_step,
        "best_eval_loss": best.eval_loss,
    }


def evaluations_text(found: Mapping[str, Any]) -> str:
    """``evaluation loss 1.641 at step 1,000, of the average 1.61; the best at step 800: 1.638``."""
    average = "" if found["ema_eval_loss"] is None else f", of the average {found['ema_eval_loss']:.4g}"
    is_best = found["best_step"] == found["step"]
    best = "the best so far" if is_best else f"the best at step {found['best_step']:,}: {found['best_eval_loss']:.4g}"
    return f"{found['eval_loss']:.4g} at step {found['step']:,}{average}; {best}"
