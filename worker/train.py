"""The trainer: one rank's training process, ``python -m worker.train RUN_DIR START``.

Builds what the configuration says, begins where the directive says, and ends with the exit code of its outcome.
Whatever ends it, what it knows of that lies in rank-N.error.json before it goes.
"""

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch
import transformers

from worker import world
from worker.attach import attach
from worker.attached import Attached, Context
from worker.contract import config as configuration
from worker.contract.claim import FencedError, check_claim
from worker.contract.directive import Directive, read_directive
from worker.contract.exit_report import EXIT_CODE_OF_OUTCOME, Outcome, TrainerError
from worker.contract.files import UnusableFileError, make_folder, publish_message
from worker.contract.pulse import collective_timeout_s
from worker.contract.run_dir import RunDir
from worker.data import TrainingData
from worker.documents import DataError
from worker.ema import EmaError
from worker.laps import Laps
from worker.largest_batch import measure_memory
from worker.leaving import AlreadyTrainedError, LeavingError, RefusedError, detail_of, is_in_order, is_out_of_memory
from worker.log_lines import LogLines
from worker.models import ModelError
from worker.own_script import ScriptContext, find_script
from worker.publish import publish_final
from worker.pulse import Heart
from worker.resume import Chosen, choose
from worker.saving import finish_saving
from worker.setup import build_trainer
from worker.staging import clear_own_staging
from worker.start import Start

_BAD_INPUT = (DataError, EmaError, ModelError, UnusableFileError)
_CRASHED = 1
_log = logging.getLogger("worker")


@dataclass
class Progress:
    """What an exit report wants to know, however training ends."""

    attached: Attached | None = None


def main() -> NoReturn:
    """Train, then leave with the exit code of the outcome; nothing lingers behind."""
    run_to_exit(RunDir(Path(sys.argv[1])), Start.model_validate_json(sys.argv[2]))


def run_to_exit(run: RunDir, start: Start, alter: Callable[[Context], Context] = lambda context: context) -> NoReturn:
    """Train one rank as ``train`` does, report, and end this process with the exit code of the outcome."""
    make_folder(run.restart(start.attempt, start.restart), within=run.path)
    _dump_stacks_on_request(run.stacks(start.attempt, start.restart, start.rank))
    progress = Progress()
    try:
        train(run, start, progress, alter)
        code = EXIT_CODE_OF_OUTCOME[Outcome.DONE]
        report(run, start, progress, None)
    except BaseException as error:  # noqa: BLE001 (whatever ends a trainer is reported, and ends it)
        code = exit_code_of(error)
        if is_in_order(error):
            _log.info("%s", error)
        else:
            _log.error("%s: %s", type(error).__name__, error, exc_info=code == _CRASHED)
        _let_save_finish(progress, error)
        report(run, start, progress, error)
    leave(code)


def _let_save_finish(progress: Progress, ending: BaseException) -> None:
    """Have a checkpoint that is on its way published; whose run is somebody else's leaves at once."""
    if progress.attached is None or isinstance(ending, FencedError):
        return
    try:
        finish_saving(progress.attached)
    except Exception as error:  # noqa: BLE001 (it ends for the reason that it had)
        _log.error("the save under way: %s: %s", type(error).__name__, error)


def exit_code_of(error: BaseException) -> int:
    """The exit code that says what an exception means."""
    if isinstance(error, LeavingError):
        return EXIT_CODE_OF_OUTCOME[error.outcome]
    if isinstance(error, FencedError):
        return EXIT_CODE_OF_OUTCOME[Outcome.FENCED]
    if is_out_of_memory(error):
        return EXIT_CODE_OF_OUTCOME[Outcome.OUT_OF_MEMORY]
    return EXIT_CODE_OF_OUTCOME[Outcome.REFUSED] if isinstance(error, _BAD_INPUT) else _CRASHED


def report(run: RunDir, start: Start, progress: Progress, error: BaseException | None) -> None:
    """Leave what is known for the exit report."""
    attached = progress.attached
    known = TrainerError(
        segment=attached.segment.number if attached and attached.segment else None,
        step=attached.step if attached else None,
        saved_step=attached.saved_step if attached else None,
        error=detail_of(error) if error else None,
    )
    place = run.error(start.attempt, start.restart, start.rank)
    try:
        publish_message(place, known)
    except OSError as full:
        _log.error("%s: %s", place, full)
        if start.rank == 0:
            clear_own_staging(run, start.attempt, start.restart)  # what could not be saved may hold the last bytes
        with suppress(OSError):
            publish_message(place, known)


def leave(code: int) -> NoReturn:
    """Exit at once: data workers are killed, and no library's thread or handler holds the process."""
    for process in multiprocessing.active_children():
        process.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _dump_stacks_on_request(path: Path) -> None:
    """SIGUSR1 writes the stacks of all threads, also while Python itself hangs."""
    faulthandler.register(signal.SIGUSR1, file=open(path, "w", encoding="utf-8"), all_threads=True)  # noqa: SIM115


def train(
    run: RunDir, start: Start, progress: Progress, alter: Callable[[Context], Context] = lambda context: context
) -> None:
    """Train one rank to the last step and publish ``final/``; raises what ends it earlier.

    ``alter`` is a replay's: what it makes of the context is trained.
    """
    laps = Laps()
    laps.lap("imports")
    config = configuration.read(run.config)
    _log_to_stderr(start)
    timeout_s = config.recovery.hang_timeout_s
    heart = Heart(run.pulse(start.attempt, start.restart, start.rank), timeout_s)
    heart.beat("starting", 0)
    _set_threads(os.environ)
    world.join_world(run, start, os.environ, collective_timeout_s(timeout_s))
    laps.lap("meet")
    directive, chosen = world.from_rank_zero(lambda: _where_to_begin(run, start))
    _log.info("attempt %d begins from %s", start.attempt, chosen.folder.name if chosen else "scratch")
    laps.lap("choose")
    context = alter(Context(run, start, directive, config, "", chosen, laps=laps))
    if config.training.entrypoint is None:
        attached = _train_as_configured(context, progress, lambda: heart.beat("starting", 0))
    else:
        attached = _train_as_scripted(context, config.training.entrypoint, progress)
    publish_final(attached)
    if directive.rehearse:
        measure_memory(attached)


def _train_as_configured(context: Context, progress: Progress, alive: Callable[[], None]) -> Attached:
    start = context.start
    staged = context.run.staged_tokens(start.attempt, start.restart, start.rank)
    make_folder(staged.parent, within=context.run.path)
    trainer, data = build_trainer(context.run, context.config, Path.cwd(), alive, staged)
    context.laps.lap("build")
    if context.start.rank == 0:
        _tell_of_data(context.run, data)
    progress.attached = attached = attach(trainer, replace(context, data_digest=data.digest, locate=data.locate))
    trainer.add_callback(LogLines(attached))
    chosen = context.chosen
    try:
        trainer.train(resume_from_checkpoint=str(chosen.folder) if chosen else None)
    except AlreadyTrainedError:
        _log.info("%s is the last step's: only final/ is missing", chosen.folder.name if chosen else "this")
    return attached


def _train_as_scripted(context: Context, entrypoint: str, progress: Progress) -> Attached:
    script = ScriptContext(context)
    try:
        return script.run(find_script(entrypoint))
    finally:
        progress.attached = script.attached


def _where_to_begin(run: RunDir, start: Start) -> tuple[Directive, Chosen | None]:
    """The directive of this attempt and the checkpoint that it begins from; FencedError where another one is on."""
    directive = read_directive(run.directive)
    if directive is None:
        raise RefusedError(f"{run.directive} is missing: nobody said where to begin")
    if directive.attempt != start.attempt:
        raise FencedError(f"attempt {directive.attempt} is under way, and this is {start.attempt}")
    check_claim(run.claim(start.attempt), start.job_id, start.restart)
    refuse_other_disk(run)
    return directive, choose(run, start.attempt, directive.resume_from, sizes_only=start.same_allocation)


def refuse_other_disk(run: RunDir) -> None:
    """RefusedError where a checkpoint could not be published by a rename."""
    disk = run.path.stat().st_dev
    for folder in (run.checkpoints, run.staging, run.quarantine):
        if folder.exists() and folder.stat().st_dev != disk:
            raise RefusedError(f"{folder} is on another file system than the run's folder: link that one as a whole")


def _tell_of_data(run: RunDir, data: TrainingData) -> None:
    """What is trained on, and what is not, in data.json and in the log."""
    publish_message(run.data_report, data.report)
    for line in (*data.lines, *data.report.said()):
        _log.info("%s", line)


def _set_threads(environment: Mapping[str, str]) -> None:
    """Use as many threads as the environment says, also where torch was imported before it said so."""
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) > 0:
        torch.set_num_threads(int(threads))


def _log_to_stderr(start: Start) -> None:
    """Log to stderr, which the agent sends to logs/train.log; the other ranks only what is wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", force=True)
    _log.setLevel(logging.INFO if start.rank == 0 else logging.WARNING)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
