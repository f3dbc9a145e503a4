"""The README's pictures, made from a real run: `python -m benchmarks.pictures`, or `make pictures`.

Runs the demo in a temporary folder, takes the live view from a real terminal (tmux) after the first rollback, and the
report from a real browser (Debian's chromium) at the end. Needs the packages that tests/install_views.sh installs.
"""

import argparse
import html
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from supervisor.journal import RolledBack, read_journal
from worker.contract.loss_history import HistoryReader
from worker.contract.run_dir import RunDir

ROOT = Path(__file__).parents[1]
HIGGSFIELD = str(Path(sys.executable).with_name("higgsfield"))
STEPS_AFTER = 60
"""Steps after the rollback at which the live view is taken: something of the new branch is to be seen."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="where the pictures go (default: docs)")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run_dir, live = demo(Path(folder))
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        picture_of_text(browser, live, out / "watch.png")
        picture_of_report(browser, run_dir.report, out / "report.png")
        browser.close()


def demo(folder: Path) -> tuple[RunDir, str]:
    """Run the demo to its end: its folder, and what the live view showed on the way."""
    run_dir = RunDir(folder / "demo")
    command = [HIGGSFIELD, "run", str(ROOT / "configs/demo.yaml"), "--set", f"run.dir={folder}"]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    rolled: Any = wait_for(lambda: rollbacks(run_dir), started)
    wait_for(lambda: last_step(run_dir) > rolled[0].to_step + STEPS_AFTER, started)
    live = watched(run_dir)
    if started.wait() != 0:
        raise SystemExit("the demo did not finish")
    return run_dir, live


def rollbacks(run_dir: RunDir) -> list[RolledBack]:
    return [event for event in read_journal(run_dir.journal) if isinstance(event, RolledBack)]


def last_step(run_dir: RunDir) -> int:
    records = HistoryReader(run_dir.history).new_records()
    return records[-1].step if records else 0


def wait_for(look: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """The first true answer; the end of the demo without one is an error."""
    while not (found := look()):
        if process.poll() is not None:
            raise SystemExit("the demo ended before there was something to show")
        time.sleep(0.2)
    return found


def watched(run_dir: RunDir) -> str:
    """What `higgsfield watch` shows in a terminal of 80 by 24."""
    tmux = ["tmux", "-L", f"higgsfield-pictures-{os.getpid()}"]
    shell = f"env LANG=C.UTF-8 TERM=screen {HIGGSFIELD} watch {run_dir.path}"
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", shell], check=True)
    try:
        while True:
            shown = subprocess.run([*tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout
            if "q quits" in shown:
                return shown
            time.sleep(0.2)
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def picture_of_text(browser: Browser, text: str, path: Path) -> None:
    page = browser.new_page(device_scale_factor=2)
    style = (
        "display:inline-block;margin:0;padding:12px;background:#16181b;color:#e9e9e6;font:14px/1.2 'DejaVu Sans Mono'"
    )
    cell = "<span style='display:inline-block;width:1ch;overflow:hidden'>{}</span>"  # another font's dots may be wider
    drawn = "".join(cell.format(c) if "\u2800" <= c <= "\u28ff" else html.escape(c) for c in text.rstrip())
    page.set_content(f'<body style="margin:0"><pre style="{style}">{drawn}</pre>')
    page.locator("pre").screenshot(path=path)


def picture_of_report(browser: Browser, report: Path, path: Path) -> None:
    page = browser.new_page(viewport={"width": 1000, "height": 2000})
    page.goto(report.as_uri())
    rolled = page.locator("[data-step]").nth(1)
    rolled.click()
    page.get_by_role("button", name="all steps").click()
    page.evaluate("window.scrollTo(0, 0)")
    chart = page.locator("#chart").bounding_box() or {}
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": 1000, "height": chart["y"] + chart["height"]})


if __name__ == "__main__":
    main()
