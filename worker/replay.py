"""Bad steps of a run once more, each time with one thing changed: ``python -m worker.replay FOLDER``, or inside a job.

FOLDER holds the plan and a small run for each trial. What comes back is a line of JSON for each. A trial is trained by
a process of its own, forked from this one, so that neither memory nor random states are shared; the trainer is the one
that trains runs. Of the run itself everything is read and nothing is written.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from worker import world
from worker.attached import Attached
from worker.checkpoints import PROOF, Proof
from worker.child import Child, die_with, log_tail, open_log
from worker.contract.claim import Claim, start_ticks, take_claim
from worker.contract.exit_report import Outcome, TrainerError, outcome_of
from worker.contract.files import UnusableFileError, encode, publish, publish_message, read_message
from worker.contract.loss_history import Record, read_history, surviving
from worker.contract.replay import PLAN, WITHOUT_ROWS, Replay, Trial, Tried
from worker.contract.run_dir import RunDir
from worker.leaving import LeavingError
from worker.start import Start
from worker.suspects import Instead, Rows, in_words, look_at_rows, suspects
from worker.train import run_to_exit
from worker.trials import came_again, judged, loss_at_verdict
from worker.wrap import wrap
from worker.zygote import fork

Tell = Callable[[Tried], None]
ROWS: Final = "rows.json"
_LOG: Final = "train.log"
_JOB: Final = "replay"
_PEER_S: Final = 10.0
"""How long the ranks of a trial outlive one of them."""
_LOOK_S: Final = 0.05


class ReplayedError(LeavingError):
    """The last step that was to be trained is done."""

    outcome: ClassVar[Outcome] = Outcome.DONE


def replay(folder: Path, start: Start, tell: Tell) -> None:
    """Train every trial, and tell what came of each; the last thing told is the last, or why it cannot go on."""
    try:
        plan = read_message(folder / PLAN, Replay)
        if plan is None:
            raise UnusableFileError(folder / PLAN, "is missing")
        recorded = surviving(read_history(RunDir(plan.run).history)[: plan.bad.num_records])
    except (UnusableFileError, OSError) as error:
        tell(Tried(error=str(error)))
        return
    _use_the_threads_of(plan)
    again = start.model_copy(update={"same_allocation": True})
    is_stable = False
    for number, trial in enumerate(plan.trials):
        why_not = trial.why_not or ("needless: as it was, it does not come again" if is_stable else None)
        if why_not is not None:
            tell(Tried(change=trial.change, what=trial.what, said=why_not))
            continue
        steps = f"steps {plan.begin_step + 1} to {trial.end_step}, {trial.what}"
        tell(Tried(note=f"trial {number + 1} of {len(plan.trials)}: {steps}"))
        told = _tried(folder, plan, trial, recorded, again if number else start)
        is_stable = trial.change == "again" and told.cured is True
        tell(told)
    tell(Tried(is_last=True))


def _tried(folder: Path, plan: Replay, trial: Trial, recorded: Sequence[Record], start: Start) -> Tried:
    if trial.change == "smallest-batch":
        return _without_rows(folder, plan, trial, start)
    place = RunDir(folder / trial.change)
    records = _records(plan, place, _trained(place, plan, trial, start))
    if isinstance(records, str):
        return Tried(change=trial.change, what=trial.what, said=records)
    return came_again(plan, trial, records, recorded) if trial.change == "again" else judged(plan, trial, records)


def _without_rows(folder: Path, plan: Replay, trial: Trial, start: Start) -> Tried:
    """Look at each row of the first bad batch by itself, and train without those that stand out, where some do not."""
    place = RunDir(folder / trial.change)
    first = trial.model_copy(update={"end_step": plan.bad.onset_step})
    records = _records(plan, place, _trained(place, plan, first, start))
    if isinstance(records, str):
        return Tried(change=trial.change, what=trial.what, said=records)
    rows = suspects((read_message(place.path / ROWS, Rows) or Rows()).rows, plan.ratio)
    if not rows.is_some:
        loss = loss_at_verdict(plan, records)
        return Tried(change=trial.change, what=trial.what, cured=False, loss=loss, said=in_words(rows))
    place = RunDir(folder / WITHOUT_ROWS)
    records = _records(plan, place, _trained(place, plan, trial, start, rows.instead))
    if isinstance(records, str):
        return Tried(change=trial.change, what=trial.what, said=f"{in_words(rows)}; {records}")
    told = judged(plan, trial, records)
    return told.model_copy(update={"said": f"{in_words(rows)}; without that {told.said}"})


def _use_the_threads_of(plan: Replay) -> None:
    """As many threads as the checkpoint was made with: another number adds up in another order."""
    proof = None if plan.checkpoint is None else read_message(plan.checkpoint / PROOF, Proof)
    if proof is not None and "threads" in proof.platform:
        os.environ["OMP_NUM_THREADS"] = str(proof.platform["threads"])


# -- one trial ---------------------------------------------------------------------------------------------------------


def _trained(place: RunDir, plan: Replay, trial: Trial, start: Start, instead: Mapping[int, int] | None = None) -> int:
    """The exit code of this rank's trainer; it gets other samples in place of those that ``instead`` names."""
    log = place.path / _LOG
    with open_log(log) as output:
        begin = output.tell()
    parent = os.getpid()
    pid = fork()
    if pid == 0:
        _become_trainer(parent, log)
        _train(place, plan, trial, start, instead)
    child = Child(pid, begin, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    code = _end_of(child, place, start)
    publish(place.path / f"ended-{start.rank}", f"{code}\n")
    return code


def _become_trainer(parent: int, log: Path) -> None:
    """In the new process: die with the old one, and say everything into the trial's log."""
    die_with(parent)
    os.setpgid(0, 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


def _end_of(child: Child, place: RunDir, start: Start) -> int:
    """How it ended; it is killed soon after another rank's trainer failed, for which it would wait in vain."""
    failed_since = None
    while (code := child.poll()) is None:
        if failed_since is None and _another_failed(place, start):
            failed_since = time.monotonic()
        if failed_since is not None and time.monotonic() - failed_since > _PEER_S:
            child.send(signal.SIGKILL)
        time.sleep(_LOOK_S)
    return code


def _another_failed(place: RunDir, start: Start) -> bool:
    others = (place.path / f"ended-{rank}" for rank in range(start.world) if rank != start.rank)
    codes = [int(path.read_text(encoding="ascii")) for path in others if path.exists()]
    return any(outcome_of(code) not in (Outcome.DONE, Outcome.VERDICT) for code in codes)


def _train(place: RunDir, plan: Replay, trial: Trial, start: Start, instead: Mapping[int, int] | None) -> NoReturn:
    if start.rank == 0:
        ticks = start_ticks(os.getpid()) or 0
        claim = Claim(
            job_id=start.job_id, name=_JOB, restart=0, host=os.uname().nodename, pid=os.getpid(),
            started_ticks=ticks, time=time.time(),
        )  # fmt: skip
        take_claim(place.claim(start.attempt), claim)
    prepare = partial(_prepare, place=place, plan=plan, trial=trial, instead=instead)
    is_altered = trial.change in ("fp32", "adamw") or instead is not None
    run_to_exit(place, start, lambda context: replace(context, then=prepare, is_altered=is_altered))


def _prepare(attached: Attached, place: RunDir, plan: Replay, trial: Trial, instead: Mapping[int, int] | None) -> None:
    """Have the Trainer end where the trial does, and change of it what no configuration says."""
    if instead is not None:
        attached.trainer.train_dataset = Instead(attached.trainer.train_dataset, instead)
    elif trial.change == "smallest-batch":
        steps = [step for step in (plan.bad.onset_step - 1, plan.bad.onset_step) if step > plan.begin_step]
        attached.trainer.add_callback(_LookAtRows(attached, place.path / ROWS, steps))
    if trial.change == "fp32":
        wrap(attached.trainer, "_load_scaler", lambda original, checkpoint: None)
    if trial.change == "adamw":
        wrap(attached.trainer, "_load_optimizer_and_scheduler", partial(_load_schedule_alone, attached))
    attached.trainer.add_callback(_EndAt(trial.end_step))


def _load_schedule_alone(attached: Attached, original: Callable[[str | None], None], checkpoint: str | None) -> None:
    original(None)
    schedule: Any = attached.trainer.lr_scheduler
    if checkpoint is not None:
        schedule.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))


class _EndAt(TrainerCallback):
    """Ends the training after a step, when its numbers are read and recorded."""

    def __init__(self, end_step: int) -> None:
        self._end_step = end_step

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step + 1 >= self._end_step:
            control.should_training_stop = True  # so that nobody reads the step's numbers later

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= self._end_step:
            raise ReplayedError(f"step {state.global_step} is done")


class _LookAtRows(TrainerCallback):
    """Before each of some steps, looks at the rows of its batch one by one."""

    def __init__(self, attached: Attached, path: Path, steps: Sequence[int]) -> None:
        self._attached, self._path, self._steps = attached, path, steps
        self._rows = Rows()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        step = state.global_step + 1
        if step in self._steps:
            self._rows = Rows(rows=(*self._rows.rows, *look_at_rows(self._attached, step)))
            if world.rank() == 0:
                publish_message(self._path, self._rows)


# -- what came of it ---------------------------------------------------------------------------------------------------


def _records(plan: Replay, place: RunDir, code: int) -> list[Record] | str:
    """What the trial's own history says of the steps that it trained; the reason where its trainer failed."""
    if outcome_of(code) not in (Outcome.DONE, Outcome.VERDICT):
        return f"could not be tried: {_why(place, code)}"
    return [one for one in surviving(read_history(place.history)) if one.step > plan.begin_step]


def _why(place: RunDir, code: int) -> str:
    told = None
    with suppress(UnusableFileError):
        told = read_message(place.error(1, 0, 0), TrainerError)
    if told is not None and told.error is not None:
        return " ".join(told.error.message.split()) or told.error.type
    last = log_tail(place.path / _LOG, 0, 1)
    return f"its trainer ended with exit code {code}{f': {last}' if last else ''}"


# -- the program -------------------------------------------------------------------------------------------------------


def job_main(folder: str, out: str, start: dict[str, Any]) -> int:
    """The same inside a job, once for each rank; rank 0 tells, into the file ``out``."""
    own = Start(
        attempt=1, restart=0, job_id=_JOB, name=_JOB,
        rank=start["rank"], world=start["world"], local_rank=start["local_rank"],
    )  # fmt: skip
    if own.rank != 0:
        replay(Path(folder), own, lambda told: None)
        return 0
    with open(out, "a", encoding="ascii", buffering=1) as file:
        replay(Path(folder), own, partial(_write, file))
    return 0


def _write(file: Any, told: Tried) -> None:
    file.write(encode(told.model_dump(exclude_defaults=True)) + "\n")
    file.flush()


def main() -> None:
    """Replay what the command line names, and tell it on stdout; nothing else is printed there."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    alone = Start(attempt=1, restart=0, job_id=_JOB, name=_JOB, rank=0, world=1, local_rank=0)
    replay(Path(sys.argv[1]), alone, partial(_write, out))


if __name__ == "__main__":
    main()
