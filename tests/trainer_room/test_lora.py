"""Adapters in place of full training: what is saved is theirs alone, and they belong to one base."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.recipe_room.recipes import configured
from tests.trainer_room.rig import TINY, Rig
from worker.contract.manifest import complete_manifest
from worker.leaving import RefusedError
from worker.lora import refuse_named_adapter
from worker.models import build_model, byte_tokenizer
from worker.resume import choose

pytest.importorskip("peft", reason="the extra lora is not installed")
pytestmark = [
    pytest.mark.training,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft 0.21 on transformers 5.24
]

LORA = {"r": 4, "alpha": 8, "dropout": 0.1, "targets": ["q_proj", "v_proj"]}


def base(folder: Path, norm: float = 1.0) -> str:
    """A pretrained model on disk, with its tokenizer."""
    model = build_model(configured({"config": TINY}))
    torch.nn.init.constant_(model.model.norm.weight, norm)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def adapted(make_rig: Callable[..., Rig], tmp_path: Path) -> Callable[..., Rig]:
    path = base(tmp_path / "base")

    def make(name: str, model: dict[str, Any] | None = None, fsdp: dict[str, Any] | None = None) -> Rig:
        told = {"config": None, "path": path, "lora": LORA, **(model or {})}
        extra = {} if fsdp is None else {"fsdp": True, "fsdp_config": fsdp}
        return make_rig(name, model=told, data={"tokenizer": None}, training={"extra": extra})

    return make


def adapters(folder: Path) -> dict[str, bytes]:
    return {name: one.numpy().tobytes() for name, one in load_file(folder / "adapter_model.safetensors").items()}


def loaded(folder: Path) -> torch.nn.Module:
    from peft import AutoPeftModelForCausalLM

    found: torch.nn.Module = AutoPeftModelForCausalLM.from_pretrained(folder)
    return found


def test_adapters_that_were_interrupted_end_bitwise_the_same_on_a_base_that_never_changed(
    adapted: Callable[..., Rig], tmp_path: Path
) -> None:
    undisturbed, disturbed = adapted("undisturbed"), adapted("disturbed")
    undisturbed.finish()
    disturbed.start(die_at=[6, "update", signal.SIGKILL, 0])
    disturbed.ends(-signal.SIGKILL)
    disturbed.finish(restart=1, tells_base=True)
    assert disturbed.losses() == undisturbed.losses()
    for place in ("final", "final/ema", "checkpoints/checkpoint-12"):
        assert adapters(disturbed.run.path / place) == adapters(undisturbed.run.path / place)

    folder, final = undisturbed.run.checkpoint(12), undisturbed.run.final
    assert adapters(final) != adapters(final / "ema")
    manifest = complete_manifest(folder)
    assert "model.safetensors" not in manifest.files
    average = load_file(folder / "ema.safetensors")
    assert len(average) == len(adapters(final)) == 8
    assert all("lora_" in name for name in average)

    raw, averaged = loaded(final), loaded(final / "ema")
    tokens = torch.arange(16)[None]
    assert not torch.equal(raw(tokens).logits, averaged(tokens).logits)
    assert manifest.base is not None
    assert manifest.base.name == str(tmp_path / "base")
    assert (disturbed.run.path / "base").read_text() == manifest.base.digest


def test_a_kill_in_the_middle_of_a_save_leaves_the_adapters_before(adapted: Callable[..., Rig]) -> None:
    undisturbed, disturbed = adapted("undisturbed"), adapted("disturbed")
    undisturbed.finish()
    disturbed.finish(-signal.SIGKILL, dies_before=[r"open \.staging/.*/checkpoint-8/adapter_config\.json$", 0])
    assert list(disturbed.run.staging.rglob("adapter_model.safetensors"))
    found = choose(disturbed.run, 1, None, sizes_only=False)
    assert found is not None
    assert found.manifest.step == 4
    disturbed.finish(restart=1)
    assert list(disturbed.run.staging.iterdir()) == []
    assert disturbed.losses() == undisturbed.losses()
    for place in ("final", "final/ema"):
        assert adapters(disturbed.run.path / place) == adapters(undisturbed.run.path / place)


def test_adapters_on_two_ranks_resume_bitwise(adapted: Callable[..., Rig]) -> None:
    undisturbed, disturbed = adapted("undisturbed"), adapted("disturbed")
    undisturbed.finish(world=2)
    disturbed.start(world=2, die_at=[6, "update", signal.SIGKILL, 1])
    assert disturbed.processes[1].wait() == -signal.SIGKILL, disturbed.processes[1].said()
    disturbed.is_killed()
    disturbed.finish(restart=1, world=2)
    start = disturbed.history()[4].start
    assert start is not None
    assert start.checkpoint == "checkpoint-4"
    assert {"adapter_model.safetensors", "rng_state_1.pth"} <= complete_manifest(
        disturbed.run.checkpoint(8)
    ).files.keys()
    assert disturbed.losses() == undisturbed.losses()
    for place in ("final", "final/ema", "checkpoints/checkpoint-12"):
        assert adapters(disturbed.run.path / place) == adapters(undisturbed.run.path / place)


def test_another_base_and_adapters_for_none_are_refused(adapted: Callable[..., Rig], tmp_path: Path) -> None:
    rig = adapted("run")
    rig.start(die_at=[5, "end", signal.SIGKILL, 0])
    rig.ends(-signal.SIGKILL)
    full = {"lora": None}
    for name, what, said, model in (
        ("other", "base", "the checkpoint's adapters are for", {"path": base(tmp_path / "another base", norm=2.0)}),
        ("full", "lora", "holds adapters and this run trains the whole model", full),
        ("larger", "model", "lora_A.weight is (4, 32), and this model's is (8, 32)", {"lora": {**LORA, "r": 8}}),
    ):
        changed = adapted(name, model)
        shutil.copytree(rig.run.checkpoint(4), changed.run.checkpoint(4))
        changed.direct(resume_from="checkpoint-4")
        changed.finish(23)
        error = changed.error().error
        assert error is not None
        assert (error.what, said in error.message) == (what, True), error.message


def test_adapters_of_a_sharded_base_in_half_precision_resume_bitwise(adapted: Callable[..., Rig]) -> None:
    model = {"dtype": "bfloat16", "lora": {**LORA, "targets": "all-linear"}}
    fsdp = {"state_dict_type": "SHARDED_STATE_DICT", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    undisturbed, disturbed = (adapted(name, model, fsdp) for name in ("undisturbed", "disturbed"))
    undisturbed.finish(world=2, fsdp_on_cpu=True)
    disturbed.start(world=2, fsdp_on_cpu=True, die_at=[6, "update", signal.SIGKILL, 1])
    assert disturbed.processes[1].wait() == -signal.SIGKILL, disturbed.processes[1].said()
    disturbed.is_killed()
    disturbed.finish(restart=1, world=2, fsdp_on_cpu=True)
    start = disturbed.history()[4].start
    assert start is not None
    assert start.checkpoint == "checkpoint-4"
    assert disturbed.losses() == undisturbed.losses()
    for place in ("final", "final/ema"):
        assert adapters(disturbed.run.path / place) == adapters(undisturbed.run.path / place)
    loaded(undisturbed.run.final)


def test_an_adapter_of_another_name_is_refused(tmp_path: Path) -> None:
    import peft

    model = AutoModelForCausalLM.from_pretrained(base(tmp_path / "base"))
    wanted = peft.LoraConfig(target_modules=["q_proj"])
    refuse_named_adapter(model)
    with pytest.raises(RefusedError, match="the adapter is named 'mine': call get_peft_model without adapter_name"):
        refuse_named_adapter(peft.get_peft_model(model, wanted, adapter_name="mine"))
