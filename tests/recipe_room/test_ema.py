"""The weight average: its numbers against a plain formula, its bytes through a file and through a swap."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.recipe_room.recipes import LLAMA, configured
from worker.contract.recipe_config import EmaConfig
from worker.ema import Ema, EmaError
from worker.models import build_model


def raw(model: torch.nn.Module) -> list[bytes]:
    return [one.detach().view(torch.uint8).numpy().tobytes() for one in model.state_dict().values()]


def moved(model: torch.nn.Module, step: int) -> None:
    """Change every parameter, differently at each step."""
    with torch.no_grad():
        for one in model.parameters():
            one.add_(torch.linspace(-1, 1, one.numel()).view_as(one) * step)


def averaged(ema: Ema, model: torch.nn.Module) -> list[torch.Tensor]:
    with ema.swapped_into(model):
        return [one.detach().clone() for one in model.parameters()]


def test_each_update_follows_the_formula() -> None:
    model = torch.nn.Linear(3, 2)
    ema = Ema(model, EmaConfig(decay=0.99, every=5))
    expected = [one.detach().double() for one in model.parameters()]
    for step in range(1, 301):
        moved(model, step)
        ema.update(model, step)
        if step % 5 == 0:
            n = step // 5 - 1
            decay = min(0.99**5, (1 + n) / (10 + n))
            expected = [decay * old + (1 - decay) * new for old, new in zip(expected, model.parameters(), strict=True)]
    assert ema.num_updates == 60
    for found, wanted in zip(averaged(ema, model), expected, strict=True):
        assert torch.allclose(found.double(), wanted, rtol=1e-5)


@given(st.floats(0.01, 0.9999), st.integers(1, 50))
def test_the_first_weights_do_not_outlive_a_short_run(decay: float, every: int) -> None:
    ema = Ema(torch.nn.Linear(1, 1), EmaConfig(decay=decay, every=every))
    share = 1.0
    for updates in range(26):
        ema.num_updates = updates
        assert 0.0 <= ema.next_decay() <= decay**every
        share *= ema.next_decay()
    assert share < 1e-6


def test_bfloat16_weights_are_averaged_in_float32() -> None:
    model = torch.nn.Linear(4, 4).bfloat16()
    ema = Ema(model, EmaConfig(decay=0.999, every=1))
    ema.num_updates = 1_000_000
    with torch.no_grad():
        model.weight.add_(1.0)
    before = ema._average["weight"].clone()
    for step in range(1, 11):
        ema.update(model, step)
    moved_by = (ema._average["weight"] - before).mean().item()
    assert moved_by == pytest.approx(1 - 0.999**10, rel=0.02)


def test_the_swap_is_undone_bitwise_however_it_ends() -> None:
    model = build_model(configured())
    ema = Ema(model, EmaConfig(every=1))
    moved(model, 1)
    own, digest = raw(model), ema.digest()
    with pytest.raises(ZeroDivisionError), ema.swapped_into(model):
        _ = 1 // (raw(model) == own)
    assert raw(model) == own
    assert ema.digest() == digest


def test_tied_weights_are_averaged_once(tmp_path: Path) -> None:
    model = build_model(configured({"config": {**LLAMA, "tie_word_embeddings": True}}))
    ema = Ema(model, EmaConfig(every=1))
    moved(model, 1)
    ema.update(model, 1)
    with ema.swapped_into(model):
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in ema._average
    ema.save(tmp_path / "ema.safetensors")
    assert (tmp_path / "ema.safetensors").stat().st_size < 1.1 * 4 * sum(one.numel() for one in model.parameters())


def test_frozen_parameters_and_buffers_are_the_models_own() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model[0].bias.requires_grad = False
    ema = Ema(model, EmaConfig(every=1))
    assert set(ema._average) == {"0.weight", "1.weight", "1.bias"}


@given(st.integers(0, 40))
def test_a_restart_changes_nothing(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    rules = EmaConfig(decay=0.9, every=3)
    path = tmp_path_factory.mktemp("ema") / "ema.safetensors"
    model = torch.nn.Linear(3, 2)
    whole = Ema(model, rules)
    ema = Ema(model, rules)
    for step in range(1, 41):
        moved(model, step)
        whole.update(model, step)
        ema.update(model, step)
        if step == cut:
            ema.save(path)
            ema = Ema(torch.nn.Linear(3, 2), rules)
            ema.load(path)
    assert ema.digest() == whole.digest()
    assert ema.num_updates == whole.num_updates == 13


@given(st.sets(st.integers(1, 20)))
def test_one_that_is_lent_stays_as_it_was_and_the_average_goes_on_bit_by_bit(lent_at: set[int]) -> None:
    rules, model, asked = EmaConfig(decay=0.9, every=2), torch.nn.Linear(3, 2), list[int]()

    def given(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(len(tensors))
        return [torch.full_like(one, torch.nan) for one in tensors]

    plain, ema = Ema(model, rules), Ema(model, rules)
    for step in range(1, 21):
        moved(model, step)
        plain.update(model, step)
        ema.update(model, step)
        if step in lent_at:
            lent, before = ema.lent(given), ema.digest()
        if lent_at and step >= min(lent_at):
            assert lent.digest() == before
        assert ema.digest() == plain.digest()
    assert asked == [2] * bool(lent_at)


def test_the_digest_names_every_bit() -> None:
    model = torch.nn.Linear(3, 2)
    ema = Ema(model, EmaConfig(every=1))
    digests = {ema.digest()}
    ema.num_updates += 1
    digests.add(ema.digest())
    ema._average["bias"].view(torch.int32)[1] ^= 1
    digests.add(ema.digest())
    assert len(digests) == 3


def test_the_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        Ema(torch.nn.Linear(1, 1), EmaConfig()).save(tmp_path / "ema.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "ema.safetensors").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (torch.nn.Linear(3, 3), "bias is (3,)"),
        (torch.nn.Linear(3, 2, bias=False), "lacks bias"),
        (torch.nn.Sequential(torch.nn.Linear(3, 2)), "which this model does not train"),
    ],
)
def test_the_average_of_another_model(tmp_path: Path, other: torch.nn.Module, expected: str) -> None:
    path = tmp_path / "ema.safetensors"
    Ema(other, EmaConfig()).save(path)
    ema = Ema(torch.nn.Linear(3, 2), EmaConfig())
    digest = ema.digest()
    with pytest.raises(EmaError) as caught:
        ema.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert expected in str(caught.value)
    assert ema.digest() == digest


def test_weights_that_deepspeed_has_taken_away_are_not_averaged() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[assignment]
    with pytest.raises(EmaError, match=r"^ema: .*; set ema: null$"):
        Ema(model, EmaConfig())


@pytest.mark.parametrize("content", [None, b"", b"no tensors at all"])
def test_a_file_that_is_no_average(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ema.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(EmaError, match="no stored average"):
        Ema(torch.nn.Linear(3, 2), EmaConfig()).load(path)
