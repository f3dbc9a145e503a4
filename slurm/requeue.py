"""`python -m slurm.requeue JOB_ID`: put a job back into the queue if it is being preempted, and in no other case.

A worker that leaves within the grace time of a preemption counts as completed and is not requeued, so it asks for
that itself. It must not ask when a person has cancelled the job: the requeue would undo it. Where Slurm ends the job
already, whatever becomes of it, it need not stay: what is left of KillWait would be spent waiting to be killed.
"""

from __future__ import annotations

import sys
from typing import Final

from slurm import commands, parsing

ENDING: Final = 3
"""Whether the job comes back is decided, and no process of it is waited for: it may leave."""


def main(argv: list[str]) -> int:
    """0 requeued, 1 not, with the reason in one line, ENDING where Slurm ends this start of it already."""
    if len(argv) != 1:
        print("usage: python -m slurm.requeue JOB_ID", file=sys.stderr)
        return 2
    try:
        return _requeue(argv[0])
    except commands.SchedulerError as error:
        print(f"not requeued: {error}", file=sys.stderr)
        return 1


def _requeue(job_id: str) -> int:
    answer = commands.query(["scontrol", "show", "--oneliner", "job", job_id])
    if parsing.is_ending(answer):
        print(f"job {job_id} is ending: there is nothing to ask for")
        return ENDING
    if not parsing.is_being_preempted(answer):
        print(f"not requeued: job {job_id} is {parsing.fields(answer).get('JobState')}, and is not being preempted")
        return 1
    commands.query(["scontrol", "requeue", job_id])
    print(f"requeued job {job_id}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
