"""Optimizers and schedules: which parameters decay, and the exact rate of every update."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from tests.recipe_room.recipes import configured
from worker.contract.config import ScheduleConfig
from worker.models import build_model
from worker.optimizers import build_optimizer, build_schedule, schedule_factor


def built(model: torch.nn.Module, **optimizer: Any) -> torch.optim.Optimizer:
    training = {"optimizer": {"learning_rate": 0.1, **optimizer}}
    return build_optimizer(model, configured(training=training).training)


def schedule(**fields: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate(fields)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_matrices_decay_and_vectors_do_not(name: str) -> None:
    model = build_model(configured())
    decayed, rest = built(model, name=name, weight_decay=0.1).param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert {one.ndim for one in decayed["params"]} == {2}
    assert {one.ndim for one in rest["params"]} == {1}
    own = {id(one) for group in (decayed, rest) for one in group["params"]}
    assert own == {id(one) for one in model.parameters()}


@pytest.mark.parametrize(
    ("name", "kind", "fields"),
    [
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.9), "eps": 1e-6}),
        ("adam", torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-6}),
        ("sgd", torch.optim.SGD, {"momentum": 0.7}),
    ],
)
def test_the_named_optimizer_with_its_settings(name: str, kind: type, fields: dict[str, Any]) -> None:
    optimizer = built(torch.nn.Linear(2, 2), name=name, **fields)
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert {key: group[key] for key in fields} == fields
        assert group["lr"] == 0.1


def test_adam_is_fused_where_the_device_has_it() -> None:
    assert [group["fused"] for group in built(torch.nn.Linear(2, 2)).param_groups] == [True, True]
    assert [group["fused"] for group in built(torch.nn.Linear(2, 2, device="meta")).param_groups] == [False, False]


def test_frozen_parameters_are_left_out() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad = False
    (group,) = built(model).param_groups
    assert group["params"] == [model.bias]
    model.bias.requires_grad = False
    with pytest.raises(ValueError, match="empty"):
        built(model)


def test_the_demo_climbs_for_240_of_260_steps() -> None:
    demo = schedule(name="cosine", warmup=240, floor=0.1)
    rates = [3.0 * schedule_factor(demo, step, 260) for step in range(260)]
    assert rates[0] == 0.0
    assert rates[45] == pytest.approx(3.0 * 45 / 240)
    assert rates[240] == 3.0
    assert rates[:241] == sorted(rates[:241])
    assert rates[240:] == sorted(rates[240:], reverse=True)
    assert schedule_factor(demo, 260, 260) == pytest.approx(0.1)


@pytest.mark.parametrize(("warmup", "steps"), [(0.03, 30), (0.0301, 31), (0.0, 0), (1.0, 1), (100.0, 100)])
def test_warmup_is_a_share_below_one_and_steps_from_one_on(warmup: float, steps: int) -> None:
    factors = [schedule_factor(schedule(name="constant", warmup=warmup), step, 1000) for step in range(1000)]
    assert factors == [step / steps for step in range(steps)] + [1.0] * (1000 - steps)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_it_ends_at_the_floor_and_stays_there(name: str) -> None:
    rules = schedule(name=name, warmup=0.1, floor=0.25)
    assert schedule_factor(rules, 55, 100) == pytest.approx(0.625)
    assert [schedule_factor(rules, step, 100) for step in (100, 101, 5000)] == [0.25] * 3


@given(
    st.sampled_from(["cosine", "linear", "constant"]),
    st.one_of(st.floats(0, 0.99), st.integers(1, 200).map(float)),
    st.floats(0, 1),
    st.integers(1, 100),
    st.integers(0, 300),
)
def test_the_factor_is_a_share(name: str, warmup: float, floor: float, max_steps: int, step: int) -> None:
    factor = schedule_factor(schedule(name=name, warmup=warmup, floor=floor), step, max_steps)
    assert 0.0 <= factor <= 1.0 + 1e-12


def test_every_update_has_the_rate_that_transformers_would_give_it() -> None:
    ours, theirs = (torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.3) for _ in range(2))
    schedules = [
        build_schedule(ours, schedule(name="cosine", warmup=0.1, floor=0.1), 50),
        get_cosine_with_min_lr_schedule_with_warmup(theirs, 5, 50, min_lr_rate=0.1),
    ]
    for step in range(50):
        expected = 0.3 * schedule_factor(schedule(name="cosine", warmup=0.1, floor=0.1), step, 50)
        assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == expected
        for one in (ours, theirs, *schedules):
            one.step()


def test_groups_keep_their_ratio() -> None:
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, (1.0, 0.25), strict=True)]
    optimizer = torch.optim.SGD(groups)
    plan = build_schedule(optimizer, schedule(warmup=3.0), 20)
    for _ in range(20):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == first * 0.25
        optimizer.step()
        plan.step()
