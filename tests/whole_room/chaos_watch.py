"""What must not happen to a run of `tests.whole_room.chaos`: looked for while it goes on, and in what it leaves."""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from slurm.commands import SchedulerError
from supervisor.fold import ending_of
from supervisor.journal import Finished, RolledBack, Submitted
from tests.whole_room.house import KILL, House
from worker.contract.loss_history import surviving
from worker.contract.manifest import complete_checkpoints
from worker.contract.run_dir import RunDir

if TYPE_CHECKING:
    from tests.whole_room.chaos import Chaos

STEPS = 400
"""How many a run makes."""
GONE = ("CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "NODE_FAIL", "COMPLETING")


@dataclass
class Watch:
    """Looks at the checkpoints and the queue of a run, again and again, and keeps what is wrong with them."""

    chaos: Chaos
    wrong: list[str] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _look(self) -> None:
        newest = 0
        while not self._end.wait(0.5):
            run = self.chaos.house.run
            published = run.checkpoint_steps() if run.checkpoints.exists() else []
            whole = [manifest.step for manifest in complete_checkpoints(run)] if published else []
            if torn := set(published) - set(whole):
                self.wrong.append(f"checkpoints {sorted(torn)} are not whole")
            if whole and whole[-1] < newest:
                self.wrong.append(f"the newest checkpoint went from {newest} back to {whole[-1]}")
            newest = max([newest, *whole])
            if len(live := self._live_jobs()) > 1:
                self.wrong.append(f"jobs {live} at once")

    def _live_jobs(self) -> list[str]:
        try:
            lines = self.chaos.site.cluster.ask("squeue", "--me", "-h", "-o", "%A|%j|%T").splitlines()
        except SchedulerError:
            return []
        jobs = [line.split("|") for line in lines]
        return [f"{job} {state}" for job, name, state in jobs if name.startswith("hf-") and state not in GONE]


def wrong_with(chaos: Chaos, weights: dict[str, str]) -> list[str]:
    """What is wrong with a run that finished, by its files and by what Slurm's controller wrote down."""
    house, wrong = chaos.house, []
    if house.started[-1].returncode not in (0, -KILL):
        wrong.append(f"its supervisor left with {house.started[-1].returncode}")
    left = [path.name for path in house.run.path.rglob(".tmp-*")]
    left += [path.name for path in house.run.staging.glob("*")]
    if left:
        wrong.append(f"{left} are left")
    if not isinstance(ending_of(house.events), Finished):
        return ["it did not finish"]
    if house.those(RolledBack):
        wrong.append("it rolled back")
    steps = [record.step for record in surviving(house.records)]
    if steps != list(range(1, STEPS + 1)):
        wrong.append("the curve that survived has not every step once")
    writers = [(record.attempt, record.restart) for record in house.records]
    if writers != sorted(writers):
        wrong.append("a start wrote that was superseded")
    log = (chaos.site.cluster.folder / "log" / "slurmctld.log").read_text(errors="replace")
    submitted = [job for job in re.findall(r"_slurm_rpc_submit_batch_job: JobId=(\d+)", log) if job not in chaos.others]
    if sorted(submitted) != sorted(event.job_id for event in house.those(Submitted)):
        wrong.append(f"Slurm was given jobs {submitted}, and the journal has others")
    wrong += began_from_older(house)
    if digests(house.run) != weights:
        wrong.append("its weights are not those of the undisturbed run")
    return wrong


def began_from_older(house: House) -> list[str]:
    """Segments that began before a checkpoint that was there when the segment before them ended."""
    wrong = []
    published = complete_checkpoints(house.run)
    for last, first in pairwise(house.records):
        if first.segment != last.segment:
            newest = max((each.step for each in published if each.time <= last.time), default=0)
            if first.step <= newest:
                wrong.append(f"segment {first.segment} began at step {first.step}, and checkpoint-{newest} was there")
    return wrong


def digests(run: RunDir) -> dict[str, str]:
    """The weights of the end, and their average, by name."""
    files = sorted(run.final.rglob("*.safetensors"))
    return {str(file.relative_to(run.final)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
