"""Everything that is added to a Trainer: ``attach(trainer, context)``, on any instance and without a subclass.

Once attached, the Trainer writes one history record per optimizer step, withholds updates whose gradient is not
finite, stops on every rank at the same step when the detector says so, saves whole checkpoints, and proves a resume
before its first step.  It ends early by raising: a LeavingError, or FencedError when the run is somebody else's.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate.data_loader import DataLoaderShard
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from worker import world
from worker.attached import Attached, Context
from worker.background import Background
from worker.beginning import begin, prove_random_states
from worker.contract.claim import FencedError, check_claim
from worker.contract.loss_history import ACTED
from worker.evaluation import evaluate_both, evaluated, evaluation_is_missing
from worker.fits import checked_optimizer, refuse_other_backend, refuse_other_model
from worker.guard import innermost, why_unguarded
from worker.interrupts import Ask, IgnoreSignals, RunFiles, Signals
from worker.judgement import GRAVITY, Judgement, worse
from worker.leaving import AlreadyTrainedError, AskedToLeaveError, VerdictError
from worker.lora import base_of, refuse_named_adapter, refuse_other_base
from worker.order import EpochOrder, FastForward, batches_an_epoch
from worker.publish import publish_if_best
from worker.pulse import Heart
from worker.rates import configured_rates
from worker.rehearsal import rehearse
from worker.repeatable import refuse_other_samplers, refuse_untested, refuse_what_cannot_repeat
from worker.resume import Chosen
from worker.saving import finish_saving, hear_of_saves, save_checkpoint
from worker.segment import Segment
from worker.shards import refuse_background, refuse_silent_fallback
from worker.spikes import Detector
from worker.staging import clear_staging
from worker.tap import Measured, StepTap, peak_memory_bytes
from worker.wrap import wrap

_log = logging.getLogger(__name__)


def attach(trainer: Trainer, context: Context) -> Attached:
    """Add everything to ``trainer``; then call ``trainer.train(resume_from_checkpoint=...)`` with the chosen folder.

    The Trainer needs a map-style data set; its sampler becomes ours. SIGTERM and SIGUSR2 are flags
    from here on.
    """
    args, chosen = trainer.args, context.chosen
    refuse_untested(transformers.__version__)
    refuse_other_samplers(trainer)
    refuse_what_cannot_repeat(trainer)
    refuse_silent_fallback(trainer)
    if context.config.checkpoint.background:
        refuse_background(trainer)
    model = cast(torch.nn.Module, trainer.model)
    refuse_named_adapter(model)
    base = world.from_rank_zero(lambda: base_of(model))
    if chosen is not None:
        refuse_other_backend(chosen.manifest.files, trainer)
        refuse_other_base(chosen.manifest.base, base)
        refuse_other_model(chosen.folder, model)
    samples = cast(Sized, trainer.train_dataset)
    global_batch = args.train_batch_size * args.gradient_accumulation_steps * world.world_size()
    order = EpochOrder(
        samples=samples,
        global_batch=global_batch,
        seed=args.seed,
        shuffle=args.train_sampling_strategy == "random",
        skipped=context.directive.skip_batches,
        begin=_place_of(chosen, batches_an_epoch(len(samples), global_batch)),
    )
    start = context.start
    attached = Attached(
        trainer=trainer,
        context=context,
        order=order,
        detector=Detector(context.config.spike, context.directive.accept_level),
        heart=Heart(
            context.run.pulse(start.attempt, start.restart, start.rank), context.config.recovery.hang_timeout_s
        ),
        base=base,
        background=Background() if context.config.checkpoint.background else None,
    )
    unguarded = why_unguarded(trainer)
    if unguarded is not None:
        _log.warning("%s", unguarded)
    if start.rank == 0:
        _take_over_files(attached, (unguarded,) if unguarded else ())
    args.logging_nan_inf_filter = False
    args.save_total_limit = None
    if context.directive.rehearse:
        rehearse(attached, context.directive.rehearse)  # first: within our own save lies the Trainer's
    trainer.add_callback(StepsCallback(attached))
    if context.then is not None:
        context.then(attached)
    return attached


def _place_of(chosen: Chosen | None, num_batches: int) -> tuple[int, int]:
    """Finished steps, and the batches of the epoch that are behind: of an adopted checkpoint as many as its steps."""
    if chosen is None:
        return 0, 0
    step, behind = chosen.manifest.step, chosen.manifest.batches_into_epoch
    return step, step % num_batches if behind is None else behind


def _take_over_files(attached: Attached, warnings: tuple[str, ...]) -> None:
    """Rank 0 alone writes the history and the checkpoints, while its claim stands."""
    run, start, chosen = attached.context.run, attached.context.start, attached.context.chosen
    claim = run.claim(start.attempt)
    attached.files = RunFiles(run, attached.context.directive, lambda: check_claim(claim, start.job_id, start.restart))
    clear_staging(run, start.attempt, start.restart)
    begin_step = chosen.manifest.step if chosen else 0
    folder = run.checkpoint(begin_step) if chosen else None
    attached.segment = Segment(run, start, begin_step, attached.files.recheck, folder, warnings)


class StepsCallback(TrainerCallback):
    """Carries one Trainer through its steps: measure, judge, record, obey."""

    def __init__(self, attached: Attached, is_late: bool | None = None) -> None:
        """``is_late``: read a step's numbers one step later, so that nobody waits for a device."""
        trainer = attached.trainer
        self._attached = attached
        self._tap = StepTap(trainer)
        self._signals = Signals()
        device = trainer.args.device
        self._is_late = device.type != "cpu" if is_late is None else is_late
        self._is_on_gpu = device.type == "cuda"
        self._unread: list[Measured] = []
        self._asked = Ask.NOTHING
        self._peaks: Sequence[float] | None = None
        self._scale: float | None = None
        """The fp16 scaler's after the last step that was read."""
        self._is_evaluated = False
        """Whether an evaluation follows this step."""
        self._held: dict[str, Any] | None = None
        """The record of the step that is being evaluated: it is written with the evaluation's losses."""
        self._saved_at: int | None = None
        """The step of the last save."""
        self._failed_save: Exception | None = None
        """What ended a save beside the training."""
        wrap(trainer, "_load_optimizer_and_scheduler", self._load_optimizer)
        wrap(trainer, "_load_rng_state", self._load_rng_state)
        wrap(trainer, "_save_checkpoint", self._save)
        wrap(trainer, "evaluate", self._evaluate)
        wrap(trainer, "get_train_dataloader", self._load_train_data)
        wrap(trainer, "get_eval_dataloader", _ignoring_signals)
        wrap(trainer, "get_test_dataloader", _ignoring_signals)
        wrap(trainer, "_get_train_sampler", lambda original, *args: attached.order)

    # ---- beginning

    def _load_optimizer(self, original: Any, checkpoint: str | None) -> None:
        optimizer, chosen = self._attached.optimizer, self._attached.context.chosen
        self._peaks = configured_rates(optimizer)
        expected = chosen.proof.optimizer_facts if chosen and chosen.proof else None
        with checked_optimizer(innermost(optimizer), Path(checkpoint or "", "optimizer.pt"), expected):
            original(checkpoint)

    def _load_rng_state(self, original: Any, checkpoint: str | None) -> None:
        original(checkpoint)
        prove_random_states(self._attached.context.chosen)

    def _load_train_data(self, original: Any) -> Any:
        """The loader; the batches that a resume passes by are not made."""
        loader, order = _ignoring_signals(original), self._attached.order
        if isinstance(loader, DataLoaderShard):  # which skips what its own batch_sampler gives out first, in one epoch
            num_behind = order.num_behind() * self._attached.trainer.args.gradient_accumulation_steps
            loader.batch_sampler = FastForward(loader.batch_sampler, order, num_behind)
        return loader

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        renewed: Any = state.compute_steps  # how often to save, evaluate and log: until here as the checkpoint has it
        renewed(args, state.max_steps)
        attached = self._attached
        attached.step = state.global_step
        peaks, laps = self._peaks or configured_rates(attached.optimizer), attached.context.laps
        laps.lap("load")
        start = begin(attached, peaks)
        laps.lap("prove")
        if attached.segment is not None:
            waited_s = attached.context.start.waited_s
            times = {"began": laps.began, "took_s": laps.took_s, "waited_s": waited_s}
            attached.segment.begin(start.model_copy(update=times))
        if state.global_step >= state.max_steps:
            raise AlreadyTrainedError
        self._tap.begin()
        self._scale = self._tap.scale()
        attached.heart.beat("compiling", state.global_step)
        if evaluation_is_missing(args, state):
            attached.trainer.evaluate()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        order = self._attached.order
        order.epoch = state.global_step // order.num_batches

    # ---- a step

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._tap.before_update()
        if self._attached.background is not None:
            self._attached.background.memory.wait_until_copied()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        attached = self._attached
        attached.step = state.global_step
        if attached.trainer.accelerator.optimizer_step_was_skipped:
            attached.schedule.step()  # by the fp16 scaler: the Trainer held the schedule, and a step has its own rate
        if attached.average is not None:
            attached.average.update(attached.model, state.global_step)
        self._unread.append(self._tap.take(state, self._look(), attached.detector.take_alarm()))
        is_boundary = control.should_save or control.should_evaluate or control.should_training_stop
        self._is_evaluated = control.should_evaluate
        self._settle(keep=1 if self._is_late and not is_boundary else 0)
        if self._asked is not Ask.NOTHING:
            self._settle(keep=0)
            self._obey(control)
        if not control.should_evaluate:
            self._append_held()
        if self._failed_save is not None and self._asked <= Ask.SAVE:  # who leaves saves once more, and plainly
            self._settle(keep=0)
            self._append_held()
            raise self._failed_save
        attached.heart.beat("training", state.global_step)
        return control

    def _look(self) -> Ask:
        files = self._attached.files
        if self._attached.background is not None:
            try:
                with self._keeping_failure():
                    hear_of_saves(self._attached)
            except FencedError:
                return Ask.FENCED
        return self._signals.asked if files is None else max(self._signals.asked, files.look())

    @contextmanager
    def _keeping_failure(self) -> Iterator[None]:
        """Within, a save that failed beside the training raises nothing yet: the step is recorded and judged first."""
        try:
            yield
        except FencedError:
            raise
        except Exception as error:  # noqa: BLE001 (torch and safetensors have errors of their own)
            self._failed_save = error
            told = f"checkpoint.background: a save failed: {type(error).__name__}: {error}"
            _log.warning("%s", told)
            if self._attached.segment is not None:
                self._attached.segment.warn(told)

    def _settle(self, keep: int) -> None:
        """Read, judge and record all measured steps but the newest ``keep``."""
        while len(self._unread) > keep:
            measured = self._unread.pop(0)
            rows = measured.rows.read()
            asked = max(row[2] for row in rows)
            if asked > self._asked:
                self._asked = Ask(int(asked))
            if self._asked is Ask.FENCED:
                raise FencedError("the run is somebody else's")
            self._judge(measured, rows)

    def _judge(self, measured: Measured, rows: list[list[float]]) -> None:
        losses = [row[0] for row in rows]
        loss = sum(losses) / len(losses)
        grad_norm = rows[0][1] if measured.knows_norm else None
        scale_before, self._scale = self._scale, rows[0][5] if measured.knows_scale else None
        said = self._attached.detector.judge(
            measured.step, loss, grad_norm, scaler_skipped=_fell(scale_before, self._scale)
        )
        said = worse(said, agreed_alarm(measured, rows))
        is_acted = said.verdict in ACTED
        is_observed = is_acted and self._attached.context.config.recovery.mode == "observe"
        if is_acted and not is_observed:
            with self._keeping_failure():
                finish_saving(self._attached)  # who reads the verdict finds no checkpoint on its way any more
        ranks = nonfinite_ranks(rows, measured.knows_norm)
        self._record(measured, said, loss=loss, grad_norm=grad_norm, nonfinite_ranks=ranks, observed=is_observed)
        if is_acted and not is_observed:
            raise VerdictError(f"{said.verdict} at step {measured.step}", what=said.verdict)

    def _record(self, measured: Measured, said: Judgement, **numbers: Any) -> None:
        attached = self._attached
        if attached.segment is None:
            return
        epoch, batch = attached.order.batch_of(measured.step)
        self._append_held()
        self._held = dict(
            step=measured.step,
            time=time.time(),
            epoch=measured.epoch,
            lr=measured.rate,
            loss_scale=self._scale,
            peak_memory_bytes=peak_memory_bytes() if self._is_on_gpu else None,
            tokens_per_s=measured.tokens_per_s,
            step_s=measured.step_s,
            data_wait_s=measured.data_wait_s,
            data={"epoch": epoch, "batch": batch},
            verdict=said.verdict,
            onset_step=said.onset_step,
            level=said.level,
            warnings=said.warnings or None,
            **numbers,
        )
        if said.verdict != "ok" or not self._is_evaluated or measured.step < attached.step:
            self._append_held()

    def _append_held(self) -> None:
        held, self._held = self._held, None
        if held is not None and self._attached.segment is not None:
            self._attached.segment.append(**held)

    def _obey(self, control: TrainerControl) -> None:
        """Save, leave after the save, or leave at once; at the last step there is nothing left to do but finish."""
        if self._asked is Ask.STOP_NOW:
            self._leave()
        control.should_save = True
        if self._asked is not Ask.SAVE:
            control.should_evaluate = False
            with self._keeping_failure():
                finish_saving(self._attached)

    def _leave(self) -> None:
        attached = self._attached
        self._append_held()
        if attached.segment is not None:
            attached.segment.sync()
        raise AskedToLeaveError(f"asked to leave at step {attached.step}", what=self._asked.what)

    # ---- between steps

    def _save(self, original: Any, model: Any, trial: Any) -> None:
        state = self._attached.trainer.state
        if self._saved_at == state.global_step:  # the end of an epoch asks once more
            return
        self._settle(keep=0)  # of a save that a callback after this one asked for nothing was known
        self._append_held()
        is_scheduled = self._asked is Ask.NOTHING and state.global_step < state.max_steps
        try:
            is_asked = self._asked is Ask.SAVE
            save_checkpoint(self._attached, original, model, trial, may_be_beside=is_scheduled, is_asked=is_asked)
            self._saved_at = state.global_step
        except Exception:  # a successor removes, under a zombie's hands, what that one has not published
            if self._attached.files is not None:
                self._attached.files.check()
            raise

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._asked > Ask.SAVE and state.global_step < state.max_steps:
            self._leave()
        if self._asked is Ask.SAVE and self._attached.files is not None:
            self._attached.files.saved()
        self._asked = Ask.NOTHING

    def _evaluate(self, original: Any, *args: Any, **kwargs: Any) -> dict[str, float]:
        try:
            return evaluate_both(self._attached, original, *args, **kwargs)
        finally:
            self._append_held()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._attached.heart.beat("evaluating", state.global_step)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        noted = evaluated(metrics or {})
        if noted and self._attached.segment is not None:
            self._attached.segment.note(**noted, eval_step=None if self._held else state.global_step)
        if "eval_loss" in noted:
            publish_if_best(self._attached, noted["eval_loss"])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Judge what is watched beside the loss; keep what is not finite out of the Trainer's mean and of its state."""
        newest: dict[str, Any] = state.log_history[-1]
        self._attached.detector.watch(state.global_step, newest)
        if not math.isfinite(newest.get("loss", 0.0)):
            self._attached.trainer._tr_loss.zero_()
        for name, value in newest.items():
            if isinstance(value, float) and not math.isfinite(value):
                newest[name] = None

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._settle(keep=0)
        finish_saving(self._attached)
        self._append_held()
        if self._attached.segment is not None:
            self._attached.segment.sync()
        self._signals.restore()


def agreed_alarm(measured: Measured, rows: Sequence[Sequence[float]]) -> Judgement:
    """The gravest alarm of any rank, so that all of them stop at the same step."""
    verdict = GRAVITY[int(max(row[4] for row in rows))]
    return measured.alarm if measured.alarm.verdict == verdict else Judgement(verdict, measured.step)


def nonfinite_ranks(rows: Sequence[Sequence[float]], knows_norm: bool) -> tuple[int, ...] | None:
    """The ranks whose own loss or gradient is not finite; None where there is none, or where nothing tells whose."""
    found = tuple(rank for rank, row in enumerate(rows) if not (math.isfinite(row[0]) and math.isfinite(row[3])))
    is_alone = len(rows) == 1 and knows_norm and not math.isfinite(rows[0][1])
    return (0,) if is_alone else found or None


def _fell(before: float | None, now: float | None) -> bool:
    """Whether the scaler skipped the step between: it lowers its scale then, and at no other time.

    What accelerate says of it is wrong for fused optimizers, whose ``step`` is called all the same.
    """
    return before is not None and now is not None and now < before


def _ignoring_signals(original: Any, *args: Any, **kwargs: Any) -> Any:
    loader = original(*args, **kwargs)
    if loader.num_workers > 0:
        iterated = getattr(loader, "base_dataloader", loader)  # accelerate's own is a shell around it
        iterated.worker_init_fn = IgnoreSignals(iterated.worker_init_fn)
    return loader
