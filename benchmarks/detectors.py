"""Scores this detector and the rules of other tools on the same loss curves, and prints the tables of docs/detector.md.

The time a row takes is the median of three turns of all rules over the first eight curves, in CPU time of this Python.

    python -m benchmarks.detectors [--labelled DIR] [--recorded FILE]

The others' rules are written anew from their sources (named at each) for this measurement, with their own defaults.
What a tool does when its rule fires differs: it stops, skips the step, or logs.  Here each firing counts as an action.

Two kinds of curves.  Labelled ones: a folder of trainer_state.json files with LABELS.json, which says where a failure
begins.  Recorded ones: the file of `benchmarks/curves.py`, where the failure is known from how the run was made (a
shard that turns into noise, a poisoned row) or, where the rate was too large, is found by ``onset_in_hindsight``.
"""

import argparse
import gzip
import json
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.heading import heading
from supervisor.detect import find_verdicts
from supervisor.loss_log import Row, read_loss_log
from worker.contract.recovery_config import SpikeConfig

Rule = Callable[[Sequence[Row]], list[int]]
"""The positions, among the rows, at which a rule acts."""
SOON_ROWS, LATE_ROWS = 3, 30


# -- rules -------------------------------------------------------------------------------------------------------------


def robust(rows: Sequence[Row]) -> list[int]:
    """Ours, the default."""
    return _ours(rows, SpikeConfig())


def median_ratio(rows: Sequence[Row]) -> list[int]:
    """Ours, `spike.rule: median_ratio`: the article's rule, and what is not finite."""
    return _ours(rows, SpikeConfig(rule="median_ratio"))


def _ours(rows: Sequence[Row], rules: SpikeConfig) -> list[int]:
    places = {row.index: place for place, row in enumerate(rows)}
    return [places[found.index] for found in find_verdicts(list(rows), rules)]


def article(rows: Sequence[Row]) -> list[int]:
    """The article as written: three losses in a row above twice the median of the last 50, once there are 20."""
    window: deque[float] = deque(maxlen=50)
    found, above = [], 0
    for place, loss in enumerate(_losses(rows)):
        is_above = len(window) >= 20 and loss > 2 * statistics.median(window)
        above = above + 1 if is_above else 0
        if above == 3:
            found.append(place)
        if math.isfinite(loss):
            window.append(loss)
    return found


def llm_foundry(rows: Sequence[Row]) -> list[int]:
    """KillLossSpike: more than 4 in a row at twice the mean of 100 or above; or half of a window above 10.

    mosaicml/llm-foundry, llmfoundry/callbacks/kill_loss_spike_callback.py.
    """
    window: deque[float] = deque(maxlen=100)
    found, outliers = [], 0
    for place, loss in enumerate(_losses(rows)):
        if len(window) == 100:
            outliers = outliers + 1 if loss >= 2 * statistics.fmean(window) else 0
            is_high = place >= 200 and sum(one > 10 for one in window) >= 50
            if outliers > 4 or is_high:
                found.append(place)
        window.append(loss)
    return found


def olmo_core(rows: Sequence[Row]) -> list[int]:
    """SkipStepOptimizer: loss or gradient norm more than 6 standard deviations from the mean of 128.

    allenai/OLMo-core, src/olmo_core/optim/skip_step_optimizer.py.
    """
    losses: deque[float] = deque(maxlen=128)
    norms: deque[float] = deque(maxlen=128)
    found = []
    for place, (loss, row) in enumerate(zip(_losses(rows), rows, strict=True)):
        known = len(losses) + 1 >= 64
        if known and not (_is_within(loss, losses) and (row.grad_norm is None or _is_within(row.grad_norm, norms))):
            found.append(place)
        losses.append(loss)
        if row.grad_norm is not None:
            norms.append(row.grad_norm)
    return found


def _is_within(value: float, window: Sequence[float]) -> bool:
    if len(window) < 2:
        return True
    if not all(map(math.isfinite, [value, *window])):
        return False
    spread = statistics.stdev(window)
    return abs(value - statistics.fmean(window)) <= 6 * spread if spread > 0 else value == window[0]


def axolotl(rows: Sequence[Row]) -> list[int]:
    """LossWatchDogCallback: 3 in a row above a threshold; its documentation proposes twice the loss of the start.

    axolotl-ai-cloud/axolotl, src/axolotl/utils/callbacks/__init__.py.
    """
    found, above, threshold = [], 0, 2 * next(filter(math.isfinite, _losses(rows)), math.inf)
    for place, loss in enumerate(_losses(rows)):
        above = above + 1 if loss > threshold else 0
        if above >= 3:
            found.append(place)
    return found


def lightning(rows: Sequence[Row]) -> list[int]:
    """SpikeDetection: a loss that rises and lies 2 means or more from the mean of 10; or is not finite.

    Lightning-AI/pytorch-lightning, src/lightning/fabric/utilities/spike.py.
    """
    window: deque[float] = deque(maxlen=10)
    found, last = [], 0.0
    for place, loss in enumerate(_losses(rows)):
        mean = statistics.fmean(window) if window else math.nan
        if place >= 1 and (not math.isfinite(loss) or (loss > last and abs(loss - mean) >= abs(2 * mean))):
            found.append(place)
            continue
        window.append(loss)
        last = loss
    return found


def _losses(rows: Iterable[Row]) -> list[float]:
    return [math.nan if row.loss is None else row.loss for row in rows]


RULES: dict[str, Rule] = {
    "higgsfield, `robust`": robust,
    "higgsfield, `median_ratio`": median_ratio,
    "the article, as written": article,
    "llm-foundry, KillLossSpike": llm_foundry,
    "OLMo-core, SkipStepOptimizer": olmo_core,
    "axolotl, loss watchdog": axolotl,
    "Lightning, SpikeDetection": lightning,
}


# -- curves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """One log, and the positions where its failures begin; what happens before the first of them is healthy."""

    name: str
    rows: list[Row]
    onsets: list[int] = field(default_factory=list)
    limit: int = LATE_ROWS
    """Rows from the onset to a timely action."""


def labelled(folder: Path, kinds: Sequence[str] = ("full", "grafted")) -> list[Curve]:
    """The labelled curves that are scored: full logs and grafted ones, without the ambiguous."""
    labels = json.loads((folder / "LABELS.json").read_text(encoding="utf-8"))
    return [
        Curve(name, rows, _onsets(rows, label))
        for name, label in sorted(labels.items())
        if not label.get("ambiguous") and _kind(label) in kinds
        for _, rows in [read_loss_log(folder / f"{name}.json")]
    ]


def _kind(label: dict[str, Any]) -> str:
    return "grafted" if label.get("grafted") else "window" if label.get("window") else "full"


def _onsets(rows: Sequence[Row], label: dict[str, Any]) -> list[int]:
    steps = [event["onset_step"] for event in label["events"] if event["kind"] != "transient"]
    return [next(place for place, row in enumerate(rows) if row.step >= step) for step in steps]


def recorded(file: Path) -> list[Curve]:
    """The curves that `benchmarks/curves.py` wrote."""
    with gzip.open(file, "rt", encoding="ascii") as lines:
        return [_recorded(json.loads(line)) for line in lines]


def _recorded(run: dict[str, Any]) -> Curve:
    numbers = zip(run["loss"], run["grad_norm"], strict=True)
    rows = [
        Row(place, place + 1, math.nan if loss is None else loss, math.nan if norm is None else norm)
        for place, (loss, norm) in enumerate(numbers)
    ]
    if not run["diverges"]:
        return Curve(run["name"], rows)
    if run["shard"] is not None:
        return Curve(run["name"], rows, [run["shard_at"]], SOON_ROWS)
    onset, limit = onset_in_hindsight(_losses(rows))
    return Curve(run["name"], rows, [] if onset is None else [onset], limit)


def onset_in_hindsight(losses: Sequence[float]) -> tuple[int | None, int]:
    """Where a run that is known to the end went wrong, and how many rows are timely; None where it did not.

    An explosion: from here on ten losses are more than twice the best mean of 20 before.  A divergence: of the next 50,
    all but 5 are more than a quarter above it.
    """
    best = math.inf
    known = [math.inf if math.isnan(loss) else loss for loss in losses]
    for place, loss in enumerate(known):
        if place >= 20:
            best = min(best, statistics.fmean(known[place - 20 : place]))
        level = best if math.isfinite(best) else max(known[:place], default=math.inf)
        if not math.isfinite(loss) or all(one > 2 * level for one in known[place : place + 10]):
            return place, SOON_ROWS
        after = known[place : place + 50]
        if len(after) == 50 and loss > 1.25 * level and sum(one > 1.25 * level for one in after) >= 45:
            return place, LATE_ROWS
    return None, 0


# -- scores ------------------------------------------------------------------------------------------------------------


@dataclass
class Score:
    """What one rule does on a set of curves."""

    wrong: list[str] = field(default_factory=list)
    """Curves on which it acts before anything is wrong."""
    num_wrong: int = 0
    missed: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    delays: list[int] = field(default_factory=list)


def score(rule: Rule, curves: Iterable[Curve]) -> Score:
    """A hit is an action at or after an onset; every action before the first one is wrong."""
    total = Score()
    for curve in curves:
        acts = rule(curve.rows)
        wrong = [act for act in acts if not any(act >= onset for onset in curve.onsets)]
        total.num_wrong += len(wrong)
        total.wrong += [curve.name] if wrong else []
        for onset in curve.onsets:
            hit = next((act for act in acts if act >= onset), None)
            if hit is None:
                total.missed.append(curve.name)
                continue
            total.delays.append(hit - onset)
            total.late += [curve.name] if hit - onset > curve.limit else []
    return total


def row_us(rule: Rule, curves: Sequence[Curve]) -> float:
    """What judging one row takes, in microseconds of CPU time."""
    began = time.process_time()
    for curve in curves:
        rule(curve.rows)
    return 1e6 * (time.process_time() - began) / sum(len(curve.rows) for curve in curves)


def upper_bound(events: int, trials: int, confidence: float = 0.95) -> float:
    """The largest rate at which so few events are still as likely as not to be refused (Clopper and Pearson).

    For no events this is about 3 / trials.
    """
    low, high = events / trials, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        seen = sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(events + 1))
        low, high = (rate, high) if seen > 1 - confidence else (low, rate)
    return high


def table(curves: Sequence[Curve]) -> str:
    """Every rule on one set of curves, as the page has it."""
    events, steps = sum(len(curve.onsets) for curve in curves), sum(len(curve.rows) for curve in curves)
    lines = [
        f"{len(curves)} curves, {steps:,} rows, {events} failures.",
        "",
        "| rule | curves wrongly acted on | at most, with 95 % confidence | failures caught | in time | median delay "
        "| us a row |",
        "|---|---|---|---|---|---|---|",
    ]
    turns = [{name: row_us(rule, curves[:8]) for name, rule in RULES.items()} for _ in range(3)]
    for name, rule in RULES.items():
        one = score(rule, curves)
        caught = events - len(one.missed)
        delay = f"{statistics.median(one.delays):g} rows" if one.delays else "-"
        bound = f"{upper_bound(len(one.wrong), len(curves)):.0%}"
        wrong = f"{len(one.wrong)} ({one.num_wrong:,} times)"
        takes_us = statistics.median(turn[name] for turn in turns)
        in_time = caught - len(one.late)
        lines.append(f"| {name} | {wrong} | {bound} | {caught} of {events} | {in_time} | {delay} | {takes_us:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--labelled", type=Path, help="a folder of labelled curves")
    parser.add_argument("--recorded", type=Path, default=Path(__file__).with_name("curves.jsonl.gz"))
    parser.add_argument("--first", type=int, metavar="N", help="only so many of the recorded curves")
    args = parser.parse_args()
    print("\n".join(heading("detectors")) + "\n")
    if args.labelled is not None:
        print(f"Labelled curves\n\n{table(labelled(args.labelled))}\n")
    curves = recorded(args.recorded)[: args.first]
    print(f"Recorded runs\n\n{table(curves)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
