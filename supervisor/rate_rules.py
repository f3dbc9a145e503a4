"""Rules of thumb for the learning rate and its warmup, as rows over what is known of a run.  Pure.

They are two articles' on fine-tuning a trained language model: one goes by the global batch, one by the model's size.
Where the two differ the wider range holds, and both are named.  Of a model from scratch only a rate far above all is
known to be too much.
"""

import math
from collections.abc import Iterator
from typing import Final

from supervisor.recipe_facts import Facts, Remark
from worker.contract.recipe_config import STARTING_RATES

_RATE: Final = ("training", "optimizer", "learning_rate")
_WARMUP: Final = ("training", "schedule", "warmup")

_BY_BATCH: Final = (32, 2.0e-5)
"""2e-5 at a global batch of 32 and below, 2.5e-5 at 64, 3e-5 at 128: half of 1e-5 more with each doubling."""
_MORE_A_DOUBLING: Final = 0.5e-5
_NEVER_ABOVE: Final = 4e-5
_BY_SIZE: Final = (
    (9.5e9, "up to 7B", (5e-5, 5e-5)),
    (20e9, "13B", (3e-5, 3e-5)),
    (math.inf, "30B and more", (1e-5, 2e-5)),
)
"""Up to how many parameters (the geometric middle between the sizes that are named), and the range."""
_ADAPTERS: Final = (1e-4, 2e-4)
_FACTORS: Final = {"adamw": (1.0, 1.0), "adam": (1.0, 1.0), "sophia": (1.0, 1.0), "lion": (0.1, 0.2)}
"""Optimizers whose rate is known as a multiple of AdamW's."""
_OWN_RANGES: Final = {"sgd": (1e-3, 1e-1), "lamb": (1e-4, 1e-2)}
"""Those that have a range of their own: ten times less and ten times more than they begin with here."""
_HARDLY_LEARNS: Final = 0.1
_BEGIN_FROM_SCRATCH, _MUCH_FROM_SCRATCH = 10.0, 100.0
"""Times the rate that an optimizer begins with when a trained model is trained further."""


def by_batch(global_batch: int) -> float:
    """AdamW's rate for full fine-tuning at a global batch of so many sequences."""
    smallest, rate = _BY_BATCH
    return min(_NEVER_ABOVE, rate + _MORE_A_DOUBLING * math.log2(max(global_batch, smallest) / smallest))


def by_size(parameters: int) -> tuple[str, tuple[float, float]]:
    """The size that is nearest, in words, and AdamW's range of rates for full fine-tuning at that size."""
    return next((name, rates) for most, name, rates in _BY_SIZE if parameters <= most)


def rates_from_scratch(optimizer: str) -> tuple[float, float] | None:
    """A rate to begin with from scratch, and one that is already much; None for an optimizer that nobody knows."""
    start = STARTING_RATES.get(optimizer)
    return None if start is None else (_BEGIN_FROM_SCRATCH * start, _MUCH_FROM_SCRATCH * start)


def rate_rule(facts: Facts) -> Iterator[Remark]:
    """The rate against optimizer, global batch and size of the model."""
    training = facts.config.training
    optimizer, rate = training.optimizer.name, training.optimizer.learning_rate
    if training.entrypoint is not None or rate is None:
        yield Remark("not checked", _RATE, "your own script decides what the rate is for")
    elif facts.is_from_scratch:
        yield _from_scratch(rate, optimizer)
    elif optimizer in _OWN_RANGES:
        yield from _within(rate, _OWN_RANGES[optimizer], f"{optimizer} has rates of its own")
    elif optimizer not in _FACTORS:
        yield Remark("not checked", _RATE, f"nothing is known of rates for {optimizer}")
    elif facts.config.model.lora is not None:
        low, high = (factor * edge for factor, edge in zip(_FACTORS[optimizer], _ADAPTERS, strict=True))
        yield from _within(rate, (low, high), f"adapters begin at zero, and take {_words(optimizer)} of their own")
    else:
        yield from _full(facts, rate, _FACTORS[optimizer])


def _from_scratch(rate: float, optimizer: str) -> Remark:
    begin, much = rates_from_scratch(optimizer) or (rate, rate)
    if rate <= much:
        return Remark("not checked", _RATE, "what is known of rates is known of models that are trained already")
    evidence = f"{much:g} is already much for {optimizer} from scratch"
    return Remark(
        "warning", _RATE, f"{rate:g} may well make the loss spike", evidence, f"set it to {begin:g} to {much:g}"
    )


def _within(rate: float, wanted: tuple[float, float], why: str) -> Iterator[Remark]:
    low, high = wanted
    if not low * _ALMOST <= rate <= high / _ALMOST:
        side = "above" if rate > high else "below"
        yield Remark(
            "warning", _RATE, f"{rate:g} is {side} the rates that are known to work: {why}",
            f"{low:.2g} to {high:.2g}", f"set it to {high if rate > high else low:.2g}",
        )  # fmt: skip


_ALMOST: Final = 1 - 1e-9
"""A rate at the edge is within."""


def _words(optimizer: str) -> str:
    return "rates" if optimizer != "lion" else "rates (lion: a tenth to a fifth of AdamW's)"


def _full(facts: Facts, rate: float, factors: tuple[float, float]) -> Iterator[Remark]:
    """Full fine-tuning, by both articles; ``factors``: the optimizer's rate in AdamW's."""
    less, more = factors
    batch = by_batch(facts.global_batch)
    told = [f"by the global batch of {facts.global_batch}, {_span(less * batch, more * batch)}"]
    size, (lowest, highest) = ("any size", (1e-5, 5e-5))
    if facts.parameters is not None:
        size, (lowest, highest) = by_size(facts.parameters)
    told.append(f"by the model's size ({size}), {_span(less * lowest, more * highest)}")
    most = more * max(batch, highest)
    if facts.config.training.optimizer.name == "lion":
        told.append("for lion, a tenth to a fifth of AdamW's")
    evidence = "; ".join(told)
    if rate > most / _ALMOST:
        mend = f"set it to {more * min(batch, highest):.2g}, or at most {most:.2g}"
        yield Remark("warning", _RATE, f"{rate:g} is above what is known to train without spikes", evidence, mend)
    elif rate < _HARDLY_LEARNS * less * min(batch, lowest):
        mend = f"set it to {less * min(batch, lowest):.2g} or more"
        yield Remark("warning", _RATE, f"at {rate:g} the weights hardly move", evidence, mend)
    elif rate > more * min(batch, highest) / _ALMOST:
        level, message = ("note", "the two articles differ, and it is within the wider range")
        if facts.parameters is None:
            level, message = ("not checked", "the size of the model is not known, and it is within one range only")
        above = f", above {more * _NEVER_ABOVE:.2g}" if rate > more * _NEVER_ABOVE / _ALMOST else ""
        yield Remark(level, _RATE, f"{rate:g}{above}: {message}", evidence)  # type: ignore[arg-type]


def _span(low: float, high: float) -> str:
    return f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"


# -- warmup ------------------------------------------------------------------------------------------------------------

_SHARES: Final = (0.02, 0.05)
_SCALED_FROM: Final = 128
"""A global batch up to which the shares hold; the fewer steps of a larger one need a larger share to warm up in."""
_LARGEST_SHARES: Final = (0.05, 0.1)


def shares_of_warmup(global_batch: int) -> tuple[float, float]:
    """The least and the greatest share of all steps for the warmup: 2 to 5 %, more with the root of a large batch."""
    scale = max(1.0, math.sqrt(global_batch / _SCALED_FROM))
    low, high = (min(most, scale * share) for share, most in zip(_SHARES, _LARGEST_SHARES, strict=True))
    return low, high


def warmup_rule(facts: Facts) -> Iterator[Remark]:
    """The share of the warmup, against 2 to 5 % scaled with the batch."""
    training, warmup = facts.config.training, facts.config.training.schedule.warmup
    if training.entrypoint is not None or facts.is_trial:
        return
    if facts.is_from_scratch:
        if warmup == 0 and training.optimizer.name != "sgd":
            evidence = f"{training.optimizer.name} from scratch, warmup 0"
            message = "without a warmup the first updates go by moments that know nothing yet"
            yield Remark("warning", _WARMUP, message, evidence, "set it to 0.02, or to some hundred steps")
        return
    if warmup >= 1 and facts.max_steps is None:
        yield Remark("not checked", _WARMUP, "it is given in steps, and how many there are in all is not known")
        return
    share = warmup if warmup < 1 else warmup / (facts.max_steps or 1)
    low, high = shares_of_warmup(facts.global_batch)
    if low * _ALMOST <= share <= high / _ALMOST:
        return
    evidence = f"{share:.1%} of all steps; {low:.1%} to {high:.1%} at a global batch of {facts.global_batch}"
    message = "so long a warmup leaves little time at the peak" if share > high else "so short a warmup invites spikes"
    yield Remark("warning", _WARMUP, message, evidence, f"set it to {high if share > high else low:.2g}")
