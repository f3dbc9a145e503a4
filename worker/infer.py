"""Text from a run's weights: ``python -m worker.infer RUN_DIR QUESTION``, or the same inside a job.

What comes back is a line of JSON for each piece of text, as soon as it is there.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from worker.checkpoints import EMA
from worker.contract import config as configuration
from worker.contract.files import UnusableFileError, encode
from worker.contract.inference import Piece, Question, Weights
from worker.contract.loss_history import read_history, surviving
from worker.contract.manifest import UnusableCheckpointError, complete_manifest
from worker.contract.recipe_config import EmaConfig
from worker.contract.run_dir import RunDir
from worker.ema import Ema, EmaError
from worker.models import ModelError, build_tokenizer

Tell = Callable[[Piece], None]
_BAD_INPUT = (ModelError, EmaError, SafetensorError, UnusableFileError)


class NoWeightsError(Exception):
    """A run that does not have the weights that are asked for; one line."""


@dataclass(frozen=True)
class Chosen:
    """Weights: a folder, and whether it is the average beside them that counts. ``note`` says which and why."""

    folder: Path
    note: str
    is_average: bool = False


def choose(run: RunDir, wanted: Weights | None) -> Chosen:
    """The weights that are asked for: of the finished run, else of its newest complete checkpoint."""
    if wanted == "best":
        if not run.best.is_dir():
            raise NoWeightsError(f"{run.path} has no best weights: it was never evaluated")
        return Chosen(run.best, "best: the lowest evaluation loss")
    raw_loss, average_loss = last_evaluation(run)
    is_better = raw_loss is not None and average_loss is not None and average_loss <= raw_loss
    folder, average = _newest(run)
    if wanted == "ema" or (wanted is None and is_better and average is not None):
        if average is None:
            raise NoWeightsError(f"{folder} has no average of the weights")
        why = f": its evaluation loss {average_loss:.4g}, the weights' own {raw_loss:.4g}" if is_better else ""
        return Chosen(folder if average == folder / EMA else average, f"{average}{why}", average == folder / EMA)
    why = f": their evaluation loss {raw_loss:.4g}, the average's {average_loss:.4g}" if average_loss else ""
    return Chosen(folder, f"{folder}{why}")


def last_evaluation(run: RunDir) -> tuple[float | None, float | None]:
    """The newest evaluation losses that survived: of the weights, and of their average."""
    evaluated = [one for one in surviving(read_history(run.history)) if one.eval_loss is not None]
    return (evaluated[-1].eval_loss, evaluated[-1].ema_eval_loss) if evaluated else (None, None)


def _newest(run: RunDir) -> tuple[Path, Path | None]:
    """The folder of the newest weights, and their average: a folder beside final weights, a file in a checkpoint."""
    if run.final.is_dir():
        return run.final, run.final / "ema" if (run.final / "ema").is_dir() else None
    for step in reversed(run.checkpoint_steps()):
        folder = run.checkpoint(step)
        try:
            complete_manifest(folder)
        except UnusableCheckpointError:
            continue
        return folder, folder / EMA if (folder / EMA).exists() else None
    raise NoWeightsError(f"{run.path} has no finished weights and no complete checkpoint yet")


def answer(run: RunDir, question: Question, tell: Tell) -> None:
    """Generate, and tell each piece as it comes; the last one says that it is the last, or what went wrong."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        chosen = choose(run, question.weights)
        tell(Piece(note=chosen.note))
        _generate(run, chosen, question, tell)
    except (NoWeightsError, *_BAD_INPUT, OSError, ValueError) as error:
        tell(Piece(error=" ".join(str(error).split())))
    except torch.OutOfMemoryError:
        tell(Piece(error="the memory of the device does not hold this model"))
    else:
        tell(Piece(is_last=True))


def _generate(run: RunDir, chosen: Chosen, question: Question, tell: Tell) -> None:
    config = configuration.read(run.config)
    tokenizer = _tokenizer(chosen.folder, config)
    inputs = _inputs(tokenizer, question)
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu and config.training.precision == "bf16" else "auto"
    model = _model(chosen.folder, dtype=dtype, device_map="auto" if on_gpu else None)
    if question.seed is not None:
        torch.manual_seed(question.seed)
    with _average_of(model, chosen, config) if chosen.is_average else nullcontext():
        model.generate(
            **{name: value.to(model.device) for name, value in inputs.items()},
            **_sampling(question),
            pad_token_id=next((one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id) if one is not None), 0),
            streamer=_Streamer(tokenizer, tell),
        )


def _model(folder: Path, **told: Any) -> Any:
    """The model, its adapters under the names that they are trained and averaged by."""
    if not (folder / "adapter_config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder, **told)
    from peft import AutoPeftModelForCausalLM

    return AutoPeftModelForCausalLM.from_pretrained(folder, is_trainable=True, **told).eval()


def _tokenizer(folder: Path, config: configuration.Config) -> Any:
    """The tokenizer beside the weights; a script of a person's own may have left none there."""
    if (folder / "tokenizer_config.json").exists():
        return AutoTokenizer.from_pretrained(folder)
    return build_tokenizer(config)


def _inputs(tokenizer: Any, question: Question) -> dict[str, torch.Tensor]:
    if question.is_chat:
        if not tokenizer.chat_template:
            raise NoWeightsError("--chat: the run's tokenizer has no chat template")
        messages = [{"role": "user", "content": question.prompt}]
        found = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        found = tokenizer(question.prompt, return_tensors="pt")
    if found["input_ids"].shape[-1] == 0:
        raise NoWeightsError("--prompt: it makes no token; write some text")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def _sampling(question: Question) -> dict[str, Any]:
    if question.temperature == 0:
        return {"max_new_tokens": question.max_tokens, "do_sample": False}
    return {
        "max_new_tokens": question.max_tokens,
        "do_sample": True,
        "temperature": question.temperature,
        "top_p": question.top_p,
        "top_k": question.top_k,
    }


@contextmanager
def _average_of(model: Any, chosen: Chosen, config: configuration.Config) -> Iterator[None]:
    """A checkpoint's average in the place of its weights."""
    average = Ema(model, config.ema or EmaConfig())
    average.load(chosen.folder / EMA)
    with average.swapped_into(model):
        yield


class _Streamer(TextStreamer):
    """Tells the text of whole words as they are complete, without the prompt."""

    def __init__(self, tokenizer: Any, tell: Tell) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._tell = tell

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._tell(Piece(text=text))


def job_main(run_dir: str, question: str, out: str, start: dict[str, Any]) -> int:
    """The same inside a job: the pieces go into the file ``out``, in ASCII."""
    with open(out, "a", encoding="ascii", buffering=1) as file:
        answer(RunDir(Path(run_dir)), Question.model_validate_json(question), lambda piece: _write(file, piece))
    return 0


def _write(file: Any, piece: Piece) -> None:
    file.write(encode(piece.model_dump(exclude_defaults=True)) + "\n")
    file.flush()


def main() -> None:
    """Answer the question of the command line on stdout; nothing else is printed there."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    question = Question.model_validate_json(sys.argv[2])
    answer(RunDir(Path(sys.argv[1])), question, lambda piece: _write(out, piece))


if __name__ == "__main__":
    main()
