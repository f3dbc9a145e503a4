"""What a person looks at: the verbs that only read, between the run's files and the pure texts of ``report/``."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TextIO

from supervisor.believed import read_evidence
from supervisor.diagnosis import diagnose
from supervisor.evidence import Evidence
from supervisor.fold import replay
from supervisor.journal import Event, SegmentStarted, parse_event, read_journal
from supervisor.observation import Observation
from supervisor.page_file import page_place, publish_page
from supervisor.report.accounting import Accounting, account
from supervisor.report.diagnosis_text import diagnosis_lines
from supervisor.report.evaluations import evaluations
from supervisor.report.figures import printable
from supervisor.report.log_text import closing_summary, costs_of, entry_lines, late_cost_lines, log_lines, milestones
from supervisor.report.page import Facts, render
from supervisor.report.standing_text import detail_lines, list_lines, stands_still
from supervisor.report.texts import WIDTH, Listing, is_told
from supervisor.run_state import RunState
from supervisor.runs import standing
from worker.contract import config as contract_config
from worker.contract.files import UnusableFileError, read_data
from worker.contract.loss_history import read_history, surviving
from worker.contract.manifest import complete_checkpoints, health
from worker.contract.run_dir import RunDir

_LOOK_EVERY_S: Final = 0.5
_LOOKS_AT_ITS_END: Final = 20
"""At a run that was over already: who says resume at this moment may need seconds until that is in the journal."""


def accounting_of(run_dir: RunDir, events: list[Event]) -> Accounting:
    """Where the run's time went, by its files as they are now."""
    nodes = contract_config.read(run_dir.config).cluster.nodes
    return account(events, read_history(run_dir.history), time.time(), nodes)


def columns(out: TextIO) -> int:
    """How wide a text may be: the terminal's width within reason, else a page's."""
    return max(60, min(WIDTH, shutil.get_terminal_size().columns)) if out.isatty() else WIDTH


# -- report ------------------------------------------------------------------------------------------------------------


def write_report(run_dir: RunDir, path: Path | None = None) -> Path:
    """Publish the run's page, as it stands now; where it lies.  UnusableFileError where no page may lie."""
    place = page_place(path or run_dir.report)
    config = contract_config.read(run_dir.config)
    events, records = read_journal(run_dir.journal), read_history(run_dir.history)
    now = time.time()
    branch, after = surviving(records), config.checkpoint.healthy_after
    graded = tuple((manifest, health(manifest, branch, after)) for manifest in complete_checkpoints(run_dir))
    accounting = account(events, records, now, config.cluster.nodes)
    findings = diagnose(Evidence(config, records, events))
    publish_page(place, render(Facts(config, events, records, accounting, graded, now, findings, still(run_dir))))
    return place


class ReportAtTheEnd:
    """Listens for the end of a run, and writes its page."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def event(self, event: Event) -> None:
        """Nothing is written before the end."""

    def progress(self, run: RunState, seen: Observation) -> None:
        """Nothing is written before the end."""

    def close(self, run: RunState) -> None:
        """Write the page where the run is over."""
        if run.is_over:
            write_report(self._run_dir)


# -- diagnosis ---------------------------------------------------------------------------------------------------------


def show_diagnosis(run_dir: RunDir, out: TextIO) -> None:
    """Print what went wrong in the run and why, or that nothing did."""
    known = read_evidence(run_dir)
    for line in diagnosis_lines(known.config.run.name, diagnose(known), columns(out)):
        print(line, file=out)


# -- status ------------------------------------------------------------------------------------------------------------


def show_standing(rows: list[dict[str, Any]], in_detail: bool, runs: Path, out: TextIO) -> None:
    """Print rows of ``supervisor.runs.standing``: all runs in columns, one run in detail with its last events."""
    now = time.time()
    if not rows:
        print(printable(f"no runs under {runs.resolve()}; --dir names another folder"), file=out)
    elif not in_detail:
        width = shutil.get_terminal_size().columns if out.isatty() else None
        print("\n".join(list_lines(rows, now, width)), file=out)
    for row in rows if in_detail else []:
        listing = Listing(told=set(row.get("try", [])))
        print("\n".join(detail_lines(row, now, columns(out))), file=out)
        for event in filter(is_told, map(parse_event, row.get("events", []))):
            print("\n".join(f"  {line}" for line in entry_lines(event, None, columns(out), listing)), file=out)


# -- log ---------------------------------------------------------------------------------------------------------------


def show_log(run_dir: RunDir, since: float, out: TextIO) -> None:
    """Print the whole log from ``since`` on, UTC seconds; the events alone where the configuration cannot be read."""
    try:
        known = read_evidence(run_dir)
    except UnusableFileError:
        listing = Listing(str(run_dir.path))
        for event in (event for event in read_journal(run_dir.journal) if event.time >= since and is_told(event)):
            print("\n".join(entry_lines(event, None, columns(out), listing)), file=out)
        raise
    told = diagnose(known), still(run_dir), str(run_dir.path), evaluations(surviving(known.records))
    for line in log_lines(known.events, _accounting(known), since, columns(out), *told):
        print(line, file=out)


def show_milestones(run_dir: RunDir, out: TextIO) -> None:
    """Print the rollback log proper, for the end of a run in the foreground."""
    known = read_evidence(run_dir)
    costs, listing = costs_of(_accounting(known)), Listing(str(run_dir.path))
    for number in sorted(milestones(known.events)):
        for line in entry_lines(known.events[number], costs.get(number), columns(out), listing):
            print(line, file=out)
    print("\n".join(_summary(run_dir, known)), file=out)


def follow_log(run_dir: RunDir, since: float, out: TextIO, sleep: Callable[[float], None] = time.sleep) -> None:
    """Print events as they come, each new start with what it cost, until the run is over; then the summary."""
    listing = Listing(str(run_dir.path))
    for events, event in _arriving(run_dir, sleep):
        if event.time < since or not is_told(event):
            continue
        lines = entry_lines(event, None, columns(out), listing)
        if isinstance(event, SegmentStarted):
            costs = accounting_of(run_dir, events).costs_of_segment(event.segment)
            lines += [line for cost in costs for line in late_cost_lines(events, cost, columns(out))]
        print("\n".join(lines), file=out, flush=True)
    print("\n".join(["", *_summary(run_dir, read_evidence(run_dir))]), file=out, flush=True)


def _summary(run_dir: RunDir, known: Evidence) -> list[str]:
    evaluated = evaluations(surviving(known.records))
    return closing_summary(known.events, _accounting(known), diagnose(known), still(run_dir), evaluated)


def still(run_dir: RunDir) -> str:
    """That the run makes no step any more, and what a person can do; empty where it does, or is over."""
    return stands_still(standing(run_dir, in_detail=False), time.time())


def _accounting(known: Evidence) -> Accounting:
    return account(known.events, known.records, time.time(), known.config.cluster.nodes)


def _arriving(run_dir: RunDir, sleep: Callable[[float], None]) -> Iterator[tuple[list[Event], Event]]:
    """Every event with all of the journal at that time, until the run is over."""
    told = 0
    for events in _until_over(run_dir, sleep):
        yield from ((events, event) for event in events[told:])
        told = len(events)


def _until_over(run_dir: RunDir, sleep: Callable[[float], None]) -> Iterator[list[Event]]:
    """The journal again and again until the run is over; one that was over already, and may go on, for a while."""
    num_looks, went_on = 0, False
    while True:
        events = read_journal(run_dir.journal)
        yield events
        state, num_looks = replay(events), num_looks + 1
        went_on = went_on or not state.is_over
        if state.is_over and (went_on or state.state == "finished" or num_looks > _LOOKS_AT_ITS_END):
            return
        sleep(_LOOK_EVERY_S)


def write_journal(
    run_dir: RunDir, since: float, is_followed: bool, out: Any, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Write the journal's lines unchanged to a binary stream, the whole ones from ``since`` on."""
    told = 0
    for _ in _until_over(run_dir, sleep):
        data = read_data(run_dir.journal)[told:]
        whole = data[: data.rfind(b"\n") + 1]
        for line in whole.splitlines(keepends=True):
            if since <= 0 or json.loads(line).get("time", 0.0) >= since:
                out.write(line)
        out.flush()
        told += len(whole)
        if not is_followed:
            return
