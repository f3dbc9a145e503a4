from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_rooms import Room


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    room = Room(tmp_path)
    yield room
    room.close()
