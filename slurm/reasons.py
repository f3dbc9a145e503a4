"""Slurm's reasons why a job does not start, in words for a person who never read its manual. Text in, text out."""

from __future__ import annotations

import re

from slurm.job import JobState, JobStatus

_FAILED_LAUNCH = re.compile(r"launch[ _]failed", re.IGNORECASE)
_MAINTENANCE = re.compile(r"reserved[ _]for[ _]maintenance|ReqNodeNotAvail.*reserved|^Reservation$", re.IGNORECASE)

# The first that is found in the reason counts, so the particular ones come first.
_EXPLANATIONS = [
    ("launch failed", "its launch failed on a node, and Slurm holds it"),
    ("JobHeldAdmin", "an administrator holds it; only they can release it"),
    ("JobHeldUser", "it is held by its owner: `scontrol release` lets it start"),
    ("BeginTime", "it may not start before its begin time"),
    ("Priority", "other jobs come first"),
    ("Resources", "it waits for nodes to become free"),
    ("DependencyNeverSatisfied", "the job it depends on failed, so that it can never start"),
    ("Dependency", "an earlier job of this run has not ended yet"),
    ("Reserved for maintenance", "the nodes are kept free for a maintenance that begins before its time limit"),
    ("ReqNodeNotAvail", "nodes that it needs are down, drained or reserved"),
    ("PartitionNodeLimit", "it asks for more nodes than the partition allows, and will never start: ask for fewer"),
    ("PartitionTimeLimit", "its time limit is above the partition's, and it will never start: lower it"),
    ("PartitionDown", "the partition is down"),
    ("PartitionInactive", "the partition is closed to new jobs"),
    ("BadConstraints", "no node can ever satisfy its constraints: change cluster.constraint, gres or mem"),
    ("NodeDown", "a node that it needs is down"),
    ("MaxJobsPerUser", "the QOS lets one person run no more jobs at once"),
    ("MaxSubmit", "the QOS or the account lets one person submit no more jobs"),
    ("MaxWallDuration", "its time limit is above the one of the QOS or the account: lower it"),
    ("MaxCpu", "it would exceed a limit on CPUs of the QOS or the account"),
    ("MaxGRES", "it would exceed a limit on GPUs or other resources of the QOS or the account"),
    ("MaxMem", "it would exceed a limit on memory of the QOS or the account"),
    ("MaxNode", "it would exceed a limit on nodes of the QOS or the account"),
    ("QOSGrp", "everybody's jobs in this QOS together are at its limit"),
    ("AssocGrp", "the account's jobs together are at its limit"),
    ("QOSUsageThreshold", "the account has used up what the QOS allows"),
    ("QOSNotAllowed", "the partition or the account does not allow this QOS: change cluster.qos"),
    ("InvalidQOS", "there is no such QOS any more: change cluster.qos"),
    ("InvalidAccount", "the account is not valid (any more): change cluster.account"),
    ("Assoc", "a limit of the account holds it back"),
    ("QOS", "a limit of the QOS holds it back"),
    ("Licenses", "it waits for a licence"),
    ("BurstBuffer", "it waits for its burst buffer"),
    ("Prolog", "its prolog runs"),
    ("Cleaning", "its last start is still being cleaned up"),
]


def explain(job: JobStatus) -> str:
    """Why this job does not run, for a person; empty where it does, or where Slurm gives no reason."""
    if job.state is JobState.CONFIGURING:
        return "its nodes boot"
    if job.state is JobState.SUSPENDED:
        return "it is suspended by the scheduler or an operator; only they can let it go on"
    if job.state not in (JobState.PENDING, JobState.HELD) or not job.why:
        return ""
    plain = job.why.replace("_", " ")
    for word, text in _EXPLANATIONS:
        if word.lower() in plain.lower() or word.lower() in job.why.lower():
            return text
    return "Slurm gives this reason"


def is_held_by_failed_launch(job: JobStatus) -> bool:
    """Held because a node could not start it: its owner may release it, nobody asked for the hold."""
    return job.state is JobState.HELD and names_failed_launch(job.why)


def names_failed_launch(why: str) -> bool:
    """Whether a reason says that a node could not start the job."""
    return _FAILED_LAUNCH.search(why) is not None


def waits_for_maintenance(job: JobStatus) -> bool:
    """Pending because its time limit reaches into a reservation."""
    return job.state is JobState.PENDING and _MAINTENANCE.search(job.why) is not None
