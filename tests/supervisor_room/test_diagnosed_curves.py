"""The diagnosis of recorded runs whose cause is known: a rate too high, a shard of noise, a poisoned row, nothing."""

import gzip
import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from supervisor.diagnosis import diagnose
from supervisor.evidence import Evidence
from tests.supervisor_room.stage import config
from worker.contract.loss_history import ACTED, BatchPosition, Record, record
from worker.contract.recovery_config import SpikeConfig
from worker.spikes import Detector

RECORDED = Path(__file__).parents[2] / "benchmarks/curves.jsonl.gz"
OFFERED = ("adamw", "adam", "sgd")


def recorded() -> Iterator[tuple[str, Evidence]]:
    """What is wrong with each run, and its history up to the first verdict; of a healthy one its first 1,000 steps."""
    with gzip.open(RECORDED, "rt", encoding="ascii") as lines:
        for run in map(json.loads, lines):
            kind = ("data" if run["shard"] else "rate") if run["diverges"] else "healthy"
            yield kind, Evidence(settings(run), list(islice(records(run), 1000)))


def settings(run: dict[str, Any]) -> Any:
    name = run["optimizer"] if run["optimizer"] in OFFERED else "torch.optim:Other"
    training = {
        "max_steps": run["steps"],
        "max_grad_norm": None,
        "precision": "fp32",
        "optimizer": {"name": name, "learning_rate": run["rate"]},
        "schedule": {"name": "constant", "warmup": run["warmup"]},
    }
    return config(Path(), training=training)


def records(run: dict[str, Any]) -> Iterator[Record]:
    detector = Detector(SpikeConfig())
    for step, (loss, norm) in enumerate(zip(run["loss"], run["grad_norm"], strict=True), 1):
        loss, norm = (math.nan if number is None else float(number) for number in (loss, norm))
        said = detector.judge(step, loss, norm)
        yield record(
            segment=1,
            attempt=1,
            restart=0,
            step=step,
            epoch=0.0,
            time=0.0,
            loss=loss,
            grad_norm=norm,
            lr=run["rate"] * min(1.0, step / max(1, run["warmup"])),
            verdict=said.verdict,
            onset_step=said.onset_step,
            level=said.level,
            data=BatchPosition(epoch=0, batch=step - 1),
        )
        if said.verdict in ACTED:
            return


def test_the_cause_is_found_of_nearly_all_and_trouble_in_no_healthy_run() -> None:
    found = Counter((kind, diagnose(evidence)[0].cure) for kind, evidence in recorded())
    assert found == {
        ("rate", "tenth-rate"): 20,
        ("rate", "fp32"): 1,  # not finite within two steps: nothing tells a rate from a range
        ("data", "without-batches"): 8,
        ("data", "tenth-rate"): 1,  # samples of mixed lengths, two a batch: a jump is nothing odd there
        ("healthy", None): 20,
    }
