from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_rooms import Room


@pytest.fixture(params=[False, True], ids=["cold", "zygote"])
def room(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Room]:
    room = Room(tmp_path, zygote=request.param)
    yield room
    room.close()
