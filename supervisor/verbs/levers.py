"""Verbs that carry a person's word to a run: rollback, pin."""

import argparse
import getpass
import math
import sys
import time
from typing import Final

from supervisor.lease import is_gone, read_holder
from supervisor.levers import ask, check_step
from supervisor.report.advice import commands
from supervisor.report.figures import rate_text
from supervisor.requests import Request
from supervisor.runs import RunError, find_run
from supervisor.supervise import read_state
from supervisor.verbs.exits import EXIT_CODE_OF_STATE, OK, complain, say
from supervisor.verbs.looking import who_comes
from worker.contract.config import read as read_config
from worker.contract.run_dir import RunDir

_ANOTHER_RUN: Final = "a run that goes back needs another run.name"


def rollback(args: argparse.Namespace) -> int:
    """Go back to a checkpoint by a person's word; a run that was stopped or gave up goes on from there."""
    run_dir = find_run(args.run, args.dir)
    _check_rollback(args, run_dir)
    before = read_state(run_dir).attempt
    if not _is_supervised(run_dir):
        say(f"{run_dir.path.name}: nobody supervises it; its job is started from here, and left alone")
    asked = Request(
        verb="rollback", by=getpass.getuser(), to=args.to, lr_scale=args.lr_scale, skip=args.skip, asked_at=time.time()
    )
    state = ask(run_dir, asked, sys.stdout)
    if state.state == "finished" and state.attempt == before:
        raise RunError(f"{run_dir.path.name}: finished before it could go back; {_ANOTHER_RUN}")
    if state.is_over:
        say(f"{run_dir.path.name}: {state.state.replace('_', ' ')} meanwhile: {state.reason}")
        return EXIT_CODE_OF_STATE[state.state]
    if state.plan is not None:
        start, rate = state.plan.resume_from or "scratch", rate_text(state.plan.lr_scale)
        say(f"{run_dir.path.name}: attempt {state.attempt} begins from {start} at {rate}")
    if not _is_supervised(run_dir):
        _say_who_may_supervise(run_dir)
    return OK


def pin(args: argparse.Namespace) -> int:
    """Keep a checkpoint, whatever retention and quarantine would do."""
    run_dir = find_run(args.run, args.dir)
    check_step(run_dir, args.step, or_scratch=False)
    ask(run_dir, Request(verb="pin", by=getpass.getuser(), to=args.step, asked_at=time.time()), sys.stdout)
    check_step(run_dir, args.step, or_scratch=False)  # the worker may have been about to remove it
    say(f"{run_dir.path.name}: checkpoint-{args.step} is kept for good")
    return OK


def _is_supervised(run_dir: RunDir) -> bool:
    holder = read_holder(run_dir)
    return holder is not None and not is_gone(holder)


def _say_who_may_supervise(run_dir: RunDir) -> None:
    """Name the job that will, or what a person can say."""
    job = who_comes(run_dir, None).get("supervisor_job")
    if job:
        say(f"{run_dir.path.name}: its supervisor's job {job['id']} supervises it when it starts")
        return
    go_on = commands(str(run_dir.path), read_config(run_dir.config).supervisor.place)
    say(f"{run_dir.path.name}: nobody supervises it from here on: {go_on}")


def _check_rollback(args: argparse.Namespace, run_dir: RunDir) -> None:
    state = read_state(run_dir).state
    if state == "finished":
        raise RunError(f"{run_dir.path.name}: is finished; {_ANOTHER_RUN}")
    if state == "stopping":
        raise RunError(f"{run_dir.path.name}: is being stopped; ask again when it is stopped")
    if args.lr_scale is not None and not (math.isfinite(args.lr_scale) and args.lr_scale > 0):
        raise RunError(f"--lr-scale {args.lr_scale:g}: is no rate; give a number above 0, 1 for the configured rate")
    check_step(run_dir, args.to, or_scratch=True)
    if args.lr_scale is not None and args.lr_scale > 1:
        complain(f"warning: --lr-scale {args.lr_scale:g}: {rate_text(args.lr_scale)}; the run goes on at it")
