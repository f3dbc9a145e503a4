"""Slurm's answers, text in and values out. Nothing here starts a program."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from slurm.job import JobState, JobStatus, Node, Reservation

# Slurm's words beside those that are ours as well.
_WORDS = {
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.COMPLETING,
    "STOPPED": JobState.SUSPENDED,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.HELD,
    "SPECIAL_EXIT": JobState.HELD,
}
_HELD = re.compile(r"JobHeld|held[ _]state|requeued[ _]held", re.IGNORECASE)
_NO_TIME = frozenset({"", "UNLIMITED", "PARTITION_LIMIT", "INVALID", "UNKNOWN", "N/A", "NONE", "NOT_SET", "(NULL)"})
_DURATION = re.compile(r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})")
_STEP = re.compile(r"\.[a-z0-9]+\+?$")


class ParseError(ValueError):
    """An answer that is not in a form that we know."""


def state(word: str, reason: str = "") -> JobState:
    """Our state for Slurm's word: `CANCELLED by 1000` and `CANCELLED+` are CANCELLED; unknown is UNRECOGNISED."""
    first = word.split()[0].rstrip("+") if word.strip() else ""
    known = _WORDS.get(first) or JobState.__members__.get(first, JobState.UNRECOGNISED)
    return JobState.HELD if known is JobState.PENDING and _HELD.search(reason) else known


def cancelled_by(word: str) -> str | None:
    """The user in `CANCELLED by 1000`, or None."""
    found = re.match(r"CANCELLED by (\S+)", word)
    return found[1] if found else None


def submitted(answer: str) -> tuple[str, str | None]:
    """(job id, cluster) from what sbatch prints: a sentence, `75168975;clustername` or the bare number."""
    for line in reversed(answer.strip().splitlines()):
        found = re.search(r"Submitted batch job (\d+)(?: on cluster (\S+))?", line)
        found = found or re.fullmatch(r"\s*(\d+)(?:;(\S+))?\s*", line)
        if found:
            return found[1], found[2]
    raise ParseError(f"sbatch answered {answer.strip()!r}, in which there is no job id")


def is_step(job_id: str) -> bool:
    """Is this row of sacct a step (`12.batch`, `12.0`, `715219_23.b+`) and not the job itself?"""
    return _STEP.search(job_id) is not None


def nodes(text: str) -> tuple[str, ...]:
    """A node list written out: `c438-[062,104]` is c438-062 and c438-104."""
    if text.strip().lower() in {"", "(null)", "none", "n/a", "none assigned"}:
        return ()
    return tuple(name for part in _outside_brackets(text.strip()) for name in _expand(part))


def _outside_brackets(text: str) -> list[str]:
    return re.findall(r"(?:[^,\[]|\[[^\]]*(?:\]|$))+", text)


def _expand(part: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, closed, tail = rest.partition("]")
    if not closed:
        raise ParseError(f"node list {part!r} has no closing bracket")
    return [head + number + end for number in _numbers(inside) for end in _expand(tail)]


def _numbers(ranges: str) -> Iterable[str]:
    for item in ranges.split(","):
        low, dash, high = item.partition("-")
        if not dash:
            yield item
        elif low.isdecimal() and high.isdecimal():
            yield from (f"{number:0{len(low)}}" for number in range(int(low), int(high) + 1))
        else:
            raise ParseError(f"node range {item!r}")


def duration_s(text: str) -> float | None:
    """A time limit in seconds (`30` is minutes, `04:00`, `1-00:00:00`); None where there is none, or none is known."""
    found = _DURATION.fullmatch(text.strip())
    if not found:
        if text.strip().upper() in _NO_TIME:
            return None
        raise ParseError(f"{text!r} is not a time limit; write minutes, HH:MM:SS or D-HH:MM:SS")
    parts = [int(part) for part in found["rest"].split(":")]
    if found["days"]:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: tuple(parts)}[len(parts)]
    return float(((int(found["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)


def duration_text(seconds: float) -> str:
    """A time limit as Slurm writes it: `1-02:30:00`, `00:03:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days}-' if days else ''}{hours:02}:{minutes:02}:{rest:02}"


def moment(text: str) -> float | None:
    """Seconds since the epoch, or None for `N/A`, `Unknown` and their like."""
    if text.strip().upper() in _NO_TIME:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise ParseError(f"{text!r} is not a time in seconds since the epoch") from None
    return seconds or None


def exit_code(text: str) -> int | None:
    """`0:0` is 0, `3:0` is 3, `0:9` is 137 as in a shell; None where nothing is said."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if not found:
        return None
    return 128 + int(found[2]) if int(found[2] or 0) else int(found[1])


def wait_status(text: str) -> int | None:
    """squeue's exit code, which is what wait(2) says: 768 is exit code 3, 15 is signal 15."""
    if not text.strip().isdecimal():
        return exit_code(text)
    code, number = divmod(int(text), 256)
    return 128 + number % 128 if number else code


SEPARATOR = "|"
_WIDTH = {"jobid": 64, "reason": 256, "nodelist": 4096, "name": 256}
_SQUEUE_FIELDS = (
    *("jobid", "state", "reason", "nodelist", "starttime", "endtime", "restartcnt", "exit_code"),
    *("timelimit", "preempttime", "name"),
)
SQUEUE_FORMAT = ",".join(f"{name}:{_WIDTH.get(name, 32)}{SEPARATOR}" for name in _SQUEUE_FIELDS)
"""The argument of squeue's --Format that `squeue` reads. The name comes last: other jobs' names may hold anything."""


def squeue(answer: str, cluster: str | None = None) -> list[JobStatus]:
    """The jobs of an answer to --Format=SQUEUE_FORMAT, one a line."""
    return [_squeue_row(line, cluster) for line in answer.splitlines() if line.count(SEPARATOR) >= len(_SQUEUE_FIELDS)]


def _squeue_row(line: str, cluster: str | None) -> JobStatus:
    values = [value.strip() for value in line.split(SEPARATOR, len(_SQUEUE_FIELDS) - 1)]
    row = dict(zip(_SQUEUE_FIELDS, values, strict=True))
    row["name"] = row["name"].removesuffix(SEPARATOR).rstrip()
    return _status(
        "squeue",
        row["jobid"],
        row["name"],
        row["state"],
        row["reason"],
        row["nodelist"],
        (row["starttime"], row["endtime"]),
        row["restartcnt"],
        wait_status(row["exit_code"]),
        cluster,
        row["timelimit"],
        row["preempttime"],
    )


def _status(
    source: str,
    job_id: str,
    name: str,
    word: str,
    reason: str,
    node_list: str,
    times: tuple[str, str],
    restarts: str,
    code: int | None,
    cluster: str | None,
    limit: str = "",
    preempted: str = "",
) -> JobStatus:
    known = state(word, reason)
    why = "" if reason in {"None", "(null)"} else reason
    plain = JobStatus(job_id, name, known, why, cluster=cluster, source=source)
    try:
        return replace(
            plain,
            why=" ".join(filter(None, [word, why])) if known is JobState.UNRECOGNISED else why,
            nodes=nodes(node_list),
            restarts=int(restarts) if restarts.isdecimal() else 0,
            starts_at=moment(times[0]),
            ends_at=moment(times[1]),
            limit_s=duration_s(limit),
            preempted_at=moment(preempted),
            exit_code=code if known.is_over else None,
        )
    except ParseError as error:
        return replace(plain, state=JobState.UNRECOGNISED, why=str(error))


def fields(record: str) -> dict[str, str]:
    """KEY=VALUE pairs of a record of `scontrol show --oneliner`; values may hold spaces, the first of a key counts."""
    found: dict[str, str] = {}
    for pair in re.split(r"\s+(?=[A-Z][A-Za-z:/]*=)", record.strip()):
        key, equals, value = pair.partition("=")
        if equals:
            found.setdefault(key, value.strip())
    return found


def scontrol_job(answer: str, cluster: str | None = None) -> JobStatus | None:
    """The job of `scontrol show --oneliner job ID`, or None where the answer holds none."""
    row = fields(answer)
    if "JobId" not in row or "JobState" not in row:
        return None
    return _status(
        "scontrol",
        row["JobId"],
        row.get("JobName", ""),
        row["JobState"],
        row.get("Reason", ""),
        row.get("NodeList", ""),
        (row.get("StartTime", ""), row.get("EndTime", "")),
        row.get("Restarts", ""),
        exit_code(row.get("ExitCode", "")),
        cluster,
        row.get("TimeLimit", ""),
        row.get("PreemptTime", ""),
    )


def is_being_preempted(answer: str) -> bool:
    """Is this job RUNNING in the grace time of a preemption? A job that a person cancelled is COMPLETING."""
    row = fields(answer)
    return row.get("JobState") == "RUNNING" and moment(row.get("PreemptTime", "")) is not None


def is_ending(answer: str) -> bool:
    """Does Slurm end this start of the job, whether it was requeued, cancelled or is out of time?"""
    return fields(answer).get("JobState") == "COMPLETING"


SACCT_FIELDS = "JobID,State,Start,End,ExitCode,NodeList,JobName"


def sacct(answer: str, cluster: str | None = None) -> dict[str, JobStatus]:
    """The newest row of each job in `sacct --duplicates --parsable2 --noheader`; steps are passed over."""
    found: dict[str, JobStatus] = {}
    for line in answer.splitlines():
        row = line.split("|", SACCT_FIELDS.count(","))
        if len(row) == SACCT_FIELDS.count(",") + 1 and not is_step(row[0]):
            job_id, word, start, end, code, node_list, name = row
            found[job_id] = _status(
                "sacct", job_id, name, word, "", node_list, (start, end), "", exit_code(code), cluster
            )
    return found


def message_timeout_s(answer: str) -> float:
    """MessageTimeout in `scontrol show config`; Slurm's default of 10 s where it is not named."""
    found = re.search(r"^MessageTimeout\s*=\s*(\d+)", answer, re.MULTILINE)
    return float(found[1]) if found else 10.0


NODE_FORMAT = "%N|%T|%E"
_NODE_MARKS = "*~#!%$@^-+"


def node_states(answer: str) -> dict[str, Node]:
    """The nodes of an answer to `sinfo --Node --format=NODE_FORMAT`; one that is in several partitions counts once."""
    found = {}
    for line in answer.splitlines():
        name, separator, rest = line.partition("|")
        word, _, why = rest.partition("|")
        if separator:
            why = "" if why.strip().lower() == "none" else why.strip()
            state = word.strip().rstrip(_NODE_MARKS)
            found[name.strip()] = Node(name.strip(), state, why, is_silent="*" in word)
    return found


def reservations(answer: str) -> list[Reservation]:
    """What `scontrol show --oneliner reservation` lists."""
    rows = (fields(line) for line in answer.splitlines())
    return [
        Reservation(
            name=row["ReservationName"],
            starts_at=moment(row.get("StartTime", "")),
            ends_at=moment(row.get("EndTime", "")),
            nodes=nodes(row.get("Nodes", "")),
            flags=tuple(filter(None, row.get("Flags", "").split(","))),
        )
        for row in rows
        if "ReservationName" in row
    ]
