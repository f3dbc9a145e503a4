"""The lines of logs/train.log that tell a person how training goes."""

import logging

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from worker.attached import Attached
from worker.contract.loss_history import Record

_log = logging.getLogger("worker")


class LogLines(TrainerCallback):
    """A line for a person whenever the Trainer logs: what it logs, and how fast the newest recorded step was."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if self._attached.segment is not None and logs:
            said = [f"{name} {value:.6g}" for name, value in logs.items() if isinstance(value, float)]
            newest = self._attached.segment.newest
            if "loss" in logs and newest is not None:
                said += speed_of(newest)
            _log.info("step %d/%d %s", state.global_step, state.max_steps, " ".join(said))


def speed_of(record: Record) -> list[str]:
    """What a step cost, a phrase for each number that is known."""
    gib = None if record.peak_memory_bytes is None else record.peak_memory_bytes / 2**30
    told = {
        "tokens/s": record.tokens_per_s,
        "step_s": record.step_s,
        "data_wait_s": record.data_wait_s,
        "peak_memory_gib": gib,
        "loss_scale": record.loss_scale,
    }
    return [f"{name} {value:.4g}" for name, value in told.items() if value is not None]
