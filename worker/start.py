"""What an agent tells the trainer that it starts: one argument, as JSON."""

from pydantic import Field

from worker.contract.files import Message


class Start(Message):
    """One start of one rank's trainer: ``python -m worker.train RUN_DIR START``."""

    attempt: int = Field(ge=1)
    restart: int = Field(ge=0)
    job_id: str
    name: str
    rank: int = Field(ge=0)
    world: int = Field(ge=1)
    local_rank: int = Field(ge=0)
    same_allocation: bool = False
    """Whether a trainer of an older attempt ran in this very process tree: files were just written here, so that
    their sizes prove enough."""
    waited_s: float = 0.0
    """Seconds that its agent waited for imports before it could be forked."""
