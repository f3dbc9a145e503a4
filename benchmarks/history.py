"""Whether the 20,000th record of a history costs more than the 20th: to append, to make durable, to follow.

``python -m benchmarks.history`` keeps a short history and a long one beside each other and appends to them in turns, so
that a busy disk is so for both; each append is then made durable, which the trainer does every 2 s, and read by one who
follows the file, as the supervisor does. The whole file is read as well.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.checkpoint import fill_history, typical
from benchmarks.heading import heading, met
from worker.contract.loss_history import HistoryReader, HistoryWriter, last_record, read_history
from worker.contract.run_dir import RunDir

WANTED_RATIO = 1.1
"""Equal, but for what the same measurement differs by from one time to the next."""
EACH_TIME = ("append", "make durable", "follow", "last record")


class History:
    """One history with its writer and a reader that has seen it all; the seconds of what is done to it."""

    def __init__(self, folder: Path, steps: int) -> None:
        folder.mkdir()
        self.run, self.step = RunDir(folder), steps
        fill_history(self.run, steps)
        self._writer = HistoryWriter(self.run.history, lambda: None)
        self._reader = HistoryReader(self.run.history)
        self._reader.new_records()
        self.times_s: dict[str, list[float]] = {name: [] for name in EACH_TIME}

    def go_on(self) -> None:
        """One more record, and everything that is measured of it."""
        self.step += 1
        one = typical(self.step)
        self._writer.sync()  # or this append might be the one that does it
        done = (
            lambda: self._writer.append(one),
            self._writer.sync,
            self._reader.new_records,
            lambda: last_record(self.run.history),
        )
        for name, what in zip(EACH_TIME, done, strict=True):
            self.times_s[name].append(seconds(what))


def seconds(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs=2, default=[20, 20_000])
    parser.add_argument("--appends", type=int, default=201, help="to each of the two")
    parser.add_argument("--repeats", type=int, default=5, help="of reading the whole file")
    parser.add_argument("--folder", help="where the histories are written; the disk that is measured")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=told.folder, prefix="benchmark-") as folder:
        short, long = (History(Path(folder, str(number)), steps) for number, steps in enumerate(told.steps))
        for turn in range(told.appends):
            for one in (short, long) if turn % 2 else (long, short):
                one.go_on()
        print(shown(short, long, told))


def shown(short: History, long: History, told: argparse.Namespace) -> str:
    """The table, with everything that is needed to read it."""
    lines = [
        *heading("history"),
        f"figures    medians of {told.appends}, milliseconds; ratios: median of those within each turn",
        "",
        f"{'':16}{told.steps[0]:>10,}{told.steps[1]:>10,}{'ratio':>8}   wanted",
    ]
    for name in EACH_TIME:
        early, late = short.times_s[name], long.times_s[name]
        ratio = statistics.median(there / here for here, there in zip(early, late, strict=True))
        figures = "".join(f"{1e3 * statistics.median(times):>10.4f}" for times in (early, late))
        lines.append(f"{name:16}{figures}{ratio:>8.2f}   equal: {met(ratio <= WANTED_RATIO)}")
    size = long.run.history.stat().st_size
    read_s = statistics.median(seconds(lambda: read_history(long.run.history)) for _ in range(told.repeats))
    lines.append(f"\n{long.step:,} records: {size / 1e6:.2f} MB, {size / long.step:.0f} bytes each")
    lines.append(f"read whole in {read_s:.3f} s (median of {told.repeats}), {1e6 * read_s / long.step:.1f} us a record")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
