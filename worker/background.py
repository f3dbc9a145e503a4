"""A save beside the training: its large parts are copied into kept memory, and a thread writes the copies.

What only an update changes is copied by that thread too, while training goes on to the next one.

What the copies take is learned in a plain save, the first of each start; a thread makes ready so much memory, touched,
so that a copy waits for no page. Where there is too little of it, saves stay plain.
"""

import copy
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from worker.checkpoints import digested_save
from worker.copying import Copying
from worker.ema import Ema
from worker.free_memory import available_bytes
from worker.wrap import replaced

_LARGE_BYTES = 1 << 16
"""What is smaller is written at once: the page cache takes it as quickly as a copy would be made."""
_SHARE = 0.75
"""Of the memory that is free, what the copies may take."""


class KeptMemory:
    """Main memory for copies of tensors, kept from one save to the next."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)
        self._taken: list[torch.Tensor] = []
        self._copying = Copying()
        self._waiting: list[tuple[torch.Tensor, torch.UntypedStorage]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        """Of what waits: torch counts the changes of each tensor."""
        self._none_waits = threading.Event()
        self._none_waits.set()
        self.is_ready = False

    def reserve(self, sizes: Counter[int], available: int | None) -> str | None:
        """Make ready a buffer of each size; why not, where too little memory is ``available`` (None: unknown)."""
        missing = sizes - Counter({size: len(buffers) for size, buffers in self._free.items()})
        needed = sum(size * number for size, number in missing.items())
        if available is not None and needed > _SHARE * available:
            gib = 2**30
            return f"copies for a save take {needed / gib:.3g} GiB, and {available / gib:.3g} GiB are free"
        for size, number in missing.items():
            self._free[size] += [self._buffer(size).zero_() for _ in range(number)]
        self.is_ready = True
        return None

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def copies(self, tensors: Sequence[torch.Tensor], lasting: Collection[int] = ()) -> list[torch.Tensor]:
        """The same tensors in kept memory, until ``give_back``; those that share memory share it there too.

        They are not to be changed, nor their copies to be read, before ``finish``. Those in memory that is ``lasting``
        (see ``id_of``) wait to be copied by ``copy_waiting``, and may not be changed before that.
        """
        storages = {id_of(one): one.untyped_storage() for one in tensors}
        places = {key: self._take(storage.nbytes()) for key, storage in storages.items()}
        self._taken += places.values()
        now = storages.keys() - lasting
        self._copying.begin([places[key] for key in now], [bytes_of(storages[key]) for key in now])
        self._waiting += [(places[key], storage) for key, storage in storages.items() if key in lasting]
        self._versions += [(one, one._version) for one in tensors if id_of(one) in lasting]
        if self._waiting:
            self._none_waits.clear()
        return [placed_like(one, places[id_of(one)].untyped_storage()) for one in tensors]

    def copy_waiting(self) -> None:
        """Copy what waits, in any thread; RuntimeError where it was changed meanwhile."""
        waiting, versions, was_changed = self._waiting, self._versions, False
        if waiting:
            copying = Copying()
            copying.begin([place for place, _ in waiting], [bytes_of(source) for _, source in waiting])
            copying.finish()
            was_changed = any(one._version != version for one, version in versions)
        self._let_go()
        if was_changed:
            raise RuntimeError("the optimizer's state was changed between the save and the next update")

    def _let_go(self) -> None:
        self._waiting, self._versions = [], []
        self._none_waits.set()

    def wait_until_copied(self) -> None:
        """Return when nothing waits to be copied."""
        self._none_waits.wait()

    def finish(self) -> None:
        """Return when all copies are made, but for those that wait."""
        self._copying.finish()

    def given(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors like these in kept memory, for good; what they hold is no matter."""
        return [placed_like(one, self._take(one.untyped_storage().nbytes()).untyped_storage()) for one in tensors]

    def _take(self, size: int) -> torch.Tensor:
        buffers = self._free[size]
        return buffers.pop() if buffers else self._buffer(size)

    def give_back(self) -> None:
        """Nobody needs the copies any longer."""
        for buffer in self._taken:
            self._free[buffer.numel()].append(buffer)
        self._taken.clear()
        self._let_go()


def id_of(one: torch.Tensor) -> int:
    """Names the memory that a tensor lies in, as long as the tensor lives."""
    return int(one.untyped_storage()._cdata)


def placed_like(one: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """The tensor that lies in ``storage`` as ``one`` does in its own."""
    return torch.empty(0, dtype=one.dtype).set_(storage, one.storage_offset(), one.shape, one.stride())


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of a storage as bytes, [its size], without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class LargeParts:
    """What of one save is large: how much memory its copies take and, where it is copied, what is left to write."""

    def __init__(
        self, memory: KeptMemory, digests: dict[Path, str], is_copied: bool, lasting: Collection[int] = ()
    ) -> None:
        """``digests`` receives those that are made while writing; ``lasting`` memory is copied later."""
        self.sizes = Counter[int]()
        self.is_copied = is_copied
        self._memory, self._digests, self._lasting = memory, digests, lasting
        self._left: list[Callable[[], None]] = []
        self._copied: dict[int, torch.UntypedStorage] = {}

    def finish(self) -> None:
        """Return when the copies are made; until then nobody may change what they are of.

        Memory that is lasting waits for ``copy_waiting``.
        """
        self._memory.finish()

    def average_now(self, average: Ema) -> Ema:
        """The average as it is now, only to be saved: itself where it is written at once."""
        if self.is_copied and average.is_in_main_memory:
            return average.lent(self._memory.given)
        return average.as_now(self.copies)

    def write(self) -> None:
        """Write what was copied."""
        for write in self._left:
            write()

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors, or their copies where they are to be written later."""
        self.sizes += Counter({id_of(one): one.untyped_storage().nbytes() for one in tensors}.values())
        if not self.is_copied:
            return list(tensors)
        copies = self._memory.copies(tensors, self._lasting)
        self._copied |= {id_of(one): kept.untyped_storage() for one, kept in zip(tensors, copies, strict=True)}
        return copies

    def parted(self, tensors: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors that were not copied, or that a device looks through at once; and the copies of the others."""
        rest, copies = list[torch.Tensor](), list[torch.Tensor]()
        for one in tensors:
            kept = self._copied.get(id_of(one)) if one.device.type == "cpu" else None
            if kept is None:
                rest.append(one)
            else:
                copies.append(placed_like(one, kept))
        return rest, copies

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within, what goes to files through torch or safetensors is noted, and what is large is written later."""
        with ExitStack() as stack:
            stack.enter_context(replaced(torch, "save", partial(self._torch_save, torch.save)))
            for module, name in _safetensors_writers():
                stack.enter_context(replaced(module, name, partial(self._save_file, getattr(module, name))))
            yield

    def _torch_save(self, original: Callable[..., None], value: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [one for one in tree_leaves(value) if type(one) is torch.Tensor and one.layout is torch.strided]
        if not isinstance(f, (str, Path)) or not _are_large(tensors):
            return original(value, f, *args, **kwargs)
        copies = self.copies(tensors)
        if not self.is_copied:
            return original(value, f, *args, **kwargs)
        known = {id(one): kept for one, kept in zip(tensors, copies, strict=True)}
        as_now = copy.deepcopy(value, known)
        self._left.append(partial(self._write_digested, as_now, Path(f), *args, **kwargs))
        return None

    def _write_digested(self, value: Any, path: Path, *args: Any, **kwargs: Any) -> None:
        self._digests[path] = digested_save(value, path, *args, **kwargs)

    def _save_file(
        self, original: Callable[..., None], tensors: dict[str, torch.Tensor], filename: Any, *args: Any, **kwargs: Any
    ) -> None:
        if not _are_large(tensors.values()):
            return original(tensors, filename, *args, **kwargs)
        copies = self.copies(list(tensors.values()))
        write = partial(original, dict(zip(tensors, copies, strict=True)), filename, *args, **kwargs)
        if not self.is_copied:
            return write()
        self._left.append(write)
        return None


def _are_large(tensors: Iterable[torch.Tensor]) -> bool:
    return sum(one.nbytes for one in tensors) >= _LARGE_BYTES


def _safetensors_writers() -> list[tuple[Any, str]]:
    """Where the writer of safetensors is called by; who imported it by another name writes at once, as ever."""
    names = {
        "safetensors.torch": "save_file",
        "transformers.modeling_utils": "safe_save_file",
        "peft.peft_model": "safe_save_file",
    }
    return [(sys.modules[module], name) for module, name in names.items() if module in sys.modules]


class Background:
    """One piece of work at a time beside the training; what it raises is raised by ``wait`` or ``result``."""

    def __init__(self) -> None:
        self.memory = KeptMemory()
        self._shortage: str | None = None
        self._has_told = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._result: float | None = None

    def reserve(self, sizes: Counter[int]) -> None:
        """Make memory for copies ready, beside the training."""

        def work() -> None:
            self._shortage = self.memory.reserve(sizes, available_bytes())

        self.start(work)

    def shortage(self) -> str | None:
        """Why there is no memory for copies, once."""
        told = None if self._has_told else self._shortage
        self._has_told = self._has_told or told is not None
        return told

    def start(self, work: Callable[[], float | None]) -> None:
        """Begin, once the work before is done."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], float | None]) -> None:
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 (the main thread raises it)
            self._failure = error

    @property
    def is_at_work(self) -> bool:
        """Whether something is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Return when nothing is under way any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def result(self) -> float | None:
        """What the last work returned, once."""
        self._raise()
        result, self._result = self._result, None
        return result

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
