"""How often to save: what the saves cost against what is done again after a fault.  Pure arithmetic.

Faults come at random with a mean time between them; one costs the restart and everything since the newest save.
"""

import math
from dataclasses import dataclass

_HALVINGS = 200


@dataclass(frozen=True)
class SaveCosts:
    """What saving is weighed by; all in seconds."""

    save_s: float
    """How long training stands still for a save."""
    fault_every_s: float
    """Mean time between faults of any kind that go back to a checkpoint."""
    restart_s: float
    """From a fault to the first step after it, without the steps that are done again."""


def best_interval_s(costs: SaveCosts) -> float:
    """Seconds of training between saves that lose the least time in the long run.

    J. T. Daly's full model (2006), solved exactly; where a save is short against the time between faults it is Young's
    ``sqrt(2 x save_s x fault_every_s)``. What a restart costs does not move it. 0.0 where a save costs nothing.
    """
    save = costs.save_s / costs.fault_every_s
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        # The derivative of the loss is zero where 1 - x = exp(-x - save), x being the interval by fault_every_s.
        low, high = (middle, high) if -middle - math.expm1(-middle - save) > 0 else (low, middle)
    return low * costs.fault_every_s


def lost_share(costs: SaveCosts, interval_s: float) -> float:
    """The share of all time, 0 to 1, that goes into saves, restarts and repeated steps at one save an interval."""
    between = costs.fault_every_s
    try:
        spent_s = between * math.exp(costs.restart_s / between) * math.expm1((interval_s + costs.save_s) / between)
    except OverflowError:  # no interval is ever finished
        return 1.0
    return 1.0 - interval_s / spent_s
