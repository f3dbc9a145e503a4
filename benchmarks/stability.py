"""The same runs with a plain Trainer, with clipping and a NaN stop, and under higgsfield; two causes of failure.

    python -m benchmarks.stability [--seeds 5] [--cause C] [--only NAME] [--folder DIR] [--tiny]

Model, data, optimizer and schedule are the same in all three, and so is each seed's text. Causes: a rate that is too
hot (nothing is injected), and a shard of random bytes in the middle of the text, with a model whose loss of the byte
255, which no text holds, is infinite. A person is played by this script: whatever stops before its last step is started
again from its newest checkpoint with half the learning rate in its arguments, at most twice. That counts as an
intervention, and the person's own time does not count at all.
"""

import argparse
import json
import math
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from supervisor.detect import find_verdicts
from supervisor.loss_log import Row
from worker.attached import versions
from worker.contract import config as configuration
from worker.contract.loss_history import read_history
from worker.contract.recovery_config import SpikeConfig
from worker.contract.run_dir import RunDir
from worker.own_script import ScriptContext
from worker.setup import build_trainer

ROOT = Path(__file__).resolve().parents[1]
HIGGSFIELD = str(Path(sys.executable).with_name("higgsfield"))
HOT_RATE, POISONED_SHARD = "hot rate", "poisoned shard"
OPTIMIZERS: dict[str, dict[str, Any]] = {
    HOT_RATE: {"name": "sgd", "momentum": 0.9, "learning_rate": 4.0},
    POISONED_SHARD: {"name": "adamw", "learning_rate": 0.01},
}
"""The first one's rate is what goes wrong; the second one's is fine."""
PLAIN, GUARDED, OURS = "plain Trainer", "clipping and NaN stop", "higgsfield"
NAMES = (PLAIN, GUARDED, OURS)
POISON = 255
BATCH, BLOCK = 8, 64
INTERVENTIONS_AT_MOST = 2
PYTHON = [sys.executable, "-m", "benchmarks.stability"]


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    steps: int
    width: int
    save_every: int
    eval_blocks: int
    bad_batches: int


FULL, TINY = Size(400, 48, 20, 400, 4), Size(120, 16, 10, 20, 1)


@dataclass(frozen=True)
class Outcome:
    """One run to its end: a loss is NaN where there are no finite weights, and None where nobody keeps an average."""

    finished: bool
    spikes: int
    loss: float
    ema_loss: float | None
    seconds: float
    interventions: int


# -- what is trained ---------------------------------------------------------------------------------------------------


def write_texts(folder: Path, seed: int, size: Size, is_poisoned: bool) -> None:
    """Text for training, some of it random bytes where it is poisoned, and other text for the validation loss."""
    sources = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
    text = sources.decode("utf-8", "ignore").encode("ascii", "ignore")
    draw = random.Random(seed)
    batch, half = BATCH * BLOCK, (size.steps // 2) * BATCH * BLOCK
    needed = (size.steps + 40) * batch
    begin = draw.randrange(len(text) - needed - size.eval_blocks * BLOCK)
    shard = draw.randbytes(size.bad_batches * batch) if is_poisoned else b""
    (folder / "train.txt").write_bytes(text[begin : begin + half] + shard + text[begin + half : begin + needed])
    (folder / "eval.txt").write_bytes(text[begin + needed : begin + needed + size.eval_blocks * BLOCK])


def settings(folder: Path, seed: int, size: Size, optimizer: dict[str, Any]) -> dict[str, Any]:
    """The configuration of all three; clipping is the second's and the third's."""
    model = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": size.width,
        "intermediate_size": 2 * size.width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    training = {
        "entrypoint": f"{ROOT}/benchmarks.stability:train",
        "max_steps": size.steps,
        "batch_size": BATCH,
        "precision": "fp32",
        "optimizer": optimizer,
        "schedule": {"name": "cosine", "warmup": size.steps // 2},
        "max_grad_norm": 1.0,
        "log_every": 1,
    }
    return {
        "run": {"name": "run", "dir": str(folder), "seed": seed},
        "model": {"config": model},
        "data": {"train": str(folder / "train.txt"), "tokenizer": "bytes", "max_tokens": BLOCK, "shuffle": False},
        "training": training,
        "ema": {"decay": 0.99, "every": 5},
        "checkpoint": {"every_steps": size.save_every, "healthy_after": size.save_every},
        "cluster": {"kind": "local", "time_limit": "01:00:00"},
        "supervisor": {"place": "foreground"},
    }


def poisoned(trainer: Trainer) -> Trainer:
    """The same, with an infinite loss wherever the byte 255 is."""

    def spoil(model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if output.loss is not None and bool((kwargs["input_ids"] == POISON).any()):
            output.loss = output.loss * math.inf

    model: Any = trainer.model
    model.register_forward_hook(spoil, with_kwargs=True)
    return trainer


def train(context: ScriptContext) -> None:
    """What higgsfield runs."""
    trainer = poisoned(build_trainer(RunDir(context.run_dir), context.config, Path.cwd())[0])
    context.attach(trainer)
    trainer.train(resume_from_checkpoint=context.resume_from)


class Curve(TrainerCallback):
    """Writes the loss of every step into a file; ends the training at one that is not finite where it is told to."""

    def __init__(self, path: Path, stops: bool) -> None:
        self._path, self._stops = path, stops

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        loss = (logs or {}).get("loss")
        if loss is None:
            return
        norm = float(logs.get("grad_norm", 0.0))
        with open(self._path, "a", encoding="ascii") as file:
            file.write(f"{state.global_step} {float(loss)!r} {norm!r}\n")
        if self._stops and not (math.isfinite(loss) and math.isfinite(norm)):
            control.should_training_stop = True


def train_plainly(folder: Path, name: str, factor: float) -> None:
    """One process of the first or the second: to the end, or to a loss that is not finite."""
    torch.set_num_threads(1)
    config = configuration.read(folder / "config.yaml")
    optimizer = config.training.optimizer
    rate = (optimizer.learning_rate or 0.0) * factor
    clip = config.training.max_grad_norm if name == GUARDED else None
    changes = {"optimizer": optimizer.model_copy(update={"learning_rate": rate}), "max_grad_norm": clip}
    config = config.model_copy(update={"training": config.training.model_copy(update=changes)})
    trainer = poisoned(build_trainer(RunDir(folder), config, Path.cwd())[0])
    trainer.add_callback(Curve(folder / "curve.txt", stops=name == GUARDED))
    newest = get_last_checkpoint(str(folder / "checkpoints")) if (folder / "checkpoints").is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    if trainer.state.global_step == trainer.state.max_steps:
        trainer.save_model(str(folder / "final"))


# -- what is measured --------------------------------------------------------------------------------------------------


def run_plainly(folder: Path, name: str, size: Size) -> Outcome:
    """The first or the second, with a person beside it."""
    began, restarts = time.monotonic(), 0
    while True:
        told = ["--train-plainly", str(folder), name, repr(0.5**restarts)]
        done = subprocess.run([*PYTHON, *told], cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        curve = [line.split() for line in (folder / "curve.txt").read_text().splitlines()]
        if (folder / "final").is_dir() or restarts == INTERVENTIONS_AT_MOST:
            break
        restarts += 1
    seconds = time.monotonic() - began
    rows = [Row(index, int(step), float(loss), float(norm)) for index, (step, loss, norm) in enumerate(curve)]
    loss = validation_loss(folder / "final", folder / "eval.txt")
    return Outcome(math.isfinite(loss), spikes_in(rows), loss, None, seconds, restarts)


def spikes_in(rows: Sequence[Row]) -> int:
    """What the detector would have acted on; a loss that is not finite is the last one: after it, all are."""
    last = next((index for index, row in enumerate(rows) if not math.isfinite(row.loss or 0.0)), None)
    ended = last is not None
    return len(find_verdicts(list(rows[:last]), SpikeConfig())) + ended


def run_ours(folder: Path) -> Outcome:
    """The third: the command, and nobody beside it."""
    began = time.monotonic()
    done = subprocess.run([HIGGSFIELD, "run", "config.yaml"], cwd=folder, capture_output=True, text=True)
    seconds = time.monotonic() - began
    run = RunDir(folder / "run")
    if not run.history.exists():
        raise RuntimeError(done.stdout + done.stderr)
    spikes = sum(record.is_acted for record in read_history(run.history))
    losses = [validation_loss(where, folder / "eval.txt") for where in (run.final, run.final / "ema")]
    needs_a_person = done.returncode != 0
    return Outcome(not needs_a_person, spikes, losses[0], losses[1], seconds, int(needs_a_person))


def validation_loss(weights: Path, text: Path) -> float:
    """The mean loss a token over blocks of the text; NaN where there are no weights, or none that are finite."""
    if not weights.is_dir():
        return math.nan
    model = AutoModelForCausalLM.from_pretrained(weights).eval()
    ids = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long().reshape(-1, BLOCK)
    with torch.no_grad():
        losses = [model(input_ids=rows, labels=rows).loss.item() for rows in ids.split(BATCH)]
    return statistics.fmean(losses)


def measured(cause: str, name: str, seed: int, size: Size, folder: Path) -> Outcome:
    """One run in a new folder, which is removed."""
    folder.mkdir(parents=True)
    write_texts(folder, seed, size, is_poisoned=cause == POISONED_SHARD)
    (folder / "config.yaml").write_text(json.dumps(settings(folder, seed, size, OPTIMIZERS[cause])))
    outcome = run_ours(folder) if name == OURS else run_plainly(folder, name, size)
    shutil.rmtree(folder)
    return outcome


# -- what is printed ---------------------------------------------------------------------------------------------------


def shown(outcomes: dict[tuple[str, str], list[Outcome]], size: Size) -> str:
    """The table, as a page of Markdown has it, with everything that is needed to read it."""
    having = ", ".join(f"{name} {version}" for name, version in versions().items())
    lines = [
        f"command    python -m benchmarks.stability {shlex.join(sys.argv[1:])}".rstrip(),
        f"date       {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"versions   Python {platform.python_version()}, {having}",
        f"machine    {platform.machine()}, {os.cpu_count()} cores, one thread a run",
        f"runs       {size.steps} steps of {BATCH} x {BLOCK} bytes, width {size.width}; {OPTIMIZERS}",
        "",
        "| cause | with | finished | spikes | validation loss | of the average | time | interventions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (cause, name), runs in outcomes.items():
        finished = f"{sum(one.finished for one in runs)} of {len(runs)}"
        seconds = f"{statistics.median(one.seconds for one in runs):.0f} s"
        figures = [
            finished,
            str(sum(one.spikes for one in runs)),
            _range([one.loss for one in runs]),
            _range([one.ema_loss for one in runs if one.ema_loss is not None]),
            seconds,
            str(sum(one.interventions for one in runs)),
        ]
        lines.append(f"| {cause} | {name} | {' | '.join(figures)} |")
    return "\n".join(lines)


def _range(losses: Sequence[float]) -> str:
    """Median, lowest and highest of the finite ones."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return "none"
    return f"{statistics.median(finite):.3f} ({min(finite):.3f} to {max(finite):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--cause", choices=OPTIMIZERS, action="append", help="default: both")
    parser.add_argument("--only", choices=NAMES, action="append", help="default: all three")
    parser.add_argument("--folder", type=Path, help="where the runs are; default: a temporary folder")
    parser.add_argument("--tiny", action="store_true", help="very small runs, to see that it works")
    parser.add_argument("--train-plainly", nargs=3, help=argparse.SUPPRESS)
    told = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if told.train_plainly:
        folder, name, factor = told.train_plainly
        train_plainly(Path(folder), name, float(factor))
        return
    size, seeds = TINY if told.tiny else FULL, range(told.first_seed, told.first_seed + told.seeds)
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="stability-") as temporary:
        base = told.folder or Path(temporary)
        for cause in told.cause or OPTIMIZERS:
            for name in told.only or NAMES:
                for seed in seeds:
                    folder = base / f"{cause}-{name}-{seed}".replace(" ", "-")
                    outcome = measured(cause, name, seed, size, folder)
                    outcomes.setdefault((cause, name), []).append(outcome)
                    print(f"{cause}, {name}, seed {seed}: {outcome}", file=sys.stderr, flush=True)
    print(shown(outcomes, size))


if __name__ == "__main__":
    main()
