"""The kernel's count of processes killed for want of memory, as recorded on real systems."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_rooms import Room

from worker.contract.exit_report import Outcome
from worker.memory_events import events_file, has_more_kills, own_kills, parse_kills

V2 = "low 0\nhigh 0\nmax 1893\noom 1\noom_kill 1\noom_group_kill 0\n"
V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
SLURM_V2 = "0::/system.slice/slurmstepd.scope/job_71/step_0/user/task_0\n"
SLURM_V1 = (
    "11:memory:/slurm/uid_1000/job_71/step_0/task_0\n10:cpuset:/slurm/uid_1000/job_71/step_0\n"
    "1:name=systemd:/system.slice/slurmd.service\n0::/system.slice/slurmd.service\n"
)
JOINED_V1 = "4:cpu,memory:/a:b\n"


def test_the_count_is_read() -> None:
    assert (parse_kills(V2), parse_kills(V1)) == (1, 3)
    assert parse_kills("low 0\nhigh 0\nmax 12\noom 4\n") is None  # before Linux 4.13
    assert parse_kills("") is None


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (SLURM_V2, "/r/system.slice/slurmstepd.scope/job_71/step_0/user/task_0/memory.events"),
        (SLURM_V1, "/r/memory/slurm/uid_1000/job_71/step_0/task_0/memory.oom_control"),
        (JOINED_V1, "/r/memory/a:b/memory.oom_control"),
    ],
)
def test_the_file_of_a_process_s_own_group(text: str, path: str) -> None:
    assert events_file(text, Path("/r")) == Path(path)


def test_without_a_group_nobody_counts() -> None:
    assert events_file("1:name=systemd:/\n") is None
    assert own_kills() is None or own_kills() == own_kills()


@pytest.mark.parametrize(
    ("before", "now", "is_more"), [(0, 1, True), (1, 1, False), (None, 1, False), (1, None, False), (2, 1, False)]
)
def test_only_a_count_that_grew_is_evidence(before: int | None, now: int | None, is_more: bool) -> None:
    assert has_more_kills(before, now) is is_more


LIMIT = "160M"
LIMIT_FILES = ("memory/{}/memory.limit_in_bytes", "{}/memory.max")
TAKES_TOO_MUCH = "note('ready')\nheld = bytearray(400 * 2**20)\nfor at in range(0, len(held), 4096): held[at] = 1\n"


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Path]:
    """A control group with little memory, of cgroup v1 or v2."""
    for pattern in LIMIT_FILES:
        limit = Path("/sys/fs/cgroup", pattern.format(f"hf-test-{tmp_path.name}"))
        try:
            limit.parent.mkdir()
        except OSError:
            continue
        try:
            limit.write_text(LIMIT)
        except OSError:
            limit.parent.rmdir()
            continue
        yield limit.parent
        limit.parent.rmdir()
        return
    pytest.skip("no control group with a limit on memory can be made here; it takes root")


def test_a_trainer_that_the_kernel_killed_for_its_memory_is_told_as_such(tmp_path: Path, group: Path) -> None:
    room = Room(tmp_path)
    room.trainer(1, TAKES_TOO_MUCH)
    room.direct(1)
    agent = room.start(["bash", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "agent", *room.agent_argv()])
    report = room.report()
    assert (report.outcome, report.signal) == (Outcome.OUT_OF_MEMORY, 9)
    assert report.error is not None
    assert "memory.events" in report.error.message
    room.direct(1, stop="now")
    assert agent.wait(60) == 1
    room.close()
