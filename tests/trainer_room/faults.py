"""launch.py with more faults.

``die_at``: [step, moment, signal, rank] sends the rank a signal at a moment of a step. ``kill_in_save``: [step, name]
kills a real process at every boundary of the save after that step. ``dies_before``: [change, rank] kills the rank
before its first change of the disk that this regular expression is found in. ``nan_weights``: N poisons the weights
before step N. ``umask``. ``draws``: the data draws random numbers. ``superseded_in_save``: another restart claims the
attempt and clears .staging/ in the middle of a save. ``superseded_at_weights``: N, the same before the weights of the
Nth save. ``poison``: a token that makes the loss of its batch infinite, gradient and all. ``nan_loss``: one that
makes it NaN and leaves the gradient as it is. ``nan_rank``: [step, rank] makes loss and gradient of that rank NaN.
``fsdp_on_cpu``: accelerate shards here too. ``holds_writes``: a save beside the training waits until it is waited
for. ``fails_writes``: it fails, before the next step where nothing holds it. ``free_bytes``: of main memory, for
copies. ``tells_base``: in the end, the digest of the frozen weights is in the file base. ``fp16_on_cpu``: a scale
that accelerate's scaler begins at here too, instead of refusing fp16. ``overflow``: a token that makes the loss of
its batch infinite under fp16, as a number above 65,504 would. ``is_busy``: no folder can be taken out of .staging/,
as where NFS keeps a file in it that is still open. ``alters``: a file of a checkpoint, whose last byte is another one
when all ranks have written theirs.
"""

import errno
import functools
import itertools
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import safetensors.torch
import torch
import transformers.modeling_utils
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from transformers import TrainerCallback
from transformers.tokenization_utils_tokenizers import TokenizersBackend

import worker.attach
import worker.background
import worker.own_script
import worker.saving
import worker.setup
import worker.train
from tests.trainer_room import launch
from worker.attached import Attached
from worker.background import Background, LargeParts
from worker.contract.claim import Claim, take_claim
from worker.contract.run_dir import RunDir
from worker.lora import base_of
from worker.saving import finish_saving
from worker.staging import clear_staging
from worker.wrap import wrap

MOMENTS = ("begin", "micro", "update", "end", "save", "evaluate")


def inject_more(faults: dict[str, Any]) -> None:
    """Have this process's trainer meet these faults too."""
    if "umask" in faults:
        os.umask(faults["umask"])
    if "fsdp_on_cpu" in faults:
        _shard_on_cpu()
    if "fp16_on_cpu" in faults:
        _train_in_fp16_on_cpu(faults["fp16_on_cpu"])
    wrap(worker.setup, "build_model", functools.partial(_build_poisoned, Poison(faults)))
    attach: Callable[..., Attached] = worker.train.attach

    def attach_with_more(trainer: Any, context: Any) -> Attached:
        if faults.get("draws"):
            trainer.train_dataset = Drawing(trainer.train_dataset)
        attached = attach(trainer, context)
        trainer.add_callback(Moments(attached, faults))
        change, rank = faults.get("dies_before", (None, None))
        if rank == attached.context.start.rank:
            Boundaries(attached.context.run.path, change)
        return attached

    worker.train.attach = worker.own_script.attach = attach_with_more
    if "free_bytes" in faults:
        worker.background.available_bytes = lambda: int(faults["free_bytes"])
    if faults.get("fails_writes"):
        _fail_writes(is_at_once="holds_writes" not in faults)
    if faults.get("holds_writes"):
        _hold_writes()
    if faults.get("superseded_in_save"):
        wrap(worker.saving, "_write_ours", _be_superseded)
    if "alters" in faults:
        wrap(worker.saving, "_publish", functools.partial(_alter, faults["alters"]))
    if faults.get("is_busy"):
        wrap(os, "rmdir", _refuse_as_busy)
    if "superseded_at_weights" in faults:
        _be_superseded_at(faults["superseded_at_weights"])
    if "kill_in_save" in faults:
        _kill_in_save(*faults["kill_in_save"])


def _alter(name: str, original: Callable[..., None], staged: Any, files: Any) -> None:
    (path,) = staged.folder.rglob(name)
    written = path.read_bytes()
    path.write_bytes(written[:-1] + bytes([written[-1] ^ 1]))
    original(staged, files)


def _refuse_as_busy(original: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
    if Path(path).parent.name == ".staging":
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
    original(path, *args, **kwargs)


def _hold_writes() -> None:
    """A save beside the training waits, before it writes anything, until somebody waits for it."""
    awaited = threading.Event()

    def held(original: Callable[..., None], large: LargeParts) -> None:
        awaited.wait()
        original(large)

    def wait(original: Callable[..., None], background: Background) -> None:
        awaited.set()
        original(background)
        awaited.clear()

    LargeParts.write = functools.partialmethod(functools.partial(held, LargeParts.write))
    Background.wait = functools.partialmethod(functools.partial(wait, Background.wait))


def _fail_writes(is_at_once: bool) -> None:
    def fail(large: LargeParts) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    def start(original: Callable[..., None], background: Background, work: Any) -> None:
        original(background, work)
        if background._thread is not None and is_at_once:
            background._thread.join()

    LargeParts.write = fail  # type: ignore[method-assign]
    Background.start = functools.partialmethod(functools.partial(start, Background.start))


def _shard_on_cpu() -> None:
    """Have accelerate answer a wish for FSDP on a CPU as it does on a GPU; all else is its own, on gloo."""

    def begin(original: Callable[..., None], state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            state.fsdp_plugin = fsdp_plugin
            state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = functools.partialmethod(functools.partial(begin, AcceleratorState.__init__))


def _train_in_fp16_on_cpu(first_scale: float) -> None:
    """Have accelerate train in fp16 on a CPU as it does on a GPU: autocast, and a scaler that begins at this scale."""

    def begin(original: Callable[..., None], accelerator: Any, *args: Any, mixed_precision: Any, **kwargs: Any) -> None:
        original(accelerator, *args, mixed_precision="no", **kwargs)
        if mixed_precision == "fp16":
            accelerator.state._mixed_precision = mixed_precision
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=first_scale)

    Accelerator.__init__ = functools.partialmethod(functools.partial(begin, Accelerator.__init__))  # type: ignore


def _build_poisoned(poison: "Poison", original: Callable[..., Any], *args: Any) -> torch.nn.Module:
    model: Any = original(*args)
    model.get_input_embeddings().register_forward_pre_hook(poison.note_precision)
    model.register_forward_hook(poison, with_kwargs=True)
    return model


def _be_superseded(original: Callable[..., None], attached: Attached, *args: Any) -> None:
    _supersede(attached.context.run)
    original(attached, *args)


def _be_superseded_at(number: int) -> None:
    numbers = itertools.count(1)

    def save_file(original: Callable[..., None], tensors: Any, filename: Any, *args: Any, **kwargs: Any) -> None:
        if next(numbers) == number:
            _supersede(RunDir(Path(sys.argv[1])))
        original(tensors, filename, *args, **kwargs)

    wrap(transformers.modeling_utils, "safe_save_file", save_file)


def _supersede(run: RunDir) -> None:
    claim = Claim(job_id="17", name="hf-test", restart=1, host="there", pid=1, started_ticks=1, time=1.0)
    take_claim(run.claim(1), claim)
    clear_staging(run, 1, 1)


class Poison:
    """Spoils the loss of a batch that holds the token which was asked for."""

    def __init__(self, faults: dict[str, Any]) -> None:
        self._infinite, self._nan = faults.get("poison", -1), faults.get("nan_loss", -1)
        self._overflow, self._is_fp16 = faults.get("overflow", -1), False

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if output.loss is None:
            return
        if (kwargs["input_ids"] == self._infinite).any():
            output.loss = output.loss * math.inf
        if (kwargs["input_ids"] == self._nan).any():
            output.loss = output.loss + math.nan
        if self._is_fp16 and (kwargs["input_ids"] == self._overflow).any():
            output.loss = output.loss * math.inf

    def note_precision(self, *_: object) -> None:
        """Autocast is on inside of a model's forward only."""
        self._is_fp16 = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16


class Drawing(torch.utils.data.Dataset[Any]):
    """Samples whose making draws from Python's global random state."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        random.random()
        return self._samples[index]


class Moments(TrainerCallback):
    """Sends this process its signal at the moment that was asked for."""

    def __init__(self, attached: Attached, faults: dict[str, Any]) -> None:
        step, moment, number, rank = faults.get("die_at", (None, None, None, None))
        self._at = (step, moment) if rank == attached.context.start.rank else None
        self._signal = number
        self._nan_weights = faults.get("nan_weights")
        self._base_path = attached.context.run.path / "base" if faults.get("tells_base") else None
        self._step = 0
        trainer = attached.trainer
        wrap(trainer, "compute_loss", self._spoil)
        self._nan_step, nan_rank = faults.get("nan_rank", (None, None))
        self._spoils = nan_rank == attached.context.start.rank
        wrap(trainer, "training_step", self._before("micro"))
        wrap(trainer, "evaluate", self._before("evaluate"))
        wrap(trainer, "_save_checkpoint", self._before("save"))

    def _spoil(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(model, *args, **kwargs)
        return loss * float("nan") if self._spoils and model.training and self._step == self._nan_step else loss

    def _before(self, moment: str) -> Callable[..., Any]:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._comes(moment)
            return original(*args, **kwargs)

        return around

    def _comes(self, moment: str) -> None:
        if self._at == (self._step, moment):
            self._at = None
            os.kill(os.getpid(), self._signal)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step = state.global_step + 1
        if self._step == self._nan_weights:
            with torch.no_grad():
                next(iter(kwargs["model"].parameters())).fill_(float("nan"))
        self._comes("begin")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._comes("update")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._comes("end")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._base_path is not None:
            base = base_of(kwargs["model"])
            assert base is not None
            self._base_path.write_text(base.digest)


# -- a kill at every boundary of one save --------------------------------------------------------------------------


class Boundaries:
    """Counts what this process does to the file system from now on, and kills it before number ``kill_at``.

    In place of a number, a regular expression that is found in what it is about to do and did just before, a line each.
    Python itself reports every open for writing, and what os does by name or by mode (audit events): all counts that
    is not known to change nothing. What os does without a report is wrapped, and so are the writers in Rust: whoever
    reads ``seen`` sees whether a file was made by one that is missing here.
    """

    _CHANGE_NOTHING = re.compile(r"os\.(chdir|fork|fwalk|getxattr|kill|listdir|listxattr|putenv|scandir|unsetenv|walk)")
    _UNREPORTED = re.compile(
        r"copy_file_range|fdatasync|fsync|mk(fifo|nod)|posix_fallocate|p?writev?|sendfile|splice|sync"
    )

    def __init__(self, run: Path, kill_at: int | str) -> None:
        self._run = str(run)
        self._kill_at = kill_at
        self.seen: list[str] = []
        sys.addaudithook(self._hear)
        for name in filter(self._UNREPORTED.fullmatch, dir(os)):
            setattr(os, name, self._told(f"os.{name}", getattr(os, name)))
        safetensors.torch.serialize_file = self._told("safetensors", safetensors.torch.serialize_file)
        tokenizer = self._told("tokenizers tokenizer.json", TokenizersBackend._save_pretrained)
        TokenizersBackend._save_pretrained = tokenizer  # type: ignore[method-assign]

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        is_of_os = event.startswith("os.") and not self._CHANGE_NOTHING.fullmatch(event)
        if is_of_os or event == "subprocess.Popen" or (event == "open" and _writes(args)):
            self._note(f"{event} {args[0]}")

    def _told(self, what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            paths = [os.fspath(one) for one in args if isinstance(one, (str, os.PathLike))]
            self._note(" ".join([what, *paths]))
            return original(*args, **kwargs)

        return told

    def _note(self, what: str) -> None:
        self.seen.append(what.replace(self._run + os.sep, ""))
        at = self._kill_at
        if len(self.seen) == at if isinstance(at, int) else re.search(at, "\n".join(self.seen[-2:])):
            os.kill(os.getpid(), signal.SIGKILL)


def _writes(args: tuple[Any, ...]) -> bool:
    _, mode, flags = args
    return bool(set(mode or "") & set("wax+")) or bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _kill_in_save(step: int, place: str) -> None:
    save = worker.saving.save_checkpoint

    def save_and_die(attached: Attached, *args: Any, **how: Any) -> None:
        if attached.trainer.state.global_step == step:
            run = attached.context.run.path
            finish_saving(attached)
            _each_kill(run, run.parent / place, lambda: (save(attached, *args, **how), finish_saving(attached)))
            os._exit(0)
        save(attached, *args, **how)

    worker.attach.save_checkpoint = save_and_die  # type: ignore[attr-defined]


def _each_kill(run: Path, place: Path, save: Callable[[], object]) -> None:
    """Fork this very process for every boundary, let it be killed there, and keep the run's folder as it left it."""
    before = place / "before"
    shutil.copytree(run, before)
    kill_at, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        kill_at += 1
        pid = os.fork()
        if pid == 0:
            boundaries = Boundaries(run, kill_at)
            save()
            (place / "boundaries").write_text("\n".join(boundaries.seen), encoding="utf-8")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        run.rename(place / str(kill_at))
        shutil.copytree(before, run)
    assert code == 0


def inject(faults: dict[str, Any], original: Callable[[dict[str, Any]], None] = launch.inject) -> None:
    """Both kinds of faults."""
    original(faults)
    inject_more(faults)


def main() -> NoReturn:
    launch.inject = inject
    launch.main()
