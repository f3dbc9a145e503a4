"""Runs that really fail, each of one cause: a real trainer and a real supervisor, without the weight of a job.

The trainers are forked from the session's zygote, the supervisor is the Stage's, and the scheduler is in memory: a run
costs a second or two. What is left is a run folder like any other, to be diagnosed and replayed.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.supervisor_room.stage import Stage
from tests.trainer_room.rig import TINY, Launcher, write_text
from tests.waiting import eventually
from worker.child import Child
from worker.contract.exit_report import EXIT_CODE_OF_OUTCOME, ErrorDetail, Outcome, TrainerError
from worker.contract.files import publish, read_message
from worker.contract.loss_history import last_record
from worker.start import Start

MARKER: Final = 7
"""The byte whose batch has an infinite loss: in the poisoned run always, in the overflowing one under fp16 alone."""
POISONED_BATCH: Final = 13
BATCH, BLOCK = 4, 32
_PATIENCE_S = 240.0
_OUTCOMES = {code: outcome for outcome, code in EXIT_CODE_OF_OUTCOME.items()}


def _write_marked(*batches: int) -> Callable[[Path], None]:
    """A document a sample; the first sample of each of these batches holds the marker."""

    def write(path: Path) -> None:
        texts = [f"sample {number}, {number * number}" for number in range(60 * BATCH)]
        for batch in batches:
            texts[batch * BATCH] += chr(MARKER)
        publish(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))

    return write


def _write_lines(path: Path) -> None:
    write_text(path, num_bytes=400 * BATCH * BLOCK)


@dataclass(frozen=True)
class Case:
    """One way to fail: what is configured, what each attempt's trainer meets (the last of it ever after), and on what
    it is trained."""

    sections: dict[str, dict[str, Any]]
    faults: Sequence[dict[str, Any]] = ({},)
    write: Callable[[Path], None] = _write_lines


_GIVES_UP: Final = {"spike": {"max_rollbacks": 1, "skip": "never"}}
_ROWS: Final = {"format": "jsonl", "pack": False, "shuffle": False}
_WINDOW: Final = {"window": 20, "warmup": 8, "ratio": 2.0}


def _sgd(learning_rate: float, warmup: int) -> dict[str, Any]:
    """Eighty steps without clipping: 0.65 with a warmup of 40 runs to the end, and so does 0.5 without one."""
    return {
        "max_steps": 80,
        "max_grad_norm": None,
        "optimizer": {"name": "sgd", "momentum": 0.9, "learning_rate": learning_rate},
        "schedule": {"name": "constant", "warmup": warmup},
    }


CASES: Final[dict[str, Case]] = {
    "poisoned_row": Case(
        {"data": _ROWS, "spike": {"nonfinite_patience": 1}, "recovery": _GIVES_UP},
        ({"poison": MARKER},),
        _write_marked(POISONED_BATCH),
    ),
    "hot_rate": Case({"training": _sgd(4.0, warmup=30), "spike": _WINDOW, "recovery": _GIVES_UP}),
    "short_warmup": Case({"training": _sgd(0.65, warmup=0), "spike": _WINDOW, "recovery": _GIVES_UP}),
    # Killed after step 18; the weights that are read back at step 16 are not those that were saved.
    "bad_restore": Case(
        {"training": {"max_steps": 40}, "spike": _WINDOW, "recovery": _GIVES_UP},
        ({"die_at": [18, "end", signal.SIGKILL, 0]}, {"spike_at": 17}, {}),
    ),
    # From batch 24 on every batch overflows, whatever the scale: the scaler skips them all, and training stands still.
    "overflow": Case(
        {"data": _ROWS, "training": {"max_steps": 50, "precision": "fp16"}, "recovery": _GIVES_UP},
        ({"fp16_on_cpu": 1024.0, "overflow": MARKER},),
        _write_marked(*range(24, 60)),
    ),
}


class Failing(Stage):
    """A run whose worker is a real trainer of this session."""

    def __init__(self, folder: Path, case: Case, launcher: Launcher) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._case, self._launcher = case, launcher
        data = folder / "train.data"
        case.write(data)
        sections = _tiny() | case.sections
        given = {name: _tiny().get(name, {}) | section for name, section in sections.items()}
        given["data"] = given["data"] | {"train": str(data)}
        super().__init__(folder, **given)
        self.now = time.time()

    def live(self) -> None:
        """Train and decide until the run is over."""
        self.settle()
        while not self.watched.run.state.is_over:
            if self.state == "queued":
                self.start_job()
                self.settle()
            else:
                self.claim()
            self._train_an_attempt()
            self.now = max(self.now, time.time())
            self.settle()

    def _train_an_attempt(self) -> None:
        attempt, faults = self.directive.attempt, self._case.faults
        start = Start(attempt=attempt, restart=0, job_id=self.job_id, name="hf", rank=0, world=1, local_rank=0)
        met = faults[min(attempt, len(faults)) - 1]
        arguments = [str(self.run_dir.path), start.model_dump_json(), json.dumps(met)]
        self.run_dir.train_log.parent.mkdir(exist_ok=True)
        code = end_of(self._launcher.start(arguments, {}, self.run_dir.train_log))
        last = last_record(self.run_dir.history)
        self.step = last.step if last else 0
        self._report(code, read_message(self.run_dir.error(attempt, 0, 0), TrainerError))

    def _report(self, code: int, told: TrainerError | None) -> None:
        """What the agent would write of how its trainer ended."""
        error = told.error if told else ErrorDetail(type="Signal", message=f"the trainer was killed by signal {-code}")
        self.leave(_OUTCOMES.get(code, Outcome.CRASHED), error=error, saved_step=told.saved_step if told else None)


def _tiny() -> dict[str, dict[str, Any]]:
    return {
        "model": {"config": TINY},
        "data": {"tokenizer": "bytes", "max_tokens": BLOCK},
        "training": {
            "max_steps": 40,
            "batch_size": BATCH,
            "optimizer": {"learning_rate": 1e-2},
            "precision": "fp32",
            "log_every": 10,
        },
        "checkpoint": {"every_steps": 4, "healthy_after": 2, "keep": 20, "keep_quarantined": 20},
    }


def end_of(child: Child) -> int:
    """The exit code of a process, once it has ended."""
    return eventually(lambda: (child.poll(),) if child.poll() is not None else None, _PATIENCE_S)[0] or 0


def fail(name: str, folder: Path, launcher: Launcher) -> Failing:
    """The run of a case, which is over."""
    run = Failing(folder, CASES[name], launcher)
    run.live()
    return run
