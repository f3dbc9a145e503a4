"""What an agent reads from the run's folder, and the two files that it writes there: claim and exit report."""

import contextlib
import os
import socket
import time
from typing import Literal

from worker.agent_rules import Seen, Task, ended_as, is_own
from worker.contract.claim import Claim, read_claim, start_ticks, take_claim
from worker.contract.directive import read_directive
from worker.contract.exit_report import ErrorDetail, ExitReport, Outcome, TrainerError
from worker.contract.files import UnusableFileError, publish_message, read_message
from worker.contract.loss_history import last_record
from worker.contract.pulse import Hang
from worker.contract.run_dir import RunDir


def look(run_dir: RunDir, task: Task, before: Seen, last_attempt: int | None) -> Seen:
    """What the run's files say now; UnusableFileError or OSError where one of them cannot be read.

    How an attempt ended is not asked for ``last_attempt``, whose trainer was this agent's own.
    """
    directive = read_directive(run_dir.directive)
    if directive is None:
        is_gone = not run_dir.path.exists()
        return Seen(held=before.held, held_claim=_claim(run_dir, before.held), is_gone=is_gone)
    attempt = directive.attempt
    claim = read_claim(run_dir.claim(attempt))
    is_twin = task.rank == 0 and claim is not None and is_own(claim, task) and not _is_by_this_process(claim)
    held = max(attempt, before.held or 0) if is_own(claim, task) and not is_twin else before.held
    is_known = before.directive is not None and before.directive.attempt == attempt and before.ended_as is not None
    return Seen(
        directive=directive,
        claim=claim,
        held=held,
        held_claim=_claim(run_dir, held),
        ended_as=before.ended_as if is_known else None if attempt == last_attempt else _ended_as(run_dir, attempt),
        is_restarted=any(restart < task.restart for restart in run_dir.restarts(attempt)),
        is_twin=is_twin,
        reported=_ranks_with(run_dir, held, task.restart, "exit"),
        is_let_go=held is not None and run_dir.let_go(held, task.restart).exists(),
        hanging=_ranks_with(run_dir, held, task.restart, "hang"),
    )


def has_run_before(run_dir: RunDir, task: Task) -> bool:
    """Whether this very start reported already: a controller that lost its memory starts a job with an old count."""
    try:
        directive = read_directive(run_dir.directive)
        path = run_dir.exit_report(directive.attempt, task.restart, task.rank) if directive else None
        report = read_message(path, ExitReport) if path else None
    except (UnusableFileError, OSError):
        return False
    return report is not None and report.job_id == task.job_id


def _claim(run_dir: RunDir, attempt: int | None) -> Claim | None:
    return read_claim(run_dir.claim(attempt)) if attempt else None


def _is_by_this_process(claim: Claim) -> bool:
    here = (socket.gethostname(), os.getpid(), start_ticks(os.getpid()))
    return (claim.host, claim.pid, claim.started_ticks) == here


def _ended_as(run_dir: RunDir, attempt: int) -> Outcome | None:
    paths = sorted(run_dir.attempt(attempt).glob("r*/rank-*.exit.json"))
    reports = [report for path in paths if (report := read_message(path, ExitReport))]
    last = last_record(run_dir.history)
    return ended_as(reports, last is not None and last.attempt == attempt and last.is_acted)


def _ranks_with(run_dir: RunDir, attempt: int | None, restart: int, kind: Literal["exit", "hang"]) -> frozenset[int]:
    """The ranks of this start that left such a file."""
    if not attempt:
        return frozenset()
    names = (path.name for path in run_dir.restart(attempt, restart).glob(f"rank-*.{kind}.json"))
    return frozenset(int(name.removeprefix("rank-").removesuffix(f".{kind}.json")) for name in names)


def claim_attempt(run_dir: RunDir, task: Task, attempt: int) -> None:
    """Claim an attempt for this start; FencedError where it is another's.

    The start's own folder comes with it: it tells all ranks of a later restart that the attempt was claimed before.
    """
    claim = Claim(
        job_id=task.job_id,
        name=task.name,
        restart=task.restart,
        host=socket.gethostname(),
        pid=os.getpid(),
        started_ticks=start_ticks(os.getpid()) or 0,
        time=time.time(),
    )
    take_claim(run_dir.claim(attempt), claim)
    run_dir.restart(attempt, task.restart).mkdir(exist_ok=True)


def let_go(run_dir: RunDir, task: Task, attempt: int) -> None:
    """Tell the other agents of this start that they need not stay until they are killed."""
    path = run_dir.let_go(attempt, task.restart)
    path.parent.mkdir(exist_ok=True)
    path.touch()


def trainers_word(run_dir: RunDir, task: Task, attempt: int) -> TrainerError:
    """What a trainer left about its own end, empty where that is nothing or cannot be read."""
    try:
        return read_message(run_dir.error(attempt, task.restart, task.rank), TrainerError) or TrainerError()
    except UnusableFileError:
        return TrainerError()


def tell_hang(run_dir: RunDir, task: Task, attempt: int, hang: Hang) -> None:
    """Let the other agents know, unless that cannot be done: a full disk must not keep a trainer alive."""
    with contextlib.suppress(OSError):
        publish_message(run_dir.hang(attempt, task.restart, task.rank), hang)


def has_reported(run_dir: RunDir, task: Task, attempt: int) -> bool:
    """Whether this start's exit report of ``attempt`` is there."""
    return run_dir.exit_report(attempt, task.restart, task.rank).exists()


def publish_report(
    run_dir: RunDir,
    task: Task,
    attempt: int,
    outcome: Outcome,
    error: ErrorDetail | None,
    started: float,
    returncode: int | None = None,
    hang: Hang | None = None,
) -> None:
    """Put this rank's exit report in place; ``returncode`` as in subprocess, minus N for signal N.

    FileNotFoundError where the attempt's folder is gone: nobody makes it again.
    """
    known = trainers_word(run_dir, task, attempt)
    report = ExitReport(
        attempt=attempt,
        restart=task.restart,
        segment=known.segment,
        rank=task.rank,
        job_id=task.job_id,
        host=socket.gethostname(),
        outcome=outcome,
        exit_code=returncode if returncode is not None and returncode >= 0 else None,
        signal=-returncode if returncode is not None and returncode < 0 else None,
        step=known.step,
        saved_step=known.saved_step,
        started=started,
        ended=time.time(),
        error=error,
        hang=hang,
    )
    path = run_dir.exit_report(attempt, task.restart, task.rank)
    path.parent.mkdir(exist_ok=True)
    publish_message(path, report)
