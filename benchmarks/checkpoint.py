"""What a save and a resume cost, beside those of the plain Trainer, early in a run and late.

``python -m benchmarks.checkpoint`` prints one table: the median of ``--repeats`` saves and resumes at every step of
``--steps``. All of them are made in one process and take turns, so that what slows the machine down meets each alike; a
step that is given twice shows the noise. A late step is not trained for: the Trainer is told that it has come so far,
and the history and the Trainer's own log are filled with as many records as there would be. The plain Trainer makes
nothing durable, so its save is shown without and with a fsync of every file. The first save and the first resume of
each kind warm up and are not counted.
"""

import argparse
import gc
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Trainer, TrainerCallback

from benchmarks.heading import heading, met
from worker.attach import attach
from worker.attached import Context
from worker.checkpoints import make_durable
from worker.contract.claim import Claim, take_claim
from worker.contract.config import Config
from worker.contract.directive import Directive, publish_directive
from worker.contract.loss_history import HistoryWriter, Record, record
from worker.contract.run_dir import RunDir, checkpoint_name
from worker.resume import choose
from worker.setup import build_trainer
from worker.start import Start

JOB = "1"
LOG_EVERY = 50
PLAIN, OURS = "plain Trainer", "higgsfield"
NOISE = 0.05
"""What the same save or resume differs by from one time to the next, on a quiet machine."""


class ReachedError(Exception):
    """The first step would begin now."""


class OnlyStep(TrainerCallback):
    """Tells a fresh Trainer that ``step - 1`` steps are behind it, and has it make the next one and end."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        self._trainer, self._step = trainer, step

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.global_step = self._step - 1
        state.log_history = logged(self._step)
        schedule: Any = self._trainer.lr_scheduler
        schedule.last_epoch = self._step - 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = True
        return control


class StopAtFirstStep(TrainerCallback):
    """Ends a resumed training where its first step would begin."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ReachedError


def configured(text: Path, told: argparse.Namespace, step: int) -> Config:
    model = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": told.hidden,
        "num_hidden_layers": told.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 3 * told.hidden,
    }
    optimizer = {"learning_rate": 1e-5}
    training = {"max_steps": step + told.repeats + 2, "batch_size": 1, "precision": "fp32"}
    fields: dict[str, Any] = {
        "run": {"name": "benchmark"},
        "model": {"config": model},
        "data": {"train": str(text), "tokenizer": "bytes", "max_tokens": 32},
        "training": {**training, "optimizer": optimizer, "log_every": LOG_EVERY},
        "checkpoint": {"every_steps": 10**9, "keep": told.repeats + 2},
    }
    return Config.model_validate(fields)


def fill_history(run: RunDir, steps: int) -> None:
    """A history of so many steps."""
    with HistoryWriter(run.history, lambda: None) as writer:
        for step in range(1, steps + 1):
            writer.append(typical(step))


def typical(step: int) -> Record:
    """The record of an ordinary step."""
    numbers = {"loss": 3.1234567, "grad_norm": 0.9876543, "lr": 1e-5, "tokens_per_s": 12345.678}
    timing = {"step_s": 0.123456, "data_wait_s": 0.000123, "data": {"epoch": 0, "batch": step - 1}}
    place = {"segment": 1, "attempt": 1, "restart": 0, "step": step, "epoch": step / 1e5, "time": time.time()}
    return record(**place, **numbers, **timing)


def logged(steps: int) -> list[dict[str, Any]]:
    """What the Trainer's own log holds after so many steps."""
    lines = range(LOG_EVERY, steps, LOG_EVERY)
    return [
        {"epoch": step / 1e5, "grad_norm": 0.98765, "learning_rate": 1e-5, "loss": 3.1234, "step": step}
        for step in lines
    ]


@dataclass
class Case:
    """One Trainer with a step behind it, and what its saves and resumes took, in seconds."""

    name: str
    step: int
    run: RunDir
    config: Config
    saver: Trainer
    save_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    resume_s: list[float] = field(default_factory=list)
    megabytes: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self.name == PLAIN

    def save(self) -> None:
        """One save, and one more where the next is: only the first checkpoint stays, to be resumed from."""
        began = begin_timing()
        self.saver._save_checkpoint(self.saver.model, trial=None)
        self.save_s.append(time.monotonic() - began)
        newest = self.run.checkpoint(self.saver.state.global_step)
        if self.is_plain:
            make_durable(newest)
        self.durable_s.append(time.monotonic() - began)
        if len(self.save_s) > 1:
            shutil.rmtree(newest)
        else:
            self.megabytes = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file()) / 1e6
        self.saver.state.global_step += 1

    def resume(self) -> None:
        """From building nothing but the checkpoint's state to where the first step would begin."""
        attempt = 2 + len(self.resume_s)
        if self.is_plain:
            trainer, chosen = plain_trainer(self.run, self.config), self.run.checkpoint(self.step)
            began = begin_timing()
        else:
            begin_attempt(self.run, attempt, self.step)
            trainer, begin = ours(self.run, self.config, attempt, self.step)
            began = begin_timing()
            chosen = begin()
        train_until_first_step(trainer, chosen)
        self.resume_s.append(time.monotonic() - began)


def begin_timing() -> float:
    """Now, with nobody's earlier writes or garbage to be waited for."""
    gc.unfreeze()  # the last turn's trainer is garbage by now, and what is frozen is never let go
    gc.collect()
    gc.freeze()
    os.sync()
    return time.monotonic()


def train_until_first_step(trainer: Trainer, checkpoint: Path) -> None:
    trainer.add_callback(StopAtFirstStep())
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except ReachedError:
        return


def prepared(name: str, step: int, run: RunDir, config: Config) -> Case:
    """A case whose Trainer has the optimizer's state and the logs of ``step`` steps."""
    run.path.mkdir()
    if name == PLAIN:
        trainer = plain_trainer(run, config)
    else:
        begin_attempt(run, 1, None)
        fill_history(run, step - 1)
        trainer, begin = ours(run, config, 1, None)
        begin()
    trainer.add_callback(OnlyStep(trainer, step))
    trainer.train()
    return Case(name, step, run, config, trainer)


def plain_trainer(run: RunDir, config: Config) -> Trainer:
    trainer, _ = build_trainer(run, config, Path.cwd())
    return trainer


def begin_attempt(run: RunDir, attempt: int, step: int | None) -> None:
    named = None if step is None else checkpoint_name(step)
    told: dict[str, Any] = {"cause": "first", "reason": "a benchmark", "time": time.time(), "resume_from": named}
    publish_directive(run.directive, Directive(attempt=attempt, **told))
    host = platform.node()
    claim = Claim(job_id=JOB, name="hf-b", restart=0, host=host, pid=1, started_ticks=1, time=time.time())
    take_claim(run.claim(attempt), claim)


def ours(run: RunDir, config: Config, attempt: int, step: int | None) -> tuple[Trainer, Callable[[], Path]]:
    """A Trainer, and what chooses the checkpoint and attaches everything to it."""
    trainer, data = build_trainer(run, config, Path.cwd())
    start = Start(attempt=attempt, restart=0, job_id=JOB, name="hf-b", rank=0, world=1, local_rank=0)
    run.restart(attempt, 0).mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"cause": "first", "reason": "a benchmark", "time": 1.0}
    named = None if step is None else checkpoint_name(step)
    directive = Directive(attempt=attempt, resume_from=named, **told)

    def begin() -> Path:
        chosen = choose(run, attempt, named, sizes_only=False)
        attach(trainer, Context(run, start, directive, config, data.digest, chosen))
        return chosen.folder if chosen else run.checkpoints

    return trainer, begin


def measured(told: argparse.Namespace) -> list[Case]:
    with tempfile.TemporaryDirectory(dir=told.folder, prefix="benchmark-") as folder:
        text = Path(folder, "text.txt")
        text.write_bytes(b"a line of the benchmark's text.\n" * (max(told.steps) + 10_000))
        cases = [
            prepared(name, step, RunDir(Path(folder, f"{number}-{name.split()[0]}")), configured(text, told, step))
            for number, step in enumerate(told.steps)
            for name in (PLAIN, OURS)
        ]
        for one in (Case.save, Case.resume):
            for turn in range(told.repeats + 1):
                for case in cases if turn % 2 else reversed(cases):
                    one(case)
    return cases


def shown(cases: list[Case], told: argparse.Namespace, parameters: int) -> str:
    """The table, with everything that is needed to read it."""
    lines = [
        *heading("checkpoint"),
        f"threads    {torch.get_num_threads()}, in {told.folder or 'a temporary folder'}",
        f"model      {parameters:,} parameters in float32, AdamW; higgsfield also keeps an average of the weights",
        f"figures    median of {told.repeats}, in seconds; ratios: within each turn, with their middle half",
        "",
        f"{'':16}{'step':>8}{'save':>10}{'durable':>10}{'resume':>10}{'MB':>10}",
    ]
    for case in cases:
        times = (case.save_s, case.durable_s, case.resume_s)
        figures = "".join(f"{statistics.median(each[1:]):>10.3f}" for each in times)
        lines.append(f"{case.name:16}{case.step:>8}{figures}{case.megabytes:>10.1f}")
    lines += ["", f"{'':34}{'durable':>10}{'resume':>26}"]
    first, wanted = dict[str, Case](), list[str]()
    for case in cases:
        base = first.setdefault(case.name, case)
        if case is not base:
            pairs = ((base.durable_s, case.durable_s), (base.resume_s, case.resume_s))
            ratios = [paired_ratios(*pair) for pair in pairs]
            row = f"{case.name:16}{f'{case.step} / {base.step}':>18}"
            lines.append(row + "".join(f"{one[1]:>10.2f} ({one[0]:.2f} to {one[2]:.2f})" for one in ratios))
            if case.name == OURS and case.step > base.step:
                for what, (_, median, _) in zip(("save", "resume"), ratios, strict=True):
                    told = f"a {what} at step {case.step} beside one at {base.step}"
                    wanted.append(f"{told:44}{1 + NOISE:>10.2f}{median:>10.2f}   {met(median <= 1 + NOISE)}")
    if wanted:
        lines += ["", f"{'wanted, ratio':44}{'at most':>10}{'measured':>10}", *wanted]
    return "\n".join(lines)


def paired_ratios(first: list[float], second: list[float]) -> list[float]:
    """The quartiles of the ratios of what was measured in the same turn."""
    return statistics.quantiles(
        (late / early for early, late in zip(first[1:], second[1:], strict=True)), n=4, method="inclusive"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 20_000])
    parser.add_argument("--repeats", type=int, default=15, help="two at least")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--folder", help="where the checkpoints are written; the disk that is measured")
    told = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cases = measured(told)
    per_layer = 4 * told.hidden**2 + 3 * told.hidden * 3 * told.hidden + 2 * told.hidden
    print(shown(cases, told, 2 * 256 * told.hidden + told.layers * per_layer + told.hidden))


if __name__ == "__main__":
    main()
