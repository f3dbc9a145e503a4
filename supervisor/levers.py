"""A person's levers: ask for it, and have it carried out by the run's supervisor, or here where none lives."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from supervisor.fold import replay
from supervisor.journal import Event, RequestRefused, RollbackRequested, read_journal
from supervisor.lease import DEAD_AFTER_S, describe, is_gone, read_holder
from supervisor.requests import Request, told_steps
from supervisor.run_state import RunState
from supervisor.runs import RunError, refuse_spoilt
from supervisor.supervise import carry_out_request, read_state
from worker.contract.files import publish_message
from worker.contract.manifest import complete_checkpoints
from worker.contract.run_dir import RunDir

_LOOK_EVERY_S = 0.3


def ask(run_dir: RunDir, request: Request, out: TextIO) -> RunState:
    """Have ``request`` carried out, and say by whom; where the run stands then. HeldError as in ``take_lease``.

    UnusableFileError, and nothing asked, where the run's files are such that no supervisor could carry it out;
    RunError where it was refused, or the journal does not tell of it.
    """
    refuse_spoilt(run_dir)
    wait_for_turn(run_dir)
    publish_message(run_dir.request, request)
    holder = read_holder(run_dir)
    if holder is not None and not is_gone(holder):
        print(f"{describe(holder)}; waiting for it", file=out, flush=True)
    if not _wait_while_supervised(run_dir, lambda: _is_carried_out(run_dir)):
        carry_out_request(run_dir, out)
    events = read_journal(run_dir.journal)
    _refuse_undone(run_dir.path.name, request, events)
    return replay(events)


def wait_for_turn(run_dir: RunDir) -> None:
    """Return when an earlier request has been taken, or nobody lives who would."""
    _wait_while_supervised(run_dir, lambda: not run_dir.request.exists())


def _refuse_undone(name: str, request: Request, events: Sequence[Event]) -> None:
    """RunError where the journal tells that ``request`` was refused, or does not tell of it at all."""
    kinds, run = RollbackRequested | RequestRefused, replay(events)
    told = [each for each in events if isinstance(each, kinds) and each.asked_at == request.asked_at]
    if told and isinstance(told[-1], RequestRefused):
        raise RunError(f"{name}: {told[-1].reason}")
    if not (request.to in run.pinned if request.verb == "pin" else told or run.is_over):
        raise RunError(f"{name}: another request took the place of this {request.verb}; ask again")


def wait_until_over(run_dir: RunDir) -> bool:
    """True when the run is over, False when its supervisor has died meanwhile."""
    return _wait_while_supervised(run_dir, lambda: read_state(run_dir).is_over)


def _wait_while_supervised(run_dir: RunDir, is_done: Callable[[], bool]) -> bool:
    """Whether it is done; False only where nobody lives who would do it, as far as can be seen from here."""
    seen, since = None, time.monotonic()
    while not is_done():
        holder = read_holder(run_dir)
        if holder is None or is_gone(holder):
            return is_done()
        if (holder.holder, holder.beat) != seen:
            seen, since = (holder.holder, holder.beat), time.monotonic()
        elif time.monotonic() - since > DEAD_AFTER_S:
            return is_done()
        time.sleep(_LOOK_EVERY_S)
    return True


def _is_carried_out(run_dir: RunDir) -> bool:
    return not run_dir.request.exists() and read_state(run_dir).rollback_asked is None


def check_step(run_dir: RunDir, step: int, *, or_scratch: bool) -> None:
    """RunError, naming the steps that there are, where no complete checkpoint is at ``step``."""
    steps = [manifest.step for manifest in complete_checkpoints(run_dir)]
    if step in steps or (or_scratch and step == 0):
        return
    aside = sorted(run_dir.quarantine.glob(f"a*-checkpoint-{step}"))
    if aside:
        raise RunError(
            f"{run_dir.path.name}: checkpoint-{step} {_why_not_again(aside[-1])}; there are: {told_steps(steps)}"
        )
    known = told_steps(steps)
    scratch = "; 0 begins from scratch" if or_scratch else ""
    raise RunError(f"{run_dir.path.name}: no checkpoint is at step {step}; there are: {known}{scratch}")


def _why_not_again(folder: Path) -> str:
    """What a folder in quarantine is, and how its weights are had all the same."""
    attempt = folder.name[1:].partition("-")[0]
    if "-bad-" in folder.name:
        return f"was found broken in attempt {attempt} and set aside as quarantine/{folder.name}"
    another = "its weights are whole: another run may begin from them (model.path)"
    return f"is of what a rollback left behind after attempt {attempt}, and lies in quarantine/{folder.name}; {another}"
