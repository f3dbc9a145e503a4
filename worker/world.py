"""The ranks of one start: how they meet, and the few things that they tell each other.

Rank 0's trainer opens a store on a port of the system's choice and publishes where; nobody guesses a port, and node
names need not resolve.  With one rank there is no process group and every function here is a plain value.
"""

import fcntl
import socket
import struct
import time
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from worker.contract.claim import FencedError
from worker.contract.exit_report import Rendezvous
from worker.contract.files import publish_message, read_message
from worker.contract.run_dir import RunDir
from worker.leaving import LeavingError, RefusedError
from worker.start import Start

Value = TypeVar("Value")

_MEETING_TIMEOUT_S = 300.0
_AGAIN_TIMEOUT_S = 120.0
"""For ranks that met before, and whose imports are done: as long as an agent may need to end its last trainer."""
_SIOCGIFADDR = 0x8915


class NoWorldError(Exception):
    """Not all ranks came: one of their agents may be gone, and only a fresh job brings it back."""


def join_world(run: RunDir, start: Start, environment: MutableMapping[str, str], timeout_s: float) -> None:
    """Meet the other ranks; NoWorldError where they are expected and do not come. A collective takes ``timeout_s``.

    Without a world every task of a job would train by itself, as rank zero, into the same folder.
    """
    refuse_lonely_tasks(start, environment)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # another launcher's leftovers would be taken for a world
    if start.world == 1:
        return
    wait_s = _AGAIN_TIMEOUT_S if start.same_allocation else _MEETING_TIMEOUT_S
    try:
        store, address, port = _meet(run.rendezvous(start.attempt, start.restart), start, wait_s)
        environment.update(
            RANK=str(start.rank),
            WORLD_SIZE=str(start.world),
            LOCAL_RANK=str(start.local_rank),
            MASTER_ADDR=address,
            MASTER_PORT=str(port),
        )
        _begin_group(store, start, environment, timedelta(seconds=timeout_s))
    except (dist.DistError, TimeoutError, OSError, RuntimeError) as error:
        raise NoWorldError(f"{start.world} ranks found no world: {error}") from error


def refuse_lonely_tasks(start: Start, environment: Mapping[str, str]) -> None:
    """RefusedError where Slurm started several tasks and this one was told that it is alone."""
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    if tasks.isdigit() and int(tasks) > 1 and start.world == 1:
        raise RefusedError(
            f"Slurm started {tasks} tasks, but this trainer was told that it is the only rank; each of them would "
            "train by itself into the same folder",
            what="world",
            expected=tasks,
            found=1,
        )


def _meet(path: Path, start: Start, wait_s: float) -> tuple[TCPStore, str, int]:
    """Return when every rank is at the store; a rank whose agent is gone would never come."""
    timeout = timedelta(seconds=wait_s)
    if start.rank == 0:
        address = own_address()
        store = TCPStore(address, 0, start.world, True, timeout, wait_for_workers=False)
        path.parent.mkdir(exist_ok=True)
        found = Rendezvous(address=address, port=store.port)
        publish_message(path, found)
    else:
        found = _wait_for(lambda: read_message(path, Rendezvous), wait_s, f"rank 0 published no {path.name}")
        store = TCPStore(found.address, found.port, start.world, False, timeout)
    store.set(f"rank {start.rank}", "")
    store.wait([f"rank {rank}" for rank in range(start.world)], timeout)
    return store, found.address, found.port


def _wait_for(look: Callable[[], Value | None], wait_s: float, otherwise: str) -> Value:
    deadline = time.monotonic() + wait_s
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} within {wait_s:.0f} s")
        time.sleep(0.02)
    return found


def _begin_group(store: TCPStore, start: Start, environment: MutableMapping[str, str], timeout: timedelta) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(start.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    if interface := interface_of(own_address()):
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo would look the host's own name up
    dist.init_process_group(backend, store=store, rank=start.rank, world_size=start.world, timeout=timeout)


def own_address() -> str:
    """The address by which other hosts reach this one; the loopback's where there is no other."""
    try:
        named = socket.gethostbyname(socket.gethostname())
    except OSError:
        named = "127.0.0.1"
    if not named.startswith("127."):
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing: it only asks for the route
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has ``address``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asker.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def is_many() -> bool:
    """Whether there is more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """This process's rank."""
    return dist.get_rank() if is_many() else 0


def world_size() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if is_many() else 1


def barrier() -> None:
    """Return when every rank is here."""
    if is_many():
        dist.barrier()


def from_rank_zero(make: Callable[[], Value]) -> Value:
    """What rank 0 makes, on every rank; an ending that it raises is raised on every rank."""
    if not is_many():
        return make()
    told: list[object] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = make()
        except (LeavingError, FencedError) as error:
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if isinstance(told[1], Exception):
        raise told[1]
    return told[0]  # type: ignore[return-value]


def of_all_ranks(value: Value) -> list[Value]:
    """Every rank's value, by rank, on every rank."""
    if not is_many():
        return [value]
    values: list[Value | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def rows_of_all_ranks(row: torch.Tensor) -> torch.Tensor:
    """Every rank's row of numbers, [ranks, numbers], on the row's device; nobody waits for a device."""
    rows = torch.zeros((world_size(), len(row)), dtype=row.dtype, device=row.device)
    rows[rank()] = row
    add_up(rows)
    return rows


def add_up(numbers: torch.Tensor) -> None:
    """Make ``numbers``, in place, the sum over all ranks; nobody waits for a device."""
    if is_many():
        dist.all_reduce(numbers)
