"""A checkpoint's manifest, for those who play a trainer; imports little, as a trainer that is played starts often."""

from typing import Any

from worker.contract.manifest import Manifest


def manifest(step: int, attempt: int = 1, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": step,
        "attempt": attempt,
        "segment": 1,
        "time": 0.0,
        "epoch": 0.0,
        "batches_into_epoch": step,
        "samples_seen": step,
        "world_size": 1,
        "batch_size": 1,
        "gradient_accumulation": 1,
        "max_steps": 100,
        "seed": 1,
        "config_digest": "c",
        "data_digest": "d",
        "lr_scale": 1.0,
        "weights_finite": True,
        "probe_loss": 1.0,
        "optimizer_steps": step,
        "versions": {},
        "files": {},
    }
    return Manifest(**fields | changes)
