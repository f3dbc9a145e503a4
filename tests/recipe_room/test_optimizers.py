"""Optimizers and schedules: which parameters decay, and the exact rate of every update."""

import math
import sys
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import pytorch_optimizer
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_cosine_with_min_lr_schedule_with_warmup, get_polynomial_decay_schedule_with_warmup

from tests.recipe_room.recipes import configured
from worker.contract.recipe_config import STARTING_RATES, ScheduleConfig, schedule_factor
from worker.data import IGNORED
from worker.leaving import RefusedError
from worker.models import build_model
from worker.optimizers import build_optimizer, build_schedule
from worker.rates import configured_rates, hold_rates
from worker.sophia import Curvature, gauss_newton_bartlett

SCHEDULES = get_args(ScheduleConfig.model_fields["name"].annotation)


def built(model: torch.nn.Module, **optimizer: Any) -> torch.optim.Optimizer:
    training = {"optimizer": {"learning_rate": 0.1, **optimizer}}
    return build_optimizer(model, configured(training=training).training)


def schedule(**fields: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate(fields)


OFFERED = list(STARTING_RATES)


@pytest.mark.parametrize("name", [*OFFERED, "torch.optim:NAdam"])
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
        ("adam", torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-6, "args": {"amsgrad": True}}),
        ("sgd", torch.optim.SGD, {"momentum": 0.7, "args": {"nesterov": True}}),
        ("lion", pytorch_optimizer.Lion, {"betas": (0.8, 0.9), "args": {"fixed_decay": True}}),
        ("lamb", pytorch_optimizer.Lamb, {"betas": (0.8, 0.9), "eps": 1e-6, "args": {"max_grad_norm": 0.0}}),
        ("sophia", pytorch_optimizer.SophiaH, {"betas": (0.8, 0.9), "args": {"eps": 1e-9}}),
        ("pytorch_optimizer:Tiger", pytorch_optimizer.Tiger, {"args": {"beta": 0.9}}),
    ],
)
def test_the_named_optimizer_with_its_settings(name: str, kind: type, fields: dict[str, Any]) -> None:
    optimizer = built(torch.nn.Linear(2, 2), name=name, **fields)
    assert type(optimizer) is kind
    told = {**fields, **fields.get("args", {})}
    told.pop("args", None)
    for group in optimizer.param_groups:
        assert {key: group[key] for key in told} == told
        assert group["lr"] == 0.1


@pytest.mark.parametrize(
    ("name", "betas"),
    [("adamw", (0.9, 0.95)), ("lion", (0.9, 0.99)), ("lamb", (0.9, 0.999)), ("sophia", (0.965, 0.99))],
)
def test_where_nothing_is_said_each_optimizer_has_its_own_rate_and_betas(name: str, betas: tuple[float, float]) -> None:
    training = configured(training={"optimizer": {"name": name}}).training
    (group, _) = build_optimizer(torch.nn.Linear(2, 2), training).param_groups
    assert (group["lr"], group["betas"]) == (STARTING_RATES[name], betas)


@pytest.mark.parametrize("name", [*OFFERED, "torch.optim:NAdam"])
def test_half_the_scale_is_half_the_update(name: str) -> None:
    moved = []
    for scale in (1.0, 0.5):
        torch.manual_seed(1)
        weight = torch.nn.Parameter(torch.randn(3, 3, dtype=torch.float64))
        layer = torch.nn.Module()
        layer.weight = weight
        optimizer = built(layer, name=name, weight_decay=0.1, learning_rate=1e-3)
        peaks = configured_rates(optimizer)
        plan = build_schedule(optimizer, schedule(name="constant", warmup=0.0), 9)
        hold_rates(optimizer, plan, peaks, lambda _, scale=scale: scale)
        before, weight.grad = weight.detach().clone(), torch.randn(3, 3, dtype=torch.float64)
        optimizer.step(**({"hessian": [torch.ones(3, 3, dtype=torch.float64)]} if name == "sophia" else {}))
        moved.append(weight.detach() - before)
    assert moved[0].abs().min() > 0
    # lamb takes the norm of weights that have decayed already
    assert torch.allclose(moved[1], moved[0] / 2, rtol=1e-3)


def missing(name: str, **fields: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        built(torch.nn.Linear(2, 2), name=name, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_optimizer_that_cannot_be_had_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nowhere.at_all:Best needs nowhere.at_all" in missing("nowhere.at_all:Best")
    assert "torch.optim has no Best; correct the name" in missing("torch.optim:Best")
    assert "Linear does not take lr=0.1" in missing("torch.nn:Linear")
    assert "AdamW does not take lr=0.1, speed=3" in missing("adamw", args={"speed": 3})
    assert "collections:OrderedDict is no torch.optim.Optimizer" in missing("collections:OrderedDict")
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    assert "pip install 'higgsfield-supervisor[optimizers]'" in missing("lion")


def test_sophia_moves_a_weight_by_its_rate_at_most() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    layer = torch.nn.Module()
    layer.weight = weight
    optimizer = built(layer, name="sophia", learning_rate=0.5, betas=(0.0, 0.0))
    weight.grad = torch.tensor([1.0, -2.0, 0.5, 3.0])
    optimizer.step(hessian=[torch.tensor([4.0, 4.0, 0.0, 1.0])])  # type: ignore[call-arg]
    assert weight.tolist() == [-0.125, 0.25, -0.5, -0.5]


@pytest.mark.parametrize(
    ("args", "said"), [({"every": 0}, "every: 0 is not a whole"), ({"rho": "x"}, "rho: 'x' is no")]
)
def test_arguments_of_sophia_that_make_no_sense_are_one_line(args: dict[str, Any], said: str) -> None:
    trainer: Any = SimpleNamespace(
        is_fsdp_enabled=False, is_deepspeed_enabled=False, args=SimpleNamespace(fp16=False), training_step=None
    )
    with pytest.raises(RefusedError, match=said):
        Curvature(trainer, built(torch.nn.Linear(2, 2), name="sophia"), args)
    trainer.args.fp16 = True
    with pytest.raises(RefusedError, match="vanish in fp16"):
        Curvature(trainer, built(torch.nn.Linear(2, 2), name="sophia"), {})


def test_a_model_that_is_not_finite_has_no_curvature_and_raises_nothing() -> None:
    layer = torch.nn.Linear(2, 4)
    with torch.no_grad():
        layer.weight.fill_(torch.nan)
    model: Any = lambda input_ids: SimpleNamespace(logits=layer(torch.ones(1, 3, 2)))  # noqa: E731
    inputs = {"input_ids": torch.zeros(1, 3, dtype=torch.long), "labels": torch.zeros(1, 3, dtype=torch.long)}
    found = gauss_newton_bartlett(model, inputs, list(layer.parameters()))
    assert not any(torch.isfinite(one).any() for one in found)


def test_the_curvature_is_that_of_a_softmax() -> None:
    """Of logits that are the weights themselves, the diagonal is p (1 - p) for each token, averaged over them."""

    class Table(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([0.3, -1.0, 0.8, 0.1]))

        def forward(self, input_ids: torch.Tensor) -> Any:
            return SimpleNamespace(logits=self.weight.expand(*input_ids.shape, 4))

    model, count = Table(), 600
    share = torch.softmax(model.weight.detach(), dim=0)
    ids = torch.zeros(1, 8, dtype=torch.long)
    labels = torch.tensor([[0, 0, 0, 0, 0, 0, IGNORED, IGNORED]])
    torch.manual_seed(3)
    found = torch.zeros(4)
    for _ in range(count):
        (estimate,) = gauss_newton_bartlett(model, {"input_ids": ids, "labels": labels}, [model.weight])
        found += estimate / count
    assert torch.allclose(found, share * (1 - share), atol=0.05)


def test_adam_is_fused_where_the_device_has_it() -> None:
    assert [group["fused"] for group in built(torch.nn.Linear(2, 2)).param_groups] == [True, True]
    assert [group["fused"] for group in built(torch.nn.Linear(2, 2, device="meta")).param_groups] == [False, False]


def test_frozen_parameters_are_left_out() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad = False
    (group,) = built(model).param_groups
    assert group["params"] == [model.bias]
    model.bias.requires_grad = False
    with pytest.raises(RefusedError, match="every parameter of the model is frozen"):
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


@pytest.mark.parametrize("name", ["cosine", "linear", "polynomial", "warmup_stable_decay"])
def test_it_ends_at_the_floor_and_stays_there(name: str) -> None:
    rules = schedule(name=name, warmup=0.1, floor=0.25)
    middle = {"cosine": 0.625, "linear": 0.625, "polynomial": 0.4375, "warmup_stable_decay": 1.0}
    assert schedule_factor(rules, 55, 100) == pytest.approx(middle[name])
    assert [schedule_factor(rules, step, 100) for step in (100, 101, 5000)] == [0.25] * 3


@given(
    st.sampled_from(SCHEDULES),
    st.one_of(st.floats(0, 0.99), st.integers(1, 200).map(float)),
    st.one_of(st.floats(0, 0.99), st.integers(1, 200).map(float)),
    st.floats(0, 1),
    st.integers(1, 100),
    st.integers(0, 300),
)
def test_the_factor_is_a_share(name: str, warmup: float, decay: float, floor: float, max_steps: int, step: int) -> None:
    rules = schedule(name=name, warmup=warmup, decay=decay, floor=floor)
    factor = schedule_factor(rules, step, max_steps)
    assert 0.0 <= factor <= 1.0 + 1e-12
    later = schedule_factor(rules, step + 1, max_steps)
    warms_up = step < (math.ceil(warmup * max_steps) if warmup < 1 else warmup)
    assert later >= factor if warms_up and warmup <= max_steps else later <= factor + 1e-12 or warms_up


@pytest.mark.parametrize(("decay", "steps"), [(0.1, 10), (0.125, 13), (20.0, 20), (95.0, 90)])
def test_a_stable_rate_falls_linearly_over_the_last_steps(decay: float, steps: int) -> None:
    rules = schedule(name="warmup_stable_decay", warmup=0.1, decay=decay, floor=0.5)
    factors = [schedule_factor(rules, step, 100) for step in range(101)]
    assert factors[: 101 - steps] == [step / 10 for step in range(10)] + [1.0] * (91 - steps)
    assert factors[101 - steps :] == pytest.approx([1 - 0.5 * fallen / steps for fallen in range(1, steps + 1)])


def test_a_polynomial_is_that_of_transformers_and_of_power_one_a_line() -> None:
    ours = [schedule_factor(schedule(name="polynomial", warmup=5.0, power=3.0), step, 50) for step in range(50)]
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    theirs = get_polynomial_decay_schedule_with_warmup(optimizer, 5, 50, lr_end=0.1, power=3.0)
    assert ours == pytest.approx([theirs.lr_lambdas[0](step) for step in range(50)])
    line = schedule(name="linear", warmup=5.0)
    assert [schedule_factor(schedule(name="polynomial", warmup=5.0, power=1.0), step, 50) for step in range(50)] == [
        schedule_factor(line, step, 50) for step in range(50)
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_scaled_absolutely_however_often_it_is_resumed(name: str) -> None:
    rules, steps = schedule(name=name, warmup=4.0, decay=6.0), 20

    def begun() -> tuple[torch.optim.Optimizer, LambdaLR]:
        layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        groups = [{"params": layer.parameters(), "lr": rate} for layer, rate in zip(layers, (0.3, 0.07), strict=True)]
        optimizer = torch.optim.SGD(groups)
        return optimizer, build_schedule(optimizer, rules, steps)

    def rates(scale: Callable[[int], float], resumed_at: Collection[int] = ()) -> list[list[float]]:
        optimizer, plan = begun()
        peaks, found = configured_rates(optimizer), []
        hold_rates(optimizer, plan, peaks, scale)
        for step in range(steps):
            if step in resumed_at:
                stored = optimizer.state_dict(), plan.state_dict()
                optimizer, plan = begun()
                optimizer.load_state_dict(stored[0])
                plan.load_state_dict(stored[1])
                hold_rates(optimizer, plan, peaks, scale)
            found.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            plan.step()
        return found

    configured = [[peak * schedule_factor(rules, step, steps) for peak in (0.3, 0.07)] for step in range(steps)]
    assert rates(lambda step: 1.0, resumed_at=(3, 11)) == configured
    halved = rates(lambda step: 0.5 if step > 7 else 1.0, resumed_at=(7, 8, 12, 17))
    assert halved == configured[:7] + [[rate * 0.5 for rate in one] for one in configured[7:]]


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
