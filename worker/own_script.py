"""A person's own training script: ``training.entrypoint`` names a function, which gets a ScriptContext.

def main(context):
    trainer = ...                      # any Trainer, with whatever model, data and optimizer
    context.attach(trainer)
    trainer.train(resume_from_checkpoint=context.resume_from)
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xxhash
from transformers import PrinterCallback, Trainer
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import SaveStrategy

from worker.attach import attach
from worker.attached import Attached, Context
from worker.leaving import AlreadyTrainedError, RefusedError
from worker.log_lines import LogLines
from worker.setup import training_fields
from worker.wrap import wrap

_SAMPLES_IN_DIGEST = 64
_KEY = "config.yaml: training.entrypoint"


class ScriptContext:
    """What a person's script needs to train under supervision; the same on every rank.

    ``config`` is the run's whole configuration: the script reads from it what it likes.  ``resume_from`` is the folder
    of the checkpoint to begin from, None from scratch.  The world of the ranks is there already.
    """

    def __init__(self, context: Context) -> None:
        self.config = context.config
        self.run_dir = context.run.path
        self.rank, self.world_size = context.start.rank, context.start.world
        self.resume_from = str(context.chosen.folder) if context.chosen else None
        self.attached: Attached | None = None
        self._context = context
        self._ending: BaseException | None = None
        self._has_trained = False

    def training_fields(self) -> dict[str, Any]:
        """Fields for TrainingArguments, or a subclass of it, as ``training`` of the configuration says.

        Without ``training.max_steps`` the length is ``training.epochs`` of whatever the script trains on.
        """
        training = self.config.training
        fields = training_fields(self._context.run, self.config, training.max_steps or -1)
        del fields["remove_unused_columns"]
        return fields | ({"num_train_epochs": training.epochs} if training.epochs is not None else {})

    def attach(self, trainer: Trainer) -> None:
        """Add everything to ``trainer``; then call ``trainer.train(resume_from_checkpoint=context.resume_from)``.

        Checkpoints go where and when the run's configuration says, whatever the Trainer's own arguments say of it.
        """
        if self.attached is not None:
            raise RefusedError(f"{_KEY}: attach was called twice; one run trains one Trainer", what="entrypoint")
        args = trainer.args
        args.output_dir = str(self._context.run.checkpoints)
        args.save_strategy, args.save_steps = SaveStrategy.STEPS, self.config.checkpoint.every_steps
        trainer.remove_callback(PrinterCallback)
        trainer.remove_callback(ProgressCallback)
        self.attached = attach(trainer, replace(self._context, data_digest=digest_of_some(trainer.train_dataset)))
        trainer.add_callback(LogLines(self.attached))
        wrap(trainer, "train", self._train)

    def _train(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._ending is not None:
                raise self._ending
            if self._has_trained:
                raise RefusedError(f"{_KEY}: trainer.train was called twice; one run trains once", what="entrypoint")
            self._has_trained = True
            return original(*args, **kwargs)
        except BaseException as error:
            self._ending = error  # a script that catches it ends nothing
            raise

    def run(self, script: Callable[["ScriptContext"], Any]) -> Attached:
        """Run the person's function to the end of its training; raises what ended that earlier."""
        with contextlib.suppress(AlreadyTrainedError):
            script(self)
        if self._ending is not None and not isinstance(self._ending, AlreadyTrainedError):
            raise self._ending
        attached = self.attached
        if attached is None:
            raise RefusedError(f"{_KEY}: it returned and had attached no Trainer", what="entrypoint")
        if attached.step < attached.trainer.state.max_steps or attached.step == 0:
            where = f"step {attached.step} of {attached.trainer.state.max_steps}"
            mend = "have it call trainer.train"
            if self._has_trained:
                mend = "a callback ended the training or an epoch early; leave that out: a run trains to its last step"
            raise RefusedError(f"{_KEY}: it returned at {where}; {mend}", what="entrypoint")
        return attached


def find_script(entrypoint: str) -> Callable[[ScriptContext], Any]:
    """The function that ``FOLDER/package.module:function`` names; RefusedError, in one line, where there is none.

    The folder is the last place that is looked in, so that nothing of a person's shadows what is installed.
    """
    place, _, name = entrypoint.rpartition(":")
    folder, _, module = place.rpartition("/")
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise RefusedError(
            f"{_KEY}: there is no module {module} in {folder}, nor is one installed", what="entrypoint"
        ) from None
    script = getattr(found, name, None)
    if not callable(script):
        raise RefusedError(
            f"{_KEY}: {getattr(found, '__file__', None) or module} has no function {name}", what="entrypoint"
        )
    return script  # type: ignore[no-any-return]


def digest_of_some(samples: Any) -> str:
    """Names a data set by its length and by samples spread over it: reading all of them may take hours."""
    if not hasattr(samples, "__len__"):
        return ""  # refused by attach
    hasher = xxhash.xxh3_128(f"{len(samples)}\n".encode())
    for index in sorted({int(place) for place in np.linspace(0, max(0, len(samples) - 1), _SAMPLES_IN_DIGEST)}):
        if index < len(samples):
            _take_in(hasher, samples[index])
    return str(hasher.hexdigest())


def _take_in(hasher: Any, value: Any) -> None:
    """Plain values, mappings, lists, tensors and arrays by what they hold, anything else by its type."""
    if isinstance(value, Mapping):
        for name in sorted(value):
            hasher.update(f"{name}=".encode())
            _take_in(hasher, value[name])
    elif isinstance(value, torch.Tensor | np.ndarray):
        _take_in(hasher, value.tolist())
    elif isinstance(value, list | tuple):
        hasher.update(f"{len(value)}:".encode())
        for one in value:
            _take_in(hasher, one)
    else:
        is_plain = value is None or isinstance(value, str | bytes | bool | int | float)
        hasher.update((repr(value) if is_plain else type(value).__name__).encode("utf-8", "backslashreplace"))
