"""The matrix: whatever a run is made of, and wherever it is interrupted, it ends with the same bytes.

``make test`` runs enough combinations that each pair of settings meets at least once, ``make exact`` all of them.
Where a run is interrupted is drawn anew for every seed (HIGGSFIELD_SEED) and printed.
"""

import itertools
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trainer_room.rig import TINY, Rig, same_end

pytestmark = pytest.mark.training

SEED = os.environ.get("HIGGSFIELD_SEED", "1")
IS_COMPLETE = os.environ.get("HIGGSFIELD_EXACT") == "complete"
MAX_STEPS, EVERY_STEPS, EVAL_EVERY, STEPS_AN_EPOCH = 8, 4, 3, 3
FACTORS: dict[str, tuple[Any, ...]] = {
    "accumulation": (1, 2, 5),
    "world": (1, 2),
    "workers": (0, 2),
    "shuffle": (True, False),
    "dropout": (0.1, 0.0),
    "pack": (True, False),
    "evaluates": (True, False),
    "stop": ("mid-epoch", "epoch end"),
}
Case = tuple[Any, ...]
ALL: list[Case] = list(itertools.product(*FACTORS.values()))


def pairs(case: Case) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(case), 2))


def pairwise(cases: list[Case]) -> Iterator[Case]:
    """Few of ``cases`` in which every pair of settings meets."""
    left = set().union(*map(pairs, cases))
    while left:
        best = max(cases, key=lambda case: (len(pairs(case) & left), -case[1] * (1 + case[2])))  # few processes
        left -= pairs(best)
        yield best


def test_every_pair_of_settings_meets() -> None:
    chosen = list(pairwise(ALL))
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, ALL))
    assert len(chosen) < 15


def name_of(case: Case) -> str:
    return " ".join(f"{name}={value}" for name, value in zip(FACTORS, case, strict=True))


def write_documents(path: Path, num_samples: int, is_packed: bool) -> str:
    """Documents of many lengths: ``num_samples`` of them, or that many blocks of 32 bytes when packed."""
    lengths = [7 + 5 * (number % 6) for number in range(num_samples)]
    if is_packed:
        lengths[-1] += 32 * num_samples - sum(lengths)
    texts = ["".join(chr(97 + (number * at + at) % 26) for at in range(size)) for number, size in enumerate(lengths)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def sections_of(case: Case, folder: Path) -> dict[str, Any]:
    told = dict(zip(FACTORS, case, strict=True))
    batch_size = 2
    global_batch = batch_size * told["accumulation"] * told["world"]
    train = write_documents(folder / "train.jsonl", STEPS_AN_EPOCH * global_batch - 1, told["pack"])
    evaluation = write_documents(folder / "eval.jsonl", 3, told["pack"]) if told["evaluates"] else None
    return {
        "model": {"config": {**TINY, "attention_dropout": told["dropout"]}},
        "data": {
            "train": train,
            "eval": evaluation,
            "pack": told["pack"],
            "shuffle": told["shuffle"],
            "workers": told["workers"],
        },
        "training": {
            "max_steps": MAX_STEPS,
            "batch_size": batch_size,
            "gradient_accumulation": told["accumulation"],
            "eval_every": EVAL_EVERY if told["evaluates"] else None,
        },
        "checkpoint": {"every_steps": EVERY_STEPS},
    }


def moments(step: int, evaluates: bool) -> list[str]:
    """The moments that step ``step`` has."""
    here = ["begin", "micro", "update", "end"]
    here += ["evaluate"] if evaluates and step % EVAL_EVERY == 0 else []
    return here + (["save"] if step % EVERY_STEPS == 0 else [])


def ways_to_leave(at_epoch_end: bool, evaluates: bool) -> list[tuple[int, int, str]]:
    """The step after which a run leaves that is asked to at a moment of a step: after that step, or after the next."""
    ways = [
        (step if moment in ("begin", "micro", "update") else step + 1, step, moment)
        for step in range(1, MAX_STEPS)
        for moment in moments(step, evaluates)
    ]
    return [way for way in ways if way[0] < MAX_STEPS and (way[0] % STEPS_AN_EPOCH == 0) == at_epoch_end]


@pytest.mark.parametrize("case", ALL if IS_COMPLETE else list(pairwise(ALL)), ids=name_of)
def test_an_interrupted_run_ends_with_the_same_bytes(make_rig: Callable[..., Rig], tmp_path: Path, case: Case) -> None:
    told = dict(zip(FACTORS, case, strict=True))
    world, sections = told["world"], sections_of(case, tmp_path)
    undisturbed, disturbed = make_rig("undisturbed", **sections), make_rig("disturbed", **sections)
    undisturbed.finish(world=world)

    draw = random.Random(f"{SEED} {name_of(case)}")
    stop, step, asking = draw.choice(ways_to_leave(told["stop"] == "epoch end", told["evaluates"]))
    asked, rank, kill = draw.randrange(world), draw.randrange(world), draw.randint(stop + 1, MAX_STEPS)
    moment = draw.choice(moments(kill, told["evaluates"]))
    print(f"seed {SEED}: SIGTERM to rank {asked} in step {step} at {asking}")
    print(f"seed {SEED}: SIGKILL to rank {rank} in step {kill} at {moment}")

    disturbed.finish(21, world=world, die_at=[step, asking, signal.SIGTERM, asked])
    assert disturbed.run.checkpoint_steps() == sorted({*range(EVERY_STEPS, stop, EVERY_STEPS), stop})
    disturbed.start(restart=1, world=world, die_at=[kill, moment, signal.SIGKILL, rank])
    assert disturbed.processes[rank - world].wait() == -signal.SIGKILL
    disturbed.is_killed()
    disturbed.finish(restart=2, world=world)
    same_end(undisturbed, disturbed)
