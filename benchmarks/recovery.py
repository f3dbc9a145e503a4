"""What an interruption costs on a real Slurm, here and with what people use today: ``python -m benchmarks.recovery``.

A Slurm cluster of its own is started in a temporary folder. From what happened to the first optimizer step after it:

- a spike (from the acted record) and a killed trainer, two ranks in the same allocation, with the zygote and without;
  in turns with the latter a bare import of the training stack by a fresh process;
- preempted by a job of a higher tier while another node is idle (PreemptMode=REQUEUE, GraceTime=0), one rank;
- a node that dies with all that runs on it, from the moment when Slurm gives it up (NODE_FAIL), one rank;
- the same preemption of the same training with the plain Trainer, in a submitit job with ``checkpoint()`` and in an
  ``sbatch --requeue`` script.

What waits in the queue is shown apart: until the job's batch script began again. Only waiting lies beside each other:
while a start is measured, all other trainers of this script stand still. The jobs that Slurm puts back for two minutes
leave first, so far apart that their returns do not meet, and what happens in an allocation is measured meanwhile, but
nothing that could last into a return. A node is lost while the job of the last one waits for another. How far this is
stands on standard error.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.heading import heading, met
from benchmarks.requeued import SBATCH, SUBMITIT, Requeued
from benchmarks.slurm_faults import until
from benchmarks.supervised import LostNode, Recovery, Supervised
from slurm.commands import clean_environment
from slurm.local_cluster.cluster import Cluster, running

ROOT = Path(__file__).resolve().parents[1]
STACK = "import torch, transformers, accelerate, datasets, worker.train"
ZYGOTE, COLD = "zygote", "cold"
SPIKE, KILL = "spike", "killed trainer"
PREEMPTION, NODE_LOSS = "preemption, idle nodes", "node failure"
CASE_S = 20.0
"""What one in an allocation may take: so long before somebody's return from the queue none is begun."""
APART_S = 12.0
"""Between two preemptions at least, so that the returns, two minutes later, do not meet."""
NODE_AFTER_S = 5.0
"""From Slurm's verdict on a node to the loss of the next, whose job starts twenty seconds later at the earliest."""
Measured = dict[str, list[Recovery]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of each")
    parser.add_argument("--tiny", action="store_true", help="one spike and one killed trainer, with the zygote alone")
    options = parser.parse_args()
    print("\n".join(heading("recovery")), flush=True)
    names = [ZYGOTE] if options.tiny else [ZYGOTE, COLD]
    moved = 0 if options.tiny else options.repeats
    with cluster_of(names, moved) as cluster, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        site = Site(cluster, Path(folder), names, moved)
        try:
            measured, imports_s = site.measure(1 if options.tiny else options.repeats)
        finally:
            site.end()
    print(f"ended      load average {os.getloadavg()[0]:.1f}")
    print("\n".join([*table(measured, imports_s), *where_it_goes(measured)]))


@contextmanager
def cluster_of(names: Sequence[str], moved: int) -> Iterator[Cluster]:
    """A partition for each of `names`, of one node, for each run that is moved, of two, and one for all that waits."""
    sizes = dict.fromkeys(names, 1) | {f"moved{number}": 2 for number in range(moved)}
    sizes |= {"plain": 2 * moved + 1} if moved else {}
    with running(nodes=sum(sizes.values())) as cluster:
        nodes, lines = iter(cluster.nodes), []
        for name, size in sizes.items():
            own = ",".join(next(nodes) for _ in range(size))
            lines.append(f"PartitionName={name} Nodes={own} PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 State=UP")
            lines.append(f"PartitionName={name}_high Nodes={own} PriorityTier=10 PreemptMode=OFF State=UP")
        cluster.conf.write_text(cluster.conf.read_text() + "\n".join(lines) + "\n")
        cluster.ask("scontrol", "reconfigure")
        os.environ.update(clean_environment(os.environ) | environment(cluster))
        yield cluster


def environment(cluster: Cluster) -> dict[str, str]:
    """What every process of this script needs."""
    return {"SLURM_CONF": str(cluster.conf), "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


class Site:
    """All runs and jobs on one cluster; one of them computes at any time."""

    def __init__(self, cluster: Cluster, folder: Path, names: Sequence[str], moved: int) -> None:
        self.inside = [
            Supervised(name, folder / name, cluster, name, ranks=2, zygote=name == ZYGOTE, is_rehearsal=True)
            for name in names
        ]
        self.moved = [Supervised(f"moved{n}", folder / f"moved{n}", cluster, f"moved{n}") for n in range(moved)]
        kinds = [kind for _ in range(moved) for kind in (SUBMITIT, SBATCH)]
        self.plain = [Requeued(kind, folder / f"plain{n}", cluster, "plain") for n, kind in enumerate(kinds)]
        self.away: list[Requeued] = []
        self.measured: Measured = {}
        self.imports_s: list[float] = []
        self.began = time.monotonic()

    def measure(self, repeats: int) -> tuple[Measured, list[float]]:
        """Everything, `repeats` times; the imports' seconds beside it."""
        self.begin()
        to_preempt = iter(self.plain)
        for run in self.inside:
            for _ in range(repeats):
                if run.name == COLD:
                    self.make_room(to_preempt)
                    self.bare_import()
                for what in (SPIKE, KILL):
                    self.make_room(to_preempt)
                    self.note(f"{what}, {run.name}", run.spike() if what == SPIKE else run.kill())
                    run.rests()
        for job in to_preempt:
            time.sleep(max(0.0, self.leaves_at() - time.time()))
            self.preempt(job)
        while self.away:
            self.welcome()
        for one in self.moved:
            self.note(PREEMPTION, one.preempt())
            one.rests()
        self.lose_nodes()
        return self.measured, self.imports_s

    def begin(self) -> None:
        """Start all of them, beside each other: nothing of this is measured; then all of them stand still."""
        everybody: list[Requeued | Supervised] = [*self.plain, *self.inside, *self.moved]
        for each in everybody:
            each.start()
        ours = [*self.inside, *self.moved]
        for run in tuple(ours):
            run.until(lambda run=run: run not in self.training(ours), "a healthy checkpoint")  # type: ignore[misc]
        for job in self.plain:
            until(lambda job=job: job.is_held() or None, f"{job.kind} trains")  # type: ignore[misc]
        self.say("all have begun and stand still")

    @staticmethod
    def training(ours: list[Supervised]) -> list[Supervised]:
        """Those that are without a healthy checkpoint, and `ours` from now on; the others are held."""
        for run in [each for each in ours if each.is_healthy()]:
            run.hold()
            ours.remove(run)
        return ours

    def note(self, name: str, recovery: Recovery) -> None:
        self.measured.setdefault(name, []).append(recovery)
        self.say(f"{name}: {recovery.total_s:.2f} s, of which {recovery.waited_s:.2f} s in the queue")

    def say(self, what: str) -> None:
        """How far this is, by seconds since its begin."""
        print(f"{time.monotonic() - self.began:6.0f} s  {what}", file=sys.stderr, flush=True)

    def bare_import(self) -> None:
        """Have a fresh process import what a trainer needs."""
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", STACK], check=True, cwd=ROOT)
        self.imports_s.append(time.monotonic() - began)
        self.say(f"bare import: {self.imports_s[-1]:.2f} s")

    def leaves_at(self) -> float:
        """When the next may be preempted, so that its return does not meet that of the last one."""
        return self.away[-1].preempted_at + APART_S if self.away else 0.0

    def preempt(self, job: Requeued) -> None:
        self.say(f"{PREEMPTION}: {job.kind} is to leave")
        job.preempt()
        self.away.append(job)

    def make_room(self, to_preempt: Iterator[Requeued]) -> None:
        """The next of them leaves, if the last one left long enough ago; whose return is near is waited for."""
        if time.time() >= self.leaves_at() and (job := next(to_preempt, None)) is not None:
            self.preempt(job)
        while self.away and self.away[0].returns_at() - time.time() < CASE_S:
            self.welcome()

    def welcome(self) -> None:
        job = self.away.pop(0)
        self.note(f"{PREEMPTION}: {job.kind}", job.recovery())

    def lose_nodes(self) -> None:
        """One node after the other: what Slurm takes to give one up lies beside the last job's waiting."""
        last: LostNode | None = None
        for one in self.moved:
            if last is not None:
                time.sleep(max(0.0, last.given_up_at() + NODE_AFTER_S - time.time()))
            lost = one.lose_node()
            self.say(f"{one.name} lost its node")
            if last is not None:
                self.replace(last)
            last = lost
        if last is not None:
            self.replace(last)

    def replace(self, lost: LostNode) -> None:
        self.note(NODE_LOSS, lost.recovery())
        lost.run.rests()

    def end(self) -> None:
        for run in (*self.inside, *self.moved):
            run.end()


# -- tables


def table(measured: Measured, imports_s: Sequence[float]) -> list[str]:
    """Medians, with the wanted figures beside them."""
    lines = ["", f"{'seconds, medians':44}{'in all':>8}{'least':>8}{'most':>8}{'waiting':>9}{'the rest':>9}    n"]
    lines += [_row(name, found) for name, found in measured.items()]
    lines += [_import_row(imports_s)] if imports_s else []
    lines += ["", f"{'wanted, seconds':44}{'at most':>8}{'measured':>9}"]
    wanted = [(f"{what}, {ZYGOTE}", 1.0, total) for what in (SPIKE, KILL) if (total := _total(measured, what, ZYGOTE))]
    if imports_s:
        limit = statistics.median(imports_s) + 2.0
        wanted += [(f"{what}, {COLD}: import + 2 s", limit, _total(measured, what, COLD)) for what in (SPIKE, KILL)]
    if PREEMPTION in measured:
        waited = statistics.median(one.waited_s for one in measured[PREEMPTION])
        wanted.append((f"{PREEMPTION}: waiting", 10.0, waited))
    lines += [f"{name:44}{limit:8.2f}{found:9.2f}   {met(found <= limit)}" for name, limit, found in wanted]
    return [*lines, *_ratios(measured)]


def _total(measured: Measured, what: str, how: str) -> float:
    return _median_total(measured[f"{what}, {how}"])


def _row(name: str, found: Sequence[Recovery]) -> str:
    totals = [one.total_s for one in found]
    waited = statistics.median(one.waited_s for one in found)
    rest = statistics.median(one.total_s - one.waited_s for one in found)
    numbers = f"{statistics.median(totals):8.2f}{min(totals):8.2f}{max(totals):8.2f}{waited:9.2f}{rest:9.2f}"
    return f"{name:44}{numbers}{len(found):5d}"


def _import_row(imports_s: Sequence[float]) -> str:
    numbers = f"{statistics.median(imports_s):8.2f}{min(imports_s):8.2f}{max(imports_s):8.2f}"
    return f"{'bare import of the training stack':44}{numbers}{len(imports_s):23d}"


def _ratios(measured: Measured) -> list[str]:
    """How many times as long the others take after the same preemption."""
    lines = []
    for kind in (SUBMITIT, SBATCH):
        if theirs := measured.get(f"{PREEMPTION}: {kind}"):
            ratio = _median_total(theirs) / _median_total(measured[PREEMPTION])
            lines.append(f"{f'{kind} beside ours, preempted':44}{5.0:8.1f}{ratio:9.1f}   {met(ratio >= 5)}")
    return ["", f"{'wanted, ratio':44}{'at least':>8}{'measured':>9}", *lines] if lines else []


def _median_total(found: Sequence[Recovery]) -> float:
    return statistics.median(one.total_s for one in found)


def where_it_goes(measured: Mapping[str, Sequence[Recovery]]) -> list[str]:
    """Medians of the parts, by the run's own files: a table for those that have the same parts."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, found in measured.items():
        if parts := tuple(part for part, _ in found[0].parts):
            alike.setdefault(parts, []).append(name)
    lines = []
    for parts, names in alike.items():
        lines += ["", f"{'where it goes, ms, medians':28}" + "".join(f"{name:>24}" for name in names)]
        for part in parts:
            medians = [_median_part(measured[name], part) for name in names]
            lines.append(f"{part:28}" + "".join(f"{1000 * median:24.0f}" for median in medians))
    return lines


def _median_part(found: Sequence[Recovery], part: str) -> float:
    return statistics.median(dict(one.parts).get(part, 0.0) for one in found)


if __name__ == "__main__":
    main()
