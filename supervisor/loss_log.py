"""Loss logs of many tools become rows: trainer_state.json, loss_history.json, JSON lines, CSV, text, TensorBoard.

What a file is, its contents tell.  Numbers may be bare ``NaN`` and ``Infinity`` tokens, the same as text, or null.
"""

import csv
import io
import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from supervisor.event_file import event_rows, is_event_file
from worker.contract.files import UnusableFileError

_STEP: Final = ("step", "current_steps", "global_step", "iteration", "iter", "_step")
_LOSS: Final = ("loss", "lm_loss", "train_loss", "training_loss")
_NORM: Final = ("grad_norm", "gradient_norm", "global_grad_norm")
_BESIDE: Final = {
    *_STEP, *_LOSS, *_NORM, "epoch", "learning_rate", "lr", "time", "timestamp", "total_steps", "percentage",
    "elapsed_time", "remaining_time", "wall_time",
}  # fmt: skip
_MOST_DIGITS: Final = 310
_OF_EVALUATION: Final = ("eval", "val", "valid", "test", "predict")
_ITERATION: Final = re.compile(r"iteration\s+(\d+)\s*/\s*\d+\s*\|(.*)")


@dataclass(frozen=True, slots=True)
class Row:
    """One logged step; None is a number that is not known, and NaN one that was not a number."""

    index: int
    """Among all rows of the file, from 0."""
    step: int
    loss: float | None
    grad_norm: float | None
    scaler_skipped: bool = False
    others: Mapping[str, float] = field(default_factory=dict)
    """All numbers of the row, by their columns."""


def read_loss_log(path: Path) -> tuple[int, list[Row]]:
    """How many rows a log has, and those of them that are training steps; UnusableFileError where it is none."""
    data = _bytes_of(path)
    raw, may_drop_loss = _raw_rows(path, data)
    rows = [row for index, one in enumerate(raw) if (row := _row(index, one, may_drop_loss)) is not None]
    if not rows:
        known = ", ".join(sorted({key for one in raw[:1000] for key in one})[:12])
        raise UnusableFileError(path, f"no training loss in it; it has {known or 'no rows'}")
    return len(raw), rows


def _bytes_of(path: Path) -> bytes:
    """What a regular file holds: reading a pipe or a device might never end."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UnusableFileError(path, "it is a folder; name the log in it")
        if not stat.S_ISREG(mode):
            raise UnusableFileError(path, "is no regular file; write the log into one first")
        return path.read_bytes()
    except OSError as error:
        raise UnusableFileError(path, f"cannot be read: {error.strerror}") from None


def _raw_rows(path: Path, data: bytes) -> tuple[list[dict[str, Any]], bool]:
    """The rows as the file has them, and whether a row without a loss can be a step whose loss was dropped."""
    if is_event_file(path, data[:200]):
        return [_named(one) for one in event_rows(data)], False
    if _is_wide(data):
        raise UnusableFileError(path, "is not UTF-8 but UTF-16 or UTF-32; `iconv -f UTF-16 -t UTF-8` converts it")
    text = data.decode("utf-8-sig", "replace")
    if _ITERATION.search(text):
        return [_iteration(*found.groups()) for found in _ITERATION.finditer(text)], True
    if text.lstrip()[:1] in ("{", "["):
        return [_named(one) for one in _json_rows(path, text)], True
    return _csv_rows(path, text)


def _is_wide(data: bytes) -> bool:
    """Whether each character has two bytes or more: by its mark, or as the first ones of Latin text have a zero."""
    zeros = [byte == 0 for byte in data[:4]]
    return data.startswith((b"\xff\xfe", b"\xfe\xff")) or zeros in ([True, False] * 2, [False, True] * 2)


# -- formats -----------------------------------------------------------------------------------------------------------


def _json_rows(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        document = json.loads(text, parse_int=_whole)
    except json.JSONDecodeError as error:
        if not _begins_with_a_row(text):
            where = f"line {error.lineno}, column {error.colno}"
            raise UnusableFileError(path, f"begins like JSON and is not valid: {where}: {error.msg}") from None
        return _lines_of_json(path, text)
    except RecursionError:
        raise UnusableFileError(path, "its JSON is nested too deeply") from None
    if isinstance(document, dict):
        document = document.get("log_history", [document])
    if not isinstance(document, list):
        raise UnusableFileError(path, "its log_history is no list")
    return [one for one in document if isinstance(one, dict)]


def _begins_with_a_row(text: str) -> bool:
    """Whether the first line that says something is whole JSON by itself: then each line is a row."""
    first = next((line for line in _stripped_lines(text)), "")
    try:
        json.loads(first, parse_int=_whole)
    except (json.JSONDecodeError, RecursionError):
        return False
    return True


def _stripped_lines(text: str) -> list[str]:
    return [stripped for line in text.splitlines() if (stripped := line.strip().strip("[],\x00 "))]


def _whole(digits: str) -> int | float:
    """A whole number; infinite, as a float would be, where it has more digits than any float."""
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


def _lines_of_json(path: Path, text: str) -> list[dict[str, Any]]:
    """One object a line, an array's commas and brackets around them; only the last line may be torn."""
    lines, rows = _stripped_lines(text), []
    for number, line in enumerate(lines, 1):
        try:
            one = json.loads(line, parse_int=_whole)
        except (json.JSONDecodeError, RecursionError):
            if number < len(lines):
                raise UnusableFileError(path, f"its row {number} is not JSON: {line[:60]!r}") from None
            continue
        if isinstance(one, dict):
            rows.append(one)
    return rows


def _iteration(step: str, rest: str) -> dict[str, Any]:
    """A line of Megatron's log: ``iteration 100/ 5000 | lm loss: 6.4E+00 | grad norm: 1.2 | ...``."""
    pairs = (part.rsplit(":", 1) for part in rest.split("|") if ":" in part)
    return {"step": _whole(step), **{_name(key.strip()): value.strip() for key, value in pairs}}


def _csv_rows(path: Path, text: str) -> tuple[list[dict[str, Any]], bool]:
    head = text.partition("\n")[0]
    table = csv.DictReader(io.StringIO(text, newline=""), delimiter=max(",\t;", key=head.count), strict=True)
    rows: list[dict[str, Any]] = []
    last_line = 0
    try:
        for one in table:
            rows.append(_named(one))
            last_line = table.line_num
    except csv.Error as error:
        where = f"from line {last_line + 1} on its quotes or separators are wrong ({error})"
        raise UnusableFileError(path, f"neither JSON, nor a table, nor a log that is known: {where}") from None
    return rows, all(key in _BESIDE for key in (rows[0] if rows else ()))


# -- a row -------------------------------------------------------------------------------------------------------------


def _named(raw: Mapping[Any, Any]) -> dict[str, Any]:
    return {_name(str(key)): value for key, value in raw.items()}


@cache
def _name(key: str) -> str:
    """A column's name as the Trainer writes it: ``Train/Grad Norm`` is ``grad_norm``."""
    name = re.sub(r"[\s-]+", "_", key.strip().lower())
    return re.sub(r"^(train|training|trainer)/", "", name).replace("eval/", "eval_")


def _row(index: int, raw: dict[str, Any], may_drop_loss: bool) -> Row | None:
    """The training step that a row is about; None where it is about something else."""
    loss, norm = _first(raw, _LOSS), _first(raw, _NORM)
    if "train_runtime" in raw or (loss is None and not _is_step_without_loss(raw, norm, may_drop_loss)):
        return None
    step = _first(raw, _STEP)
    return Row(
        index=index,
        step=int(step) if step is not None and math.isfinite(step) else index + 1,
        loss=loss,
        grad_norm=_told_norm(raw, loss, norm),
        scaler_skipped=_is_scalers(raw, norm),
        others={key: number for key, value in raw.items() if (number := _number(value)) is not None},
    )


def _is_step_without_loss(raw: dict[str, Any], norm: float | None, may_drop_loss: bool) -> bool:
    """Whether a row without a loss is a step whose loss was dropped because it was not a number."""
    if norm is not None and not math.isfinite(norm):
        return True
    told = {key for key, value in raw.items() if _number(value) is not None}
    if not may_drop_loss or any(key.startswith(_OF_EVALUATION) for key in told):
        return False
    return not told.isdisjoint(_STEP) and (told <= _BESIDE or "loss_scale" in told)


def _is_ours(raw: dict[str, Any]) -> bool:
    return "verdict" in raw


def _is_scalers(raw: dict[str, Any], norm: float | None) -> bool:
    """Whether the scaler of mixed precision skipped the step: our history has a loss scale, Megatron's lines count."""
    has_scale = (_number(raw.get("loss_scale")) or 0) > 1
    if _is_ours(raw):
        return has_scale and raw["verdict"] == "skipped"
    return (
        has_scale
        and (_number(raw.get("number_of_skipped_iterations")) or 0) > 0
        and (norm is None or not math.isnan(norm))
    )


def _told_norm(raw: dict[str, Any], loss: float | None, norm: float | None) -> float | None:
    """The gradient norm as far as it can be believed.

    Elsewhere a norm that is not finite beside a loss that is a number tells of mixed precision, or of a norm that was
    not computed: training goes on, and the loss is judged. We withhold such an update, so in our history it counts.
    """
    if norm is None or math.isfinite(norm) or _is_ours(raw) or loss is None or not math.isfinite(loss) or loss == 0:
        return norm
    return None


def _first(raw: dict[str, Any], names: Iterable[str]) -> float | None:
    for name in names:
        if name in raw:
            found = _number(raw[name], raw.get("nonfinite"), name)
            if found is not None:
                return found
    return None


def _number(value: Any, nonfinite: Any = None, name: str = "") -> float | None:
    """A number, also where it is text; None where there is none. Our history names what was not finite."""
    if value is None and isinstance(nonfinite, dict):
        value = nonfinite.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
