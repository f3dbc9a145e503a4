"""One trainer process: started so that it never outlives its agent, ended whatever state it is in."""

import ctypes
import os
import signal
import subprocess
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from worker.agent_rules import Task

POLL_S = 0.05
HANG_GRACE_S = 5.0
TERM_GRACE_S = 10.0
KILL_GRACE_S = 60.0

LIBC = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec
_PR_SET_PDEATHSIG = 1


class Child:
    """A started trainer: a child of this process, in a process group of its own so that its data workers end with it.

    ``spawn`` makes one, and so does a zygote.
    """

    def __init__(self, pid: int, log_begin: int, wait: Callable[[], int]) -> None:
        """``wait`` returns at once when the process is over: its return code as in subprocess, minus N for signal N."""
        self.pid = pid
        self.log_begin = log_begin
        """Where its own output begins in its log, in bytes."""
        self._wait = wait
        self._returncode: int | None = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; the pid is the trainer's until ``poll`` has told its end."""
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        """None while it runs, then its exit code, or minus the signal that killed it."""
        if self._returncode is None:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # before it is reaped: until then no other group has this number
            self._returncode = self._wait()
        return self._returncode

    def end(self, at_once: bool, clock: Callable[[], float], sleep: Callable[[float], None]) -> int | None:
        """End it: SIGTERM, SIGKILL after 10 s or ``at_once``; its return code, None where it survived that for 60 s.

        A stopped process answers nothing, so it is continued. SIGTERM asks a trainer to save and leave, and through it
        all the others: not one whose answer nobody wants.
        """
        rungs = [((signal.SIGTERM, signal.SIGCONT), TERM_GRACE_S), ((signal.SIGKILL,), KILL_GRACE_S)]
        for numbers, grace_s in rungs[at_once:]:
            if self.poll() is not None:
                break  # it went by itself meanwhile, and its number may be another's
            for number in numbers:
                self.send(number)
            if _within(grace_s, lambda: self.poll() is not None, clock, sleep):
                break
        return self.poll()

    def dump_stacks(self, stacks: Path, clock: Callable[[], float], sleep: Callable[[float], None]) -> bool:
        """Ask it for the stacks of its threads, in ``stacks``; whether they came within 5 s."""
        before = _size(stacks)
        sizes = [before]

        def is_done() -> bool:
            sizes.append(_size(stacks))
            return self.poll() is not None or before < sizes[-2] == sizes[-1]

        if self.poll() is None:
            for number in (signal.SIGUSR1, signal.SIGCONT):
                self.send(number)
        _within(HANG_GRACE_S, is_done, clock, sleep)
        return _size(stacks) > before


def _within(
    grace_s: float, is_done: Callable[[], bool], clock: Callable[[], float], sleep: Callable[[float], None]
) -> bool:
    deadline = clock() + grace_s
    while not is_done():
        if clock() >= deadline:
            return False
        sleep(POLL_S)
    return True


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def spawn(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
    """Start a trainer as a program of its own, its output appended to ``log``."""
    with open_log(log) as output:
        log_begin = output.tell()
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=partial(die_with, os.getpid()),
        )
    return Child(process.pid, log_begin, process.wait)


def open_log(log: Path) -> BinaryIO:
    """A log to append to, its folder made where it is missing."""
    log.parent.mkdir(exist_ok=True)
    return open(log, "ab")


def die_with(parent: int) -> None:
    """Have this process killed when its parent dies; it ends here where ``parent`` is not its parent any more."""
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def trainer_environment(inherited: Mapping[str, str], task: Task, cpus_per_task: int) -> dict[str, str]:
    """The trainer's environment: torch's names for its place in the world, and our packages importable.

    Its threads sleep while they wait, unless OMP_WAIT_POLICY says otherwise. MASTER_ADDR and MASTER_PORT must exist and
    mean nothing: the real rendezvous is a file.
    """
    environment = dict(inherited)
    environment.setdefault("OMP_NUM_THREADS", str(cpus_per_task))
    # Threads that spin while they wait for each other stand still together where something else has one of their cores.
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment |= {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.world),
        "LOCAL_RANK": str(task.local_rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "PYTHONSAFEPATH": "1",
    }
    root = str(Path(__file__).resolve().parent.parent)
    if root != sysconfig.get_path("purelib"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, inherited.get("PYTHONPATH"))))
    return environment


def log_tail(log: Path, begin: int, num_lines: int) -> str:
    """The last lines that were written to ``log`` from byte ``begin`` on, of 64 KiB at most; none where it is gone."""
    try:
        with open(log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(begin, end - 65_536))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-num_lines:])
