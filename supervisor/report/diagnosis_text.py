"""A diagnosis as a person reads it.  Pure."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final

from supervisor.journal import Diagnosis
from supervisor.report.figures import printable

_LABEL: Final = "  {:<9} "


def diagnosis_lines(name: str, findings: Sequence[Diagnosis], width: int) -> Iterator[str]:
    """Every finding about the run ``name``, the most telling first: cause, evidence, what to try, and what shows it."""
    for number, one in enumerate(findings, 1):
        count = f"{number}. " if len(findings) > 1 else ""
        yield printable(f"{count}{_headline(one)}")
        for label, text in _details(one, name):
            head = _LABEL.format(label)
            room = max(24, width - len(head))
            first, *more = textwrap.wrap(printable(text), room, break_on_hyphens=False, break_long_words=False) or [""]
            yield f"{head}{first}".rstrip()
            yield from (" " * len(head) + line for line in more)


def _headline(one: Diagnosis) -> str:
    return f"{one.symptom}: {one.cause} ({one.confidence})"


def _details(one: Diagnosis, name: str) -> Iterator[tuple[str, str]]:
    for number, evidence in enumerate(one.evidence):
        yield "" if number else "seen", evidence
    if one.next != "nothing":
        yield "try", one.next
    if one.cure is not None:
        yield "shown by", f"higgsfield diagnose {name} --replay: it is this if `{one.cure}` cures it"


def in_one_line(one: Diagnosis) -> str:
    """``Diagnosis: ...``, for a summary."""
    tried = "" if one.next == "nothing" else f"; to try next: {one.next}"
    return f"Diagnosis: {_headline(one)}{tried}."


def as_json(findings: Sequence[Diagnosis]) -> list[dict[str, Any]]:
    """As ``diagnose --json`` prints them."""
    return [one.model_dump(mode="json") for one in findings]
