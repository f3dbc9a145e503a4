"""Finished weights: ``final/`` with ``final/ema/``, and ``best/`` by evaluation loss. Plain Hugging Face folders."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from worker import world
from worker.attached import Attached
from worker.checkpoints import make_durable, publish_folder
from worker.contract.files import Message, make_folder, publish_message, read_message
from worker.staging import FORMER, remove
from worker.wrap import replaced


class BestEvaluation(Message):
    """best.json: which weights lie beside it."""

    step: int
    eval_loss: float


def publish_final(attached: Attached) -> None:
    """Publish the model as it is now as ``final/``, its average as ``final/ema/``; on every rank, together."""
    attached.heart.beat("finishing", attached.step)
    staged = _staged(attached, "final")
    _save_model(attached, staged)
    if attached.average is not None:
        with attached.average.swapped_into(attached.model):
            _save_model(attached, staged / "ema")
    _publish(attached, staged, attached.context.run.final)


def publish_if_best(attached: Attached, eval_loss: float) -> None:
    """Publish the weights as ``best/`` when they evaluate lower than those that lie there."""
    run = attached.context.run
    best = world.from_rank_zero(lambda: read_message(run.best / "best.json", BestEvaluation))
    if not eval_loss < (best.eval_loss if best else float("inf")):
        return
    staged = _staged(attached, "best")
    _save_model(attached, staged)
    if attached.segment is not None:
        publish_message(staged / "best.json", BestEvaluation(step=attached.step, eval_loss=eval_loss))
    _publish(attached, staged, run.best)


def _save_model(attached: Attached, folder: Path) -> None:
    """Write the model with its own ``use_cache``: off is for training only, and would make generation slow."""
    model: Any = attached.model
    generation = getattr(model, "generation_config", None)
    own = getattr(generation, "use_cache", None)
    with replaced(model.config, "use_cache", own) if own is not None else nullcontext():
        if attached.trainer.is_fsdp_enabled:  # the Trainer would write nothing where checkpoints are of shards
            whole = attached.trainer.accelerator.get_state_dict(attached.trainer.model)
            attached.trainer._save(str(folder), state_dict=whole)
        else:
            attached.trainer.save_model(str(folder))


def _staged(attached: Attached, name: str) -> Path:
    start, run = attached.context.start, attached.context.run
    make_folder(run.staging, within=run.path)
    return run.staging / f"a{start.attempt}-r{start.restart}-{name}"


def _publish(attached: Attached, staged: Path, place: Path) -> None:
    def publish() -> None:
        assert attached.files is not None
        make_durable(staged)
        attached.files.check()
        former = staged.with_name(f"{staged.name}{FORMER}")
        publish_folder(staged, place, lambda: former)
        remove(former, staged.with_name(f"{staged.name}-replaced-{attached.step}"))

    world.from_rank_zero(publish)
