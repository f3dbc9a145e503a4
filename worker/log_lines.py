"""The lines of logs/train.log that tell a person how training goes."""

import logging

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_log = logging.getLogger("worker")


class LogLines(TrainerCallback):
    """A line for a person whenever the Trainer logs."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: object,
    ) -> None:
        if state.is_world_process_zero and logs:
            said = " ".join(f"{name} {value:.6g}" for name, value in logs.items() if isinstance(value, float))
            _log.info("step %d/%d %s", state.global_step, state.max_steps, said)
