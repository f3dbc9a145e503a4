"""The real trainer, which waits after a step for as long as its room says so: ``pause-ATTEMPT-STEP``."""

import time
from typing import Any

from transformers import TrainerCallback

import worker.train
from worker.attached import Attached, Context


class Pauses(TrainerCallback):
    """Pauses rank 0, and with it every rank; ``paused-ATTEMPT-STEP`` says that it does."""

    def __init__(self, context: Context) -> None:
        self._room, self._start = context.run.path.parent, context.start

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pause = self._room / f"pause-{self._start.attempt}-{state.global_step}"
        if self._start.rank == 0 and pause.exists():
            pause.with_name(pause.name.replace("pause", "paused")).touch()
            while pause.exists():
                time.sleep(0.01)


def main() -> None:
    attach = worker.train.attach

    def attach_with_pauses(trainer: Any, context: Context) -> Attached:
        attached = attach(trainer, context)
        trainer.add_callback(Pauses(context))
        return attached

    worker.train.attach = attach_with_pauses
    worker.train.main()


if __name__ == "__main__":
    main()
