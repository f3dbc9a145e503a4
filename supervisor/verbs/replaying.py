"""What `diagnose --replay` does: the bad steps once more, told as it goes, and what to try."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from supervisor.replay import planned, replay_by_job, replay_here
from supervisor.report.figures import printable
from supervisor.report.replay_text import Standing, about, advice, as_json, table, was_tried
from supervisor.runs import RunError
from supervisor.supervise import read_state
from supervisor.verbs.exits import sigterm_as_ctrl_c
from worker.contract import config as contract_config
from worker.contract.replay import Tried
from worker.contract.run_dir import RunDir


@dataclass(frozen=True)
class Replayed:
    """What came of the changes."""

    lines: list[str]
    """For a person: the table, and what to try."""
    as_json: list[dict[str, Any]]
    was_tried: bool
    """Whether any change was trained to an answer."""


def replay(run_dir: RunDir, *, is_here: bool) -> Replayed:
    """Train the bad steps once more with each change; what is under way is told on stderr."""
    plan = planned(run_dir, is_alone=is_here)
    print(printable(about(plan.replay)), file=sys.stderr, flush=True)
    lines = replay_here(run_dir, plan, os.environ) if is_here else replay_by_job(run_dir, plan)
    with sigterm_as_ctrl_c(), closing(lines):  # type: ignore[type-var]
        tried = list(_changes(lines))
    said = advice(plan.replay, tried, _standing(run_dir))
    return Replayed([*table(tried), said], as_json(tried), was_tried(tried))


def _standing(run_dir: RunDir) -> Standing:
    state, rules = read_state(run_dir), contract_config.read(run_dir.config).training.optimizer
    scale = state.plan.lr_scale if state.plan is not None else 1.0
    return Standing(run_dir.path, state.state == "finished", scale, rules.learning_rate)


def _changes(lines: Iterator[Tried]) -> Iterator[Tried]:
    """What came of each change; RunError where the program could not go on."""
    for told in lines:
        if told.note is not None:
            print(printable(told.note), file=sys.stderr, flush=True)
        if told.error is not None:
            raise RunError(told.error)
        if told.change is not None:
            yield told
