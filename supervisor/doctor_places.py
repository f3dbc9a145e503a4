"""Which of the supervisor's places this cluster allows, as far as that can be known without a job."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from slurm.job import JobRequest, RequestError, Resources
from slurm.partitions import Partition, partitions
from slurm.scheduler import Scheduler, SchedulerError
from supervisor.doctor import CheckedItem

_WITHOUT_A_JOB: Final = "`higgsfield run` here in tmux, or `higgsfield run CONFIG --once` in a crontab of this host"


def look_at_places(scheduler: Scheduler, folder: Path) -> Iterator[CheckedItem]:
    """Whether a supervisor may have a small job of its own, and whether it may submit from there; what works else."""
    yield _small_job(scheduler, folder)
    try:
        yield _submission(partitions())
    except SchedulerError as error:
        yield CheckedItem("submitting from nodes", True, f"not known ({error})")


def _small_job(scheduler: Scheduler, folder: Path) -> CheckedItem:
    """The scheduler's opinion of a job of one CPU and no GPU, in the default partition."""
    try:
        small = Resources(cpus_per_task=1, time_limit="10")
        said = scheduler.test_only(
            JobRequest("hs-doctor", "supervisor.cli:job_main", (), folder, small, use_srun=False)
        )
    except (SchedulerError, RequestError) as error:
        mend = "name a partition that takes it in supervisor.partition (and supervisor.account, supervisor.qos)"
        others = f"or set supervisor.place to embedded, or {_WITHOUT_A_JOB}"
        return CheckedItem("supervisor's job", False, f"one CPU without a GPU is refused: {error}", f"{mend}, {others}")
    return CheckedItem("supervisor's job", True, f"one CPU without a GPU is taken: {said}")


def _submission(found: Sequence[Partition]) -> CheckedItem:
    """Whether a job may submit another one, to each partition from each."""
    closed = [each for each in found if not all(each.takes_from(other) for other in found)]
    if not closed:
        return CheckedItem("submitting from nodes", True, "every partition takes jobs from the nodes (AllocNodes)")
    told = "; ".join(f"{each.name} takes jobs from {', '.join(each.submit_from or ())} only" for each in closed)
    open_to_all = [other.name for other in found if all(each.takes_from(other) for each in closed)]
    if open_to_all:
        mend = f"for such a run set supervisor.partition to {' or '.join(open_to_all)}"
    else:
        mend = "for such a run set supervisor.place to embedded, whose job is put back into the queue instead"
    return CheckedItem("submitting from nodes", False, f"{told} (AllocNodes)", f"{mend}, or {_WITHOUT_A_JOB}")
