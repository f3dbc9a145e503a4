"""A folder that a Trainer wrote without us becomes a run: log as history, checkpoints linked in. It stays as it is."""

import errno
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from supervisor.loss_log import Row, read_loss_log
from supervisor.runs import RunError, create, is_run
from worker.contract.config import Config
from worker.contract.digest import digest_of
from worker.contract.files import UnusableFileError, publish_message
from worker.contract.loss_history import ACTED, HistoryWriter, Record, record
from worker.contract.manifest import MANIFEST, FileEntry, Manifest
from worker.contract.recipe_config import schedule_factor
from worker.contract.recovery_config import SpikeConfig
from worker.contract.run_dir import RunDir, checkpoint_step
from worker.spikes import Detector

NOT_PROVEN: Final = (
    "the loss of its weights (there is no probe), the random states of each rank, and which samples it has seen: the "
    "data go on in the run's own order, the average of the weights begins there, and betas, eps and weight decay stay "
    "those of its optimizer.pt"
)
_STATE: Final = "trainer_state.json"
_ALIKE: Final = 0.05
"""Rates that differ by less are one: a warmup of some steps more or less."""
_RANDOM_STATES: Final = re.compile(r"rng_state(_\d+)?\.pth")
_NO_LINK: Final = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})


@dataclass(frozen=True)
class Found:
    """A complete checkpoint of somebody else's folder."""

    folder: Path
    step: int
    max_steps: int
    epoch: float
    files: tuple[Path, ...]
    """Regular files, relative to the folder."""


@dataclass(frozen=True)
class Adopted:
    """What became of a folder."""

    run_dir: RunDir
    config: Config
    steps: tuple[int, ...]
    """Of the checkpoints that are in the run; it goes on from the last one."""
    notes: tuple[str, ...]
    """For a person: what was passed over or copied, and why, and a rate that is not theirs."""


def adopt(folder: Path, config: Config) -> Adopted:
    """Make the run of ``config`` out of what a Trainer wrote into ``folder``; RunError where it cannot be one."""
    run_dir = RunDir(Path(config.run.dir) / config.run.name)
    if run_dir.path.exists():
        raise RunError(f"{run_dir.path}: is there already; choose another run.name")
    found, passed_over = look_through(folder)
    config, note = _with_its_steps(config, found[-1].max_steps, folder)
    records = records_of(_newest_log(folder, found), config.spike)
    usable, blown = _before_the_rails(found, records)
    if not usable:
        raise RunError(f"{folder}: its loss had left the rails before every checkpoint that is there")
    passed_over.extend(blown)

    def fill(making: RunDir) -> None:
        passed_over.extend(_fill(making, usable, records, config.checkpoint.keep))

    create(run_dir, config, fill, reason=f"run {config.run.name}, adopted from {folder.resolve()}")
    steps = tuple(run_dir.checkpoint_steps())
    rate = _another_rate(config, records, steps[-1], found[-1].max_steps)
    return Adopted(run_dir, config, steps, (*passed_over, *note, *rate))


def _with_its_steps(config: Config, max_steps: int, folder: Path) -> tuple[Config, tuple[str, ...]]:
    """The configuration with the folder's own number of steps, which makes the schedule."""
    told = config.training.max_steps
    if told is not None and told != max_steps:
        raise RunError(
            f"training.max_steps: is {told}, and {folder} was trained for {max_steps}, which its schedule is made for: "
            f"set it to {max_steps}, or begin a new run from its weights (model.path)"
        )
    training = config.training.model_copy(update={"max_steps": max_steps, "epochs": None})
    note = () if told else (f"training.max_steps is {max_steps}, as there; training.epochs is left out",)
    return config.model_copy(update={"training": training}), note


def _another_rate(config: Config, records: Sequence[Record], begin: int, max_steps: int) -> Iterator[str]:
    """A line where the last rate that was logged up to step ``begin`` is not what the configuration has at its step.

    Some versions of the Trainer log the rate of the step itself, others that of the next one: either is alike.
    """
    peak, schedule = config.training.optimizer.learning_rate, config.training.schedule
    known = [one for one in records if one.step <= begin and one.lr is not None and math.isfinite(one.lr)]
    if config.training.entrypoint is not None or peak is None or not known or begin >= max_steps:
        return
    step, theirs = known[-1].step, known[-1].lr or 0.0
    own, after, then = (peak * schedule_factor(schedule, done, max_steps) for done in (step - 1, step, begin))
    if min(own, after) * (1 - _ALIKE) <= theirs <= max(own, after) * (1 + _ALIKE):
        return
    yield (
        f"the learning rate logged at step {step} is {theirs:.3g} there and would be {own:.3g} here, which goes on "
        f"with {then:.3g} at step {begin + 1}: unless that is meant, set training.optimizer.learning_rate and "
        "training.schedule as they were there"
    )


# -- what is there -----------------------------------------------------------------------------------------------------


def look_through(folder: Path) -> tuple[list[Found], list[str]]:
    """The complete checkpoints of a folder, ascending by step, and why others are none; RunError without any."""
    if is_run(folder):
        raise RunError(f"{folder}: is a run of ours already; `higgsfield resume {folder}` goes on with it")
    try:
        named = [(step, path) for path in folder.iterdir() if (step := checkpoint_step(path.name)) is not None]
    except OSError as error:
        raise RunError(f"{folder}: cannot be read ({error.strerror})") from None
    found, passed_over = [], []
    for step, path in sorted(named):
        try:
            found.append(_complete(path, step))
        except (UnusableFileError, OSError) as error:
            why = error.why if isinstance(error, UnusableFileError) else error.strerror
            passed_over.append(f"{path.name} is passed over: {why}")
    if not found:
        told = "; ".join(passed_over) or "it has no checkpoint-N; name the Trainer's output_dir"
        raise RunError(f"{folder}: nothing to adopt: {told}")
    return found, passed_over


def _complete(folder: Path, step: int) -> Found:
    """The checkpoint in a folder; UnusableFileError where a resume would miss something, or begin it afresh."""
    files = tuple(_files_of(folder))
    names = {path.as_posix() for path in files}
    for path in files:
        if (folder / path).stat().st_size == 0:
            raise UnusableFileError(folder / path, f"{path} is empty")
    lacks = _lacks(names, folder)
    if lacks is not None:
        raise UnusableFileError(folder, f"{lacks} is missing")
    state = _state(folder / _STATE)
    if state.get("global_step") != step:
        raise UnusableFileError(folder, f"its {_STATE} is of step {state.get('global_step')}")
    max_steps, epoch = state.get("max_steps"), state.get("epoch")
    if not isinstance(max_steps, int) or max_steps < 1:
        raise UnusableFileError(folder, f"its {_STATE} names no max_steps")
    return Found(folder, step, max_steps, float(epoch) if isinstance(epoch, int | float) else 0.0, files)


def _files_of(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(parent, name)
            if not stat.S_ISREG(path.stat().st_mode):
                raise UnusableFileError(path, f"{path.relative_to(folder)} is no regular file")
            yield path.relative_to(folder)


def _lacks(names: Collection[str], folder: Path) -> str | None:
    """What the plain files of a checkpoint lack; None if nothing. Shards of FSDP and DeepSpeed are not adopted."""
    for always in (_STATE, "scheduler.pt", "optimizer.pt"):
        if always not in names:
            return always
    if "model.safetensors.index.json" in names:
        shards = set(_state(folder / "model.safetensors.index.json").get("weight_map", {}).values())
        return next(iter(sorted(shards - set(names))), None)
    weights = {"model.safetensors", "adapter_model.safetensors", "pytorch_model.bin"}
    return None if weights & set(names) else "model.safetensors"


def _state(path: Path) -> dict[str, Any]:
    """A JSON object, bare NaN tokens and all."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise UnusableFileError(path, f"{path.name} is no whole JSON") from None
    if not isinstance(found, dict):
        raise UnusableFileError(path, f"{path.name} is no JSON object")
    return found


# -- the history -------------------------------------------------------------------------------------------------------


def _newest_log(folder: Path, found: Sequence[Found]) -> tuple[list[Row], float]:
    """The rows of the log that reaches furthest, and when it was written; none where nothing was logged."""
    logs = [found[-1].folder / _STATE, folder / _STATE]
    best: tuple[list[Row], float] = [], found[-1].folder.stat().st_mtime
    for path in logs:
        try:
            rows, written = read_loss_log(path)[1], path.stat().st_mtime
        except (UnusableFileError, OSError):
            continue
        if not best[0] or rows[-1].step > best[0][-1].step:
            best = rows, written
    return best


def records_of(log: tuple[list[Row], float], rules: SpikeConfig) -> list[Record]:
    """A Trainer's log as history, with the verdicts that were ours; a loss there is the mean since the row before."""
    detector, records = Detector(rules), list[Record]()
    for row in log[0]:
        if records and row.step <= records[-1].step:
            continue
        said = detector.judge_logged(row.step, row.loss, row.grad_norm, row.others, scaler_skipped=row.scaler_skipped)
        records.append(
            record(
                segment=0,
                attempt=0,
                restart=0,
                step=row.step,
                epoch=row.others.get("epoch", 0.0),
                time=log[1],
                loss=row.loss,
                grad_norm=row.grad_norm,
                lr=row.others.get("learning_rate"),
                verdict=said.verdict,
                observed=said.verdict in ACTED,
                onset_step=said.onset_step,
                level=said.level,
                adopted=True,
            )
        )
    return records


def _before_the_rails(found: Sequence[Found], records: Sequence[Record]) -> tuple[list[Found], list[str]]:
    """The checkpoints at whose step the loss was as it should be, and why others are left out."""
    usable, left_out = [], []
    for one in found:
        own = max((each for each in records if each.step <= one.step), key=lambda each: each.step, default=None)
        if own is None or own.verdict == "ok":
            usable.append(one)
        else:
            since = own.onset_step if own.onset_step is not None else own.step
            left_out.append(f"{one.folder.name} is left out: the loss was off the rails since step {since}")
    return usable, left_out


# -- the run -----------------------------------------------------------------------------------------------------------


def _fill(making: RunDir, found: Sequence[Found], records: Sequence[Record], keep: int) -> list[str]:
    """Put history and checkpoints into a run that is being made; notes about those that could not be linked."""
    notes = []
    for number, one in enumerate(reversed(found), 1):
        try:
            _link(one, making.checkpoint(one.step), is_copied=False)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            shutil.rmtree(making.checkpoint(one.step))
            if number > keep:
                notes.append(f"{one.folder.name} is left where it is: it cannot be linked here ({error.strerror})")
                continue
            _link(one, making.checkpoint(one.step), is_copied=True)
            notes.append(f"{one.folder.name} is copied: it cannot be linked here ({error.strerror})")
    for one in found:
        place = making.checkpoint(one.step)
        if place.exists():
            _write_history(place / making.history.name, [each for each in records if each.step <= one.step])
            _write_manifest(place, one)
    _write_history(making.history, records)
    return notes


def _link(found: Found, place: Path, *, is_copied: bool) -> None:
    place.mkdir(parents=True)
    for name in found.files:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        source = (found.folder / name).resolve()
        if is_copied:
            shutil.copyfile(source, place / name)
        else:
            os.link(source, place / name)


def _write_history(path: Path, records: Sequence[Record]) -> None:
    with HistoryWriter(path, lambda: None) as writer:
        for one in records:
            writer.append(one)


def _write_manifest(place: Path, found: Found) -> None:
    """Written last, over what lies there now: a resume finds out if somebody writes into a linked file."""
    names = [*found.files, Path("loss_history.json")]
    entries = {
        name.as_posix(): FileEntry(bytes=(place / name).stat().st_size, xxh128=digest_of(place / name))
        for name in names
    }
    publish_message(place / MANIFEST, _manifest(found, entries))


def _manifest(found: Found, files: dict[str, FileEntry]) -> Manifest:
    return Manifest(
        step=found.step,
        attempt=0,
        segment=0,
        time=(found.folder / _STATE).stat().st_mtime,
        epoch=found.epoch,
        batches_into_epoch=None,
        samples_seen=None,
        world_size=sum(_RANDOM_STATES.fullmatch(name.as_posix()) is not None for name in found.files) or None,
        batch_size=None,
        gradient_accumulation=None,
        max_steps=found.max_steps,
        seed=None,
        config_digest=None,
        data_digest=None,
        lr_scale=1.0,
        weights_finite=None,
        probe_loss=None,
        optimizer_steps=None,
        versions={},
        files=files,
        adopted=True,
    )
