"""What the benchmarks print gets to docs/benchmarks.md, and the page counts which wanted figures are met."""

import pytest

from benchmarks import page
from tests.trainer_room.test_benchmarks import SCRIPTS as TRIED

TRIED_OTHERWISE = {
    "page": "it would write into the checkout; its parts are tried in this file",
    "pictures": "it runs the whole demo, as whole_room does; test_page.py in report_room has it draw",
    "requeued": "its first start never ends by itself; test_benchmarks.py in trainer_room starts it twice",
}
"""Scripts without a tiny run, and why."""

TEXT = """By a person.
<!-- benchmarks.page -->
<!-- end -->
<!-- benchmarks.overhead -->
old
<!-- end -->
Said a person.
<!-- benchmarks.history -->
append   1.01   equal: met
<!-- end -->
"""


def test_output_replaces_the_last_one_and_leaves_the_words_around_it() -> None:
    changed = page.with_output(TEXT, "overhead", "short   0.3   met\nlong \\1   9   NOT met\n")
    assert "old" not in changed
    assert (
        "<!-- benchmarks.overhead -->\n```text\nshort   0.3   met\nlong \\1   9   NOT met\n```\n<!-- end -->" in changed
    )
    assert changed.startswith("By a person.")
    assert "Said a person.\n<!-- benchmarks.history -->\nappend   1.01   equal: met\n" in changed


def test_the_summary_counts_what_is_met_and_shows_what_is_not() -> None:
    changed = page.with_output(TEXT, "overhead", "short   0.3   met\nlong   9   NOT met\n")
    assert page.summary(changed).splitlines() == [
        "overhead    1 of 2 met",
        "    long   9   NOT met",
        "history     1 of 1 met",
    ]


def test_a_page_without_a_place_for_it_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"0 places <!-- benchmarks\.saves -->"):
        page.with_output(TEXT, "saves", "1")


def test_a_script_that_fails_leaves_the_page_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = page.PAGE.read_bytes()
    monkeypatch.setitem(page.SCRIPTS, "history", "--no-such-option")
    assert not page.written("history")
    assert page.PAGE.read_bytes() == before


@pytest.mark.parametrize("script", page.SCRIPTS)
def test_each_script_has_its_place(script: str) -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.count(f"<!-- benchmarks.{script} -->") == 1


def test_each_script_is_tried() -> None:
    files = (page.ROOT / "benchmarks").glob("*.py")
    scripts = {file.stem for file in files if 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")}
    assert scripts == TRIED.keys() | TRIED_OTHERWISE.keys()
