"""Verbs that only look: status, log, watch, report, doctor."""

import argparse
import json
import sys
from typing import Any

from slurm.scheduler import SchedulerError
from supervisor.config import load_targets
from supervisor.dead_supervisor import last_supervisor
from supervisor.fold import replay
from supervisor.journal import read_journal
from supervisor.lease import is_gone, read_holder
from supervisor.live import watch_run
from supervisor.notify import ask_targets
from supervisor.report.figures import printable
from supervisor.report.log_text import since_time
from supervisor.report.standing_text import dead_supervisor_text
from supervisor.run_state import OVER
from supervisor.runs import RunError, all_runs, find_run, standing, unreadable
from supervisor.supervise import own_job
from supervisor.verbs.exits import OK, UNFORESEEN, complain
from supervisor.views import follow_log, show_log, show_standing, write_journal, write_report
from worker.contract.files import UnusableFileError
from worker.contract.loss_history import broken_line
from worker.contract.run_dir import RunDir


def status(args: argparse.Namespace) -> int:
    """Where runs stand."""
    found = [find_run(args.run, args.dir)] if args.run else all_runs(args.dir)
    rows = [_row(run_dir, in_detail=args.run is not None) for run_dir in found]
    if args.json:
        print(json.dumps({"runs": rows}, indent=2))
        return OK
    show_standing(rows, args.run is not None, args.dir, sys.stdout)
    if args.run:
        warn_of_a_broken_history(found[0])
    return OK


def _row(run_dir: RunDir, in_detail: bool) -> dict[str, Any]:
    """A run's row; one that cannot be read does not hide the others."""
    try:
        row = standing(run_dir, in_detail)
        return row if row["state"] in OVER else _with_its_job(row | who_comes(run_dir, row["supervisor"]))
    except UnusableFileError as error:
        if in_detail:
            raise
        return unreadable(run_dir, str(error))
    except OSError as error:
        if in_detail:
            raise
        return unreadable(run_dir, f"{error.filename or run_dir.path}: {error.strerror}")


def _with_its_job(row: dict[str, Any]) -> dict[str, Any]:
    """The row with the run's job as it is now, where its supervisor comes with it: nobody looks at it till then."""
    job, found = row["job"], row.get("supervisor_job")
    if not job or not found or found["id"] != job["id"] or found["state"] == job["state"]:
        return row
    return row | {"job": job | found | {"because": "", "nodes": [], "draining": []}, "eta": None}


def who_comes(run_dir: RunDir, holder: dict[str, Any] | None) -> dict[str, Any]:
    """The supervisor's job, where no supervisor is known to live; nothing where the scheduler does not answer."""
    if holder is not None and holder["alive"]:
        return {}
    try:
        job = own_job(run_dir)
    except SchedulerError:
        return {}
    if job is not None:
        told = {"id": job.job_id, "state": job.state.value, "why": job.why, "starts_at": job.starts_at}
        return {"supervisor_job": told}
    ended = last_supervisor(run_dir, read_journal(run_dir.journal))
    died = ended and {"id": ended.job_id, "began": ended.began, "said": ended.said, "file": str(ended.file)}
    return {"supervisor_job": None, "supervisor_died": died}


def _warn_of_a_dead_supervisor(run_dir: RunDir) -> None:
    """Name the supervisor's job that is over though the run is not; the scheduler is asked where a file says so."""
    events = read_journal(run_dir.journal)
    holder = read_holder(run_dir)
    is_alive = holder is not None and not is_gone(holder)
    if is_alive or replay(events).is_over or last_supervisor(run_dir, events) is None:
        return
    died = who_comes(run_dir, None).get("supervisor_died")
    if died:
        complain(f"{run_dir.path.name}: {dead_supervisor_text(died)}")


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
        _warn_of_a_dead_supervisor(run_dir)
        warn_of_a_broken_history(run_dir)
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
    warn_of_a_broken_history(run_dir)
    return OK


def warn_of_a_broken_history(run_dir: RunDir) -> None:
    """Name the line of the history that cannot be read, where others follow it."""
    line = broken_line(run_dir.history)
    if line is not None:
        mend = "what follows is not counted here; each checkpoint has a copy of the file up to its step"
        complain(f"{run_dir.history}: line {line} is no record though others follow it; {mend}")


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
