"""The command line: one function a verb; the only place that prints or chooses an exit code."""

import argparse
import contextlib
import errno
import getpass
import importlib.metadata
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from slurm.job import RequestError
from slurm.scheduler import LocalScheduler, SchedulerError, choose
from supervisor.arguments import parser_of
from supervisor.config import ConfigError, load_config, load_spike, load_targets
from supervisor.job_request import supervisor_request, worker_request
from supervisor.lease import HeldError, LostError, is_gone, read_holder
from supervisor.levers import ask, check_step, wait_until_over
from supervisor.live import watch_run
from supervisor.notify import ask_targets
from supervisor.page_file import page_place, publish_page
from supervisor.report.figures import printable
from supervisor.report.log_text import SinceError, since_time
from supervisor.requests import Request
from supervisor.run_state import OVER
from supervisor.runs import RunError, all_runs, find_run, open_or_create, standing, unreadable
from supervisor.supervise import own_job, own_job_name, read_state, reopen, supervise, supervise_once
from supervisor.views import follow_log, show_log, show_milestones, show_standing, write_journal, write_report
from worker.contract.config import Config
from worker.contract.config import read as read_config
from worker.contract.files import UnusableFileError, publish_message
from worker.contract.inference import Piece, Question
from worker.contract.loss_history import broken_line
from worker.contract.run_dir import RunDir

OK: Final = 0
UNFORESEEN: Final = 1
WRONG_INPUT: Final = 2
GAVE_UP: Final = 3
STOPPED: Final = 4
HELD: Final = 5
INTERRUPTED: Final = 130

_A_PERSONS_DISK: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT})
_A_PERSONS_NAME: Final = frozenset({errno.ENAMETOOLONG, errno.ELOOP})
_EXIT_CODE_OF_STATE: Final = {"finished": OK, "gave_up": GAVE_UP, "stopped": STOPPED}


def job_main(run_dir: str, start: dict[str, Any]) -> int:
    """The supervisor inside its own job: what it prints is logs/supervisor.log."""
    folder = RunDir(Path(run_dir))
    with open(folder.supervisor_log, "a", buffering=1, encoding="utf-8") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    return _guarded(lambda: _EXIT_CODE_OF_STATE[supervise(folder, sys.stdout, job_id=str(start["job_id"])).state])


# -- verbs -------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Supervise in the foreground; make the run first if it is new."""
    config = load_config(args.config, args.set)
    _ask_before_creating(args.config, config, with_supervisor=False)
    run_dir = open_or_create(config)
    try:
        state = supervise_once(run_dir, sys.stdout) if args.once else supervise(run_dir, sys.stdout)
    except KeyboardInterrupt:
        return _say_that_it_goes_on(run_dir)
    if args.once:
        return OK
    _say_goodbye(run_dir)
    return _EXIT_CODE_OF_STATE[state.state]


def submit(args: argparse.Namespace) -> int:
    """Start the run and a supervisor of its own, and return."""
    config = load_config(args.config, args.set)
    if config.supervisor.place != "job":
        mend = "start it with `higgsfield run`, or set supervisor.place to job"
        raise RunError(f"{args.config}: supervisor.place is foreground; {mend}")
    _ask_before_creating(args.config, config, with_supervisor=True)
    run_dir = open_or_create(config, may_change=True)
    if read_state(run_dir).state == "finished":
        print(f"{config.run.name} is finished already: {run_dir.path}")
        return OK
    name = own_job_name(reopen(run_dir, config))
    scheduler = choose(config.cluster.kind, run_dir.jobs)
    live = scheduler.find(name)
    job_id = live[0].job_id if live else scheduler.submit(supervisor_request(config, run_dir, name))
    where = "process" if isinstance(scheduler, LocalScheduler) else "job"
    print(f"{config.run.name}: the supervisor is {where} {job_id}; you may log out now")
    print(f"where it stands: higgsfield status {run_dir.path}")
    print(f"what happened:   higgsfield log {run_dir.path}")
    return OK


def status(args: argparse.Namespace) -> int:
    """Where runs stand."""
    found = [find_run(args.run, args.dir)] if args.run else all_runs(args.dir)
    rows = [_row(run_dir, in_detail=args.run is not None) for run_dir in found]
    if args.json:
        print(json.dumps({"runs": rows}, indent=2))
        return OK
    show_standing(rows, args.run is not None, args.dir, sys.stdout)
    if args.run:
        _warn_of_a_broken_history(found[0])
    return OK


def _row(run_dir: RunDir, in_detail: bool) -> dict[str, Any]:
    """A run's row; one that cannot be read does not hide the others."""
    try:
        row = standing(run_dir, in_detail)
        return row if row["state"] in OVER else row | _who_comes(run_dir, row["supervisor"])
    except UnusableFileError as error:
        if in_detail:
            raise
        return unreadable(run_dir, str(error))


def _who_comes(run_dir: RunDir, holder: dict[str, Any] | None) -> dict[str, Any]:
    """The supervisor's own job, where no supervisor is known to live; nothing where the scheduler does not answer."""
    if holder is not None and holder["alive"]:
        return {}
    try:
        job = own_job(run_dir)
    except SchedulerError:
        return {}
    told = job and {"id": job.job_id, "state": job.state.value, "why": job.why, "starts_at": job.starts_at}
    return {"supervisor_job": told}


def log(args: argparse.Namespace) -> int:
    """The rollback log."""
    run_dir = find_run(args.run, args.dir)
    since = since_time(args.since) if args.since is not None else 0.0
    if args.json:
        write_journal(run_dir, since, args.follow, sys.stdout.buffer)
    elif args.follow:
        follow_log(run_dir, since, sys.stdout)
    else:
        show_log(run_dir, since, sys.stdout)
        _warn_of_a_broken_history(run_dir)
    return OK


def watch(args: argparse.Namespace) -> int:
    """Show a run as it goes on, whether or not anybody supervises it; q quits."""
    run_dir = find_run(args.run, args.dir)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise RunError(f"watch needs a terminal; `higgsfield log {args.run} --follow` goes anywhere")
    watch_run(run_dir, sys.stdout)
    return OK


def report(args: argparse.Namespace) -> int:
    """Write one offline page: the curve with its rollbacks, where the time went, what was lost and saved."""
    run_dir = find_run(args.run, args.dir)
    print(printable(str(write_report(run_dir, args.output))))
    _warn_of_a_broken_history(run_dir)
    return OK


def _warn_of_a_broken_history(run_dir: RunDir) -> None:
    line = broken_line(run_dir.history)
    if line is not None:
        mend = "what follows is not counted here; each checkpoint has a copy of the file up to its step"
        _complain(f"{run_dir.history}: line {line} is no record though others follow it; {mend}")


def _say_goodbye(run_dir: RunDir) -> None:
    print(f"\nThe rollback log of {run_dir.path.name} (all of it: higgsfield log {run_dir.path}):")
    show_milestones(run_dir, sys.stdout)
    print("\n" + printable(f"Everything is in {run_dir.path}"))
    for path in (
        run_dir.final,
        run_dir.checkpoints,
        run_dir.history,
        run_dir.history_csv,
        run_dir.journal,
        run_dir.report,
    ):
        if path.exists():
            print(f"  {path.name}")


def _say_that_it_goes_on(run_dir: RunDir) -> int:
    print(
        f"\nthe worker goes on without a supervisor; `higgsfield resume {run_dir.path}` supervises it again,",
        file=sys.stderr,
    )
    print(f"`higgsfield stop {run_dir.path}` saves and ends it", file=sys.stderr)
    return INTERRUPTED


def stop(args: argparse.Namespace) -> int:
    """Save, stop, and stay stopped until somebody says resume."""
    run_dir = find_run(args.run, args.dir)
    if read_state(run_dir).is_over:
        print(printable(f"{run_dir.path.name} is over already"))
        return OK
    publish_message(run_dir.request, Request(verb="stop", by=getpass.getuser()))
    holder = read_holder(run_dir)
    if holder is not None and not is_gone(holder):
        print(f"asked the supervisor on {holder.host} to stop {run_dir.path.name}; waiting", flush=True)
        if wait_until_over(run_dir):
            print(printable(f"{run_dir.path.name} is stopped"))
            return OK
    code = _EXIT_CODE_OF_STATE[supervise(run_dir, sys.stdout).state]
    return OK if code == STOPPED else code


def rollback(args: argparse.Namespace) -> int:
    """Go back to a checkpoint by a person's word; a run that was stopped or gave up goes on from there."""
    run_dir = find_run(args.run, args.dir)
    _check_rollback(args, run_dir)
    if not _is_supervised(run_dir):
        print(f"{run_dir.path.name}: nobody supervises it; its job is started from here, and left alone", flush=True)
    asked = Request(
        verb="rollback", by=getpass.getuser(), to=args.to, lr_scale=args.lr_scale, skip=args.skip, asked_at=time.time()
    )
    state = ask(run_dir, asked, sys.stdout)
    if state.is_over:
        print(f"{run_dir.path.name}: {state.state} meanwhile: {state.reason}")
        return _EXIT_CODE_OF_STATE[state.state]
    if state.plan is not None:
        start, rate = state.plan.resume_from or "scratch", f"{state.plan.lr_scale:g} of the configured rate"
        print(f"{run_dir.path.name}: attempt {state.attempt} begins from {start} at {rate}")
    if not _is_supervised(run_dir):
        _say_who_may_supervise(run_dir)
    return OK


def _is_supervised(run_dir: RunDir) -> bool:
    holder = read_holder(run_dir)
    return holder is not None and not is_gone(holder)


def _say_who_may_supervise(run_dir: RunDir) -> None:
    """Name the job that will, or what a person can say."""
    job = _who_comes(run_dir, None).get("supervisor_job")
    if job:
        print(f"{run_dir.path.name}: its supervisor's job {job['id']} supervises it when it starts")
        return
    here = f"higgsfield resume {run_dir.path} (here)"
    if read_config(run_dir.config).supervisor.place == "job":
        here = f"higgsfield submit {run_dir.config} (a job), or {here}"
    print(f"{run_dir.path.name}: nobody supervises it from here on: {here}")


def _check_rollback(args: argparse.Namespace, run_dir: RunDir) -> None:
    state = read_state(run_dir).state
    if state == "finished":
        raise RunError(f"{run_dir.path.name}: is finished; a run that goes back needs another run.name")
    if state == "stopping":
        raise RunError(f"{run_dir.path.name}: is being stopped; ask again when it is stopped")
    if args.lr_scale is not None and not (math.isfinite(args.lr_scale) and args.lr_scale > 0):
        raise RunError(f"--lr-scale {args.lr_scale:g}: is no rate; give a number above 0, 1 for the configured rate")
    check_step(run_dir, args.to, or_scratch=True)


def pin(args: argparse.Namespace) -> int:
    """Keep a checkpoint, whatever retention and quarantine would do."""
    run_dir = find_run(args.run, args.dir)
    check_step(run_dir, args.step, or_scratch=False)
    ask(run_dir, Request(verb="pin", by=getpass.getuser(), to=args.step, asked_at=time.time()), sys.stdout)
    print(printable(f"{run_dir.path.name}: checkpoint-{args.step} is kept for good"))
    return OK


def resume(args: argparse.Namespace) -> int:
    """Let a run go on that was stopped, gave up or lost its supervisor; in the foreground."""
    run_dir = find_run(args.run, args.dir)
    if read_state(run_dir).state == "finished":
        print(f"{run_dir.path.name} is finished already: {run_dir.path}")
        return OK
    try:
        state = supervise(run_dir, sys.stdout, is_asked=True)
    except KeyboardInterrupt:
        return _say_that_it_goes_on(run_dir)
    _say_goodbye(run_dir)
    return _EXIT_CODE_OF_STATE[state.state]


def check(args: argparse.Namespace) -> int:
    """What can be known before anything is spent."""
    from supervisor.check import check as examine

    try:
        result = examine(load_config(args.config, args.set))
    except ConfigError as error:
        if not args.json:
            raise
        print(
            json.dumps(
                {
                    "errors": [vars(each) for each in error.findings],
                    "warnings": [],
                    "sbatch": "",
                    "memory": None,
                    "data": None,
                },
                indent=2,
            )
        )
        return WRONG_INPUT
    print(json.dumps(result.as_json(), indent=2) if args.json else result.as_text())
    return WRONG_INPUT if result.errors else OK


def detect(args: argparse.Namespace) -> int:
    """What the detector says about loss logs of any tool: what would have been rolled back."""
    from supervisor.detect import examine_log, lines_about

    rules, examined, unusable = load_spike(args.set), [], []
    if args.html is not None:
        page_place(args.html)  # before anything is read: it may be refused
    for file in args.files:
        try:
            examined.append(examine_log(file, rules))
        except UnusableFileError as error:
            unusable.append(error)
            continue
        print(json.dumps(examined[-1].as_json()) if args.json else "\n".join(map(printable, lines_about(examined[-1]))))
    if args.html is not None:
        from supervisor.report.detect_page import detect_page

        publish_page(args.html, detect_page(examined))
    for one in unusable:
        _complain(str(one))
    return WRONG_INPUT if unusable else OK


def infer(args: argparse.Namespace) -> int:
    """Generate text from the run's weights."""
    from supervisor.infer import answer_here, answer_of_job, inference_request

    run_dir = find_run(args.run, args.dir)
    given = {name: getattr(args, name) for name in Question.model_fields if getattr(args, name) is not None}
    try:
        question = Question.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from None
    if args.here:
        return _print_answer(answer_here(run_dir, question, dict(os.environ)))
    config = read_config(run_dir.config)
    job = inference_request(config, run_dir, read_state(run_dir).run_id, question)
    return _print_answer(answer_of_job(job, choose(config.cluster.kind, run_dir.jobs)))


def _print_answer(pieces: Iterator[Piece]) -> int:
    """The text on stdout as it comes, everything else on stderr."""
    with contextlib.closing(pieces):  # type: ignore[type-var]
        for piece in pieces:
            print(piece.text, end="", flush=True)
            if piece.note is not None:
                print(piece.note, file=sys.stderr, flush=True)
            if piece.error is not None:
                raise RunError(piece.error)
    print()
    return OK


def doctor(args: argparse.Namespace) -> int:
    """Whether this machine and cluster are fit to run it."""
    from supervisor.doctor import examine

    items = examine(args.dir)
    if args.notify is not None:
        items += ask_targets(load_targets(args.notify))
    if args.json:
        print(json.dumps({"checks": [vars(item) for item in items]}, indent=2))
    else:
        for item in items:
            mend = f"; {item.mend}" if item.mend else ""
            print(printable(f"{'ok     ' if item.ok else 'MISSING'}  {item.name}: {item.message}{mend}"))
    return OK if all(item.ok for item in items) else UNFORESEEN


def _ask_before_creating(file: Path, config: Config, *, with_supervisor: bool) -> None:
    """Ask the scheduler's opinion of a new run's jobs, so that no folder is made for jobs that it would refuse."""
    run_dir = RunDir(Path(config.run.dir) / config.run.name)
    if run_dir.path.exists():
        return
    try:
        worker = worker_request(config, run_dir, "hf-00000000", 1)
    except RequestError as error:  # load_config has looked at everything but the folder
        raise RunError(f"run.dir: {error}; choose another folder") from None
    scheduler = choose(config.cluster.kind, run_dir.jobs)
    scheduler.test_only(worker)
    if with_supervisor:
        scheduler.test_only(supervisor_request(config, run_dir, "hs-00000000"))


# -- the command -------------------------------------------------------------------------------------------------------


VERBS: Final = (run, submit, check, detect, status, watch, log, report, stop, resume, rollback, pin, infer, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; errors that a person can cause are one line on stderr."""
    if _is_installed("supervisor"):
        print(
            "the PyPI package `supervisor` has the same import name; install higgsfield-supervisor without it",
            file=sys.stderr,
        )
        return WRONG_INPUT
    parser = parser_of(VERBS)
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for the words that may stand here
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(argv)
    return _guarded(lambda: int(args.act(args)))


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _complain(text: str) -> None:
    """One line on stderr, whatever is in the names that it quotes."""
    print(printable(" ".join(text.split())), file=sys.stderr)


def _guarded(act: Callable[[], int]) -> int:
    try:
        return act()
    except ConfigError as error:
        print("\n".join(str(finding) for finding in error.findings), file=sys.stderr)
        return WRONG_INPUT
    except (RunError, RequestError, SchedulerError, SinceError, UnusableFileError) as error:
        _complain(str(error))
        return WRONG_INPUT
    except (HeldError, LostError) as error:
        _complain(str(error))
        return HELD
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except OSError as error:
        is_name = error.errno in _A_PERSONS_NAME
        if not is_name and error.errno not in _A_PERSONS_DISK:
            raise
        mend = "make room or use a folder that you may write"
        _complain(f"{error.filename or 'the disk'}: {error.strerror}" + ("" if is_name else f"; {mend}"))
        return WRONG_INPUT
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
