"""The rules of thumb of check: wrong recipes of every kind are named with reason, evidence and mend; no other."""

import math
from dataclasses import replace
from typing import Any

import pytest

from supervisor.devices import device_in
from supervisor.rate_rules import by_batch, by_size, rates_from_scratch, shares_of_warmup
from supervisor.recipe_facts import Facts, Remark
from supervisor.recipe_rules import remarks
from supervisor.save_interval import SaveCosts, best_interval_s, lost_share
from worker.contract.config import Config

GIB = 2**30
SEVEN, THIRTEEN, SEVENTY = 7_000_000_000, 13_000_000_000, 70_000_000_000


def recipe(**changes: Any) -> Config:
    """A sound recipe for full fine-tuning of 7B on eight GPUs, global batch 32; dotted keys change it."""
    document: dict[str, Any] = {
        "run": {"name": "r"},
        "model": {"path": "org/model"},
        "data": {"train": "stdlib"},
        "training": {
            "max_steps": 5_000, "gradient_accumulation": 4, "activation_checkpointing": True,
            "optimizer": {"learning_rate": 2e-5}, "extra": {"fsdp": True},
        },
        "cluster": {"gpus_per_node": 8, "gres": "gpu:a100:8"},
    }  # fmt: skip
    for key, value in changes.items():
        *path, last = key.split("__")
        section = document
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return Config.model_validate(document)


def facts(config: Config | None = None, **known: Any) -> Facts:
    given = {"parameters": SEVEN, "trained": known.get("parameters", SEVEN), "activations": 4 * GIB, **known}
    return Facts(
        config or recipe(), device=device_in(str((config or recipe()).cluster.gres)), free_disk=10**13, **given
    )


def said(given: Facts, level: str = "warning") -> list[Remark]:
    return [remark for remark in remarks(given) if remark.level == level]


def test_a_sound_recipe_is_left_alone() -> None:
    assert said(facts()) == []
    assert said(facts(), "not checked") == []


RATE = "training__optimizer__learning_rate"
LORA = {"model__lora": {"r": 8}, "training__extra": {}}
TWO_NODES = {"cluster__nodes": 2, "training__gradient_accumulation": 2}
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str, str, str]] = {
    "rate above both": ({RATE: 6e-5}, {}, "learning_rate", "5e-05", "set it to 2e-05"),
    "rate for 13B": ({RATE: 4e-5}, {"parameters": THIRTEEN}, "learning_rate", "13B", "3e"),
    "rate for 70B": (
        {RATE: 3e-5}, {"parameters": SEVENTY}, "learning_rate", "30B and more", "2e-05",
    ),
    "rate too low": ({RATE: 1e-7}, {}, "learning_rate", "global batch of 32", "2e-05"),
    "adapters at a full rate": ({**LORA, RATE: 2e-5}, {"trained": 4 * 10**7},
        "learning_rate", "0.0001 to 0.0002", "0.0001"),
    "adapters too hot": ({**LORA, RATE: 1e-3}, {"trained": 4 * 10**7},
        "learning_rate", "0.0001 to 0.0002", "0.0002"),
    "lion at AdamW's rate": ({"training__optimizer": {"name": "lion", "learning_rate": 2e-5}}, {},
        "learning_rate", "a tenth to a fifth", "4e-06"),
    "sgd at AdamW's rate": ({"training__optimizer": {"name": "sgd", "learning_rate": 2e-5}}, {},
        "learning_rate", "0.001 to 0.1", "0.001"),
    "lamb at AdamW's rate": ({"training__optimizer": {"name": "lamb", "learning_rate": 2e-5}}, {},
        "learning_rate", "0.0001 to 0.01", "0.0001"),
    "warmup too short": ({"training__schedule": {"warmup": 0.0}}, {}, "warmup",
        "0.0% of all steps; 2.0% to 5.0%", "0.02"),
    "warmup too long": ({"training__schedule": {"warmup": 1000.0}}, {}, "warmup", "20.0% of all steps", "0.05"),
    "warmup for a large batch": (
        {"training__gradient_accumulation": 64}, {}, "warmup", "4.0% to 10.0% at a global batch of 512", "0.04",
    ),
    "rate from scratch": ({"model__path": None, "model__config": {"model_type": "llama"},
        "training__optimizer": {"name": "sgd", "learning_rate": 1.1}}, {}, "learning_rate",
        "1 is already much for sgd from scratch", "0.1 to 1"),
    "no warmup from scratch": ({"model__path": None, "model__config": {"model_type": "llama"},
        "training__schedule": {"warmup": 0.0}}, {}, "warmup", "adamw from scratch", "0.02"),
    "a batch larger than the data": ({}, {"samples": 20}, "batch_size", "32 (batch size x", "the three 20 at most"),
    "saved too seldom": ({"checkpoint__every_steps": 2_000}, {}, "every_steps", "5000 steps; saved every 2000", "500"),
    "saved too often": ({"checkpoint__every_steps": 2}, {}, "every_steps",
        "of all time goes into saves", "set it to about"),
    "sharded over a slow network": ({**TWO_NODES, "cluster__environment": {"NCCL_IB_DISABLE": "1"}}, {},
        "cluster.nodes", "10 Gbit/s", "cpu_offload"),
    "few micro-steps over a slow network": ({**TWO_NODES, **LORA, "cluster__environment": {"NCCL_NET": "Socket"},
        RATE: 2e-4}, {"trained": 4 * 10**7}, "gradient_accumulation", "320 MB an update", "8 or more"),
    "too large for the GPU": ({"training__extra": {}}, {}, "batch_size", "optimizer 52.2",
        "shard with training.extra.fsdp"),
    "activations too large": ({}, {"activations": 90 * GIB}, "batch_size", "activations 90", "halve data.max_tokens"),
    "offloaded beyond main memory": ({"training__extra": {"fsdp": True, "fsdp_config": {"cpu_offload": True}}},
        {"main_memory": 64 * GIB}, "cluster.mem", "GiB are offloaded", "ask for more"),
    "disk too small": ({}, {"free_disk": 10**11}, "checkpoint.keep", "5 of 112 GB at once", "run.dir to a larger disk"),
    "out of GPU hours": ({"recovery__max_gpu_hours": 1.0}, {}, "max_gpu_hours", "5,000 steps of about", "set it to"),
    "bf16 without it": ({"cluster__gres": "gpu:v100:8", "training__extra": {"fsdp": True}}, {}, "precision",
        "Ampere", "fp16"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_each_wrong_recipe_is_named_with_evidence_and_mend(kind: str) -> None:
    changes, known, key, evidence, mend = WRONG[kind]
    given = facts(recipe(**changes))
    given = replace(given, **({"trained": known["parameters"]} if "parameters" in known else {}), **known)
    (found,) = [remark for remark in said(given) if key in ".".join(remark.place)]
    assert found.message
    assert evidence in found.evidence
    assert mend in found.mend


def test_where_the_articles_differ_the_wider_range_holds_and_both_are_named() -> None:
    (noted,) = [
        one for one in said(facts(recipe(training__optimizer__learning_rate=5e-5)), "note") if "rate" in one.place[-1]
    ]
    assert "above 4e-05" in noted.message
    assert "wider range" in noted.message
    assert "by the global batch of 32, 2e-05" in noted.evidence
    assert "by the model's size (up to 7B), 5e-05" in noted.evidence
    unsized = replace(facts(recipe(training__optimizer__learning_rate=5e-5)), parameters=None, trained=None)
    assert said(unsized) == []
    assert "learning_rate" in {remark.place[-1] for remark in said(unsized, "not checked")}


def test_of_a_model_from_scratch_a_rate_that_is_much_is_the_one_that_diagnose_goes_by() -> None:
    given = {"model__path": None, "model__config": {"model_type": "llama"}}
    assert rates_from_scratch("sgd") == (0.1, 1.0)
    at_the_edge = facts(recipe(**given, training__optimizer={"name": "sgd", "learning_rate": 1.0}))
    assert said(at_the_edge) == []
    assert "learning_rate" in {remark.place[-1] for remark in said(at_the_edge, "not checked")}
    unknown = facts(recipe(**given, training__optimizer={"name": "torch.optim:NAdam", "learning_rate": 9.0}))
    assert said(unknown) == []


def test_the_numbers_are_those_of_the_articles() -> None:
    assert [by_batch(size) for size in (8, 32, 64, 128, 4096)] == pytest.approx([2e-5, 2e-5, 2.5e-5, 3e-5, 4e-5])
    sizes = [by_size(count)[1] for count in (SEVEN, 8_000_000_000, THIRTEEN, 32_000_000_000, SEVENTY)]
    assert sizes == [(5e-5, 5e-5), (5e-5, 5e-5), (3e-5, 3e-5), (1e-5, 2e-5), (1e-5, 2e-5)]
    assert shares_of_warmup(32) == (0.02, 0.05)
    assert shares_of_warmup(512) == pytest.approx((0.04, 0.1))


def test_what_is_not_known_is_not_checked_and_warns_of_nothing() -> None:
    given = Facts(recipe(cluster__gres=None, cluster__nodes=2))
    assert said(given) == []
    keys = {remark.place[-1] for remark in said(given, "not checked")}
    assert keys >= {"every_steps", "batch_size", "keep", "time_limit", "precision", "gradient_accumulation"}


def test_a_script_of_ones_own_decides_its_rates() -> None:
    own = facts(recipe(training__entrypoint="/here/train:main", training__optimizer__learning_rate=1.0))
    assert not [remark for remark in said(own) if remark.place[0] == "training"]


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("gpu:a100:8", "A100", (40, 80)), ("gpu:nvidia_a100-sxm4-80gb:4", "A100", (80, 80)),
        ("a100_40g", "A100", (40, 40)), ("gpu:8", None, None),
        ("Model: \t\t NVIDIA H100 80GB HBM3", "H100", (80, 80)), ("gpu:rtx3090:2", "3090", (24, 24)),
        ("gpu:NVIDIAA100-PCIE-40GB", "A100", (40, 40)), ("Tesla V100-SXM2-32GB", "V100", (32, 32)),
        ("gpu", None, None), ("debug-a10000", None, None),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_the_names_that_sites_use(text: str, name: str | None, gib: tuple[int, int] | None) -> None:
    device = device_in(text)
    assert (device and device.name, device and device.memory_gib) == (name, gib)


# -- how often to save -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("save_s", [0.5, 60.0, 600.0, 7_200.0])
@pytest.mark.parametrize("fault_every_s", [600.0, 10_800.0, 1e6])
def test_no_other_interval_loses_less(save_s: float, fault_every_s: float) -> None:
    costs = SaveCosts(save_s, fault_every_s, restart_s=30.0)
    best = best_interval_s(costs)
    least = lost_share(costs, best)
    assert all(least <= lost_share(costs, best * factor) + 1e-12 for factor in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 10))
    assert 0 < least < 1


def test_short_saves_go_by_youngs_rule_and_a_restart_does_not_move_it() -> None:
    costs = SaveCosts(save_s=2.0, fault_every_s=10_800.0, restart_s=0.0)
    assert best_interval_s(costs) == pytest.approx(math.sqrt(2 * 2.0 * 10_800.0), rel=0.01)
    assert best_interval_s(replace(costs, restart_s=600.0)) == best_interval_s(costs)
    assert lost_share(replace(costs, restart_s=600.0), 200.0) > lost_share(costs, 200.0)
    assert best_interval_s(replace(costs, save_s=0.0)) == pytest.approx(0.0, abs=1e-9)
    assert lost_share(costs, 1e9) == 1.0


def test_the_share_that_is_lost_is_what_a_counted_history_loses() -> None:
    """Faults at the interval's exact rate: the loss of 100,000 simulated intervals is the formula's, within 1 %."""
    import random

    costs, interval = SaveCosts(save_s=30.0, fault_every_s=3_600.0, restart_s=90.0), 600.0
    draw, spent, done = random.Random(7), 0.0, 0
    until = draw.expovariate(1 / costs.fault_every_s)
    for _ in range(100_000):
        needed = interval + costs.save_s
        while until < needed:
            spent += until
            until, needed = draw.expovariate(1 / costs.fault_every_s), interval + costs.save_s + costs.restart_s
        spent, until, done = spent + needed, until - needed, done + 1
    assert lost_share(costs, interval) == pytest.approx(1 - done * interval / spent, abs=0.01)
