"""The real trainer with a pause after each step, which makes room for faults and needs no processor."""

from __future__ import annotations

import os
import time
from typing import Any

from transformers import TrainerCallback

import worker.train
from worker.attached import Attached, Context

STEP_S = "PACED_STEP_S"
"""A variable of `cluster.environment`: how long the pause is."""


class Pace(TrainerCallback):
    """Pauses after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(float(os.environ.get(STEP_S, "0")))


def main() -> None:
    attach = worker.train.attach

    def attach_with_pace(trainer: Any, context: Context) -> Attached:
        attached = attach(trainer, context)
        trainer.add_callback(Pace())
        return attached

    worker.train.attach = attach_with_pace
    worker.train.main()


if __name__ == "__main__":
    main()
