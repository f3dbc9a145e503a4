"""Runs the benchmarks one after the other, and puts what they print into docs/benchmarks.md: `make bench`.

What a script printed stands between `<!-- benchmarks.NAME -->` and `<!-- end -->`; what people wrote around it stays. A
script that fails leaves the last figures where they are, and the exit code is 1.
"""

import argparse
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "benchmarks.md"
SCRIPTS: Final = {
    "overhead": "",
    "history": "",
    "checkpoint": "--steps 20 20000 --repeats 21",
    "saves": "--turns 1 --saves 3 --every 12",
    "relaunch": "--relaunches 3",
    "recovery": "",
    "supervisor": "",
    "goodput": "--seeds 3",
    "detectors": "",
}
"""In this order, with these arguments."""
ONE_THREAD: Final = frozenset({"overhead", "saves"})
"""Where a step is to be of a given length, or the second core is to write."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="only these: " + ", ".join(SCRIPTS))
    told = parser.parse_args()
    if unknown := set(told.scripts) - set(SCRIPTS):
        parser.error(f"no such script: {', '.join(sorted(unknown))}")
    failed = [name for name in told.scripts or SCRIPTS if not written(name)]
    if failed:
        print(f"failed, their figures are the last ones: {', '.join(failed)}", file=sys.stderr)
    print(f"written: {PAGE}\n\n{summary(PAGE.read_text(encoding='utf-8'))}")
    return 1 if failed else 0


def written(name: str) -> bool:
    """Run one script and put its output into the page; False where it fails, and then the page is as it was."""
    print(f"-- {name}", flush=True)
    began = time.monotonic()
    threads = {"OMP_NUM_THREADS": "1"} if name in ONE_THREAD else {}
    command = [sys.executable, "-m", f"benchmarks.{name}", *shlex.split(SCRIPTS[name])]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | threads, stdout=subprocess.PIPE, text=True)
    print(f"{done.stdout}-- {name}: {time.monotonic() - began:.0f} s", flush=True)
    if done.returncode == 0:
        page = with_output(PAGE.read_text(encoding="utf-8"), name, done.stdout)
        PAGE.write_text(with_output(page, "page", summary(page)), encoding="utf-8")
    return done.returncode == 0


def with_output(page: str, name: str, output: str) -> str:
    """The page with this output in the script's place.

    Raises:
        ValueError: the page has no place for it, or more than one.
    """
    block = re.compile(rf"(<!-- benchmarks\.{name} -->\n).*?(<!-- end -->)", re.DOTALL)
    shown = f"```text\n{output.strip()}\n```\n"
    changed, places = block.subn(lambda found: found[1] + shown + found[2], page)
    if places != 1:
        raise ValueError(f"{PAGE}: {places} places <!-- benchmarks.{name} --> for its output, not one")
    return changed


def summary(page: str) -> str:
    """How many of the wanted figures each script met, and the rows of those that it did not."""
    lines = []
    for name in SCRIPTS:
        rows = _wanted_rows(page, name)
        missed = [row for row in rows if row.endswith("NOT met")]
        if rows:
            lines.append(f"{name:12}{len(rows) - len(missed)} of {len(rows)} met")
            lines += [f"    {row}" for row in missed]
    return "\n".join(lines)


def _wanted_rows(page: str, name: str) -> list[str]:
    block = re.search(rf"<!-- benchmarks\.{name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    return [] if block is None else [line.strip() for line in block[1].splitlines() if line.endswith("met")]


if __name__ == "__main__":
    sys.exit(main())
