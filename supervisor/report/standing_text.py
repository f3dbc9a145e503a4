"""Where runs stand, for a person: one line each, or all there is to know about one.  Pure.

A row is what ``supervisor.runs.standing`` answers and ``status --json`` prints.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from supervisor.report.advice import commands, how_to_go_on
from supervisor.report.evaluations import evaluations_text
from supervisor.report.figures import FAR_S, clipped, duration, local_clock, local_moment, printable
from supervisor.run_state import OVER
from worker.contract.words import count

Row = dict[str, Any]

_COLUMNS: Final = ("run", "state", "step", "loss", "rate", "")
_LONGEST_REASON: Final = 100
"""Characters of a reason among others; `status RUN` has all of it."""
_MOST_NODES: Final = 4
_LONG_AGO_S: Final = 12 * 3600.0
_BUDGETS: Final = {
    "rollbacks_left": ("more rollback", "more rollbacks"),
    "attempts_left": ("more attempt without progress", "more attempts without progress"),
}
HEALTH: Final = {
    "healthy": "healthy",
    "untested": "untested, too few steps came after it yet",
    "suspect": "suspect, a spike began before it or its weights are not finite",
}
"""Of a checkpoint, in words."""


def list_lines(rows: Sequence[Row], now: float, width: int | None = None) -> list[str]:
    """One line a run below a head, in columns, each at most ``width`` wide; ``now`` is UTC seconds.

    What is most telling comes first, so that a narrow terminal cuts off the rest.
    """
    table = [_COLUMNS, *(_cells(row, now) for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(_COLUMNS) - 1)]
    lines = [printable("  ".join([*map(str.ljust, line, widths), line[-1]]).rstrip()) for line in table]
    return [line if width is None else clipped(line, width) for line in lines]


def _cells(row: Row, now: float) -> tuple[str, ...]:
    if row["since"] is None:
        return (row["name"], row["state"], "", "", "", _short(row["reason"]))
    return (
        row["name"],
        row["state"].replace("_", " "),
        _progress(row),
        "" if row["loss"] is None else f"{row['loss']:.4g}",
        f"x {row['lr_scale']:g}",
        _remark(row, now),
    )


def _progress(row: Row) -> str:
    if row["step"] is None:
        return "none yet"
    return f"{row['step']:,}" + (f" of {row['max_steps']:,}" if row["max_steps"] else "")


def _remark(row: Row, now: float) -> str:
    """Whether nobody supervises it; why it waits and until when, or when it will end; where it runs; since when."""
    since, back = f"for {duration(now - row['since'])}", count(row["rollbacks"], "rollback") if row["rollbacks"] else ""
    waits, doing = _waits(row, now), row.get("doing") or ""
    place = "" if waits.startswith("job ") else _place(row)
    parts = [_unattended(row), waits, doing, _ends(row, now), back, place, since]
    if row["state"] in OVER:
        parts = [back, _short(row["reason"]), f"{duration(now - row['since'])} ago"]
    return _one_line(", ".join(part for part in parts if part))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(text: str) -> str:
    return clipped(_one_line(text), _LONGEST_REASON)


def _place(row: Row) -> str:
    """``job 4711 on n1 n2``; of many nodes the first."""
    job = row["job"]
    if not job or not job["nodes"]:
        return ""
    nodes = job["nodes"]
    named = " ".join(nodes) if len(nodes) <= _MOST_NODES else f"{nodes[0]} and {len(nodes) - 1} more"
    return f"job {job['id']} on {named}"


def _waits(row: Row, now: float) -> str:
    """Why there is no step at this moment, where that is known."""
    job = row["job"]
    if row["state"] == "training":
        return ""
    if job is None:
        return _short(row["reason"] or "")
    if job["state"] == "RUNNING":
        return "the worker starts"
    if job["because"]:
        return f"{_short(job['because'])}{_expected(job, now)}"
    why = f" ({job['why']})" if job["why"] and job["why"] != "None" else ""
    return f"job {job['id']} is {job['state']}{why}{_expected(job, now)}"


def _expected(job: dict[str, Any], now: float) -> str:
    starts_at = job["starts_at"]
    if job["state"] != "PENDING" or job["nodes"]:  # where there is no Slurm
        return ""
    if starts_at is None or not now < starts_at < now + FAR_S:
        return ", Slurm names no start"
    return f", Slurm expects it to start about {local_moment(starts_at, now)}"


def _ends(row: Row, now: float) -> str:
    if row["eta"] is not None and row["eta"] > now:
        return f"done about {local_moment(row['eta'], now)}"
    return _short(still_text(row, now))


def still_text(row: Row, now: float) -> str:
    """That no step is made any more, and how the worker ended where that is known; empty where steps go on."""
    since, left = row.get("still_since"), row.get("worker_left")
    told = [f"no step since {_clock(since, now)}"] if since is not None else []
    return "; ".join([*told, *([left] if left else [])])


def stands_still(row: Row, now: float) -> str:
    """That no step is made any more, how the worker ended, and what a person can do; empty where steps go on."""
    still, holder = still_text(row, now), row["supervisor"]
    is_alone = holder is None or holder["alive"] is False
    return f"{still}; {_supervisor(row)}" if still and is_alone else still


def _clock(time: float, now: float) -> str:
    """To the second where it is not long ago."""
    return local_clock(time) if now - time < _LONG_AGO_S else local_moment(time, now)


def _unattended(row: Row) -> str:
    job = row.get("supervisor_job")
    if job and job["state"] != "RUNNING":
        is_waiting = f"job {job['id']} waits"
        return (
            f"{is_waiting}, and its supervisor comes with it" if _is_embedded(row) else f"its supervisor's {is_waiting}"
        )
    if row.get("supervisor_died"):
        return _short(dead_supervisor_text(row["supervisor_died"]))
    holder = row["supervisor"]
    return "nobody supervises it" if not job and (holder is None or holder["alive"] is False) else ""


# -- one run -----------------------------------------------------------------------------------------------------------


def detail_lines(row: Row, now: float, width: int | None = None) -> list[str]:
    """All there is to know about one run; ``now`` is UTC seconds.  A long fact goes on below itself at ``width``."""
    if row["since"] is None:
        return [printable(f"{row['name']}: {row['state']}"), printable(f"  {row['reason']}")]
    lines = [_head(row, now)]
    for label, text in facts_of(row, now):
        lines += _wrapped(f"  {label:<12} ", printable(_one_line(text)), width)
    return [printable(line) for line in lines]


def _wrapped(head: str, text: str, width: int | None) -> list[str]:
    room = max(24, (width or len(head) + len(text)) - len(head))
    first, *more = textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""]
    return [f"{head}{first}", *(" " * len(head) + line for line in more)]


def _head(row: Row, now: float) -> str:
    share = f" ({100 * row['step'] / row['max_steps']:.0f} %)" if row["step"] and row["max_steps"] else ""
    step = "no step yet" if row["step"] is None else f"step {_progress(row)}{share}"
    loss = "" if row["loss"] is None else f", loss {row['loss']:.4g}"
    scale = "" if row["lr_scale"] == 1 else f", rate x {row['lr_scale']:g}"
    state = f"{row['state'].replace('_', ' ')} for {duration(now - row['since'])}"
    return f"{row['name']}: {state}, {step}{loss}{scale}, {count(row['rollbacks'], 'rollback')}"


def facts_of(row: Row, now: float) -> Iterator[tuple[str, str]]:
    """Labels and what they say; an empty label goes on with the one before."""
    if row["state"] not in OVER:
        yield "job", _job(row, now)
        yield "supervisor", _supervisor(row)
        if still := still_text(row, now):
            yield "steps", still
        if row.get("doing"):
            yield "now", f"{row['doing']}: no step is made meanwhile"
        if row["eta"] is not None and row["eta"] > now:
            left = duration(row["eta"] - now)
            yield "done", f"about {local_moment(row['eta'], now)}, in {left}, if it goes on as it does now"
    because = row["job"]["because"] if row["job"] and row["state"] not in OVER else ""
    if row.get("evaluations"):
        yield "evaluation", f"loss {evaluations_text(row['evaluations'])}"
    if because and because != row["reason"]:
        yield "waits", because
    if row["reason"]:
        yield "last", row["reason"]
    if row["state"] == "gave_up":
        found = row.get("try", [])
        for number, text in enumerate(found):
            yield "" if number else "try", text
        is_saved, is_lowered = bool(row.get("checkpoints")), row["lr_scale"] != 1 or bool(found)
        how = how_to_go_on(found, row["dir"], is_saved=is_saved, is_lowered=is_lowered)
        yield "go on", f"{how}; as it is it may give up again" if is_saved else how
        if row.get("supervisor_place") != "foreground":
            yield "", f"in a job: higgsfield submit {row['dir']}/config.yaml in place of the resume"
    if row["state"] == "finished":
        yield "model", f"{row['dir']}/final"
        yield "report", f"{row['dir']}/report.html"
    if row["state"] == "stopped":
        yield "go on", _commands(row)
    checkpoints = row.get("checkpoints", [])
    for number, each in enumerate(reversed(checkpoints)):
        label = "" if number else "checkpoints"
        yield label, f"step {each['step']:,}: {HEALTH.get(each['health'], each['health'])} (attempt {each['attempt']})"
    if not checkpoints:
        yield "checkpoints", "none"
    for number, node in enumerate(row.get("excluded", [])):
        yield "" if number else "excluded", _excluded(node, now)
    if "budgets" in row and row["state"] != "finished":
        end = "" if row["state"] in OVER else "; then it gives up"
        yield "budgets", f"{', '.join(_budgets(row['budgets']))}{end}"


def _budgets(budgets: Mapping[str, float | None]) -> Iterator[str]:
    """How often a run may still be helped without progress, and for how long."""
    for name, left in budgets.items():
        if name in _BUDGETS and left is not None:
            yield count(int(left), *_BUDGETS[name])
        elif left is not None:
            yield f"{left:,.4g} {name.removesuffix('_left').replace('_', ' ').replace('gpu', 'GPU')}"


def _job(row: Row, now: float) -> str:
    job = row["job"]
    if job is None:
        return "none now"
    text = f"{job['id']} is {job['state']}"
    text += f" ({job['why']})" if job["why"] and job["why"] != "None" else ""
    text += f" on {' '.join(job['nodes'])}" if job["nodes"] else ""
    text += _expected(job, now)
    if job.get("draining"):
        text += f"; {', '.join(job['draining'])} drains: training goes on, the next job starts elsewhere"
    if job["state"] == "RUNNING" and job["ends_at"] is not None and job["ends_at"] > now:
        text += f"; its time limit comes {local_moment(job['ends_at'], now)}"
    return text


def _supervisor(row: Row) -> str:
    holder, job = row["supervisor"], row.get("supervisor_job")
    is_gone = holder is None or holder["alive"] is False
    if job and (is_gone or job["state"] != "RUNNING"):
        why = f" ({job['why']})" if job["why"] and job["why"] != "None" else ""
        if _is_embedded(row):
            return f"comes with the worker's job {job['id']}, which is {job['state']}{why}"
        return f"its supervisor's job {job['id']} is {job['state']}{why}: it supervises the run when it starts"
    if row.get("supervisor_died"):
        died = row["supervisor_died"]
        mend, file = ("", "its log") if died["began"] else ("mend that, and ", "all of it")
        return f"{dead_supervisor_text(died)} ({file}: {died['file']}); {mend}{_commands(row)}"
    if is_gone:  # without the key nobody has asked, or the scheduler did not answer
        unless = "" if "supervisor_job" in row else "unless a job of its supervisor waits, "
        return f"nobody supervises it: {unless}{_commands(row)}"
    return f"process {holder['pid']} on {holder['host']}"


def _commands(row: Row) -> str:
    return commands(row["dir"], row.get("supervisor_place"))


def _is_embedded(row: Row) -> bool:
    """Whether the job that the supervisor comes with is the worker's."""
    job, worker = row.get("supervisor_job"), row["job"]
    return job is not None and worker is not None and bool(job["id"] == worker["id"])


def dead_supervisor_text(died: Mapping[str, Any]) -> str:
    """That the supervisor's own job came to nothing, or to its end before the run's, and its last words."""
    how = "ended before the run did" if died["began"] else "ended without starting"
    silent = "without an error, as one that is killed does" if died["began"] else "and wrote nothing"
    said = f": {died['said']}" if died["said"] else f", {silent}"
    return f"its supervisor's job {died['id']} {how}{said}"


def _excluded(node: Any, now: float) -> str:
    """A node that is avoided: its name, until when, and the evidence, as far as the row says so."""
    if not isinstance(node, dict):
        return str(node)
    until = f" until {local_moment(node['until'], now)}" if node.get("until") else ""
    evidence = node.get("evidence") or ""
    told = "; ".join(evidence) if isinstance(evidence, list | tuple) else str(evidence)
    return f"{node.get('node', '?')}{until}{f': {told}' if told else ''}"
