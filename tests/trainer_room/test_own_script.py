"""A person's own script, as docs/own-script.md shows it: everything of ours holds there."""

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BatchEncoding

from tests.recipe_room.recipes import LLAMA, chat_tokenizer, configured
from tests.trainer_room.rig import Rig, copies_begin_the_history, same_end, weights
from worker.contract.manifest import complete_manifest
from worker.leaving import RefusedError
from worker.models import build_model
from worker.own_script import digest_of_some, find_script

pytestmark = pytest.mark.training
PAGE = (Path(__file__).parents[2] / "docs" / "own-script.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SFT = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

def main(context):
    folder = context.config.model.path
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = load_dataset("json", data_files=context.config.data.train, split="train")
    fields = context.training_fields() | {"max_length": 64, "gradient_checkpointing": False}
    fields |= {"eval_strategy": "steps", "eval_steps": 6}
    trainer = SFTTrainer(
        model=model, args=SFTConfig(**fields), train_dataset=rows,
        eval_dataset=rows.select(range(4)), processing_class=AutoTokenizer.from_pretrained(folder),
    )
    context.attach(trainer)
    try:
        trainer.train(resume_from_checkpoint=context.resume_from)
    except Exception:  # a script that catches what ends it ends all the same
        pass
"""


STOPS = """
    from transformers import TrainerCallback

    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    trainer.add_callback(Stops())
"""
RESUMED = "    trainer.train(resume_from_checkpoint=context.resume_from)"


OWN_SAVE = """
    class Own(Trainer):
        def _save_optimizer_and_scheduler(self, folder):
            import torch
            torch.save(self.lr_scheduler.state_dict(), f"{folder}/scheduler.pt")

"""
CALLBACKS = """
import os, signal, torch
from transformers import TrainerCallback

class SignalledRows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        assert torch.utils.data.get_worker_info() is not None
        os.kill(os.getpid(), signal.SIGTERM)
        return self.rows[index]

class Mine(TrainerCallback):
    def __init__(self, trainer, rows):
        self.trainer, self.rows = trainer, SignalledRows(rows)

    def on_train_begin(self, args, state, control, train_dataloader=None, **kwargs):
        assert train_dataloader.total_batch_size == 4

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = control.should_save or state.global_step == 6
        if state.global_step == 10:
            self.trainer.predict(self.rows)

    def on_epoch_end(self, args, state, control, **kwargs):
        control.should_save = True
"""


@pytest.fixture
def make_script(make_rig: Callable[..., Rig], tmp_path: Path) -> Callable[..., Rig]:
    """A run of ``script``, with a model and rows of its own."""
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = "</s>"
    tokenizer.save_pretrained(tmp_path / "model")
    build_model(configured({"config": {**LLAMA, "vocab_size": 260, "attention_dropout": 0.1}})).save_pretrained(
        tmp_path / "model"
    )
    rows = [{"text": f"row {number} of some text"} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(script: str, name: str = "run", module: str = "my_script", **training: Any) -> Rig:
        (tmp_path / f"{module}.py").write_text(script)
        return make_rig(
            name,
            model={"config": None, "path": str(tmp_path / "model")},
            data={"train": str(tmp_path / "rows.jsonl"), "tokenizer": None},
            training={"entrypoint": f"{tmp_path}/{module}:main", **training},
        )

    return make


def metrics_of_trl(rig: Rig) -> list[tuple[int, float]]:
    """What its evaluations found, in which a probe would be seen."""
    lines = json.loads((rig.run.checkpoint(12) / "trainer_state.json").read_text())["log_history"]
    return [(line["step"], line["eval_entropy"]) for line in lines if "eval_entropy" in line]


def error_of(rig: Rig, restart: int = 0) -> str:
    rig.finish(23, restart=restart)
    error = rig.error(restart=restart).error
    assert error is not None
    assert "\n" not in error.message
    return error.message


@pytest.mark.parametrize("script", [EXAMPLE, SFT], ids=["the worked example", "SFTTrainer"])
def test_a_kill_changes_no_bit(make_script: Callable[..., Rig], script: str) -> None:
    module = "sft" if script == SFT else "example"
    whole, cut = (make_script(script, name, module) for name in ("whole", "cut"))
    whole.finish()
    assert [record.step for record in whole.history()] == list(range(1, 13))
    cut.start(die_at=[7, "end", signal.SIGKILL, 0])
    cut.ends(-signal.SIGKILL)
    cut.finish(restart=1)
    same_end(whole, cut)
    assert metrics_of_trl(whole) == metrics_of_trl(cut)
    assert weights(cut.run.final) != weights(cut.run.final / "ema")
    for step in (4, 8, 12):
        complete_manifest(cut.run.checkpoint(step))
    start = next(record.start for record in cut.history() if record.step == 5)
    assert start is not None
    assert start.probe.expected == start.probe.found


def test_a_spike_is_a_verdict(make_script: Callable[..., Rig]) -> None:
    rig = make_script(EXAMPLE.replace("max_steps=12", "max_steps=40"), module="example_of_a_spike")
    rig.finish(20, spike_at=30)
    assert rig.history()[-1].verdict == "spike"
    assert not rig.run.final.exists()


def test_callbacks_of_ones_own_save_look_and_predict(make_script: Callable[..., Rig]) -> None:
    """On a device that nobody waits for: a save that is asked for after our callback has the record of its step."""
    script = CALLBACKS + EXAMPLE.replace("train_dataset=rows", "train_dataset=rows.select(range(16))")
    script = script.replace("use_cpu=True,", "use_cpu=True, dataloader_num_workers=1,")
    script = script.replace(
        "    context.attach(trainer)", "    context.attach(trainer); trainer.add_callback(Mine(trainer, rows))"
    )
    rig = make_script(script, module="example_with_callbacks")
    rig.start(is_late=True, die_at=[7, "begin", signal.SIGKILL, 0])
    rig.ends(-signal.SIGKILL)
    assert rig.run.checkpoint_steps() == [4, 6]
    rig.finish(restart=1, is_late=True)
    assert [record.step for record in rig.history()] == list(range(1, 13))
    assert rig.run.checkpoint_steps() == [4, 6, 8, 12]
    copies_begin_the_history(rig)
    assert not rig.run.quarantine.exists()


def test_two_ranks(make_script: Callable[..., Rig]) -> None:
    rig = make_script(EXAMPLE, module="example_of_two")
    rig.finish(world=2)
    assert [record.step for record in rig.history()] == list(range(1, 13))
    assert complete_manifest(rig.run.checkpoint(4)).world_size == 2


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("def other(context): ...", "has no function main"),
        ("def main(context): ...", "it returned and had attached no Trainer"),
        (EXAMPLE.replace("    trainer.train(", "    dict("), "it returned at step 0 of 0; have it call trainer.train"),
        (
            EXAMPLE.replace("    trainer = Trainer(", f"{OWN_SAVE}    trainer = Own("),
            "checkpoint-4 was saved without optimizer.pt: no resume could begin from it",
        ),
        (
            EXAMPLE.replace(RESUMED, STOPS + RESUMED),
            "it returned at step 2 of 12; a callback ended the training or an epoch early",
        ),
        (
            EXAMPLE.replace("max_steps=12", "max_steps=1").replace(RESUMED, f"{RESUMED}\n{RESUMED}"),
            "trainer.train was called twice",
        ),
    ],
)
def test_what_cannot_hold_is_refused_in_one_line(make_script: Callable[..., Rig], script: str, expected: str) -> None:
    assert expected in error_of(make_script(script, module=f"refused_{abs(hash(script))}"))


def test_a_module_that_is_not_there(make_script: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make_script("", entrypoint=f"{tmp_path}/none.of_this:main")
    assert f"there is no module none.of_this in {tmp_path}, nor is one installed" in error_of(rig)


def test_a_module_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(RefusedError, match=r"training.entrypoint: time has no function main$"):
        find_script("/nowhere/time:main")


def test_other_data_than_the_checkpoint_s(make_script: Callable[..., Rig], tmp_path: Path) -> None:
    rig = make_script(EXAMPLE, module="example_of_data")
    rig.start(die_at=[5, "end", signal.SIGKILL, 0])
    rig.ends(-signal.SIGKILL)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(rows.read_text() + '{"text": "one more"}\n')
    assert "the samples, or the tokenizer, are not the same" in error_of(rig, restart=1)


@pytest.mark.parametrize("made", [dict, BatchEncoding], ids=lambda made: made.__name__)
def test_the_digest_of_data_sees_what_a_sample_holds(made: type[Any]) -> None:
    digests = {digest_of_some([made({"input_ids": [1, last]})]) for last in (2, 3)}
    assert len(digests) == 2
