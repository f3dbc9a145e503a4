"""What is known of a GPU by its name: how much memory it has, whether it computes in bf16, how fast it is."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker.contract.cluster_config import ClusterConfig

_GIB: Final = 2**30


@dataclass(frozen=True)
class Device:
    """A kind of GPU; sold with more than one size of memory, ``memory_gib`` names the smallest and the largest."""

    name: str
    memory_gib: tuple[int, int]
    has_bf16: bool
    tera_flops: float
    """Of dense matrix products in 16 bits, as its maker says."""

    @property
    def smallest(self) -> int:
        """Bytes that it has for certain."""
        return self.memory_gib[0] * _GIB

    @property
    def largest(self) -> int:
        """Bytes that it has at most."""
        return self.memory_gib[1] * _GIB


# The makers' data sheets, 2026-11: memory in GiB, bf16 in hardware, dense 16-bit TFLOP/s.
_DATA_SHEETS: Final = (
    ("b200", (180, 192), True, 2250), ("b100", (180, 192), True, 1750),
    ("h200", (141, 141), True, 989), ("h100", (80, 96), True, 989), ("gh200", (96, 144), True, 989),
    ("h800", (80, 80), True, 989), ("h20", (96, 141), True, 148),
    ("a100", (40, 80), True, 312), ("a800", (40, 80), True, 312), ("a40", (48, 48), True, 150),
    ("a30", (24, 24), True, 165), ("a10", (24, 24), True, 125), ("a6000", (48, 48), True, 155),
    ("a5000", (24, 24), True, 111), ("l40s", (48, 48), True, 362), ("l40", (48, 48), True, 181),
    ("l4", (24, 24), True, 121), ("3090", (24, 24), True, 71), ("4090", (24, 24), True, 165),
    ("5090", (32, 32), True, 210), ("mi210", (64, 64), True, 181), ("mi250", (64, 64), True, 191),
    ("mi250x", (64, 64), True, 191), ("mi300x", (192, 192), True, 1307), ("mi325x", (256, 256), True, 1307),
    ("v100", (16, 32), False, 125), ("v100s", (32, 32), False, 130), ("t4", (16, 16), False, 65),
    ("p100", (12, 16), False, 21), ("p40", (24, 24), False, 12), ("k80", (12, 12), False, 4),
    ("2080", (8, 11), False, 54), ("2080ti", (11, 11), False, 54), ("1080ti", (11, 11), False, 11),
)  # fmt: skip
_DEVICES: Final = {name: Device(name.upper(), *facts) for name, *facts in _DATA_SHEETS}  # type: ignore[arg-type]
_MAKERS = re.compile(r"^(?:nvidia|tesla|geforce|rtx|gtx|amd|instinct)*")
_FORMS = re.compile(r"(?:pcie|sxm\d?|nvl|x\d+)$")
_MEMORY = re.compile(r"^(\d{2,3})g(?:b|ib)?$")
_DRIVER = Path("/proc/driver/nvidia/gpus")


def device_in(text: str) -> Device | None:
    """The GPU that ``text`` names (``gpu:a100:8``, ``nvidia_a100-sxm4-80gb``); None where it names none we know."""
    words = [word for word in re.split(r"[^a-z0-9]+", text.lower()) if word]
    for word in words:
        found = _DEVICES.get(_FORMS.sub("", _MAKERS.sub("", word)))
        if found is not None:
            sizes = [int(said[1]) for said in map(_MEMORY.match, words) if said]
            return found if not sizes else Device(found.name, (sizes[0], sizes[0]), found.has_bf16, found.tera_flops)
    return None


def device_of(cluster: ClusterConfig) -> Device | None:
    """The GPU that the job asks for, as far as the keys that may name one do."""
    named = (cluster.gres, cluster.constraint, *cluster.sbatch.values(), cluster.partition)
    return _first(str(text) for text in named if text is not None)


def device_here(driver: Path = _DRIVER) -> Device | None:
    """The first GPU of this machine, by what Nvidia's driver says of it; None where there is none that we know."""
    try:
        told = sorted(path.read_text(encoding="utf-8", errors="replace") for path in driver.glob("*/information"))
    except OSError:
        return None
    return _first(line for text in told for line in text.splitlines() if line.startswith("Model"))


def _first(texts: Iterable[str]) -> Device | None:
    return next(filter(None, map(device_in, texts)), None)
