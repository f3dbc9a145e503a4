"""What an interruption costs on a real Slurm, here and with what people use today: ``python -m benchmarks.recovery``.

A Slurm cluster of its own is started in a temporary folder. From what happened to the first optimizer step after it:

- a spike (from the acted record) and a killed trainer, two ranks in the same allocation, with the zygote and without,
  in turns; beside them a bare import of the training stack by a fresh process;
- preempted by a job of a higher tier while another node is idle (PreemptMode=REQUEUE, GraceTime=0), one rank;
- a node that dies with all that runs on it, from the moment when Slurm gives it up (NODE_FAIL), one rank;
- the same preemption of the same training with the plain Trainer, in a submitit job with ``checkpoint()`` and in an
  ``sbatch --requeue`` script.

What waits in the queue is shown apart: until the job's batch script began again. Only waiting lies beside each other;
while a start is measured, all other trainers of this script stand still.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.heading import heading, met
from benchmarks.requeued import SBATCH, SUBMITIT, Requeued
from benchmarks.slurm_faults import until
from benchmarks.supervised import Recovery, Supervised
from slurm.commands import clean_environment
from slurm.local_cluster.cluster import Cluster, running

ROOT = Path(__file__).resolve().parents[1]
STACK = "import torch, transformers, accelerate, datasets, worker.train"
ZYGOTE, COLD = "zygote", "cold"
SPIKE, KILL = "spike", "killed trainer"
PREEMPTION, NODE_LOSS = "preemption, idle nodes", "node failure"
START_S = 25.0
"""What a cold start may take: so long before somebody's return from the queue nothing else is begun."""
APART_S = 14.0
"""Between two preemptions, so that the returns, two minutes later, do not meet."""
NODES_APART_S = 22.0
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

    def measure(self, repeats: int) -> tuple[Measured, list[float]]:
        """Everything, `repeats` times; the imports' seconds beside it."""
        self.begin()
        to_preempt = iter(self.plain)
        for _ in range(repeats):
            for run, what in [(run, what) for run in self.inside for what in (SPIKE, KILL)]:
                self.preempt_next(to_preempt)
                self.make_room()
                self.note(f"{what}, {run.name}", run.spike() if what == SPIKE else run.kill())
                run.settles()
            if self.plain:
                self.make_room()
                self.imports_s.append(bare_import())
        for job in to_preempt:
            self.preempt(job)
        while self.away:
            self.welcome()
        for one in self.moved:
            self.note(PREEMPTION, one.preempt())
            one.settles()
        self.lose_nodes()
        return self.measured, self.imports_s

    def begin(self) -> None:
        """Start all of them, beside each other: nothing of this is measured; then all of them stand still."""
        everybody: list[Requeued | Supervised] = [*self.plain, *self.inside, *self.moved]
        for each in everybody:
            each.start()
        for run in (*self.inside, *self.moved):
            run.until(lambda run=run: bool(run.new_records()) or None, "a first step")  # type: ignore[misc]
            run.settles()
        for job in self.plain:
            until(lambda job=job: job.is_held() or None, f"{job.kind} trains")  # type: ignore[misc]

    def note(self, name: str, recovery: Recovery) -> None:
        self.measured.setdefault(name, []).append(recovery)
        print(f"    {name:34}{recovery.total_s:8.2f} s", file=sys.stderr, flush=True)

    def preempt_next(self, jobs: Iterator[Requeued]) -> None:
        """The next of them, if the last one was preempted long enough ago."""
        if self.away and time.time() - self.away[-1].preempted_at < APART_S:
            return
        for job in jobs:
            self.preempt(job)
            return

    def preempt(self, job: Requeued) -> None:
        if self.away:
            time.sleep(max(0.0, self.away[-1].preempted_at + APART_S - time.time()))
        job.preempt()
        self.away.append(job)

    def make_room(self) -> None:
        """Where somebody's return is near, wait for it."""
        while self.away and self.away[0].returns_at() - time.time() < START_S:
            self.welcome()

    def welcome(self) -> None:
        job = self.away.pop(0)
        self.note(f"{PREEMPTION}: {job.kind}", job.recovery())

    def lose_nodes(self) -> None:
        """One node after the other: the half minutes that Slurm takes to give one up lie beside each other."""
        awaited: list[Callable[[], Recovery]] = []
        for one in self.moved:
            if awaited:
                time.sleep(NODES_APART_S)
            awaited.append(one.lose_node())
        for one, recovery in zip(self.moved, awaited, strict=True):
            self.note(NODE_LOSS, recovery())
            one.settles()

    def end(self) -> None:
        for run in (*self.inside, *self.moved):
            run.end()


def bare_import() -> float:
    """Seconds that a fresh process needs to import what a trainer needs."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", STACK], check=True, cwd=ROOT)
    return time.monotonic() - began


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
