"""The verb rehearse: a short copy of a run on its own cluster, with faults, or at several rates."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slurm.scheduler import LocalScheduler, choose
from supervisor.config import load_config
from supervisor.journal import read_journal
from supervisor.rehearsal import (
    RATE_STEPS,
    STANDARD,
    advice,
    fault_rows,
    length,
    parse_faults,
    parse_rates,
    rate_config,
    rate_row,
    rehearsal_config,
)
from supervisor.rehearse import Rehearsed, carry_out, ended_by_signals, free_name
from supervisor.report.figures import printable
from supervisor.report.rehearsal_text import fault_lines, memory_lines, rate_lines
from supervisor.runs import RunError, open_or_create
from supervisor.supervise import read_state
from supervisor.verbs.exits import GAVE_UP, OK
from supervisor.verbs.going import ask_before_creating
from supervisor.views import columns
from worker.contract.config import Config
from worker.contract.files import read_message
from worker.contract.loss_history import read_history
from worker.contract.rehearsal import Fault, MemoryFound, inflicted
from worker.contract.run_dir import RunDir
from worker.contract.words import count


def rehearse(args: argparse.Namespace) -> int:
    """Throw faults into a short copy of the run, on its own cluster; or compare learning rates."""
    config = load_config(args.config, args.set)
    if args.learning_rate is not None and args.fault:
        raise RunError("--learning-rate: compares rates without faults; leave --fault out")
    if args.steps is not None and args.steps < 1:
        raise RunError(f"--steps {args.steps}: is no length; give a whole number above 0")
    with ended_by_signals():
        return _compare_rates(args, config) if args.learning_rate is not None else _throw_faults(args, config)


def _throw_faults(args: argparse.Namespace, config: Config) -> int:
    faults = parse_faults(args.fault or STANDARD)
    steps = length(config, faults, args.steps)
    is_local = isinstance(choose(config.cluster.kind), LocalScheduler)
    name = free_name(Path(config.run.dir), config.run.name)
    short = rehearsal_config(config, name, faults, steps, is_local=is_local)
    run = _made(args, short, faults)
    _tell(f"{name}: {count(steps, 'step')}, {count(len(faults), 'fault')}; everything is in {run.run_dir.path}")
    (state,) = carry_out([run])
    run_dir = run.run_dir
    came = {fault: found for fault in faults if (found := inflicted(run_dir, fault)) is not None}
    end = f"{state.state.replace('_', ' ')}, {state.reason}"
    rows = fault_rows(faults, came, read_journal(run_dir.journal), read_history(run_dir.history), end)
    memory = _memory(run_dir, config.cluster.world_size)
    if args.json:
        told = {"run": name, "dir": str(run_dir.path), "state": state.state, "steps": steps}
        _print_json(told | {"faults": [asdict(row) for row in rows], "memory": [one.model_dump() for one in memory]})
    else:
        lines = [*fault_lines(rows, columns(sys.stdout)), *memory_lines(memory)]
        print("\n".join([*lines, f"The rehearsal {printable(end)}: {printable(str(run_dir.path))}"]))
    return OK if state.state == "finished" and all(row.survived for row in rows) else GAVE_UP


def _made(args: argparse.Namespace, config: Config, faults: tuple[Fault, ...], *, is_quiet: bool = False) -> Rehearsed:
    """A new run, after the scheduler was asked for its opinion of the job."""
    ask_before_creating(args, config, with_supervisor=False)
    run_dir = open_or_create(config, rehearse=faults)
    return Rehearsed(run_dir, choose(config.cluster.kind, run_dir.jobs), faults, args.json or is_quiet)


def _tell(text: str) -> None:
    print(printable(text), file=sys.stderr, flush=True)


def _print_json(told: dict[str, Any]) -> None:
    print(json.dumps(told, indent=2))


def _memory(run_dir: RunDir, world: int) -> list[MemoryFound]:
    found = (read_message(run_dir.memory(rank), MemoryFound) for rank in range(world))
    return [one for one in found if one is not None]


def _compare_rates(args: argparse.Namespace, config: Config) -> int:
    rates, steps = parse_rates(args.learning_rate), args.steps or RATE_STEPS
    base = free_name(Path(config.run.dir), config.run.name)
    named = [(rate, rate_config(config, f"{base}-lr-{rate:g}", rate, steps)) for rate in rates]
    are_local = isinstance(choose(config.cluster.kind), LocalScheduler)
    runs = [_made(args, short, (), is_quiet=not are_local) for _, short in named]
    how = "one after the other" if are_local else "beside each other"
    each = f"{count(steps, 'step')} at each of {count(len(rates), 'rate')}"
    _tell(f"{base}: {each}, {how}; everything is in {config.run.dir}")
    for together in [[run] for run in runs] if are_local else [runs]:
        carry_out(together)
    rows = []
    for (rate, short), run in zip(named, runs, strict=True):
        state = read_state(run.run_dir).state
        rows.append(rate_row(rate, short.run.name, str(run.run_dir.path), state, read_history(run.run_dir.history)))
    if args.json:
        _print_json({"rates": [asdict(row) for row in rows], "advice": advice(rows)})
    else:
        print("\n".join(rate_lines(rows, advice(rows), columns(sys.stdout))))
    return OK if any(row.state == "finished" for row in rows) else GAVE_UP
