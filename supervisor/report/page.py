"""report.html: one offline page of a run.  Pure but for reading the page's own parts.

Everything that comes from files is escaped; the page's own policy forbids it to load anything from anywhere.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any, Final

from supervisor.fold import replay
from supervisor.how_it_left import cause_of
from supervisor.journal import Continued, Diagnosis, Event, RolledBack, RunCreated, Stopped, VerdictSeen, WorkerLeft
from supervisor.report.accounting import Accounting
from supervisor.report.evaluations import evaluations
from supervisor.report.figures import (
    duration,
    local_clock,
    local_day,
    local_time,
    node_hours,
    printable,
    share,
    size,
)
from supervisor.report.log_text import closing_summary, costs_of, milestones
from supervisor.report.page_data import chart_data
from supervisor.report.spans import KINDS, MEANING, Kind
from supervisor.report.standing_text import HEALTH
from supervisor.report.texts import Listing, details_once, is_told, step_of, text_of, word_of
from worker.contract.config import Config, format_config, without_secrets
from worker.contract.exit_report import Outcome
from worker.contract.loss_history import Record, surviving
from worker.contract.manifest import Health, Manifest

_PARTS: Final = Path(__file__).with_name("page")
_LONG: Final = 24


@dataclass(frozen=True)
class Facts:
    """What a report is made from; ``health`` has the health of each checkpoint that is there."""

    config: Config
    events: Sequence[Event]
    records: Sequence[Record]
    accounting: Accounting
    health: Sequence[tuple[Manifest, Health]]
    now: float
    findings: Sequence[Diagnosis] = ()
    """The diagnosis, the most telling first."""
    still: str = ""
    """That no step is made any more, and what a person can do."""


def render(facts: Facts) -> str:
    """The whole page."""
    state = replay(facts.events)
    data = chart_data(facts.events, facts.records, [manifest.step for manifest, _ in facts.health])
    page = Template((_PARTS / "page.html").read_text(encoding="utf-8"))
    return page.substitute(
        style=(_PARTS / "page.css").read_text(encoding="utf-8"),
        script=(_PARTS / "page.js").read_text(encoding="utf-8"),
        data=_json(data),
        name=_text(facts.config.run.name),
        state=_text(state.state.replace("_", " ")),
        made=_text(f"as of {local_time(facts.now)}"),
        summary="\n".join(_summary(facts)),
        log="\n".join(_log(facts)),
        diagnosis="\n".join(_diagnosis(facts.findings)),
        time_bar="".join(_bar(facts.accounting)),
        time=_table("kind, what it is, share, time, allocated", _time_rows(facts.accounting)),
        attempts=_table("attempt, because, from, steps, rate, took, making steps, ended", _attempts(facts))
        or "<p>No attempt has begun yet.</p>",
        checkpoints=_table("checkpoint, health, attempt, size", _checkpoints(facts))
        or "<p>The run has no checkpoint now.</p>",
        config=_text(format_config(without_secrets(facts.config)), keep_lines=True),
        versions=_table("software, version", _versions(facts)),
    )


def _text(value: object, *, keep_lines: bool = False) -> str:
    """Escaped, and without control characters."""
    if keep_lines:
        return "\n".join(_text(line) for line in str(value).split("\n"))
    return escape(printable(str(value)))


def _json(data: Any) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# -- parts -------------------------------------------------------------------------------------------------------------


def _summary(facts: Facts) -> Iterator[str]:
    found = evaluations(surviving(facts.records))
    for line in closing_summary(facts.events, facts.accounting, facts.findings, facts.still, found):
        yield f"<p>{_text(line)}</p>"


def _log(facts: Facts) -> Iterator[str]:
    costs, shown, listing = costs_of(facts.accounting), milestones(facts.events), Listing()
    day = ""
    for number, event in enumerate(facts.events):
        if not is_told(event):
            continue
        if local_day(event.time) != day:
            day = local_day(event.time)
            yield f"<h3>{_text(day)}</h3>"
        own = listing if number in shown else Listing()  # the others are folded away at first
        details = "".join(
            f"<dt>{_text(label)}</dt><dd>{_text(text)}</dd>"
            for label, text in details_once(event, costs.get(number), own)
        )
        yield (
            f"<article{' class=milestone' if number in shown else ''}>"
            f"<time>{local_clock(event.time)}</time>{_step(step_of(event))}"
            f"<strong>{_text(word_of(event))}</strong><div><p>{_text(text_of(event))}</p>"
            f"{f'<dl>{details}</dl>' if details else ''}</div></article>"
        )


def _step(step: int | None) -> str:
    if step is None:
        return "<span></span>"
    return f'<button type=button data-step={step} title="show it in the chart">step {step:,}</button>'


def _diagnosis(findings: Sequence[Diagnosis]) -> Iterator[str]:
    for one in findings:
        evidence = "".join(f"<li>{_text(line)}</li>" for line in one.evidence)
        tried = "" if one.next == "nothing" else f"<p>To try next: {_text(one.next)}</p>"
        head = f"<h3>{_text(one.symptom)}</h3><p><strong>{_text(one.cause)}</strong> ({one.confidence})</p>"
        yield f"<div>{head}<ul>{evidence}</ul>{tried}</div>"


def _bar(accounting: Accounting) -> Iterator[str]:
    for kind in KINDS:
        seconds = accounting.seconds(kind)
        if seconds > 0:
            told = f"{kind}: {share(seconds, accounting.wall_s)}, {duration(seconds)}"
            style = f"flex-grow:{seconds:.3f}"
            yield f'<span class="kind {kind}" style="{style}" title="{_text(told)}">{_letters(kind)}</span>'


def _letters(kind: Kind) -> str:
    """What tells the kinds apart without their colours."""
    return kind[:2].capitalize()


def _time_rows(accounting: Accounting) -> Iterator[str]:
    for kind in KINDS:
        seconds = accounting.seconds(kind)
        if seconds > 0:
            nodes = node_hours(accounting.node_s(kind), whole_s=accounting.node_s())
            cells = (share(seconds, accounting.wall_s), duration(seconds), nodes)
            key = f'<span class="key kind {kind}">{_letters(kind)}</span> {kind}'
            yield _row([key, _text(MEANING[kind]), *map(_text, cells)])
    whole = (share(1, 1), duration(accounting.wall_s), node_hours(accounting.node_s(), whole_s=accounting.node_s()))
    yield _row(["in all", "from the run's making to the last thing known of it", *map(_text, whole)])


def _table(head: str, rows: Iterable[str]) -> str:
    """A table, which a narrow screen scrolls sideways; empty without a row."""
    body = "\n".join(rows)
    names = "".join(f"<th scope=col>{name}</th>" for name in head.split(", "))
    whole = f"<table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll" tabindex="0">{whole}</div>' if body else ""


def _row(cells: Sequence[str]) -> str:
    """A row of escaped cells; a long one may be broken into lines."""
    told = "".join(f"<td{' class=prose' if len(cell) > _LONG else ''}>{cell}</td>" for cell in cells[1:])
    return f"<tr><th scope=row>{cells[0]}</th>{told}</tr>"


def _attempts(facts: Facts) -> Iterator[str]:
    """One row an attempt: why, from where, at which rate, how far, how long, and how it ended."""
    begun = [event for event in facts.events if isinstance(event, RolledBack | Continued)]
    for event in begun:
        steps = [record.step for record in facts.records if record.attempt == event.attempt]
        reach = f"{steps[0]:,} to {steps[-1]:,}" if steps else "none"
        spent = sum(facts.accounting.seconds(kind, event.attempt) for kind in KINDS if kind != "paused")
        trained = sum(facts.accounting.seconds(kind, event.attempt) for kind in ("training", "repeated"))
        cells = [
            event.attempt,
            "the run begins" if event.cause == "first" else cause_of(event),
            event.resume_from or "scratch",
            reach,
            f"x {event.lr_scale:g}",
            duration(spent),
            duration(trained),
            _end_of(facts.events, event.attempt),
        ]
        yield _row([_text(cell) for cell in cells])


def _end_of(events: Sequence[Event], attempt: int) -> str:
    """How an attempt ended, as far as that is known."""
    own = [event for event in events if event.attempt == attempt]
    stopped = next((event for event in own if isinstance(event, Stopped)), None)
    if stopped is not None:
        return stopped.reason
    verdict = next((event for event in own if isinstance(event, VerdictSeen)), None)
    left = next((event for event in reversed(own) if isinstance(event, WorkerLeft)), None)
    if verdict is not None:
        return f"{verdict.kind} at step {verdict.step}"
    if left is None:
        return "its job ended" if any(event.attempt > attempt for event in events) else ""
    if left.outcome is Outcome.CRASHED and left.error is not None and left.error.type == "Signal":
        return left.error.message
    what = f": {left.error.what.replace('_', ' ')}" if left.error is not None and left.error.what else ""
    return f"{left.outcome.value.replace('_', ' ')}{what}"


def _checkpoints(facts: Facts) -> Iterator[str]:
    for manifest, health in reversed(facts.health):
        whole = size(sum(entry.bytes for entry in manifest.files.values()))
        yield _row([_text(cell) for cell in (f"step {manifest.step:,}", HEALTH[health.value], manifest.attempt, whole)])


def _versions(facts: Facts) -> Iterator[str]:
    """What the run was made with, and what each segment found that differs."""
    known: dict[str, str] = {}
    for event in facts.events:
        if isinstance(event, RunCreated):
            known |= event.versions | {"higgsfield": event.versions.get("higgsfield-supervisor", "")}
            yield from (_row([_text(name), _text(version)]) for name, version in event.versions.items())
    for record in facts.records:
        if record.start is None:
            continue
        for name, version in record.start.versions.items():
            if known.get(name) != version:
                known[name] = version
                yield _row([_text(name), _text(f"{version}, from segment {record.segment} on")])
