"""docs/configuration.md is what the models say today."""

from pathlib import Path

from supervisor.config_findings import all_places
from supervisor.config_page import page

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_current() -> None:
    again = "run: python -m supervisor.config_page > docs/configuration.md"
    assert PAGE.read_text(encoding="utf-8") == page(), again


def test_every_key_has_its_row_and_says_something() -> None:
    rows = [line.strip("| ").split(" | ") for line in page().splitlines() if line.startswith("| `")]
    told = {row[0].strip("`"): row[-1] for row in rows}
    keys = [".".join(place) for place in all_places()]
    leaves = {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    assert leaves <= told.keys()
    assert all(len(told[key]) > 2 for key in leaves)
