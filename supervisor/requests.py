"""request.json: a person's word to a run, until the lease holder has it in the journal."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from supervisor.journal import Event, Pinned, RequestRefused, RollbackRequested, StopRequested
from supervisor.report.figures import rate_text
from supervisor.run_state import RunState
from worker.contract.files import Message, UnusableFileError, read_message


class Request(Message):
    """What a person asks of a run, by the verb of that name; ``to`` is the step of a checkpoint, 0 = from scratch.

    ``asked_at``, in UTC seconds, tells two requests apart that ask for the same.
    """

    verb: Literal["stop", "rollback", "pin"]
    by: str
    to: int | None = Field(default=None, ge=0)
    lr_scale: float | None = Field(default=None, gt=0)
    skip: bool = False
    asked_at: float = 0.0


def read_request(path: Path) -> Request | None:
    """A person's request; None where there is none, or none that can be understood."""
    try:
        return read_message(path, Request)
    except UnusableFileError:
        return None


def clear_request(path: Path, taken: Request | None) -> bool:
    """Remove the request that was ``taken``, or one that nobody can understand (then False); a newer one stays."""
    there = read_request(path)
    if there == taken:
        is_understood = there is not None or not path.exists()
        path.unlink(missing_ok=True)
        return is_understood
    return True


def request_news(run: RunState, request: Request | None, steps: Collection[int]) -> Iterator[Event]:
    """What is asked and not yet in the journal; also of a run that is over. ``steps``: the complete checkpoints. Pure.

    What a person saw may be gone by now, for retention went on meanwhile: then the request is refused.
    """
    match request:
        case Request(verb="stop", by=by) if run.stop_by is None and not run.is_over:
            yield StopRequested(by=by, reason=f"{by} asked for a stop")
        case Request(verb="rollback", to=int(to)) if request.asked_at != run.last_asked_at and run.state != "finished":
            yield _rollback(request, to) if to == 0 or to in steps else refusal("rollback", request, to, steps)
        case Request(verb="pin", to=int(to)) if to not in steps:
            yield refusal("pin", request, to, steps)
        case Request(verb="pin", by=by, to=int(to)) if to not in run.pinned:
            yield Pinned(by=by, to=to, reason=f"{by} wants checkpoint-{to} to be kept")


def refusal(
    verb: Literal["rollback", "pin"], asked: Request | RollbackRequested, to: int, steps: Collection[int]
) -> RequestRefused:
    """What is said of a checkpoint that is not there (any more), by the steps of those that are."""
    wish = f"to go back to step {to}" if verb == "rollback" else f"for checkpoint-{to} to be kept"
    reason = f"{asked.by} asked {wish}; refused, no checkpoint is there by now; there are: {told_steps(steps)}"
    return RequestRefused(by=asked.by, verb=verb, to=to, asked_at=asked.asked_at, reason=reason)


def told_steps(steps: Collection[int]) -> str:
    """Steps for a person."""
    return ", ".join(map(str, steps)) if steps else "none"


def _rollback(request: Request, to: int) -> RollbackRequested:
    rate = f" at {rate_text(request.lr_scale)}" if request.lr_scale is not None else ""
    without = ", without the batches since then" if request.skip else ""
    return RollbackRequested(
        by=request.by,
        to=to,
        lr_scale=request.lr_scale,
        skip=request.skip,
        asked_at=request.asked_at,
        reason=f"{request.by} asked to go back to step {to}{rate}{without}",
    )
