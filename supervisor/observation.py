"""What one look at a run shows: its job, new records, complete checkpoints, exit reports, a person's request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from slurm.job import JobStatus, Node, Reservation
from supervisor.batches import Stretch
from supervisor.requests import Request
from worker.contract.claim import Claim
from worker.contract.exit_report import ExitReport
from worker.contract.loss_history import Record
from worker.contract.manifest import Manifest
from worker.contract.pulse import Pulse

STOP_FILE: Final = "a STOP file"
"""Who asked, where nobody gave a name."""


@dataclass(frozen=True)
class Observation:
    """One look at a run. What could not be known is told apart from what is not there."""

    now: float
    job: JobStatus | None = None
    """The run's job; None = the scheduler does not know it, or there is none, or ``look_error`` says why not."""
    look_error: str | None = None
    """Why the scheduler could not be asked; None = it answered."""
    claim: Claim | None = None
    reports: Mapping[int, ExitReport] = field(default_factory=dict)
    """Exit reports of the attempt's newest start, by rank."""
    started_segments: Sequence[Record] = ()
    """First records of segments that this process has not seen before."""
    branch: Sequence[Record] = ()
    """Of the surviving branch: every record that is not ``ok``, and the last one."""
    trail: Sequence[Stretch] = ()
    """Which global batches the steps of the surviving branch were trained on."""
    manifests: Sequence[Manifest] = ()
    """Complete checkpoints, ascending by step."""
    unusable: Mapping[int, str] = field(default_factory=dict)
    """Why each of the others may not be begun from, ascending by step."""
    request: Request | None = None
    has_stop_file: bool = False
    """Whether a person has left a file STOP in the run's folder."""
    nodes: Mapping[str, Node] = field(default_factory=dict)
    """The job's nodes, and those of its last start while it waits for the next; what is absent is not known."""
    reservations: Sequence[Reservation] = ()
    save_s: float | None = None
    """The longest of the last saves with the step before it; None before the first."""
    pulses: Mapping[int, Pulse] = field(default_factory=dict)
    """The last sign of life in the attempt's newest start, of rank 0 and of those that saw numbers not finite."""
    quiet_s: float = 0.0
    """For how long rank 0's was the same while the job was seen to run and nobody had reported."""

    @property
    def steps(self) -> list[int]:
        """Of the complete checkpoints, ascending."""
        return [each.step for each in self.manifests]

    @property
    def last(self) -> Record | None:
        """The newest record, None before the first step."""
        return self.branch[-1] if self.branch else None
