"""The kernel's count of processes killed for want of memory, as recorded on real systems."""

from pathlib import Path

import pytest

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
