"""Three runs under the faults that their seeds draw, beside each other; `make chaos` draws others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from slurm.local_cluster.configuration import missing_packages
from tests.conftest import need
from tests.whole_room.chaos import Told, draw, survive

pytestmark = [pytest.mark.slurm, pytest.mark.training]
SEEDS = (5, 7, 8)
"""One task, two on a node, two on two nodes; nine kinds of faults."""


@pytest.fixture(scope="module")
def begun() -> Iterator[Mapping[int, Future[Told]]]:
    need(missing_packages(accounting=True))
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        yield {seed: pool.submit(survive, draw(seed)) for seed in SEEDS}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_finishes_with_the_same_weights_whatever_its_seed_draws(
    begun: Mapping[int, Future[Told]], seed: int
) -> None:
    told = begun[seed].result()
    assert (list(told.wrong), len(told.faults)) == ([], 4), str(told)


def test_a_seed_draws_the_same_again_and_another_one_something_else() -> None:
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)
