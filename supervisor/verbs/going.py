"""Verbs that let a run go on, or end it: run, submit, resume, stop."""

import argparse
import getpass
import sys
from collections.abc import Iterable
from pathlib import Path

from slurm.job import RequestError
from slurm.scheduler import LocalScheduler, choose
from supervisor.check import short_warnings
from supervisor.config import Finding, load_config, writer_of_keys
from supervisor.config_history import changes, named
from supervisor.fleet import fleet_supervisor
from supervisor.hub import fetch_from_hub
from supervisor.job_request import supervisor_request, worker_request
from supervisor.journal import read_journal
from supervisor.lease import describe, is_gone, is_suspended, read_holder
from supervisor.levers import wait_for_turn, wait_until_over
from supervisor.report.advice import commands
from supervisor.requests import Request
from supervisor.run_state import RunState
from supervisor.runs import RunError, find_run, open_or_create, refuse_other_training, refuse_spoilt
from supervisor.supervise import own_job_name, rate_that_stays, read_state, reopen, supervise, supervise_once
from supervisor.verbs.exits import EXIT_CODE_OF_STATE, INTERRUPTED, OK, complain, say, sigterm_as_ctrl_c
from supervisor.views import show_milestones
from worker.contract.config import Config
from worker.contract.config import read as read_config
from worker.contract.files import is_left, publish_message
from worker.contract.run_dir import RunDir


def run(args: argparse.Namespace) -> int:
    """Supervise in the foreground; make the run first if it is new."""
    if args.all is not None:
        from supervisor.verbs.fleet import run_all

        if args.set:
            raise RunError("--set changes one CONFIG; the runs under --all keep the configuration that they have")
        return run_all(args.all, once=args.once)
    config = load_config(args.config, args.set)
    odd = ask_before_creating(args, config, with_supervisor=False)
    run_dir = open_or_create(config)
    _say_what_is_odd(odd)
    was_over = read_state(run_dir).is_over
    try:
        with sigterm_as_ctrl_c():
            state = supervise_once(run_dir, sys.stdout) if args.once else supervise(run_dir, sys.stdout)
    except KeyboardInterrupt:
        return _say_that_it_goes_on(run_dir)
    if args.once:
        return OK
    _say_goodbye(run_dir)
    if was_over and state.state == "finished":
        _say_that_it_is_finished(run_dir, config)
    elif was_over:
        _say_how_it_goes_on(run_dir, state.state)
    return EXIT_CODE_OF_STATE[state.state]


def submit(args: argparse.Namespace) -> int:
    """Start the run and a supervisor of its own, and return."""
    config = load_config(args.config, args.set)
    fleet = fleet_supervisor(Path(config.run.dir))
    if config.supervisor.place == "foreground" and fleet is None:
        mend = "start it with `higgsfield run`, or set supervisor.place to job or embedded"
        raise RunError(f"{args.config}: supervisor.place is foreground; {mend}")
    odd = ask_before_creating(args, config, with_supervisor=fleet is None and config.supervisor.place == "job")
    run_dir = open_or_create(config, may_change=True)
    _say_what_is_odd(odd)
    scheduler = choose(config.cluster.kind, run_dir.jobs)
    is_embedded = fleet is None and config.supervisor.place == "embedded" and not isinstance(scheduler, LocalScheduler)
    if is_embedded and read_state(run_dir).attempt:
        supervise_once(run_dir, sys.stdout)  # its last supervisor may have been killed with its job
    if fleet is None and is_left(run_dir.stop_file):
        supervise(run_dir, sys.stdout)  # it may be half obeyed by now
    if read_state(run_dir).state == "finished":
        _say_that_it_is_finished(run_dir, config)
        return OK
    if fleet is None or read_state(run_dir).is_over:
        _warn_of_what_changed(run_dir, config)
        reopen(run_dir, config)
    start = _start_worker if is_embedded else _start_supervisor
    who = f"{fleet}, for as long as that process lives" if fleet else f"{start(config, run_dir)}; you may log out now"
    say(f"{config.run.name}: {who}")
    say(f"where it stands: higgsfield status {run_dir.path}")
    say(f"what happened:   higgsfield log {run_dir.path}")
    return OK


def adopt(args: argparse.Namespace) -> int:
    """Make a run out of a Hugging Face output folder that was trained without us; nothing of it changes."""
    from supervisor.adopt import NOT_PROVEN, look_through
    from supervisor.adopt import adopt as take_over
    from supervisor.sbatch_file import read_sbatch

    overrides, left_out = read_sbatch(args.sbatch) if args.sbatch is not None else ([], [])
    found, _ = look_through(args.folder)
    adopted = take_over(args.folder, load_config(args.config, [*overrides, *args.set], found[-1].max_steps))
    path, steps = adopted.run_dir.path, ", ".join(map(str, adopted.steps))
    lines = [
        f"{path.name}: has the checkpoints of {args.folder} at step {steps}, and goes on from the last of them",
        *adopted.notes,
        *left_out,
        f"not proven when it goes on: {NOT_PROVEN}",
        f"go on: higgsfield submit {adopted.run_dir.config}, or here: higgsfield resume {path}",
    ]
    for line in lines:
        say(line)
    return OK


def _start_supervisor(config: Config, run_dir: RunDir) -> str:
    """Start the run's own supervisor, unless it is on its way already; what it is, to find it again.

    Of the stand-in's job that is no number: its process starts the supervisor's, and `status` names that one.
    """
    name = own_job_name(read_state(run_dir))
    scheduler = choose(config.cluster.kind, run_dir.jobs)
    live = scheduler.find(name)
    job_id = live[0].job_id if live else scheduler.submit(supervisor_request(config, run_dir, name))
    return f"the supervisor is {'a process of its own' if isinstance(scheduler, LocalScheduler) else f'job {job_id}'}"


def _start_worker(config: Config, run_dir: RunDir) -> str:
    """Make a pass that submits the worker, whose job brings its supervisor; which one that is."""
    state = supervise_once(run_dir, sys.stdout)
    if state.job_id is None or not state.has_live_job:
        raise RunError(f"{run_dir.path}: no job yet: {state.reason}; again: higgsfield submit {run_dir.config}")
    return f"the supervisor lives in the worker's job {state.job_id}"


def stop(args: argparse.Namespace) -> int:
    """Save, stop, and stay stopped until somebody says resume."""
    run_dir = find_run(args.run, args.dir)
    if not read_state(run_dir).is_over:
        refuse_spoilt(run_dir)
        _say_if_suspended(run_dir)
        wait_for_turn(run_dir)
    if read_state(run_dir).is_over:
        say(f"{run_dir.path.name} is over already")
        return OK
    publish_message(run_dir.request, Request(verb="stop", by=getpass.getuser()))
    holder = read_holder(run_dir)
    if holder is not None and not is_gone(holder):
        say(f"asked the supervisor on {holder.host} to stop {run_dir.path.name}; waiting")
        if wait_until_over(run_dir):
            state = read_state(run_dir)
            meanwhile = f": {state.state.replace('_', ' ')} meanwhile: {state.reason}"
            say(f"{run_dir.path.name}{' is stopped' if state.state == 'stopped' else meanwhile}")
            return _exit_code_of_stop(state)
    return _exit_code_of_stop(supervise(run_dir, sys.stdout))


def _exit_code_of_stop(state: RunState) -> int:
    return OK if state.state == "stopped" else EXIT_CODE_OF_STATE[state.state]


def _say_if_suspended(run_dir: RunDir) -> None:
    holder = read_holder(run_dir)
    if holder is not None and is_suspended(holder):
        say(f"{describe(holder)}; or, to stop the training without it: touch {run_dir.stop_file}")


def resume(args: argparse.Namespace) -> int:
    """Let a run go on that was stopped, gave up or lost its supervisor; in the foreground."""
    run_dir = find_run(args.run, args.dir)
    if read_state(run_dir).state == "finished":
        _say_that_it_is_finished(run_dir, read_config(run_dir.config))
        return OK
    refuse_spoilt(run_dir)
    _warn_of_what_changed(run_dir, read_config(run_dir.config))
    try:
        with sigterm_as_ctrl_c():
            state = supervise(run_dir, sys.stdout, is_asked=True)
    except KeyboardInterrupt:
        return _say_that_it_goes_on(run_dir)
    _say_goodbye(run_dir)
    return EXIT_CODE_OF_STATE[state.state]


def _warn_of_what_changed(run_dir: RunDir, config: Config) -> None:
    """What a person would want to know before a job is spent; RunError for what the job would surely be refused."""
    for doubt in (refuse_other_training(run_dir), rate_that_stays(run_dir, config)):
        if doubt:
            complain(f"warning: {run_dir.path.name}: {doubt}")


def _say_goodbye(run_dir: RunDir) -> None:
    print()
    say(f"The rollback log of {run_dir.path.name} (all of it: higgsfield log {run_dir.path}):")
    show_milestones(run_dir, sys.stdout)
    print()
    say(f"Everything is in {run_dir.path}")
    for path in (
        run_dir.final,
        run_dir.checkpoints,
        run_dir.history,
        run_dir.history_csv,
        run_dir.journal,
        run_dir.report,
    ):
        if path.exists():
            say(f"  {path.name}")


def _say_that_it_is_finished(run_dir: RunDir, config: Config) -> None:
    """And, of a ``config`` by which it was not trained, that a finished run goes on by none."""
    changed = changes(read_journal(run_dir.journal), config)
    is_whole = config.training.entrypoint is None and config.model.lora is None
    begins = f", whose model.path is {run_dir.final}" if is_whole else ""
    no_effect = f"; {named(changed)}: without effect, for that another run is needed{begins}" if changed else ""
    say(f"{run_dir.path.name} is finished already: {run_dir.path}{no_effect}")


def _say_how_it_goes_on(run_dir: RunDir, state: str) -> None:
    """``run`` has left alone a run that was over."""
    mend = f"; what to mend first: higgsfield status {run_dir.path}" if state == "gave_up" else ""
    how = commands(str(run_dir.path), read_config(run_dir.config).supervisor.place)
    ended = "gave up" if state == "gave_up" else "was stopped"
    say(f"{run_dir.path.name} {ended} before, and is left alone; go on: {how}{mend}")


def _say_that_it_goes_on(run_dir: RunDir) -> int:
    print(file=sys.stderr)
    has_job = read_config(run_dir.config).supervisor.place != "foreground"
    in_job = f"`higgsfield submit {run_dir.config}` does so in a job, " if has_job else ""
    say(f"the worker goes on without a supervisor; `higgsfield resume {run_dir.path}` supervises it again,", sys.stderr)
    say(f"{in_job}`higgsfield stop {run_dir.path}` saves and ends it", sys.stderr)
    return INTERRUPTED


def ask_before_creating(args: argparse.Namespace, config: Config, *, with_supervisor: bool) -> list[Finding]:
    """Ask the scheduler's opinion of a new run's jobs, so that no folder is made for jobs that it would refuse.

    Returns what is odd about the recipe of a new run, as far as that is known at once.
    """
    run_dir = RunDir(Path(config.run.dir) / config.run.name)
    if run_dir.path.exists():
        return []
    try:
        worker = worker_request(config, run_dir, "hf-00000000", 1)
    except RequestError as error:  # load_config has looked at everything but the folder
        raise RunError(f"run.dir: {error}; choose another folder") from None
    scheduler = choose(config.cluster.kind, run_dir.jobs)
    scheduler.test_only(worker)
    if with_supervisor:
        scheduler.test_only(supervisor_request(config, run_dir, "hs-00000000"))
    if config.cluster.offline:
        fetch_from_hub(config)
    return short_warnings(config, str(args.config), writer_of_keys(args.config, args.set), scheduler)


def _say_what_is_odd(findings: Iterable[Finding]) -> None:
    for finding in findings:
        complain(f"warning: {finding}")
