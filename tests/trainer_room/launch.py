"""The trainer of these tests, which meets the faults that are asked for: its arguments are RUN_DIR START FAULTS.

``replays``: the rank of a replay's job instead, and its arguments are FOLDER OUT FAULTS. ``benchmark``: that script of
benchmarks/ instead, and its arguments are the script's own.

A zygote forks it for each start: one real process, a fraction of a second.
"""

import importlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import TrainerCallback

import worker.attach
import worker.own_script
import worker.replay
import worker.saving
import worker.train
from worker.attached import Attached
from worker.contract import config as configuration
from worker.contract.run_dir import RunDir
from worker.setup import build_trainer
from worker.wrap import wrap


def main() -> NoReturn:
    faults = json.loads(sys.argv.pop())
    if "benchmark" in faults:
        _run_benchmark(faults["benchmark"])
    if faults.get("is_plain"):
        _train_plainly(RunDir(Path(sys.argv[1])))
    if "elsewhere_until" in faults:
        _train_elsewhere(RunDir(Path(sys.argv[1])), faults["elsewhere_until"])
    inject(faults)
    if "replays" in faults:
        os._exit(worker.replay.job_main(*sys.argv[1:], faults["replays"]))
    worker.train.main()


def _run_benchmark(script: str) -> NoReturn:
    importlib.import_module(f"benchmarks.{script}").main()
    sys.stdout.flush()
    os._exit(0)


def _train_plainly(run: RunDir) -> NoReturn:
    """The Trainer alone, with the same settings, until a loss is not finite; then its weights, in plain.json."""
    trainer, _ = build_trainer(run, configuration.read(run.config), Path.cwd())
    ending = UntilNotFinite()
    trainer.add_callback(ending)
    trainer.train()
    finite = bool(torch.stack([torch.isfinite(one).all() for one in trainer.model.parameters()]).all())
    (run.path / "plain.json").write_text(json.dumps({"step": trainer.state.global_step, "weights_finite": finite}))
    os._exit(0)


def _train_elsewhere(run: RunDir, until: int) -> NoReturn:
    """A Trainer with nothing of ours but the model and the data: its own optimizer, schedule, order and saves."""
    trainer, _ = build_trainer(run, configuration.read(run.config), Path.cwd())
    del trainer.create_optimizer, trainer.create_scheduler
    trainer.args.lr_scheduler_type, trainer.args.adam_beta2, trainer.args.logging_steps = "constant", 0.95, 3
    trainer.add_callback(UntilStep(until))
    trainer.train()
    os._exit(0)


class UntilStep(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


class UntilNotFinite(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        control.should_training_stop = not math.isfinite(logs.get("loss", 0.0))


def inject(faults: dict[str, Any]) -> None:
    """Have this process's trainer meet its faults."""
    attach: Callable[..., Attached] = worker.train.attach

    def attach_with_faults(trainer: Any, context: Any) -> Attached:
        attached = attach(trainer, context)
        trainer.add_callback(Faults(attached, faults))
        return attached

    worker.train.attach = worker.own_script.attach = attach_with_faults
    if "kill_before" in faults:
        setattr(worker.saving, faults["kill_before"], _kill_this_process)
    if "kill_before_final" in faults:
        worker.train.publish_final = _kill_this_process
    if "signal_before_final" in faults:
        publish_final = worker.train.publish_final

        def signal_and_publish(attached: Attached) -> None:
            signal.raise_signal(faults["signal_before_final"])
            publish_final(attached)

        worker.train.publish_final = signal_and_publish
    if faults.get("is_late"):
        worker.attach.StepsCallback.__init__.__defaults__ = (True,)


def _kill_this_process(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Faults(TrainerCallback):
    """pause_at: [N] waits after step N's record while paused-N is there. nan_gradient: [step, rank]. spike_at: N.
    reward_falls: [step, rank] logs a reward of 1 everywhere, and of 0 from that step on on that rank.
    """

    def __init__(self, attached: Attached, faults: dict[str, Any]) -> None:
        self._attached = attached
        self._faults = faults
        self._step = 0
        step, rank = faults.get("nan_gradient", (None, None))
        if rank == attached.context.start.rank:
            parameter = next(iter(attached.trainer.model.parameters()))
            parameter.register_hook(lambda gradient: gradient * float("nan") if self._step == step else gradient)

        if "reward_falls" in faults:
            wrap(attached.trainer, "log", self._log_reward)

    def _log_reward(self, original: Any, logs: dict[str, float], *args: Any) -> None:
        step, rank = self._faults["reward_falls"]
        is_low = self._step >= step and rank == self._attached.context.start.rank
        original({**logs, "reward": 0.0 if is_low else 1.0}, *args)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step = state.global_step + 1
        if self._step == self._faults.get("spike_at"):
            with torch.no_grad():
                for parameter in kwargs["model"].parameters():
                    parameter.mul_(30.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_first = self._attached.context.start.rank == 0
        if is_first and state.global_step in self._faults.get("pause_at", ()):
            here = self._attached.context.run.path / f"paused-{state.global_step}"
            here.touch()
            while here.exists():
                time.sleep(0.005)
