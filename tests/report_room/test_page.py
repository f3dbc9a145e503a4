"""The report as a person opens it: in a real browser, from disk, without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from supervisor.journal import (
    Continued,
    Diagnosis,
    Event,
    Finished,
    JobSeen,
    RolledBack,
    RunCreated,
    SegmentStarted,
    VerdictSeen,
)
from supervisor.report.page import Facts, render
from supervisor.report.page_data import MOST_POINTS, chart_data, thinned
from tests.manifests import manifest
from tests.report_room.stories import RECORDINGS, Story, a_start, long_records, one_spike, recorded
from tests.supervisor_room.stage import config
from worker.contract.config import Config, without_secrets
from worker.contract.loss_history import surviving
from worker.contract.manifest import Health

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>'\"&\x1b[2J"


def page_of(story: Story, settings: Config, now: float = 0.0, findings: Sequence[Diagnosis] = ()) -> str:
    graded = [(manifest(30), Health.HEALTHY), (manifest(40, attempt=2), Health.UNTESTED)]
    return render(Facts(settings, story.events, story.records, story.accounting(now), graded, now, findings))


def long_story(steps: int = 20_000) -> Story:
    """A run of many steps with one rollback."""
    records = long_records(steps)
    turn, begin = steps * 3 // 4, records[0].time
    plan: dict[str, Any] = {"where": "same_allocation", "resume_step": turn - 100}
    events: list[Event] = [
        RunCreated(run_id="r", config_digest="", versions={"python": "3.11"}, time=begin - 60),
        Continued(cause="first", where="new_job", attempt=1, time=begin - 59, reason="the run begins"),
        JobSeen(job_id="1", state="RUNNING", nodes=("n1",), attempt=1, time=begin - 30),
        SegmentStarted(segment=1, restart=0, step=1, start=a_start(steps), attempt=1, time=begin),
        VerdictSeen(kind="spike", step=turn, onset_step=turn - 2, attempt=1, time=begin + turn / 2, reason="loss 9"),
        RolledBack(cause="spike", kind="spike", verdict_step=turn, onset_step=turn - 2, from_step=turn,
                   to_step=turn - 100, attempt=2, lr_scale=0.5, time=begin + turn / 2 + 1, **plan),
        Finished(final_step=steps, attempt=2, time=records[-1].time + 5, reason=f"all {steps} steps are done"),
    ]  # fmt: skip
    return Story(events, records)


# -- without a browser -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_story_has_a_page_that_stands_alone(tmp_path: Path, name: str) -> None:
    page = page_of(recorded(name), config(tmp_path))
    assert page.count("<article") == page.count("</article>") > 2
    assert "untested, too few steps came after it yet" in page
    for outside in ("http://", "https://", "src=", "@import", "url("):
        assert outside not in page.partition('<script type="application/json"')[0].replace("src=x", "")


def test_a_run_without_checkpoints_says_so_and_shows_no_empty_table(tmp_path: Path) -> None:
    page = render(Facts(config(tmp_path), [], [], Story([], []).accounting(), [], 0.0))
    assert "<p>The run has no checkpoint now.</p>" in page
    assert "<p>No attempt has begun yet.</p>" in page
    assert "<tbody>\n\n</tbody>" not in page


def test_what_comes_from_files_is_escaped(tmp_path: Path) -> None:
    story = one_spike(tmp_path).story
    events = [event.model_copy(update={"reason": EVIL}) for event in story.events]
    settings = config(tmp_path, cluster={"setup": (EVIL,), "environment": {"WANDB_API_KEY": "secret-1"}})
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"name": EVIL})})
    finding = Diagnosis(symptom=EVIL, cause=EVIL, confidence="likely", evidence=(EVIL, "batch 7"), next=EVIL)
    page = page_of(Story(events, story.records), settings, findings=[finding])
    assert "<li>batch 7</li>" in page.partition("Diagnosis</h2>")[2].partition("</section>")[0]
    assert page.count("<script") == 2
    assert "<img" not in page
    assert "secret-1" not in page
    assert "WANDB_API_KEY" in page
    assert all(c.isprintable() or c == "\n" for c in page)


def test_secrets_are_left_out_of_the_configuration(tmp_path: Path) -> None:
    settings = config(tmp_path, cluster={"environment": {"TOKEN": "t-1"}})
    settings = settings.model_copy(update={"notify": ("tgram://bot-token/chat",)})
    shown = without_secrets(settings)
    assert shown.notify == ("***",)
    assert shown.cluster.environment == {"TOKEN": "***"}


def test_a_very_long_curve_keeps_its_extremes_and_what_was_noted() -> None:
    records = long_records()
    kept = thinned(records, 2000)
    assert len(kept) <= 2002 < MOST_POINTS
    assert max(r.loss or 0 for r in kept) == max(r.loss or 0 for r in records)
    assert min(r.loss or 0 for r in kept) == min(r.loss or 0 for r in records)
    assert [r.step for r in kept if r.verdict != "ok"] == [15_000]
    data = chart_data([], records, [])
    assert sum(each["survivors"] for each in data["segments"]) < sum(len(each["step"]) for each in data["segments"])


def test_the_curve_that_counts_is_the_surviving_one(tmp_path: Path) -> None:
    story = recorded("demo")
    data = chart_data(story.events, story.records, [])
    steps = [step for each in data["segments"] for step in each["step"][: each["survivors"]]]
    assert steps == [record.step for record in surviving(story.records)]
    assert [mark["kind"] for mark in data["marks"]] == ["verdict", "rollback"]


# -- in Chromium -------------------------------------------------------------------------------------------------------


@dataclass
class Opened:
    """A page in the browser, and all that it said or asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def readout(self) -> str:
        return str(self.page.locator("#readout").inner_text())

    @property
    def view(self) -> list[int]:
        return [int(at) for at in self.page.locator("#chart").get_attribute("data-view").split()]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, steered by Playwright."""
    found = shutil.which("chromium")
    if found is None:
        message = "needs the Debian package chromium"
        if os.environ.get("HIGGSFIELD_REQUIRE_VIEWS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    pages: list[Opened] = []

    def open_page(text: str, **options: Any) -> Opened:
        file = tmp_path / 'a page\'s "name" #1?.html'
        file.write_text(text, encoding="utf-8")
        one = Opened(browser.new_page(**({"viewport": {"width": 1200, "height": 900}} | options)))
        one.page.on("console", lambda message: one.said.append(message.text))
        one.page.on("pageerror", lambda error: one.said.append(str(error)))
        one.page.on("request", lambda request: one.requests.append(request.url))
        one.page.goto(file.as_uri())
        pages.append(one)
        return one

    yield open_page
    for one in pages:
        assert one.said == []
        assert [url.partition(":")[0] for url in one.requests] == ["file"]
        one.page.close()


def test_it_opens_from_disk_and_hover_says_the_numbers(opened: Any, tmp_path: Path) -> None:
    one = opened(page_of(recorded("demo"), config(tmp_path)))
    one.page.locator("canvas").nth(1).hover(position={"x": 600, "y": 40})
    assert one.readout.startswith("step 13")
    assert "learning rate" in one.readout
    before = one.readout
    one.page.mouse.move(300, one.page.locator("canvas").first.bounding_box()["y"] + 50)
    assert one.readout != before


def test_dragging_zooms_and_the_buttons_do_too(opened: Any, tmp_path: Path) -> None:
    one = opened(page_of(recorded("demo"), config(tmp_path)))
    assert one.view == [1, 260]
    chart = one.page.locator("canvas").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    one.page.mouse.move(box["x"] + 400, box["y"] + 100)
    one.page.mouse.down()
    one.page.mouse.move(box["x"] + 600, box["y"] + 100, steps=3)
    one.page.mouse.up()
    low, high = one.view
    assert 60 < low < high < 150
    one.page.get_by_role("button", name="zoom out").click()
    assert one.view[1] - one.view[0] > high - low
    one.page.get_by_role("button", name="all steps").click()
    assert one.view == [1, 260]


def test_the_keyboard_is_enough(opened: Any, tmp_path: Path) -> None:
    one = opened(page_of(recorded("demo"), config(tmp_path)))
    one.page.locator("#chart").focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        one.page.keyboard.press(key)
    assert one.readout.startswith("step 3 ")
    one.page.keyboard.press("Shift+ArrowRight")
    assert one.readout.startswith("step 13 ")
    one.page.keyboard.press("+")
    assert one.view[1] - one.view[0] < 259
    one.page.keyboard.press("0")
    assert one.view == [1, 260]


def test_a_step_of_the_log_shows_its_place_in_the_curve(opened: Any, tmp_path: Path) -> None:
    one = opened(page_of(recorded("demo"), config(tmp_path)))
    one.page.get_by_role("button", name="step 129").first.click()
    low, high = one.view
    assert low < 129 < high < 160
    assert "rollback at step 129" in one.readout
    one.page.get_by_label("every event").check()
    assert one.page.get_by_text("job 12777 is submitted").is_visible()


def test_what_comes_from_files_runs_nothing(opened: Any, tmp_path: Path) -> None:
    story = one_spike(tmp_path).story
    events = [event.model_copy(update={"reason": EVIL}) for event in story.events]
    settings = config(tmp_path)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"name": EVIL})})
    one = opened(page_of(Story(events, story.records), settings))
    assert one.page.title().startswith("</script>")


def test_a_table_that_goes_on_beyond_a_narrow_screen_has_a_shadow_there(opened: Any, tmp_path: Path) -> None:
    one = opened(page_of(recorded("demo"), config(tmp_path)), viewport={"width": 400, "height": 800})
    table = one.page.locator(".scroll", has_text="making steps")
    wide, shown = (table.evaluate(f"each => each.{name}") for name in ("scrollWidth", "clientWidth"))
    assert wide > shown
    assert "linear-gradient" in table.evaluate("each => getComputedStyle(each).backgroundImage")
    table.focus()
    one.page.keyboard.press("ArrowRight")
    one.page.wait_for_function("() => [...document.querySelectorAll('.scroll')].some((each) => each.scrollLeft > 0)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_needs_no_scrolling_sideways(opened: Any, tmp_path: Path, scheme: str) -> None:
    one = opened(page_of(long_story(), config(tmp_path)), viewport={"width": 360, "height": 800}, color_scheme=scheme)
    assert one.page.evaluate("document.documentElement.scrollWidth") <= 360
    ground = one.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(n) for n in ground[4:-1].split(",")) < 200) == (scheme == "dark")


def test_twenty_thousand_steps_stay_fluid(opened: Any, tmp_path: Path) -> None:
    """Every move of the cursor is drawn in the next frame: counted, not timed."""
    one = opened(page_of(long_story(), config(tmp_path)))
    drawn = one.page.evaluate(
        """async () => {
            const chart = document.getElementById("chart"), box = chart.getBoundingClientRect();
            let frames = 0;
            for (let i = 0; i < 20; i++) {
                const at = { clientX: box.left + 100 + i * 45, clientY: box.top + 50 };
                chart.dispatchEvent(new PointerEvent("pointermove", at));
                await new Promise((done) => requestAnimationFrame(() => { frames++; done(); }));
            }
            return frames;
        }"""
    )
    assert drawn == 20
    pixels = one.page.evaluate(
        """() => { const canvas = document.querySelector("canvas"), pen = canvas.getContext("2d");
            const data = pen.getImageData(0, 0, canvas.width, canvas.height).data;
            let inked = 0; for (let i = 3; i < data.length; i += 4) inked += data[i] > 0; return inked; }"""
    )
    assert pixels > 5000
    assert one.readout.startswith("step ")


def test_a_run_that_made_no_step_says_so(opened: Any, tmp_path: Path) -> None:
    one = opened(page_of(recorded("refused"), config(tmp_path)))
    assert one.readout == "No step was made yet."


def test_the_pictures_of_the_readme_are_drawn(browser: Any, tmp_path: Path) -> None:
    from benchmarks.pictures import picture_of_report, picture_of_text

    report = tmp_path / "report.html"
    report.write_text(page_of(recorded("demo"), config(tmp_path)), encoding="utf-8")
    picture_of_report(browser, report, tmp_path / "report.png")
    picture_of_text(browser, "loss  \u28ff\u2801 <2.5>\n", tmp_path / "watch.png")
    for name in ("report.png", "watch.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
