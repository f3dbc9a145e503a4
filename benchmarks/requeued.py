"""What people use today, as benchmarks.recovery preempts it: the plain Trainer in a job that Slurm puts back.

``python -m benchmarks.requeued FOLDER`` is such a job's program: it trains what FOLDER/config.yaml says from its newest
checkpoint, writes when each step was done into FOLDER/steps, and stands still after a few steps, until it is preempted.
"""

import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.slurm_faults import logged, note_start, occupy, starts, until
from benchmarks.supervised import EVERY, Recovery, recipe
from slurm.local_cluster.cluster import Cluster
from worker.contract import config as configuration
from worker.contract.run_dir import RunDir

SUBMITIT, SBATCH = "submitit checkpoint()", "sbatch --requeue"
HELD_AFTER = EVERY + 2
REQUEUE_WAIT_S = 119.0
"""A little less than a job that was put back waits for its begin time."""


def main() -> None:
    train(Path(sys.argv[1]))


def prepare(folder: Path) -> None:
    """Make the folder of such a job, with its text and its config."""
    folder.mkdir(parents=True)
    text = folder / "text.txt"
    text.write_text("".join(f"line {number}: {number * number}\n" for number in range(20_000)))
    told = configuration.Config.model_validate(recipe(text) | {"run": {"name": "plain"}})
    configuration.write(folder / "config.yaml", told)


def train(folder: Path) -> None:
    """Train from the newest checkpoint; a later start ends after its second step."""
    from transformers.trainer_utils import get_last_checkpoint

    from worker.setup import build_trainer

    trainer, _ = build_trainer(RunDir(folder), configuration.read(folder / "config.yaml"), folder)
    trainer.add_callback(_steps_callback(folder))
    checkpoints = Path(str(trainer.args.output_dir))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None)


def _steps_callback(folder: Path) -> Any:
    from transformers import TrainerCallback

    is_first = not (folder / "steps").exists()

    class Steps(TrainerCallback):
        """Writes down each step; the first start stands still until it is preempted."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            with open(folder / "steps", "a", encoding="utf-8") as file:
                file.write(f"{time.time()} {state.global_step}\n")
            while is_first and state.global_step >= HELD_AFTER:
                time.sleep(0.02)
            control.should_training_stop = not is_first and state.global_step >= EVERY + 2
            return control

    return Steps()


class Training:
    """What submitit's users submit: a callable that knows how to go on."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self) -> None:
        train(Path(self.folder))

    def checkpoint(self) -> Any:
        """Called by submitit when the job is told to leave: it is put back with this."""
        import submitit

        return submitit.helpers.DelayedSubmission(Training(self.folder))


@dataclass
class Requeued:
    """One job of either kind, preempted once."""

    kind: str
    folder: Path
    cluster: Cluster
    partition: str
    preempted_at: float = 0.0

    def start(self) -> None:
        """Submit it."""
        prepare(self.folder)
        self.job_id = self._submit() if self.kind == SUBMITIT else self._sbatch()

    def _submit(self) -> str:
        import submitit

        executor = submitit.SlurmExecutor(self.folder / "jobs")
        executor.update_parameters(
            time=60,
            setup=[note_start(self.folder)],
            additional_parameters={"partition": self.partition, "exclusive": True},
        )
        return str(executor.submit(Training(str(self.folder))).job_id)

    def _sbatch(self) -> str:
        command = shlex.join([sys.executable, "-m", "benchmarks.requeued", str(self.folder)])
        script = self.folder / "job.sh"
        script.write_text(f"#!/bin/bash\n{note_start(self.folder)}\nsrun {command}\n")
        argv = ["sbatch", "--parsable", "--requeue", "--exclusive", "--time=60", f"--partition={self.partition}"]
        return self.cluster.ask(*argv, f"--output={self.folder / 'job.log'}", "--open-mode=append", str(script)).strip()

    def steps(self) -> list[float]:
        """When each step was done."""
        file = self.folder / "steps"
        return [float(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []

    def is_held(self) -> bool:
        return len(self.steps()) >= HELD_AFTER

    def preempt(self) -> None:
        """A job above it takes its node for three seconds.

        submitit hears of it as it would where Slurm sends the user's signal ahead (PreemptParameters=send_user_signal),
        its best case: without, it ignores the SIGTERM, and is killed.
        """
        node = self.cluster.ask("squeue", "-h", "-j", self.job_id, "-o", "%N").strip()
        asked = time.time()
        if self.kind == SUBMITIT:
            self.cluster.ask("scancel", "--signal=USR2", self.job_id)
            self.preempted_at = asked
            self._until_it_waits()
            occupy(self.cluster, self.partition, node)
        else:
            occupy(self.cluster, self.partition, node)
            self.preempted_at = logged(self.cluster, "[Pp]reempted JobId", asked)
            self._until_it_waits()

    def returns_at(self) -> float:
        """When it may start again at the earliest, by Slurm's default for jobs that were put back."""
        return self.preempted_at + REQUEUE_WAIT_S

    def _until_it_waits(self) -> None:
        until(lambda: self._state() == "PENDING" or None, f"job {self.job_id} waits in the queue")

    def _state(self) -> str:
        return self.cluster.ask("squeue", "-h", "-t", "all", "-j", self.job_id, "-o", "%T").strip()

    def recovery(self) -> Recovery:
        """Wait for the first step after the preemption."""
        step = until(lambda: next((at for at in self.steps() if at > self.preempted_at + 1.0), None), "a step again")
        waited_s = starts(self.folder)[-1] - self.preempted_at
        return Recovery(step - self.preempted_at, waited_s)


if __name__ == "__main__":
    main()
