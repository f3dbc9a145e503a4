"""Where a trainer stands that makes no progress: its own stacks, or what the system says of it."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from worker.child import POLL_S, Child
from worker.contract.files import publish


def take_stacks(
    child: Child, stacks: Path, spread_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Have the stacks of its threads written into ``stacks``; what /proc says where it does not answer.

    For ``spread_s`` it is left as it is: a stopped one that is continued would let the other ranks go on, or break
    their collective, before their agents have noticed too.
    """
    if child.poll() is None:
        child.send(signal.SIGUSR1)
    until = clock() + spread_s
    while child.poll() is None and clock() < until:
        sleep(POLL_S)
    if child.poll() is not None or (stacks.exists() and stacks.stat().st_size):
        return
    words = what_proc_says(child.pid)  # before it is continued: it may crash before it can write
    if not child.dump_stacks(stacks, clock, sleep):
        leave_words(words, stacks)


def leave_words(words: str, stacks: Path) -> None:
    """Write down what /proc said, unless that cannot be done: a full disk must not keep a trainer alive."""
    with contextlib.suppress(OSError):
        publish(stacks, words + "\n")


def process_state(pid: int) -> str:
    """The main thread's state, ``T (stopped)`` or ``D (disk sleep)``, and where in the kernel it waits; "" if gone."""
    return _thread_state(Path(f"/proc/{pid}/task/{pid}"))


def what_proc_says(pid: int) -> str:
    """A line a thread: name, state, kernel function; the kernel's stack below it where it may be read."""
    return "\n".join(_lines(Path(f"/proc/{pid}/task")))


def _lines(tasks: Path) -> Iterator[str]:
    try:
        threads = sorted(tasks.iterdir(), key=lambda each: int(each.name))
    except OSError:
        return
    for thread in threads:
        yield f"thread {thread.name} {_read(thread / 'comm')}: {_thread_state(thread)}"
        yield from (f"  {line}" for line in _read(thread / "stack").splitlines())


def _thread_state(thread: Path) -> str:
    states = [line.partition(":")[2].strip() for line in _read(thread / "status").splitlines() if line[:5] == "State"]
    waits_in = _read(thread / "wchan")
    return " ".join([*states, f"in {waits_in}"] if waits_in not in ("", "0") else states)


def _read(path: Path) -> str:
    """A file of /proc; "" where it is gone, or only root may read it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
