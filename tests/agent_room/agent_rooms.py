"""A run folder with real agent processes, whose trainers are small scripts and whose clock a test can move on.

Trainers run ``fake_trainer``, from a zygote or without one, as the room was made.
"""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.waiting import eventually
from worker.agent_rules import Task
from worker.contract import config
from worker.contract.directive import Directive, publish_directive
from worker.contract.exit_report import ExitReport
from worker.contract.files import publish, read_message
from worker.contract.run_dir import RunDir

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

AGENT = """
import sys, time
from pathlib import Path
from worker.agent import run
from worker.agent_rules import Task

run_dir, task, room = Path(sys.argv[1]), Task.model_validate_json(sys.argv[2]), Path(sys.argv[3])
run(run_dir, task, sys.argv[4], clock=lambda: time.monotonic() + float((room / "clock").read_text()))
"""

TRAINER = """
import faulthandler, json, os, signal, sys, time
from pathlib import Path

run_dir, start = Path(sys.argv[1]), json.loads(sys.argv[2])
room = run_dir.parent
folder = run_dir / "attempts" / f"{start['attempt']:04d}" / f"r{start['restart']}"

def note(what, **fields):
    line = json.dumps({"what": what, "pid": os.getpid(), "ppid": os.getppid(), **start, **fields}) + "\\n"
    with open(room / "notes", "a") as file:
        file.write(line)

def leave(code, **word):
    (folder / f"rank-{start['rank']}.error.json").write_text(json.dumps(word))
    os._exit(code)

def left(what):
    return lambda number, frame: leave(21, step=7, saved_step=7, error={"type": "Left", "message": "", "what": what})

"""


def is_alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def children(pid: int) -> list[int]:
    """The living children of a process."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        found = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return [one for one in found if is_alive(one)]
    return []


class Room:
    """One run, its agents, its fake trainers, and what these noted."""

    trainer_module = "fake_trainer"
    trainer_path = HERE

    def __init__(self, path: Path, zygote: bool = False) -> None:
        self.path, self.zygote = path, zygote
        self.run_dir = RunDir(path / "a run")
        self.run_dir.path.mkdir()
        self.agents: list[subprocess.Popen[str]] = []
        (path / "clock").write_text("0")
        self.configure()

    def configure(self, **recovery: Any) -> None:
        document = {
            "run": {"name": "r"},
            "model": {"config": {"model_type": "llama"}},
            "data": {"train": "x"},
            "training": {"max_steps": 9, "optimizer": {"learning_rate": 1.0}, "zygote": self.zygote},
            "recovery": recovery,
            "cluster": {"cpus_per_task": 3},
        }
        config.write(self.run_dir.config, config.Config.model_validate(document))

    def advance(self, seconds: float) -> None:
        """Let time pass for the agents, at once."""
        publish(self.path / "clock", str(float((self.path / "clock").read_text()) + seconds))

    def direct(self, attempt: int, **fields: Any) -> None:
        fields = {"cause": "first", "reason": "a test", "time": 0.0, **fields}
        publish_directive(self.run_dir.directive, Directive(attempt=attempt, **fields))

    def trainer(self, attempt: int, body: str, rank: int = 0) -> None:
        script = TRAINER + "note('started')\n" + textwrap.dedent(body)
        (self.path / f"trainer-{attempt}-{rank}.py").write_text(script)

    def task(self, **fields: Any) -> Task:
        return Task(**{"job_id": "7", "name": "hf-1", "restart": 0, "rank": 0, "world": 1, "local_rank": 0, **fields})

    def agent_argv(self, **fields: Any) -> list[str]:
        return [
            sys.executable,
            "-c",
            AGENT,
            str(self.run_dir.path),
            self.task(**fields).model_dump_json(),
            str(self.path),
            self.trainer_module,
        ]

    def start(self, argv: list[str]) -> subprocess.Popen[str]:
        unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTHONPATH", "PYTHONSAFEPATH")
        environment = {name: value for name, value in os.environ.items() if name not in unset}
        environment["PYTHONPATH"] = str(self.trainer_path)  # for the trainer; our own packages have to be found without
        with open(self.path / "agents.log", "a") as log:
            process = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)
        self.agents.append(process)
        return process

    def agent(self, **fields: Any) -> subprocess.Popen[str]:
        return self.start(self.agent_argv(**fields))

    def said(self, text: str) -> bool:
        """Whether an agent printed this."""
        return text in (self.path / "agents.log").read_text()

    def is_waited_in(self, attempt: int = 1) -> None:
        """Returns when an agent waits for the directive after this attempt's: from then on its patience is counted."""
        eventually(lambda: self.said(f"attempt {attempt} is over, waiting"))

    def notes(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """What trainers noted under this word, in order."""
        try:
            text = (self.path / "notes").read_text()
        except FileNotFoundError:
            return []
        notes = [json.loads(line) for line in text.splitlines()]
        return [note for note in notes if note["what"] == what and fields.items() <= note.items()]

    def noted(self, what: str, **fields: Any) -> dict[str, Any]:
        """The first such note, waited for."""
        found: list[dict[str, Any]] = eventually(lambda: self.notes(what, **fields))
        return found[0]

    def zygote_of(self, agent: subprocess.Popen[str]) -> int:
        """The zygote of an agent, waited for."""

        def look() -> list[int]:
            commands = {one: Path(f"/proc/{one}/cmdline") for one in children(agent.pid)}
            found = [one for one, path in commands.items() if b"worker.zygote" in path.read_bytes()]
            return [one for one in found if os.getpgid(one) != one]  # a trainer leads a group of its own

        return eventually(look)[0]

    def report(self, attempt: int = 1, restart: int = 0, rank: int = 0) -> ExitReport:
        """An exit report, waited for."""
        path = self.run_dir.exit_report(attempt, restart, rank)
        report: ExitReport = eventually(lambda: read_message(path, ExitReport))
        return report

    def close(self) -> None:
        """Kill the agents; nothing that they started may outlive them."""
        left = {note["pid"] for note in self.notes("started")}
        for agent in self.agents:
            left |= set(children(agent.pid)) if agent.poll() is None else set()
            agent.kill()
            agent.wait()
        for pid in left:
            eventually(lambda pid=pid: not is_alive(pid))
