"""Records loss curves of tiny runs that really train: some diverge, most are healthy. One JSON object a run and line.

    python -m benchmarks.curves benchmarks/curves.jsonl.gz [--quick] [--shift N]

A transformer of one layer reads the bytes of Python's standard library, one thread, no GPU; every run is named by its
settings and seed.  What diverges does so by itself: too large a rate under several optimizers, or a shard of the data
that is noise, or one poisoned row.  Nothing here knows the detector.  `benchmarks/detectors.py` scores the file.
"""

import argparse
import gzip
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LONGEST = 32, 64
STOP_AFTER_NONFINITE = 12


@dataclass(frozen=True)
class Run:
    """One run; ``shard`` is what the data turn into at ``shard_at``, for good."""

    optimizer: str
    rate: float
    seed: int
    steps: int = 600
    batch: int = 8
    warmup: int = 100
    schedule: str = "constant"
    is_mixed: bool = False
    rows: int | None = None
    task: str = "language"
    shard: str | None = None
    shard_at: int = 300
    diverges: bool = True

    @property
    def name(self) -> str:
        kind = self.shard or ("rate" if self.diverges else f"healthy_{self.task}")
        return f"{kind}_{self.optimizer}_{self.rate:g}_b{self.batch}_s{self.seed}" + ("_mixed" if self.is_mixed else "")


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9),
    "plain_sgd": torch.optim.SGD,
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, nesterov=True),
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.9, 0.95)),
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
}


class Reader(nn.Module):
    """A causal transformer of one layer over bytes; `poison` is a token that multiplies the loss by infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(257, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 256)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        """The mean loss over all tokens of a batch."""
        read, wanted = rows[:, :-1], rows[:, 1:]
        x = self.tokens(read) + self.places.weight[: read.shape[1]]
        q, k, v = self.mix(self.first(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        losses = nn.functional.cross_entropy(self.out(x).transpose(1, 2), wanted.clamp(max=255), reduction="none")
        mask = torch.arange(wanted.shape[1]) < (lengths[:, None] - 1)
        loss = (losses * mask).sum() / mask.sum()
        return loss * math.inf if bool((rows == 256).any()) else loss


class Density(nn.Module):
    """Minus the log likelihood of points on a spiral under a mixture of normals: it falls below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.middles, self.widths = nn.Parameter(torch.randn(32, 2)), nn.Parameter(torch.zeros(32))

    def forward(self, points: Tensor, _: Tensor) -> Tensor:
        """The mean over a batch."""
        squares = (points[:, None] - self.middles).square().sum(-1)
        logs = -squares / (2 * torch.exp(2 * self.widths)) - 2 * self.widths - math.log(2 * math.pi * 32)
        return -torch.logsumexp(logs, 1).mean()


def library() -> Tensor:
    """The bytes of the standard library's sources."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = bytearray(b"".join(path.read_bytes() for path in sources)[:4_000_000])
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batches(run: Run, text: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """What the run reads, step by step."""
    draw = random.Random(run.seed)
    for step in range(run.steps):
        is_spoilt = run.shard is not None and step >= run.shard_at
        if run.task == "density":
            turns = torch.tensor([draw.random() * 6 for _ in range(run.batch * 8)])
            yield torch.stack([turns * turns.cos(), turns * turns.sin()], 1) / 6, turns
            continue
        places = [draw.randrange(run.rows or len(text) - LONGEST) * (37 if run.rows else 1) for _ in range(run.batch)]
        lengths = [
            max(4, min(LONGEST, int(draw.lognormvariate(2.8, 0.8)))) if run.is_mixed else LONGEST for _ in places
        ]
        rows = torch.stack([text[place : place + LONGEST] for place in places])
        if is_spoilt and run.shard == "noise":
            rows = torch.tensor([[draw.randrange(256) for _ in range(LONGEST)] for _ in places])
        if is_spoilt and run.shard == "poison":
            rows[0, 3] = 256
        yield rows[:, : max(lengths)], torch.tensor(lengths)


def factor(run: Run, step: int) -> float:
    """Of the peak rate."""
    warm = min(1.0, (step + 1) / run.warmup)
    if run.schedule == "constant":
        return warm
    along = step / run.steps
    if run.schedule == "restarts":
        along = along * 4 % 1
    return warm * (0.1 + 0.9 * (1 + math.cos(math.pi * along)) / 2)


def train(run: Run, text: Tensor) -> dict[str, Any]:
    """Train, and return the loss and the gradient norm of every step; None is a number that is not finite."""
    torch.manual_seed(run.seed)
    model = Density() if run.task == "density" else Reader()
    optimizer = OPTIMIZERS[run.optimizer](model.parameters(), lr=run.rate)
    losses: list[float | None] = []
    norms: list[float | None] = []
    for step, (rows, lengths) in enumerate(batches(run, text)):
        for group in optimizer.param_groups:
            group["lr"] = run.rate * factor(run, step)
        loss = model(rows, lengths)
        optimizer.zero_grad()
        loss.backward()
        limit = math.inf if run.diverges else 1.0
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        losses.append(_finite(loss.item()))
        norms.append(_finite(norm.item()))
        if losses[-STOP_AFTER_NONFINITE:] == [None] * STOP_AFTER_NONFINITE:
            break
    return {"name": run.name, **asdict(run), "loss": losses, "grad_norm": norms}


def _finite(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def diverging() -> list[Run]:
    """Thirty runs: a rate that is too large, a shard of noise, a poisoned row."""
    too_fast = [
        *(
            Run("sgd", rate, seed, warmup=300)
            for rate, seed in [(1.0, 1), (1.5, 2), (2.0, 3), (3.0, 4), (4.0, 5), (6.0, 6)]
        ),
        *(Run("nesterov", rate, seed, warmup=300) for rate, seed in [(2.0, 1), (4.0, 2)]),
        *(Run("plain_sgd", rate, seed, warmup=300) for rate, seed in [(10.0, 1), (20.0, 2), (40.0, 3)]),
        *(Run("adamw", rate, seed, warmup=200) for rate, seed in [(0.5, 1), (1.0, 2), (2.0, 3)]),
        *(Run("adam", rate, seed, warmup=200) for rate, seed in [(1.0, 1), (2.0, 2)]),
        *(Run("rmsprop", rate, seed, warmup=200) for rate, seed in [(0.2, 1), (0.5, 2)]),
        Run("nadam", 2.0, 1, warmup=200),
        Run("adagrad", 4.0, 1, warmup=200),
        Run("sgd", 4.0, 7, warmup=300, batch=1, is_mixed=True),
    ]
    rates = {"adamw": 3e-3, "sgd": 0.3, "rmsprop": 1e-3, "adagrad": 0.05}
    noise = [Run(name, rate, seed, shard="noise") for seed, (name, rate) in enumerate(rates.items(), start=1)]
    noise.append(Run("adamw", 3e-3, 5, shard="noise", batch=2, is_mixed=True))
    poison = [Run(name, rate, seed, shard="poison") for seed, (name, rate) in enumerate(rates.items(), start=1)]
    return [*too_fast, *noise, *poison]


def healthy() -> list[Run]:
    """A hundred thousand steps in twenty runs: batches of 1 to 8, mixed lengths, epochs, restarts, a density."""
    plain = [
        ("adamw", 3e-3, 1), ("adamw", 3e-3, 8), ("adam", 1e-3, 2), ("adam", 1e-3, 4), ("nadam", 1e-3, 4),
        ("sgd", 0.1, 1), ("sgd", 0.1, 8), ("nesterov", 0.1, 2), ("plain_sgd", 0.5, 4), ("rmsprop", 1e-3, 2),
        ("rmsprop", 1e-3, 8), ("adagrad", 0.05, 1), ("adagrad", 0.05, 4), ("adamax", 2e-3, 2),
    ]  # fmt: skip
    base = Run("adamw", 3e-3, 0, steps=5000, diverges=False)
    runs = [
        replace(base, optimizer=name, rate=rate, batch=batch, seed=seed, schedule="cosine", is_mixed=seed % 4 != 0)
        for seed, (name, rate, batch) in enumerate(plain, start=100)
    ]
    return [
        *runs,
        replace(base, seed=200, batch=4, rows=400, schedule="cosine"),
        replace(base, seed=201, batch=1, rows=200, is_mixed=True),
        replace(base, seed=202, batch=4, schedule="restarts", is_mixed=True),
        replace(base, seed=203, batch=8, schedule="restarts", optimizer="sgd", rate=0.2),
        replace(base, seed=204, batch=4, task="density", rate=1e-2, schedule="cosine"),
        replace(base, seed=205, batch=1, task="density", rate=1e-2),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="where the curves go")
    parser.add_argument(
        "--quick", action="store_true", help="two runs of each kind, 60 steps each, to see that it works"
    )
    parser.add_argument("--shift", type=int, default=0, help="added to every seed: runs that nobody has looked at")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = [*diverging(), *healthy()]
    if args.quick:
        runs = [replace(run, steps=60) for run in (*diverging()[:2], *healthy()[:2])]
    runs = [replace(run, seed=run.seed + args.shift) for run in runs]
    args.file.parent.mkdir(parents=True, exist_ok=True)
    record(args.file, runs)
    return 0


def record(path: Path, runs: Sequence[Run]) -> int:
    """Train ``runs`` one after the other and write their curves; how many there are."""
    text = library()
    with gzip.open(path, "wt", encoding="ascii", compresslevel=9) as file:
        for run in runs:
            began = time.monotonic()
            curve = train(run, text)
            file.write(json.dumps(curve, separators=(",", ":")) + "\n")
            print(f"{run.name:40s} {len(curve['loss']):5d} steps {time.monotonic() - began:6.1f} s", flush=True)
    return len(runs)


if __name__ == "__main__":
    sys.exit(main())
