"""A process that has imported all that a trainer needs, touches nothing, and forks a trainer for each start.

The imports are nearly all of what a start costs.  An agent has one zygote, ``python -m worker.zygote FD MODULE LOG``,
and speaks with it through a socket, a line of JSON at a time: the zygote says ``"ready"`` after its imports, the agent
asks for a trainer, and the trainer itself answers with its pid.  Its standard output is the log and never an answer.

A trainer is forked twice and becomes the agent's own child: its exit status needs no messenger, and a dead zygote
harms no trainer.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from worker.child import LIBC, Child, die_with, open_log

_FORK_TIMEOUT_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NAME = 15
TRAINER_NAME = "hf-trainer"
"""What ps and top call a forked trainer, whose command line is its zygote's."""
_READY = "ready"
_FOR_TRAINERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class ZygoteGoneError(Exception):
    """This zygote forks no trainer any more, and none that nobody knows of is left."""


# The agent's side


class Zygote:
    """An agent's zygote; it dies with its agent."""

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        """Begin to import ``module``, whose ``main`` is the trainer; ``environment`` is what a trainer would get."""
        self._is_ready = False
        self._control, theirs = socket.socketpair()
        with theirs, open_log(log) as output:
            self._process = subprocess.Popen(
                # The log's path is for people: it tells whose zygote this is.
                [sys.executable, "-m", "worker.zygote", str(theirs.fileno()), module, str(log)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                preexec_fn=partial(die_with, os.getpid()),
            )
        self.pid = self._process.pid

    def is_ready(self) -> bool:
        """Whether the imports are done; ZygoteGoneError where it ended instead."""
        if not self._is_ready and select.select([self._control], [], [], 0)[0]:
            if self._read() != _READY:
                raise ZygoteGoneError(self.close())
            self._is_ready = True
        return self._is_ready

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
        """A trainer that runs with these arguments and this environment, as ``spawn`` would have started it.

        ZygoteGoneError where none came: then none will.
        """
        with open_log(log) as output:
            log_begin = output.tell()
        request = {"arguments": list(arguments), "environment": dict(environment), "log": str(log)}
        with _adopting():
            pid = self._ask(request)
        return Child(pid, log_begin, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def _ask(self, request: dict[str, Any]) -> int:
        self._control.settimeout(_FORK_TIMEOUT_S)
        try:
            self._control.sendall(json.dumps(request).encode() + b"\n")
            answer = self._read()
        except OSError as error:
            answer = str(error)
        if isinstance(answer, int):
            return answer
        # A trainer may be on its way: from here on it cannot answer any more, and so ends; one that did is taken.
        self._control.shutdown(socket.SHUT_RD)
        late = self._read()
        ended = self.close()
        if isinstance(late, int):
            return late
        raise ZygoteGoneError(f"{ended}: {answer}" if answer else ended)

    def _read(self) -> Any:
        """The next answer, None where the other side is closed; answers are so short that they come whole."""
        line = self._control.recv(65_536)
        return json.loads(line) if line else None

    def close(self) -> str:
        """End it; how it ended."""
        self._control.close()
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile a descendant whose parent ends becomes this process's child, and afterwards init's again."""
    LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# The zygote's side


def main() -> None:
    """Import, serve, and in each trainer run the module's ``main`` as ``python -m MODULE`` would."""
    control, module, agent = socket.socket(fileno=int(sys.argv[1])), sys.argv[2], os.getppid()
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _FOR_TRAINERS}
    control.set_inheritable(False)
    gc.disable()  # imports make nothing but what stays: walking it again and again was a quarter of their time
    trainer = importlib.import_module(module)
    if reason := _is_touched():
        sys.exit(f"zygote: the imports {reason}, which no fork survives: trainers start without it")
    gc.collect()
    gc.freeze()  # a collection in a trainer then neither walks nor copies what was imported
    gc.enable()
    control.sendall(json.dumps(_READY).encode() + b"\n")
    arguments = _serve(control, agent, handlers)
    sys.argv = [str(trainer.__file__), *arguments]
    trainer.main()


def _is_touched() -> str | None:
    """What the imports did beyond importing, None where that is nothing that a forked process would trip over.

    The threads of OpenBLAS and of arrow's allocator are no harm: both know about forks.
    """
    if threading.active_count() > 1:
        return "started a thread"
    files = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    return "opened a GPU" if any(file.startswith(("/dev/nvidia", "/dev/kfd")) for file in files) else None


def _serve(control: socket.socket, agent: int, handlers: Mapping[signal.Signals, Any]) -> list[str]:
    """Fork a trainer for each request; returns in the trainers only, with a trainer's arguments."""
    with control, control.makefile("rb") as requests:
        for line in requests:
            between = fork()
            if between == 0:
                between = os.getpid()
                if fork() == 0:
                    return _begin(json.loads(line), control, agent, between, handlers)
                os._exit(0)
            if os.waitpid(between, 0)[1] != 0:
                os._exit(1)
    os._exit(0)


def fork() -> int:
    """``os.fork``, in a process that has imported and done nothing else."""
    with warnings.catch_warnings():
        # From Python 3.12 on it warns of any native thread; those that are here do no harm (_is_touched).
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _begin(
    request: Mapping[str, Any],
    control: socket.socket,
    agent: int,
    between: int,
    handlers: Mapping[signal.Signals, Any],
) -> list[str]:
    """Become a trainer as an agent would have started it, and tell the agent; the trainer's arguments.

    An agent that does not listen any more has given this start up: then it ends here.
    """
    try:
        os.setpgid(0, 0)
        LIBC.prctl(_PR_SET_NAME, TRAINER_NAME.encode(), 0, 0, 0)
        _become_child_of(agent, between)
        _redirect_output(request["log"])
        os.environ.clear()
        os.environ.update(request["environment"])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        control.sendall(json.dumps(os.getpid()).encode() + b"\n")
    except OSError as error:
        with suppress(OSError):
            control.sendall(json.dumps(f"{type(error).__name__}: {error}").encode() + b"\n")
        os._exit(1)
    arguments: list[str] = request["arguments"]
    return arguments


def _become_child_of(agent: int, between: int) -> None:
    while os.getppid() == between:
        time.sleep(0.001)
    if os.getppid() != agent:
        raise ProcessLookupError(f"process {os.getppid()} adopted the trainer instead of its agent {agent}")
    die_with(agent)


def _redirect_output(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(descriptor, number)
    os.close(descriptor)


if __name__ == "__main__":
    main()
