"""Which nodes a job can do without: the scheduler's own opinion decides, so that a request always fits."""

from collections.abc import Callable, Collection, Sequence

from slurm.job import JobRequest, RequestError
from slurm.scheduler import Scheduler, SchedulerError


def fits(scheduler: Scheduler, request: JobRequest) -> bool:
    """Whether the scheduler would take the request; SchedulerError where it does not answer."""
    try:
        scheduler.test_only(request)
    except RequestError:
        return False
    except SchedulerError as error:
        if not error.answered:
            raise
        return False
    return True


def can_spare(scheduler: Scheduler, request: Callable[[Collection[str]], JobRequest], nodes: Collection[str]) -> bool:
    """Whether the request fits without ``nodes``, or would not with them either.

    A controller that has just begun does not know yet that its nodes are there, and refuses everything.
    """
    return fits(scheduler, request(nodes)) or not fits(scheduler, request(()))


def fitting(
    scheduler: Scheduler, request: Callable[[Collection[str]], JobRequest], nodes: Sequence[str]
) -> tuple[JobRequest, Sequence[str]]:
    """The request without ``nodes``, or without fewer of them where it would not fit; and the nodes left out.

    The first ones are allowed again first. SchedulerError where the scheduler does not answer.
    """
    if not nodes or can_spare(scheduler, request, nodes):
        return request(nodes), nodes
    for begin in range(1, len(nodes)):
        left_out = nodes[begin:]
        if fits(scheduler, request(left_out)):
            return request(left_out), left_out
    return request(()), ()
