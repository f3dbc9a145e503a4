"""What is asked of Slurm, and where the supervisor lives; one documented field a setting."""

import re
from typing import Annotated, Literal

from pydantic import Field

from worker.contract.section import NotNegative, Positive, Section


class Fallback(Section):
    """Where a job goes that did not start where it was."""

    partition: str | None = None
    qos: str | None = None
    after_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds in the queue before it goes there."""


_GPUS_IN_GRES = re.compile(r"(?:^|,)gpu(?::[^,:]*[^,:\d][^,:]*)?(?::(\d+))?(?:,|$)")


class ClusterConfig(Section):
    """Where the worker runs; what is null is left to the site's defaults."""

    kind: Literal["auto", "slurm", "local"] = "auto"
    """auto = Slurm where sbatch is found and has a configuration, else this machine."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gres: str | None = None
    mem: str | None = None
    """Memory a node, as in Slurm: ``64G``."""
    reservation: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    nodes: Positive = 1
    tasks_per_node: Positive | None = None
    """Ranks a node; null = one a GPU, or one."""
    gpus_per_node: NotNegative = 0
    cpus_per_task: Positive = 1
    time_limit: str = "1-00:00:00"
    """As in Slurm: ``days-hours:minutes:seconds``."""
    min_time: str | None = None
    """The shortest time limit worth starting with before a maintenance, three times its warning at least; null = wait
    until it is over."""
    fallback: Annotated[tuple[Fallback, ...], Field(strict=False)] = ()
    """Partitions and QOS to try, one after the other, for a job that does not start."""
    setup: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Shell lines before the worker starts: module load, conda activate."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the worker."""
    python: str | None = None
    """Interpreter on the nodes; null = the one that submits."""
    srun: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Further srun arguments."""
    container: str | None = None
    """Words before the interpreter, such as ``apptainer exec --nv image.sif``; pyxis takes
    ``--container-image=image.sqsh`` in ``srun``."""
    offline: bool = False
    """Nodes have no way out: what the hub has is fetched where the run is made, and the worker asks it for nothing."""
    mail_user: str | None = None
    """Whom Slurm itself mails when a job of the run ends, fails or is put back into the queue."""
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    """Any other sbatch option, long name to value; true for an option without one."""

    @property
    def tasks_on_each_node(self) -> int:
        """Ranks a node."""
        return self.tasks_per_node or max(1, self.gpus_per_node)

    @property
    def gpus(self) -> int:
        """GPUs in all, as far as ``gpus_per_node`` or ``gres`` say."""
        in_gres = _GPUS_IN_GRES.search(self.gres or "")
        return self.nodes * (self.gpus_per_node or (int(in_gres[1] or 1) if in_gres else 0))

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.tasks_on_each_node


class SupervisorConfig(Section):
    """Where the supervisor runs after ``submit``."""

    place: Literal["job", "embedded", "foreground"] = "job"
    """job = a small Slurm job of its own; embedded = inside the worker's job, where a person may have only one; both a
    detached process without Slurm; foreground = ``higgsfield run`` only."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str | None = None
