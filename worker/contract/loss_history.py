"""loss_history.json: one record per optimizer step, a JSON document at every moment.

The file is an array with one record a line.  An append is one ``pwrite`` over the closing bracket, so it costs the
same at the first step and at the millionth.  A cut at any byte leaves every whole record readable; the writer mends
the tail when it opens.  Records of an abandoned branch stay: ``surviving`` tells which ones count.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from pydantic import Field, ValidationError

from worker.contract.byte_lines import lines_from_end, written_length
from worker.contract.claim import FencedError
from worker.contract.directive import SkippedBatches
from worker.contract.files import Message, UnusableFileError, encode, open_data, sync_folder
from worker.contract.syncs import Syncs

Verdict = Literal["ok", "skipped", "pending", "suspect", "spike", "divergence", "nonfinite"]
ACTED: frozenset[Verdict] = frozenset({"spike", "divergence", "nonfinite"})

_HEAD = b"["
_TAIL = b"\n]\n"
_SYNC_EVERY_S = 2.0
_CHUNK_BYTES = 16 << 20
"""Read at once, and longer than any record: a file of a person's own making must not fill the memory."""
_ALWAYS = frozenset({"segment", "attempt", "restart", "step", "epoch", "time", "loss", "grad_norm", "lr", "verdict"})
_PLAIN = (
    *("segment", "attempt", "restart", "step", "epoch", "time", "loss", "grad_norm", "lr", "loss_scale"),
    *("peak_memory_bytes", "tokens_per_s", "step_s", "verdict", "data", "data_wait_s"),
)
"""What the record of a step says of which there is nothing to say, in the order of its fields."""
_FINITE_OR_NAMED = ("loss", "grad_norm", "lr", "loss_scale", "eval_loss", "ema_eval_loss", "level")


class BatchPosition(Message):
    """Which global batch, counted in the epoch's own order."""

    epoch: int
    batch: int


class Probe(Message):
    """The loss on one fixed batch: as the checkpoint holds it, and as computed again now."""

    expected: float | None
    found: float | None


class PassedOver(Message):
    """A checkpoint that was not used, and why."""

    checkpoint: str
    reason: str


class SourceRows(Message):
    """Rows of one file that lie together, counted from 1; what a row is depends on the file's format."""

    file: str
    unit: Literal["line", "entry", "row"]
    first: int
    last: int


class LeftOutBatch(Message):
    """A global batch that is skipped, and the text in it: of every document that any of its samples holds.

    ``samples``, their indices, instead where nothing is known of files: a data set that is a person's own.
    """

    epoch: int
    batch: int
    rows: tuple[SourceRows, ...] = ()
    samples: tuple[int, ...] = ()


class Start(Message):
    """What a segment began with, stated and checked before its first step."""

    checkpoint: str | None = None
    digest: str | None = None
    max_steps: int
    lr: float
    lr_expected: float
    optimizer_steps: int
    rng_digests: tuple[str, ...]
    next_samples: tuple[int, ...]
    ema_digest: str | None = None
    probe: Probe
    passed_over: tuple[PassedOver, ...] = ()
    versions: dict[str, str]
    skip_batches: tuple[SkippedBatches, ...] = ()
    left_out: tuple[LeftOutBatch, ...] = ()
    """What of ``skip_batches`` is ahead of this segment and was not left out before its checkpoint was made."""
    began: float | None = None
    """When rank 0's trainer process did, in UTC seconds."""
    took_s: dict[str, float] = Field(default_factory=dict)
    """Seconds of the parts of its start, in order, from there on: imports, meet, choose, build, load, prove."""
    waited_s: float = 0.0
    """Seconds that its agent waited before that, for the imports of what forks it."""


class Record(Message):
    """One optimizer step. A null among the numbers is explained by ``nonfinite``, or the number was not known."""

    segment: int
    attempt: int
    restart: int
    step: int
    epoch: float
    time: float
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    peak_memory_bytes: int | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    nonfinite: dict[str, Literal["nan", "inf", "-inf"]] = Field(default_factory=dict)
    verdict: Verdict = "ok"
    observed: bool = False
    onset_step: int | None = None
    data: BatchPosition | None = None
    nonfinite_ranks: tuple[int, ...] | None = None
    level: float | None = None
    save_s: float | None = None
    write_s: float | None = None
    eval_loss: float | None = None
    ema_eval_loss: float | None = None
    eval_step: int | None = None
    data_wait_s: float | None = None
    warnings: tuple[str, ...] | None = None
    start: Start | None = None
    adopted: bool = False

    @property
    def is_acted(self) -> bool:
        """Whether this record ended its segment with a verdict."""
        return self.verdict in ACTED and not self.observed

    @property
    def evaluated_step(self) -> int:
        """The step whose weights ``eval_loss`` is of."""
        return self.step if self.eval_step is None else self.eval_step


def record(**fields: Any) -> Record:
    """A record whose non-finite numbers became null, each named in ``nonfinite``."""
    named = {name: _name_of(fields[name]) for name in _FINITE_OR_NAMED if _is_nonfinite(fields.get(name))}
    return Record(**fields | dict.fromkeys(named), nonfinite=named)


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _name_of(value: float) -> Literal["nan", "inf", "-inf"]:
    if math.isnan(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def read_history(path: Path) -> list[Record]:
    """All whole records in file order, abandoned ones among them; [] where there is no file yet."""
    return HistoryReader(path).new_records()


def broken_line(path: Path) -> int | None:
    """The line, from 1, where readers stop though whole records follow it; None = there is none.

    A torn end and the zeros that a crashed host leaves are none: nothing that was ever written whole follows them.
    """
    try:
        with open_data(path) as file:
            lines = _until_zeros(file).split(b"\n")
    except FileNotFoundError:
        return None
    is_no_record = [line not in (b"", b"[", b"]", b",") and _parse(line, path) is None for line in lines]
    if True not in is_no_record:
        return None
    first = is_no_record.index(True)
    has_more = any(
        line.startswith(b"{") and not bad for line, bad in zip(lines[first:], is_no_record[first:], strict=True)
    )
    return first + 1 if has_more else None


def last_record(path: Path) -> Record | None:
    """The last whole record, read from the end of the file in constant time; None where there is none."""
    try:
        with open_data(path) as file:
            size = os.fstat(file.fileno()).st_size
            return _last_of_tail(path, file.fileno(), size)
    except FileNotFoundError:
        return None


def recent_records(path: Path, length: int = 65_536) -> list[Record]:
    """The whole records within the last ``length`` bytes, at least the last one; [] where there is none."""
    try:
        with open_data(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - length))
            lines = _before_zeros(file.read(length)).split(b"\n")
    except FileNotFoundError:
        return []
    found = [record for record in (_parse(line, path) for line in lines[1:]) if record is not None]
    last = None if found else last_record(path)
    return found if last is None else [last]


def _last_of_tail(path: Path, descriptor: int, size: int) -> Record | None:
    length = 16_384
    while True:
        begin = max(0, size - length)
        lines = _before_zeros(os.pread(descriptor, size - begin, begin)).split(b"\n")
        for line in reversed(lines[1:]):  # the first line of a chunk may lack its beginning; of the file it is "["
            found = _parse(line, path)
            if found is not None:
                return found
        if begin == 0 or length > _CHUNK_BYTES:
            return None
        length *= 4


def _before_zeros(data: bytes) -> bytes:
    """What was really written: a host that crashes may leave zeros where a block should be, also midway."""
    return data.split(b"\0", 1)[0]


def _until_zeros(file: BinaryIO) -> bytes:
    """All that was really written, without reading the hole of a file that is nothing else."""
    parts: list[bytes] = []
    while (part := file.read(_CHUNK_BYTES)) and not (parts and b"\0" in parts[-1]):
        parts.append(part)
    return _before_zeros(b"".join(parts))


def _parse(line: bytes, path: Path) -> Record | None:
    """The record on a line, None where the line is torn or holds none; whole JSON that is no record is an error."""
    if not line.startswith(b"{"):
        return None
    try:
        return Record.model_validate_json(line.removesuffix(b","))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return None
        where = ".".join(str(part) for part in first["loc"])
        raise UnusableFileError(path, f"a record that this version cannot read ({where}: {first['msg']})") from None


class HistoryReader:
    """Follows a history from outside the process that writes it; opens the file anew at each look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0  # just past the last whole record that was handed out

    def new_records(self) -> list[Record]:
        """Whole records since the last look, in file order; stops before a torn line and takes it up later."""
        try:
            with open_data(self.path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    raise UnusableFileError(self.path, "became shorter than what was read before")
                found: list[Record] = []
                while new := self._take(_before_zeros(self._next(file))):
                    found += new
        except FileNotFoundError:
            return []
        return found

    def _next(self, file: BinaryIO) -> bytes:
        """What follows the last whole record, as much as is read at once."""
        file.seek(self._offset)
        return file.read(min(_CHUNK_BYTES, os.fstat(file.fileno()).st_size - self._offset))

    def _take(self, data: bytes) -> list[Record]:
        found: list[Record] = []
        position = taken = 0
        for line in data.split(b"\n"):
            end = position + len(line)
            parsed = _parse(line, self.path)
            if parsed is not None:
                found.append(parsed)
                taken = end - line.endswith(b",")
            elif line not in (b"", b"[", b"]", b","):
                break
            position = end + 1
        self._offset += taken
        return found


def surviving(records: Iterable[Record]) -> list[Record]:
    """The branch that counts: a record of step s removes all earlier ones with step >= s."""
    branch: list[Record] = []
    for one in records:
        while branch and branch[-1].step >= one.step:
            branch.pop()
        branch.append(one)
    return branch


def copy_until(path: Path, end: int, write: Callable[[bytes], object]) -> None:
    """Hand the history to ``write`` as it was, byte for byte, when ``end`` was its writer's ``end``."""
    with open(path, "rb", buffering=0) as file:
        left = end
        while left and (chunk := file.read(min(left, 1 << 20))):
            write(chunk)
            left -= len(chunk)
    write(_TAIL)


class HistoryWriter:
    """The one writer of a history; mends a torn tail when it opens.

    ``end`` is where its records end: all bytes before that stay as they are. ``last`` is the record that was the last
    when it opened.

    ``check`` is called before each append and raises FencedError when the run is somebody else's by now.
    A size that is not the one this writer left means another writer: FencedError too.
    """

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        self.path = path
        self._check = check
        check()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.end, self.last = _mend(path, self._descriptor)
        self._syncs = Syncs(self._descriptor, _SYNC_EVERY_S)
        sync_folder(path.parent)

    @property
    def next_segment(self) -> int:
        """The number of the segment that begins now."""
        return self.last.segment + 1 if self.last else 1

    def append(self, new: Record) -> None:
        """Add one record; on disk at once when it is not ``ok`` or begins a segment, else within 2 s.

        OSError also where an earlier one, made durable beside the writer, did not come to the disk.
        """
        self._append(_as_json(new), is_urgent=new.verdict != "ok" or new.start is not None)

    def append_plain(self, fields: Mapping[str, Any]) -> None:
        """The same for the record of a step of which only numbers are to be told, all of them finite and of their kind.

        It is neither built nor checked: nearly every step is one of these.
        """
        told = {name: fields[name] for name in _PLAIN if fields[name] is not None or name in _ALWAYS}
        self._append(told, is_urgent=False)

    def _append(self, told: dict[str, Any], *, is_urgent: bool) -> None:
        self._check()
        if os.fstat(self._descriptor).st_size != self.end + len(_TAIL):
            raise FencedError(f"{self.path} changed under its writer")
        separator = b"\n" if self.end == len(_HEAD) else b",\n"
        line = separator + encode(told).encode("ascii")
        self._write(line + _TAIL)
        self.end += len(line)
        if is_urgent:
            self.sync()
        else:
            self._syncs.soon()

    def _write(self, data: bytes) -> None:
        """Put ``data`` over the closing bracket; on a full disk the file stays as it was and OSError is raised."""
        try:
            if os.pwrite(self._descriptor, data, self.end) != len(data):
                raise OSError(errno.ENOSPC, "the disk took only part of a record", str(self.path))
        except OSError:
            _close_array(self._descriptor, self.end)
            raise

    def sync(self) -> None:
        """Make all records durable and visible to other hosts."""
        self._syncs.now()

    def close(self) -> None:
        """Sync and close; the writer is of no use afterwards."""
        try:
            self._syncs.end()
        finally:
            os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()


def _as_json(one: Record) -> dict[str, Any]:
    """A record's fields; what every reader asks for is always there, the rest only when it says something."""
    told = {name: value for name, value in vars(one).items() if name in _ALWAYS or not _says_nothing(value)}
    return {
        name: value.model_dump(mode="json") if isinstance(value, Message) else value for name, value in told.items()
    }


def _says_nothing(value: object) -> bool:
    return value is None or value is False or value == {}


def _mend(path: Path, descriptor: int) -> tuple[int, Record | None]:
    """Cut a torn tail off, close the array; the offset just past the last whole record, and that record.

    All bytes are looked at for zeros, and only the end is parsed: a long history opens as quickly as a short one.
    """
    head = os.pread(descriptor, 1, 0)
    if head not in (b"", _HEAD, b"\0"):
        raise UnusableFileError(path, "is not a loss history (it does not begin with '[')")
    written = written_length(descriptor)
    end, last = _last_whole(path, descriptor, written)
    if last is None and _holds_something(os.pread(descriptor, written, 0)):
        raise UnusableFileError(path, "was rewritten by another program (it has not one record a line)")
    if head != _HEAD:
        os.pwrite(descriptor, _HEAD, 0)
    if os.pread(descriptor, len(_TAIL) + 1, end) != _TAIL:
        _close_array(descriptor, end)
    os.fsync(descriptor)
    return end, last


def _close_array(descriptor: int, end: int) -> None:
    os.ftruncate(descriptor, end)
    os.pwrite(descriptor, _TAIL, end)


def _holds_something(data: bytes) -> bool:
    """Whether this is a whole JSON document that is not empty: not ours to cut."""
    try:
        return bool(json.loads(data))
    except ValueError:
        return False


def _last_whole(path: Path, descriptor: int, written: int) -> tuple[int, Record | None]:
    for begin, line in lines_from_end(descriptor, written):
        found = _parse(line, path) if begin > 0 else None
        if found is not None:
            return begin + len(line.removesuffix(b",")), found
    return len(_HEAD), None
