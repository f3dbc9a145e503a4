"""The pages say what the code says: every field, word, key, verb and file, and nothing that is not there."""

import argparse
import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from slurm.job import JobRequest, JobState, JobStatus
from slurm.scheduler import Scheduler
from supervisor import cli
from supervisor.arguments import parser_of
from supervisor.check import CheckResult
from supervisor.config import Finding
from supervisor.config_findings import all_places
from supervisor.doctor import CheckedItem
from supervisor.journal import Event, Where
from supervisor.report.history_csv import _COLUMNS
from supervisor.run_state import State
from supervisor.runs import open_or_create, standing
from supervisor.verbs import exits
from worker.agent_rules import What
from worker.contract.config import Config
from worker.contract.directive import Cause
from worker.contract.exit_report import EXIT_CODE_OF_OUTCOME, Outcome
from worker.contract.loss_history import _ALWAYS, Verdict
from worker.contract.manifest import Health
from worker.contract.pulse import Phase
from worker.contract.yaml_file import parse_yaml

ROOT = Path(__file__).parents[2]
PACKAGES = ("supervisor", "slurm", "worker")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CONTRACTS = (ROOT / "docs/contracts.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs/design.md").read_text(encoding="utf-8")
BUILT, PLANNED = CONTRACTS.split("## Planned, not built\n")
EVENTS = {kind.__name__: kind for kind in get_args(Event)}


def spans(text: str) -> list[str]:
    """What stands between backticks, code blocks left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def words(text: str) -> set[str]:
    """The words within backticks."""
    return {word for span in spans(text) for word in re.findall(r"[A-Za-z_][\w-]*", span)}


def sections(text: str) -> dict[str, str]:
    """The sections of a page, by title."""
    parts = re.split(r"^#{1,3} (.+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def tables(text: str) -> Iterator[list[list[str]]]:
    """The tables of a text, each a list of rows of cells, its head first and the rule below it left out."""
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block.splitlines()]
        yield [rows[0], *rows[2:]]


def first_cells(text: str, head: str) -> Iterator[tuple[set[str], str]]:
    """The words in the first cell of each row below the head ``head``, and the whole row."""
    for table in tables(text):
        if table[0][0].strip("| ") == head:
            yield from ((words(row[0]), " | ".join(row)) for row in table[1:])


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@functools.cache
def messages() -> dict[tuple[str, str], list[str]]:
    """Every kind of message that our code defines, by file and name, with its own fields; imports nothing."""
    classes = [
        (path.relative_to(ROOT).as_posix(), node)
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    kinds, grown = {"Message"}, True
    while grown:
        found = {node.name for _, node in classes if {ast.unparse(base) for base in node.bases} & kinds}
        grown = not found <= kinds
        kinds |= found
    return {
        (file, node.name): [each.target.id for each in node.body if _is_field(each)]  # type: ignore[attr-defined]
        for file, node in classes
        if {ast.unparse(base) for base in node.bases} & kinds
    }


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


@functools.cache
def section_of_model() -> dict[tuple[str, str], str]:
    """The section that describes each model: the one that names it as `file: Class`."""
    found = {}
    for text in sections(BUILT).values():
        for file, name in re.findall(r"`([\w/]+\.py): (\w+)`", text):
            assert (file, name) not in found, f"{name} is described twice"
            found[file, name] = text
    return found


def test_the_search_for_messages_finds_them() -> None:
    found = messages()
    assert ("worker/publish.py", "BestEvaluation") in found
    assert "lr_scale" in found["supervisor/journal.py", "Plan"]
    assert {name for file, name in found if file == "supervisor/journal.py"} >= EVENTS.keys()


@pytest.mark.parametrize("key", [key for key in messages() if key[1] not in EVENTS], ids=": ".join)
def test_every_field_of_every_message_has_its_line(key: tuple[str, str]) -> None:
    described = section_of_model()
    assert key in described, f"docs/contracts.md describes no `{key[0]}: {key[1]}`"
    assert set(messages()[key]) <= words(described[key])


def test_no_field_is_described_that_is_not_there() -> None:
    fields = messages()
    described = section_of_model()
    assert described.keys() <= fields.keys()
    for text in set(described.values()):
        known = {name for key, where in described.items() if where == text for name in fields[key]}
        named = {word for cell, _ in first_cells(text, "field") for word in cell}
        assert named <= known


def test_every_event_has_its_line_with_its_own_fields() -> None:
    rows = {word: row for cell, row in first_cells(BUILT, "event") for word in cell}
    assert rows.keys() == EVENTS.keys()
    fields = messages()
    for name, row in rows.items():
        own = set(fields["supervisor/journal.py", name]) - {"event"}
        assert own == words(row) - {name} - {"first"}, name


@pytest.mark.parametrize(
    ("section", "known"),
    [
        pytest.param("Directive", get_args(Cause), id="causes"),
        pytest.param("Journal", get_args(Where), id="places"),
        pytest.param("Journal", get_args(State), id="run states"),
        pytest.param("Exit reports and pulses", get_args(What), id="error.what"),
        pytest.param("Exit reports and pulses", get_args(Phase), id="phases"),
        pytest.param("Checkpoints", [each.value for each in Health], id="health"),
        pytest.param("Jobs", [each.value for each in JobState], id="job states"),
        pytest.param("Jobs", [each.name for each in dataclasses.fields(JobStatus)], id="job status"),
        pytest.param("Jobs", [each.name for each in dataclasses.fields(JobRequest)], id="job request"),
        pytest.param("Jobs", [name for name in vars(Scheduler) if not name.startswith("_")], id="scheduler"),
        pytest.param("Run directory", _COLUMNS, id="csv"),
    ],
)
def test_every_word_is_in_its_section(section: str, known: list[str]) -> None:
    assert set(known) <= words(sections(BUILT)[section])


def test_what_is_always_in_a_record_is_said() -> None:
    (said,) = re.findall(r"Always there:(.*?);", BUILT, flags=re.DOTALL)
    assert words(said) == _ALWAYS


def test_the_verdicts_and_outcomes_are_those_of_the_code() -> None:
    verdicts = {word for cell, _ in first_cells(BUILT, "verdict") for word in cell}
    assert verdicts == set(get_args(Verdict))
    (outcomes,) = [table for table in tables(BUILT) if "trainer's exit" in table[0][0]]
    codes = {spans(row[1])[0]: row[0].strip("| ") for row in outcomes[1:]}
    assert codes.keys() == {each.value for each in Outcome}
    for outcome, code in EXIT_CODE_OF_OUTCOME.items():
        assert codes[outcome.value] == str(code)


# -- configuration -----------------------------------------------------------------------------------------------------


def leaves(values: dict[str, Any], at: str = "") -> dict[str, Any]:
    """Dotted keys and their values; free groups of keys count as values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        below = leaves(value, f"{at}{name}.") if isinstance(value, dict) else {}
        found |= below or {f"{at}{name}": value}
    return found


def test_every_key_is_on_the_page_with_its_default() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", BUILT, flags=re.DOTALL)
    told = leaves(parse_yaml(block))
    needed = {key for key, value in told.items() if value == "REQUIRED"}
    config = Config.model_validate({"run": {"name": "r"}})
    built = leaves(config.model_dump(mode="json"))
    assert needed == {"run.name"}
    assert {key: value for key, value in told.items() if key not in needed} == {
        key: value for key, value in built.items() if key not in needed
    }


# -- command line ------------------------------------------------------------------------------------------------------


@functools.cache
def verbs() -> dict[str, set[str]]:
    """Every verb with its options."""
    (choices,) = [each for each in parser_of(cli.VERBS)._actions if isinstance(each, argparse._SubParsersAction)]
    return {
        name: {option for each in parser._actions for option in each.option_strings if option not in ("-h", "--help")}
        for name, parser in choices.choices.items()
    }


def test_every_verb_has_its_line_with_its_options() -> None:
    rows = [row for table in tables(BUILT) if table[0][0] == "| verb" or table[0][0] == "verb" for row in table[1:]]
    told = {spans(row[0])[0].split()[0]: set(re.findall(r"--[a-z-]+", row[1])) for row in rows}
    assert told == verbs()
    command_line = sections(DESIGN)["The command line"].split("Not built yet")[0]
    assert verbs().keys() <= {span.split()[0] for span in spans(command_line.replace("\n", " "))}


def test_the_exit_codes_are_those_of_the_command() -> None:
    (table,) = [table for table in tables(BUILT) if "exit code" in table[0][0]]
    codes = {int(row[0].strip("| ")) for row in table[1:]}
    built = {code for name, code in vars(exits).items() if name.isupper() and isinstance(code, int)}
    assert codes == built


def test_what_json_prints_is_on_the_page(tmp_path: Path) -> None:
    rows = {cell.pop(): row for cell, row in json_rows()}
    settings: dict[str, Any] = {"run": {"name": "r", "dir": str(tmp_path)}, "model": {"path": "m"}}
    settings |= {"data": {"train": "stdlib"}, "training": {"max_steps": 1, "optimizer": {"learning_rate": 1.0}}}
    row = standing(open_or_create(Config.model_validate(settings)), in_detail=True)
    assert row.keys() | row["budgets"].keys() <= words(rows["status"])
    finding = {each.name for each in dataclasses.fields(Finding)}
    assert CheckResult((), (), "").as_json().keys() | finding <= words(rows["check"])
    assert {each.name for each in dataclasses.fields(CheckedItem)} <= words(rows["doctor"])
    assert {name for name, options in verbs().items() if "--json" in options} == rows.keys()


def json_rows() -> Iterator[tuple[set[str], str]]:
    (table,) = [table for table in tables(BUILT) if "`--json` of" in table[0][0]]
    return (({spans(row[0])[0].split()[0]}, " | ".join(row)) for row in table[1:])


# -- what is planned ---------------------------------------------------------------------------------------------------


def test_nothing_planned_is_there_already() -> None:
    assert not set(planned("key")) & {".".join(place) for place in all_places()}


def planned(head: str) -> list[str]:
    """What the first cells of the planned table with this head name; nothing where all of its kind is built."""
    found = [table for table in tables(PLANNED) if table[0][0].strip("| ") == head]
    return [span for table in found for row in table[1:] for span in spans(row[0])]


# -- the pages themselves ----------------------------------------------------------------------------------------------


def test_every_file_of_the_house_has_its_line() -> None:
    files = {path.relative_to(ROOT).as_posix() for path in sources() if path.name != "__init__.py"}
    listed = [spans(row[0])[0] for table in tables(DESIGN) if "file" in table[0][0] for row in table[1:]]
    assert sorted(listed) == sorted(files)


def test_every_room_of_the_tests_has_its_line() -> None:
    rooms = {f"tests/{path.name}/" for path in (ROOT / "tests").glob("*_room")}
    assert rooms == {span for span in spans(DESIGN) if span.startswith("tests/")} - {"tests/"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    ours = re.compile(r"((supervisor|slurm|worker|configs|docs|tests|\.ci)/[\w./-]*|Makefile|\w+\.(toml|txt))(: \w+)?")
    named = [match[1] for span in spans(page.read_text(encoding="utf-8")) if (match := ours.fullmatch(span))]
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#{1,6} (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_stand_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert str(ROOT) not in text
    assert re.findall(r"(?:^|[\s`(\"'])(?:/(?:work|root|home|Users)/|(?:\.\./)+shared|\.library)\S*", text) == []
