"""A trainer that only counts steps, and its real agent.

Faults of a cluster do not care what is trained, and a trainer that starts at once lets many of them be tested beside
each other: this module imports nothing of the supervisor.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.manifests import manifest
from worker import agent
from worker.agent_rules import Task
from worker.contract import config as configuration
from worker.contract.claim import FencedError, check_claim
from worker.contract.directive import Directive, read_directive
from worker.contract.exit_report import EXIT_CODE_OF_OUTCOME, ErrorDetail, Outcome, TrainerError
from worker.contract.files import publish_message
from worker.contract.loss_history import HistoryWriter, Probe, Start, record
from worker.contract.manifest import MANIFEST, complete_checkpoints
from worker.contract.run_dir import RunDir, checkpoint_step
from worker.interrupts import Ask, RunFiles, Signals
from worker.start import Start as TrainerStart

STEP_S, SAVE_S, LAST_SAVE_S, REQUEUE = "LIGHT_STEP_S", "LIGHT_SAVE_S", "LIGHT_LAST_SAVE_S", "LIGHT_REQUEUE"
"""Variables of `cluster.environment`: seconds of a step, of a save, of the one when asked to leave; 0 = no requeue."""
END = "LIGHT_END"
"""Another: the file without which the last step is not made: a slow machine's run is not over before its fault came."""
TRAINER = "LIGHT_TRAINER"
"""Another: the module of another trainer."""


def agent_main(run_dir: str, start: Mapping[str, Any]) -> None:
    """The real agent of one rank, with the trainer below; without the requeue command where the test wants none."""
    task = Task.model_validate(start)
    if os.environ.get(REQUEUE) == "0":
        task = task.model_copy(update={"requeue": None})
    agent.run(Path(run_dir), task, os.environ.get(TRAINER, "tests.whole_room.light_trainer"))


class LightTrainer:
    """One rank's trainer: a record a step, a manifest a save, and the exit code of its outcome."""

    def __init__(self, run: RunDir, start: TrainerStart) -> None:
        self.run, self.start = run, start
        self.config = configuration.read(run.config)
        directive = read_directive(run.directive)
        assert directive is not None
        self.directive: Directive = directive
        self.signals = Signals()
        self.files = RunFiles(run, directive, self.check)
        self.saved: int | None = None

    def check(self) -> None:
        check_claim(self.run.claim(self.start.attempt), self.start.job_id, self.start.restart)

    def train(self) -> Outcome:
        """Steps until the last one or until somebody asks; other ranks than 0 only wait for that."""
        self.run.restart(self.start.attempt, self.start.restart).mkdir(parents=True, exist_ok=True)
        return self._lead() if self.start.rank == 0 else self._follow()

    def _follow(self) -> Outcome:
        while not self.run.final.exists():
            asked = max(self.signals.asked, self.files.look())
            if asked > Ask.SAVE:
                return self._leave(asked, None)
            time.sleep(0.1)
        return Outcome.DONE

    def _lead(self) -> Outcome:
        last = self.config.training.max_steps or 0
        with HistoryWriter(self.run.history, self.files.check) as writer:
            segment, begin = writer.next_segment, self._begin()
            for step in range(begin + 1, last + 1):
                self._step(writer, segment, step, is_first=step == begin + 1)
                asked = self._asked(is_waiting=step == last - 1)
                if asked > Ask.SAVE:
                    self._save(step, LAST_SAVE_S)
                    return self._leave(asked, step)
                if asked is Ask.SAVE or step % self.config.checkpoint.every_steps == 0:
                    self._save(step, SAVE_S, is_asked=asked is Ask.SAVE)
                if asked is Ask.SAVE:
                    self.files.saved()
        self.run.final.mkdir(exist_ok=True)
        (self.run.final / "model.safetensors").touch()
        return Outcome.DONE

    def _asked(self, is_waiting: bool) -> Ask:
        """What is asked now; ``is_waiting``, it is asked again until something is, or until the run may end."""
        end = os.environ.get(END)
        while True:
            asked = max(self.signals.asked, self.files.look())
            if asked is not Ask.NOTHING or not is_waiting or end is None or Path(end).exists():
                return asked
            time.sleep(0.1)

    def _begin(self) -> int:
        own = [m.step for m in complete_checkpoints(self.run) if m.attempt == self.start.attempt]
        return own[-1] if own else checkpoint_step(self.directive.resume_from or "") or 0

    def _step(self, writer: HistoryWriter, segment: int, step: int, is_first: bool) -> None:
        seconds = float(os.environ.get(STEP_S, "0.05"))
        time.sleep(seconds)
        writer.append(
            record(
                segment=segment,
                attempt=self.start.attempt,
                restart=self.start.restart,
                step=step,
                epoch=0.0,
                time=time.time(),
                loss=2.0,
                lr=self.directive.lr_scale,
                verdict="ok",
                step_s=seconds,
                start=self._proof() if is_first else None,
            )
        )

    def _proof(self) -> Start:
        return Start(
            checkpoint=self.directive.resume_from,
            max_steps=self.config.training.max_steps or 0,
            lr=1.0,
            lr_expected=1.0,
            optimizer_steps=0,
            rng_digests=("r",),
            next_samples=(1,),
            probe=Probe(expected=None, found=1.0),
            versions={},
        )

    def _save(self, step: int, variable: str, is_asked: bool = False) -> None:
        time.sleep(float(os.environ.get(variable, "0")))
        self.files.check()
        folder = self.run.checkpoint(step)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        made = manifest(step, self.start.attempt, asked=is_asked, time=time.time())
        publish_message(folder / MANIFEST, made)
        self.saved = step

    def _leave(self, asked: Ask, step: int | None) -> Outcome:
        if asked is Ask.FENCED:
            return Outcome.FENCED
        error = ErrorDetail(type="Left", message=f"asked to leave: {asked.what}", what=asked.what)
        path = self.run.error(self.start.attempt, self.start.restart, self.start.rank)
        publish_message(path, TrainerError(step=step, saved_step=self.saved, error=error))
        return Outcome.LEFT


def train() -> None:
    """`python -m tests.whole_room.light_trainer RUN_DIR START`."""
    trainer = LightTrainer(RunDir(Path(sys.argv[1])), TrainerStart.model_validate_json(sys.argv[2]))
    try:
        outcome = trainer.train()
    except FencedError:
        outcome = Outcome.FENCED
    os._exit(EXIT_CODE_OF_OUTCOME[outcome])


if __name__ == "__main__":
    train()
