"""Making a run's folder, finding it again, and where it stands."""

import errno
import importlib.metadata
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm.job import JobState
from supervisor.attempts import why_not_begun
from supervisor.budget import gpu_hours
from supervisor.config_history import BATCH, by_key, fixed, fixed_since, named, surely_fixed
from supervisor.fold import ending_of, replay
from supervisor.job_policy import why_not_submitted
from supervisor.journal import Event, GaveUp, RunCreated, SegmentStarted, read_journal
from supervisor.lease import is_gone, read_holder
from supervisor.pace import between_steps, estimate, still_since, unread_text, whole_rounds
from supervisor.report.advice import after_giving_up, commands
from supervisor.report.evaluations import evaluations
from supervisor.report.figures import local_clock
from supervisor.run_state import OVER, RunState
from worker.contract import config as contract_config
from worker.contract.config import Config, config_digest
from worker.contract.exit_report import STAY_S, Outcome
from worker.contract.files import UnusableFileError, append_line, encode, is_left, refuse_what_is_no_file
from worker.contract.loss_history import HistoryReader, recent_records, surviving
from worker.contract.manifest import Manifest, complete_checkpoints, health
from worker.contract.rehearsal import Fault
from worker.contract.run_dir import RunDir
from worker.contract.words import count

_FOLDERS = ("checkpoints", "attempts", "quarantine", "logs")
_CHANGEABLE = frozenset({"cluster", "recovery", "supervisor", "notify"})
_SHAPE = frozenset(f"cluster.{name}" for name in ("kind", "nodes", "tasks_per_node", "gpus_per_node"))
"""How many ranks there are, which makes the batch; and the scheduler that knows the jobs of the run."""
_COLUMNS = [
    "name",
    "dir",
    "state",
    "step",
    "max_steps",
    "loss",
    "lr_scale",
    "rollbacks",
    "attempt",
    "job",
    "supervisor",
    "supervisor_place",
    "since",
    "eta",
    "doing",
    "still_since",
    "worker_left",
    "reason",
]
_RECENT_BYTES, _STEPS_IN_RECENT, _MOST_STEPS = 65_536, 100, 2_000
"""What is read of a history's end for the pace: some steps at least, and as many as lie between two evaluations."""
_VERSIONED = ("higgsfield-supervisor", "torch", "transformers", "accelerate", "submitit")


class RunError(Exception):
    """A run that cannot be made, found or read; the message is one line for a person."""


def open_or_create(config: Config, *, may_change: bool = False, rehearse: tuple[Fault, ...] | None = None) -> RunDir:
    """The run's folder: a new one, made whole or not at all, or the one that is there with the same configuration.

    With ``may_change``, a run that was stopped or gave up may differ in keys that leave the training as it is.
    ``rehearse``: a new run is a rehearsal with these faults.
    """
    run_dir = RunDir(Path(config.run.dir) / config.run.name)
    if run_dir.path.exists():
        _check_same(run_dir, config, may_change=may_change)
        return run_dir
    try:
        create(run_dir, config, rehearse=rehearse)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and run_dir.config.exists():
            _check_same(run_dir, config)  # somebody else made it at the same moment
            return run_dir
        raise RunError(
            f"{run_dir.path}: cannot be made ({error.strerror}); set run.dir to a folder you may write"
        ) from None
    return run_dir


def _check_same(run_dir: RunDir, config: Config, *, may_change: bool = False) -> None:
    if not run_dir.config.exists():
        raise RunError(f"{run_dir.path}: is there and is no run of ours; choose another run.name")
    try:
        there = contract_config.read(run_dir.config)
    except UnusableFileError as error:
        raise RunError(f"{error}; put it back, or choose another run.name") from None
    if not run_dir.journal.exists():
        raise RunError(f"{run_dir.journal}: is gone; put it back, or choose another run.name")
    if there != config:
        _check_change(run_dir, there, config, may_change)
    if not os.access(run_dir.path, os.W_OK):
        raise RunError(f"{run_dir.path}: may not be written by you; run it as its owner or choose another run.dir")


def _check_change(run_dir: RunDir, there: Config, config: Config, may_change: bool) -> None:
    keys, path = changed_keys(there, config), run_dir.path
    told = ", ".join(keys)
    state, place = replay(read_journal(run_dir.journal)).state, config.supervisor.place
    go_on = commands(str(path), place)
    if not all(map(_leaves_the_training, keys)):
        mend = f"choose another run.name, or remove {path} to begin anew"
        stays = fixed(by_key(there), by_key(config)) if complete_checkpoints(run_dir) else {}
        if stays:
            mend = f"{' and '.join(stays)} of a run cannot change; {mend}"
        elif state != "finished" and "cluster.kind" not in keys:
            change = f"which may be changed{'' if state in OVER else f' after `higgsfield stop {path}`'}"
            mend += f"; or let that run go on by {run_dir.config}, {change}: {go_on}"
        raise RunError(f"{path}: another run has this name (it differs in {told}); {mend}")
    if state == "finished" or (may_change and state in OVER):
        return
    first = "" if state in OVER else f"`higgsfield stop {path}` first, then "
    this = "" if place == "foreground" else "submit this file, or "
    mend = f"{first}{this}change {run_dir.config}, by which it goes on: {go_on}"
    raise RunError(f"{path}: this run has another {told}; to go on with the new one {mend}")


def refuse_other_training(run_dir: RunDir) -> str:
    """RunError where a run that is over would be refused by its worker, for what its config.yaml has changed.

    Returns what else of it may be refused, once the worker has looked at the files; empty where nothing is.
    """
    config, manifests = contract_config.read(run_dir.config), complete_checkpoints(run_dir)
    events = read_journal(run_dir.journal)
    if not manifests or not replay(events).is_over or config.training.entrypoint is not None:
        return ""
    _refuse_other_batch(run_dir, manifests[-1], config)
    if manifests[-1].adopted:
        return ""
    for what, keys in surely_fixed(events, config, manifests[-1].attempt).items():
        raise RunError(
            f"{run_dir.path}: {what} of a run cannot change ({named(keys)}); put it back in {run_dir.config}, or begin "
            "a new run under another run.name"
        )
    doubtful = fixed_since(events, config, manifests[-1].attempt)
    doubtful.pop(BATCH, None)
    told = [f"{what} of a run cannot change ({named(keys)})" for what, keys in doubtful.items()]
    return f"{'; '.join(told)}: the worker looks, and refuses to resume with others" if told else ""


def _refuse_other_batch(run_dir: RunDir, made: Manifest, config: Config) -> None:
    """RunError where the next step would not take as many sequences as those before; other ranks may share them."""
    size, accumulation, ranks = (
        config.training.batch_size,
        config.training.gradient_accumulation,
        config.cluster.world_size,
    )
    now, before = size * accumulation * ranks, made.global_batch
    if before is None or now == before:
        return
    rounds, rest = divmod(before, size * ranks)
    mend = f"training.gradient_accumulation: {rounds} makes it {before} again" if not rest else "put it back"
    parts = f"training.batch_size {size} x training.gradient_accumulation {accumulation} x {count(ranks, 'rank')}"
    raise RunError(
        f"{run_dir.path}: the global batch of a run cannot change: a step took {count(before, 'sequence')}, and would "
        f"take {now} ({parts}); {mend} in {run_dir.config}, or begin a new run under another run.name"
    )


def _leaves_the_training(key: str) -> bool:
    """Whether a run may go on with another value of it: who watches, where it waits, what answers what."""
    return key.partition(".")[0] in _CHANGEABLE and key not in _SHAPE


def changed_keys(there: Config, config: Config) -> list[str]:
    """The keys, as ``cluster.partition``, in which two configurations differ."""
    return _differences(there.model_dump(), config.model_dump())


def _differences(left: dict[str, Any], right: dict[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in [*left, *(key for key in right if key not in left)]:
        one, other = left.get(key), right.get(key)
        if isinstance(one, dict) and isinstance(other, dict):
            found += _differences(one, other, f"{prefix}{key}.")
        elif one != other:
            found.append(prefix + key)
    return found


def create(
    run_dir: RunDir,
    config: Config,
    fill: Callable[[RunDir], None] = lambda making: None,
    reason: str | None = None,
    rehearse: tuple[Fault, ...] | None = None,
) -> None:
    """Make a new run's folder with what ``fill`` puts into it, whole or not at all."""
    run_dir.path.parent.mkdir(parents=True, exist_ok=True)
    making = RunDir(run_dir.path.with_name(f".tmp-{run_dir.path.name}-{secrets.token_hex(4)}"))
    try:
        making.path.mkdir()
        for name in _FOLDERS:
            (making.path / name).mkdir()
        making.jobs.mkdir(mode=0o700)
        contract_config.write(making.config, config)
        created = RunCreated(
            time=time.time(),
            reason=reason or f"run {config.run.name}{_rehearsed(rehearse)}",
            run_id=secrets.token_hex(8),
            config_digest=config_digest(config),
            config=by_key(config),
            versions=_versions(),
            rehearse=rehearse,
        )
        append_line(making.journal, encode({"event": "RunCreated"} | created.model_dump(mode="json")))
        fill(making)
        making.path.rename(run_dir.path)
    except BaseException:
        shutil.rmtree(making.path, ignore_errors=True)
        raise


def _rehearsed(faults: tuple[Fault, ...] | None) -> str:
    """What the log has to say of a run whose spikes and crashes are made."""
    if faults is None:
        return ""
    made = ", ".join(fault.name for fault in faults)
    return f", a rehearsal in which these are made: {made}" if made else ", a rehearsal without faults"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def find_run(text: str, runs: Path) -> RunDir:
    """The run that a person means: a folder, or a name under ``runs``; RunError where there is none."""
    for path in (Path(text), runs / text):
        if is_run(path):
            return RunDir(path.resolve())
    raise RunError(f"{text}: is no run folder, and there is no run of that name under {runs}")


def refuse_spoilt(run_dir: RunDir) -> None:
    """UnusableFileError where a folder, a pipe or a device has the name of a file that a supervisor needs."""
    for path in run_dir.own_files:
        refuse_what_is_no_file(path)


def is_run(path: Path) -> bool:
    """Whether a folder is a run, by its two files that are there from the beginning."""
    return (path / "config.yaml").is_file() and (path / "rollback_log.jsonl").is_file()


def all_runs(runs: Path) -> list[RunDir]:
    """Every run under a folder, by name."""
    if not runs.is_dir():
        return []
    return [RunDir(path.resolve()) for path in sorted(runs.iterdir()) if _may_be_run(path)]


def _may_be_run(path: Path) -> bool:
    """Whether it has a journal, or is a folder that nobody lets us look into."""
    try:
        return (path / "rollback_log.jsonl").is_file()
    except PermissionError:
        return True


# -- where a run stands ------------------------------------------------------------------------------------------------


def standing(run_dir: RunDir, in_detail: bool, now: float | None = None) -> dict[str, Any]:
    """One run as ``status --json`` prints it at ``now``, UTC seconds; nothing but files is asked."""
    now = time.time() if now is None else now
    config = contract_config.read(run_dir.config)
    events = read_journal(run_dir.journal)
    state = replay(events)
    every = config.training.eval_every
    recent = recent_records(run_dir.history, _RECENT_BYTES * (1 + min(every or 0, _MOST_STEPS) // _STEPS_IN_RECENT))
    last = recent[-1] if recent else None
    holder, total = _holder(run_dir), _max_steps(config, events)
    own = [record for record in recent if record.segment == state.segment]
    unread = unread_text(run_dir, state)
    left = unread or _waits_to_be_killed(state)
    is_alone = holder is None or holder["alive"] is False
    doing = None if left else between_steps(run_dir, state, now)
    still = own[-1].time if left and own else still_since(state, own, now, is_alone=is_alone)
    still = None if doing else still
    row: dict[str, Any] = {
        "name": config.run.name,
        "dir": str(run_dir.path),
        "state": state.state,
        "step": last.step if last else None,
        "max_steps": total,
        "loss": last.loss if last else None,
        "lr_scale": state.plan.lr_scale if state.plan else 1.0,
        "rollbacks": state.rollbacks,
        "attempt": state.attempt,
        "job": _job(state),
        "supervisor": holder,
        "supervisor_place": config.supervisor.place,
        "since": state.since,
        "eta": None if still else estimate(state, total, whole_rounds(own, every), now),
        "doing": doing,
        "still_since": still,
        "worker_left": left,
        "reason": _stop_file(run_dir, state, unread) or _reason(config, state),
    }
    return row | _details(run_dir, config, state, events) if in_detail else row


def unreadable(run_dir: RunDir, why: str) -> dict[str, Any]:
    """The row of a run whose files cannot be read: every number null."""
    row: dict[str, Any] = dict.fromkeys(_COLUMNS)
    return row | {"name": run_dir.path.name, "dir": str(run_dir.path), "state": "unreadable", "reason": why}


def _waits_to_be_killed(state: RunState) -> str | None:
    """That a worker which was preempted has left, and its job is still there; None where it is not so."""
    left, job = state.left, state.job
    if state.is_over or left is None or job is None or job.state != JobState.RUNNING.value:
        return None
    if left.outcome is not Outcome.LEFT or left.error is None or left.error.what != "preempted":
        return None
    until = local_clock(left.time + STAY_S)
    return f"{left.reason or 'the worker left in order'}; its job waits to be killed, until {until} at the latest"


def _stop_file(run_dir: RunDir, state: RunState, left: str | None) -> str | None:
    """What a STOP file asks for that is not in the journal yet: at most a pass ago, or nobody supervises."""
    if state.is_over or state.stop_by is not None or not is_left(run_dir.stop_file):
        return None
    if left is not None:
        return f"a STOP file is there, and the worker has left: higgsfield resume {run_dir.path} removes it and goes on"
    return "a STOP file is there: the worker saves and leaves at its next step"


def _reason(config: Config, state: RunState) -> str:
    """Why it stands where it stands: the journal's last reason, or why there is no job, or no attempt."""
    now, wait = time.time(), None
    if state.state == "queued" and state.job_id is None:
        wait = why_not_submitted(state, now, config.recovery)
    elif not state.is_over and state.stop_by is None:
        wait = why_not_begun(state, now, config.recovery)
    return wait or state.reason


def _max_steps(config: Config, events: list[Event]) -> int | None:
    starts = [e.start.max_steps for e in events if isinstance(e, SegmentStarted) and e.start is not None]
    return starts[-1] if starts else config.training.max_steps


def _job(state: RunState) -> dict[str, Any] | None:
    job = state.job
    if job is None or (state.is_over and not JobState(job.state).is_over):
        return None  # nobody looks at the job of a run that is over: what was seen last is stale
    told = {"id": job.job_id, "state": job.state, "why": job.why, "because": job.reason, "nodes": list(job.nodes)}
    draining = sorted(state.memory.draining & set(job.nodes))
    return told | {"draining": draining, "starts_at": job.starts_at, "ends_at": job.ends_at}


def _holder(run_dir: RunDir) -> dict[str, Any] | None:
    """Who supervises; ``alive`` is null for another host, where only watching would tell."""
    file = read_holder(run_dir)
    if file is None:
        return None
    here = file.host == socket.gethostname()
    return {"host": file.host, "pid": file.pid, "alive": not is_gone(file) if here else None}


def _details(run_dir: RunDir, config: Config, state: RunState, events: list[Event]) -> dict[str, Any]:
    branch = surviving(HistoryReader(run_dir.history).new_records())
    after = config.checkpoint.healthy_after
    checkpoints = [
        {"step": m.step, "health": health(m, branch, after).value, "attempt": m.attempt}
        for m in complete_checkpoints(run_dir)
    ]
    recovery, used = config.recovery, gpu_hours(state, time.time(), config.cluster.gpus)
    budgets = {
        "rollbacks_left": max(0, recovery.spike.max_rollbacks - state.rollbacks_since_progress),
        "gpu_hours_left": None if recovery.max_gpu_hours is None else max(0.0, recovery.max_gpu_hours - used),
        "attempts_left": max(0, recovery.max_attempts_without_progress - state.attempts_since_progress),
    }
    excluded = [
        {"node": each.node, "until": each.until, "evidence": each.evidence}
        for each in state.excluded(time.time()).values()
    ]
    last_events = [event.model_dump(mode="json") for event in events[-10:]]
    ending = ending_of(events)
    tried = after_giving_up(ending) if isinstance(ending, GaveUp) else []
    told = {"checkpoints": checkpoints, "excluded": excluded, "budgets": budgets, "events": last_events}
    return told | {"try": tried, "evaluations": evaluations(branch)}
