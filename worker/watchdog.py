"""An agent's look at the pulses: whether its trainer still makes progress."""

from worker.agent_rules import Task
from worker.contract.files import UnusableFileError, read_message
from worker.contract.pulse import Hang, Pulse, Quiet, hang_limit_s
from worker.contract.run_dir import RunDir

_LONGEST_GAP_S = 5.0


class Watchdog:
    """Counts for how long neither this rank's nor rank 0's trainer gave a sign of life.

    Rank 0's counts too: while it alone verifies or publishes a checkpoint, the others wait for it.
    """

    def __init__(self, run_dir: RunDir, task: Task, attempt: int, timeout_s: float) -> None:
        """``timeout_s`` is ``recovery.hang_timeout_s``."""
        self._own, self._first = (run_dir.pulse(attempt, task.restart, rank) for rank in (task.rank, 0))
        self._limit_s = hang_limit_s("starting", timeout_s)
        self._quiet = Quiet(_LONGEST_GAP_S)
        self._pulse: Pulse | None = None

    def look(self, now: float) -> None:
        """Read the pulses, at ``now`` of the agent's clock; one that cannot be read says nothing."""
        try:
            self._pulse, first = (read_message(path, Pulse) for path in (self._own, self._first))
        except UnusableFileError:
            return
        self._quiet.look((self._pulse, first), now)

    @property
    def is_hanging(self) -> bool:
        """Whether it is quiet for longer than the pulse allowed; before the first pulse, than a start may take."""
        return self._quiet.quiet_s > (self._pulse.limit_s if self._pulse else self._limit_s)

    def seen(self, process: str = "") -> Hang:
        """What is known of the trainer now; ``process`` is its state in the system's words."""
        pulse = self._pulse
        return Hang(
            phase=pulse.phase if pulse else "starting",
            step=pulse.step if pulse else 0,
            quiet_s=round(self._quiet.quiet_s, 1),
            limit_s=pulse.limit_s if pulse else self._limit_s,
            process=process,
        )
