"""A run's evidence as its files hold it, and what is believed of a verdict while it is answered."""

from collections.abc import Sequence
from typing import Final

from supervisor.diagnosis import explain
from supervisor.evidence import Evidence
from supervisor.journal import Diagnosis, read_journal
from worker.contract import config as contract_config
from worker.contract.data_report import DataReport
from worker.contract.files import UnusableFileError, read_message
from worker.contract.loss_history import Record, read_history, recent_records
from worker.contract.run_dir import RunDir

_RECENT: Final = 8 * 2**20
"""Bytes of the history that are looked at for an answer, about 20,000 steps: a supervisor's job is a small one."""


def read_evidence(run_dir: RunDir) -> Evidence:
    """All that is known of a run; only reads.  UnusableFileError where its configuration, journal or history is
    spoilt; what cannot be read of its data is not known."""
    return _evidence(run_dir, read_history(run_dir.history))


def _evidence(run_dir: RunDir, records: Sequence[Record]) -> Evidence:
    return Evidence(
        config=contract_config.read(run_dir.config),
        records=records,
        events=read_journal(run_dir.journal),
        data=_data(run_dir),
    )


def _data(run_dir: RunDir) -> DataReport | None:
    try:
        return read_message(run_dir.data_report, DataReport)
    except UnusableFileError:
        return None


def believed(run_dir: RunDir, attempt: int, verdict_step: int) -> Diagnosis | None:
    """Why ``attempt`` went wrong at ``verdict_step``, by the last of the history up to there; None where that cannot
    be known.

    More may be there already: of an observed run that trains on, or of a later attempt, where a predecessor died over
    the answer.
    """
    try:
        records = recent_records(run_dir.history, _RECENT)
        ends = [at for at, one in enumerate(records, 1) if (one.attempt, one.step) == (attempt, verdict_step)]
        return explain(_evidence(run_dir, records[: ends[-1]] if ends else []), attempt)
    except (UnusableFileError, OSError):
        return None
