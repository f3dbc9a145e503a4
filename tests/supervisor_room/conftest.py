"""Fixtures of the supervisor's room."""

from pathlib import Path

import pytest

from tests.supervisor_room.stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A run that was just made, with its supervisor and nothing decided yet."""
    return Stage(tmp_path)
