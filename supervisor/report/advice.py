"""What a person may try after an event.  Pure."""

import re
import signal
from collections.abc import Iterator, Sequence
from typing import Final

from supervisor.journal import Continued, Event, GaveUp, HangSeen, RolledBack, WorkerLeft
from worker.contract.config import Config
from worker.contract.exit_report import Outcome, tells_of_disk

_LOWER: Final = "a lower training.optimizer.learning_rate, a longer training.schedule.warmup"
_ADVICE: Final = {
    "spike": f"if it comes again: {_LOWER}, or training.max_grad_norm where it is off",
    "divergence": f"if it comes again: {_LOWER}",
    "nonfinite": f"if it comes again: training.precision bf16 or fp32 instead of fp16, {_LOWER}",
    "refused": "look at the disk that holds the checkpoints; higgsfield doctor checks it",
    "hang": "look at the stacks in the attempt's folder: they say where each rank stood",
    "out_of_memory": "a smaller training.batch_size with more gradient_accumulation, or activation_checkpointing",
    "vanished": "jobs/ has the job's stderr (ID_0_log.err); a Slurm that keeps accounts may know why: `sacct -j ID`",
    "crash": "the traceback is in logs/train.log; a crash that comes again at the same step is the program or its data",
}
_KEY: Final = re.compile(rf"\b({'|'.join(Config.model_fields)})\.[a-z_]+")
_MEND: Final = "mend "
_CALLS_SCRIPT: Final = '/worker/own_script.py"'
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARY: Final = re.compile(r"^<|/site-packages/|/lib/python\d")
_AFTER_A_KILL: Final = (
    "signal 9 leaves no traceback: most often memory ran out, or a person sent it; logs/train.log has its last words, "
    "`dmesg` or `journalctl -k` on its node names what was killed for memory; a Slurm that keeps accounts knows what "
    "the job used: `sacct -j JOB -o State,MaxRSS,ReqMem`"
)
_AFTER_A_FAULT: Final = (
    "a fault in native code (a driver, a library) or bad memory, and no error of Python: logs/train.log has its last "
    "words; where it comes again on one node alone, it is the node"
)
_AFTER_A_REQUEST: Final = "somebody outside sent that signal: there is no traceback to look for"
_FAULTS: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL})
_AFTER_THE_DISK: Final = (
    "an error of the disk, its server or the network, not of the program: `df -h` and `quota -s` say whether it is full"
)
_AFTER_ANOTHER: Final = (
    "another rank ended first, and its agent may be gone with it: attempts/ has the exit reports of those that wrote "
    "one, logs/train.log the last words"
)


def advice(event: Event, folder: str = "") -> Iterator[tuple[str, str]]:
    """What to try after an event: pairs of the word ``try`` and a text; none where there is nothing to do.

    ``folder`` is the run's, for commands that a person can paste; empty for a text that names none.
    """
    match event:
        case RolledBack() if event.cause == "rollback":
            return  # a person asked for it, and knows why
        case RolledBack() if event.diagnosis is not None and event.diagnosis.next == "nothing":
            return  # a person has changed already what would be advised
        case RolledBack() if event.diagnosis is not None:
            yield "try", f"if it comes again: {event.diagnosis.next}"
        case RolledBack() if event.skip_batches:
            yield "try", "look at the data of those batches; recovery.spike.skip says when they are left out"
        case Continued() if event.cause == "crash":
            yield "try", _after_crash(event.reason) or _ADVICE["crash"]
        case RolledBack() | Continued() if event.cause in _ADVICE:
            yield "try", _ADVICE[event.cause]
        case GaveUp():
            found = after_giving_up(event)
            yield from (("try", text) for text in found)
            yield "try", _go_on(event, found, folder)
        case _:
            return


def after_giving_up(event: GaveUp) -> list[str]:
    """What is known to be worth trying before a run that gave up goes on; [] for nothing."""
    memory = _ADVICE["out_of_memory"] if event.reason.startswith("out of memory") else None
    settings = event.diagnosis.next if event.diagnosis is not None and event.diagnosis.next != "nothing" else None
    known = _after_crash(event.reason), memory, settings, _mend_script(event.error or "")
    return [text for text in known if text is not None]


def after_bad_end(end: WorkerLeft | HangSeen) -> str | None:
    """What to try after a start that ended badly; None where its log alone says more."""
    if isinstance(end, HangSeen):
        return _ADVICE["hang"]
    if end.outcome in (Outcome.OUT_OF_MEMORY, Outcome.VANISHED):
        return _ADVICE[end.outcome.value]
    traceback = end.error.traceback if end.outcome is Outcome.CRASHED and end.error is not None else ""
    return _after_crash(end.reason) or _mend_script(traceback)


def _go_on(event: GaveUp, found: Sequence[str], folder: str) -> str:
    is_lowered = bool(event.tried) or event.diagnosis is not None
    return how_to_go_on(found, folder, is_saved=event.saved_step is not None, is_lowered=is_lowered)


def how_to_go_on(found: Sequence[str], folder: str, *, is_saved: bool, is_lowered: bool) -> str:
    """The commands after which a run that gave up goes on; ``is_lowered``: a resume would keep a lower rate, or lower
    it."""
    resume = f"higgsfield resume {folder}".rstrip()
    if is_saved or any(text.startswith(_MEND) for text in found):
        keeps = is_lowered and any("learning_rate" in text for text in found)
        whole = f"higgsfield rollback {folder or 'RUN'} --to STEP --lr-scale 1 begins at the configured one"
        return f"{first(found)}, then {resume}{f', at a lowered rate; {whole}' if keeps else ''}"
    config, whole = (f"{folder}/config.yaml", folder) if folder else ("config.yaml in the run's folder", "that folder")
    anew = f"higgsfield rollback {folder or 'RUN'} --to 0 --lr-scale 1, which begins at the configured rate"
    steps = f"edit {config}, then {anew}, then {resume}" if is_lowered else f"edit {config} and {resume}"
    return f"there is no checkpoint yet, so nothing is lost by beginning anew: {steps}, or remove {whole}"


def commands(folder: str, place: str | None) -> str:
    """How a run goes on by its config.yaml, here or in a job; ``place``: its ``supervisor.place``."""
    here = f"higgsfield resume {folder} (here)"
    return here if place == "foreground" else f"higgsfield submit {folder}/config.yaml (a job), or {here}"


def _mend_script(error: str) -> str | None:
    """Where in a person's own script an error came up, by its traceback; None where it was not there."""
    _, ours, theirs = error.rpartition(_CALLS_SCRIPT)
    frames = [one for one in _FRAME.findall(theirs) if not _LIBRARY.search(one[0])] if ours else []
    return f"{_MEND}{frames[-1][0]}, line {frames[-1][1]}" if frames else None


def first(found: Sequence[str]) -> str:
    """What comes before a resume of a run that gave up, where ``found`` is worth trying."""
    if any(_KEY.search(text) for text in found):
        return "set that in the run's config.yaml"
    return "do that" if found else "mend what made it give up"


def _after_crash(reason: str) -> str | None:
    """What to do about a crash whose traceback says nothing, or that left none; None where it says enough."""
    if tells_of_disk(reason):
        return _AFTER_THE_DISK
    killed = re.search(r"killed by signal (\d+)", reason)
    if killed is None:
        return _AFTER_ANOTHER if "was ended by its agent" in reason or "ended (rank_died)" in reason else None
    number = int(killed[1])
    if number == signal.SIGKILL:
        return _AFTER_A_KILL
    return _AFTER_A_FAULT if number in _FAULTS else _AFTER_A_REQUEST
