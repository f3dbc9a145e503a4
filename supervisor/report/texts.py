"""Events as a person reads them.  Pure.

Every event has a line, by its own ``reason`` where nothing better is said here, so that a new kind of event is never
left out of the log.
"""

import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from supervisor.batches import left_out
from supervisor.config_history import named
from supervisor.how_it_left import cause_of
from supervisor.journal import (
    AttemptDecided,
    CancelIntended,
    ChangeIntended,
    Continued,
    Diagnosis,
    Event,
    Finished,
    GaveUp,
    HangSeen,
    JobSeen,
    LookRecovered,
    NodeExcluded,
    Plan,
    Preempted,
    ProgressMade,
    RolledBack,
    SegmentStarted,
    Stopped,
    SubmitIntended,
    SupervisorStarted,
    WorkerLeft,
    WouldHaveDone,
)
from supervisor.lease import BEAT_EVERY_S
from supervisor.report.advice import advice
from supervisor.report.figures import (
    FAR_S,
    clipped,
    duration,
    local_clock,
    local_time,
    node_hours,
    printable,
    rate_text,
)
from supervisor.report.interruptions import Interruption
from worker.contract.exit_report import Outcome
from worker.contract.loss_history import BatchPosition, LeftOutBatch, Start
from worker.contract.words import count

_QUIET = (AttemptDecided, SubmitIntended, CancelIntended, ChangeIntended, ProgressMade)
"""Intents, whose outcomes say the same a moment later, and progress, which status shows."""
_TOLD_ABOVE: Final = "as above"
"""Of what a listing has given already."""
_TOLD_ONCE: Final = ("try", "left out")
_OBSERVED: Final = "not done, for recovery.mode is observe: "


_BY_A_PERSON: Final = {"first": "begun", "resumed": "resumed"}
"""Of causes of an attempt, the word."""
_SAYS_NO_MORE: Final = {
    "first": "the run begins",
    "resumed": "a person asked for the run to go on",
    "time_limit": "the time limit came",
}
"""Reasons of attempts that say no more than their cause."""
_WORDS: Final = {
    "RunCreated": "created",
    "SupervisorStarted": "supervisor",
    "RolledBack": "ROLLED BACK",
    "Submitted": "submitted",
    "SubmitFailed": "not submitted",
    "StartMoved": "start moved",
    "JobSeen": "job",
    "JobChanged": "job changed",
    "SegmentStarted": "training",
    "VerdictSeen": "VERDICT",
    "WorkerLeft": "worker",
    "HangSeen": "HANG",
    "NodeStruck": "node",
    "NodeExcluded": "node excluded",
    "DrainSeen": "drain",
    "WouldHaveDone": "OBSERVED",
    "LookFailed": "no answer",
    "LookRecovered": "answers again",
    "StopRequested": "stop asked",
    "Pinned": "pinned",
    "RequestRefused": "refused",
    "SaveAnswered": "saved",
    "ResumeRequested": "resume asked",
    "ConfigEdited": "edited",
    "RollbackRequested": "rollback asked",
    "Finished": "FINISHED",
    "Stopped": "STOPPED",
    "GaveUp": "GAVE UP",
}
_COMPARED: Final = 60
"""How many characters of an error tell it from others."""
_MOST_LINES: Final = 12
"""Of an error that a run gave up over."""
_LONGEST_ERROR: Final = 240
"""Characters of an error in the log; all of it is in the exit report and in logs/train.log."""
_MOST_BATCHES: Final = 6
"""How many batches that are left out are told one by one."""
_ROUNDED: Final = ((9.95, 0.1), (600.0, 1.0), (math.inf, 60.0))
"""Up to so many seconds, a duration is told in such units."""
_MOST_NAMED: Final = 16
"""How many lines or samples of one of them."""
WORD_WIDTH: Final = 15
_LABEL_WIDTH: Final = 9
WIDTH: Final = 110
"""Columns of a log that goes to no terminal."""

Detail = tuple[str, str]
"""A label and what it says; an empty label for a plain further line."""


@dataclass
class Listing:
    """Events below each other: what they have told so far, which is not told again."""

    folder: str = ""
    """The run's, for paths that a person can paste; empty where nobody has to look for it."""
    told: set[str] = field(default_factory=set)
    """Sentences of events, advice, and what the batches are that are left out."""
    answers: set[str] = field(default_factory=set)
    """Why each attempt was begun: a run that gives up need not say again what it tried."""


def word_of(event: Event) -> str:
    """One or two words for the kind of an event; its own name in small letters where nothing better is known."""
    cause = getattr(event, "cause", None)
    if cause in _BY_A_PERSON:
        return _BY_A_PERSON[cause]
    if event.event == "NodeExcluded" and getattr(event, "until", None) is None:
        return "node allowed"
    return _WORDS.get(event.event) or re.sub(r"(?<!^)(?=[A-Z])", " ", event.event).lower()


def step_of(event: Event) -> int | None:
    """The optimizer step that an event is about."""
    for name in ("verdict_step", "step", "final_step", "saved_step", "healthy_step"):
        step = getattr(event, name, None)
        if isinstance(step, int):
            return step
    return event.rollback.verdict_step if isinstance(event, WouldHaveDone) and event.rollback is not None else None


def is_told(event: Event) -> bool:
    """Whether an event has a line of its own; what a verdict, a hang or the end of the run tells is told there."""
    return not isinstance(event, _QUIET) and not (isinstance(event, WorkerLeft) and _is_told_elsewhere(event))


def _is_told_elsewhere(left: WorkerLeft) -> bool:
    is_hang = left.outcome is Outcome.ENDED and left.error is not None and left.error.what == "hang"
    return is_hang or left.outcome in (Outcome.DONE, Outcome.VERDICT)


def event_lines(event: Event, listing: Listing) -> list[str]:
    """An event as the live screen shows it: [] for what another line says anyway."""
    return lay_out(event, f"{local_time(event.time)}  ", None, WIDTH, listing) if is_told(event) else []


def lay_out(event: Event, stamp: str, cost: Interruption | None, width: int, listing: Listing) -> list[str]:
    """An event below each other: ``stamp``, its word, its text, and its labelled details, ``width`` columns wide."""
    lines = _wrap(f"{stamp}{word_of(event):<{WORD_WIDTH}}", " " * (len(stamp) + WORD_WIDTH), text_of(event), width)
    for label, text in details_once(event, cost, listing):
        lines += detail_lines(len(stamp), label, text, width)
    return lines


def detail_lines(indent: int, label: str, text: str, width: int) -> list[str]:
    """A labelled detail of an event whose stamp is ``indent`` wide."""
    head = " " * (indent + 2) + (f"{label:<{_LABEL_WIDTH}} " if label else " " * (_LABEL_WIDTH + 1))
    return _wrap(head, " " * len(head), text, width)


def _wrap(head: str, margin: str, text: str, width: int) -> list[str]:
    room = max(24, width - len(margin))
    first, *more = textwrap.wrap(printable(text), room, break_on_hyphens=False, break_long_words=False) or [""]
    return [f"{head}{first}".rstrip(), *(margin + line for line in more)]


# -- what each event says ----------------------------------------------------------------------------------------------


def _expected(job: JobSeen) -> str:
    if job.state != "PENDING" or job.starts_at is None or job.starts_at > job.time + FAR_S:
        return ""
    return f"; Slurm expects it to start at {local_time(job.starts_at)}"


def text_of(event: Event) -> str:
    """What happened, in one sentence."""
    match event:
        case RolledBack():
            return f"from step {event.from_step} back to {_start(event)}, at {rate_text(event.lr_scale)}"
        case Continued():
            because = "" if event.cause in _BY_A_PERSON else f"{cause_of(event)}, "
            back = f"step {left_at(event)} back to " if event.cost.steps_repeated else ""
            return f"attempt {event.attempt} from {back}{_start(event)} ({because}{_where(event.where)})"
        case WouldHaveDone():
            return f"would have begun at {_start(event)}, at {rate_text(event.lr_scale)} ({event.cause})"
        case JobSeen() if event.reason:
            return f"{event.reason}{_expected(event)}"
        case JobSeen():
            nodes = f" on {', '.join(event.nodes)}" if event.nodes else ""
            why = f" ({event.why})" if event.why and event.why != "None" else ""
            times = f", restart {event.restarts}" if event.restarts else ""
            return f"{event.job_id} is {event.state}{why}{nodes}{times}"
        case SupervisorStarted():
            return f"process {event.pid} on {event.host} holds the run"
        case NodeExcluded() if event.until is not None:
            return f"{event.reason}: no job goes there until {local_time(event.until)}"
        case Preempted():
            return event.reason.removeprefix("preempted; ")
        case LookRecovered():
            return f"{event.reason}, after {duration(event.quiet_s)}"
        case _:
            return event.reason or event.event


def left_at(event: Continued) -> int:
    """The newest step that was finished when an attempt was begun, which may lie behind where it begins."""
    return event.resume_step + event.cost.steps_repeated


def details_of(event: Event, cost: Interruption | None = None, folder: str = "") -> list[Detail]:
    """What there is to say beyond the sentence; ``cost`` is what the event led to, where that is known.

    ``folder`` is the run's, where what lies in it is to be named.
    """
    details = _DETAILS[type(event)](event) if type(event) in _DETAILS else iter(())
    if isinstance(event, Finished) and folder:
        details = iter((("model", f"{folder}/final"), ("report", f"{folder}/report.html")))
    return [*details, *([("cost", cost_text(cost))] if cost is not None else []), *advice(event, folder)]


def details_once(event: Event, cost: Interruption | None, listing: Listing) -> list[Detail]:
    """``details_of`` without the sentences and advice that the listing has; those of this event are added to it."""
    told = listing.told
    given = [
        one for one in details_of(event, cost, listing.folder) if one[0] != "tried" or one[1] not in listing.answers
    ]
    listing.answers |= {event.reason} if isinstance(event, RolledBack) else set()
    details = [(label, _untold(label, text, told)) for label, text in given]
    told |= {text_of(event), *(text for label, text in details if label in _TOLD_ONCE)}
    return [one for at, one in enumerate(details) if one[1] and not (one[1] == _TOLD_ABOVE and one in details[:at])]


def _untold(label: str, text: str, told: Collection[str]) -> str:
    """What a detail says beyond what was told: of a reason what goes on after that; empty for nothing."""
    if label in _TOLD_ONCE and text in told:
        return _TOLD_ABOVE
    if label not in ("because", "tried"):
        return text
    known = max((each for each in told if text == each or text.startswith(f"{each}; ")), key=len, default="")
    return text.removeprefix(known).removeprefix("; ") if known else text


def cost_text(cost: Interruption) -> str:
    """What an interruption cost, and what the checkpoint saved; the summary of the log adds both up."""
    steps = f"{count(cost.steps_undone, 'step')} again, " if cost.steps_undone else ""
    whole_s = max(cost.lost_node_s, cost.kept_node_s)
    pause = f" beside a pause of {duration(cost.paused_s)}" if cost.paused_s else ""
    text = f"{steps}{duration(cost.idle_s)} without training{pause}: {node_hours(cost.lost_node_s, whole_s)}"
    kept = f"; its checkpoint saved {node_hours(cost.kept_node_s, whole_s)}, against starting from the first step"
    return text + (kept if cost.kept_node_s else "")


def _start(event: Plan) -> str:
    return event.resume_from or "scratch"


def _where(where: str) -> str:
    return {"same_allocation": "in the same allocation", "requeued": "in the queued job", "new_job": "in a new job"}[
        where
    ]


def _of_rollback(event: RolledBack) -> Iterator[Detail]:
    yield "seen", _seen(event)
    if event.diagnosis is not None:
        yield from _of_diagnosis(event.diagnosis)
    elif not event.skip_batches and event.accept_level is None:  # else the policy's own words say it best
        yield "believed", _BELIEFS.get(event.cause, _ANY_BELIEF).format(onset=event.onset_step)
    yield "done", _done(event)
    if event.reason:
        yield "because", event.reason


def _of_diagnosis(said: Diagnosis) -> Iterator[Detail]:
    """What was believed, how surely, and what speaks for it."""
    yield "believed", f"{said.cause} ({said.confidence}): {said.symptom}"
    for evidence in said.evidence:
        yield "", evidence


def _seen(event: RolledBack) -> str:
    span = f"from step {event.onset_step} to step {event.verdict_step}"
    where = f"; {batches_text(event.batches)}" if event.batches else ""
    if event.kind == "nonfinite":
        streak = f", in a streak from step {event.onset_step}" if event.onset_step < event.verdict_step else ""
        return f"numbers that are not finite at step {event.verdict_step}{streak}{where}"
    if event.kind in ("spike", "divergence"):
        return f"the loss above its band {span}{where}"
    return f"{event.kind} at step {event.verdict_step}{where}"


_BELIEFS: Final = {
    "spike": "the updates were too large for this stretch; the weights from before step {onset} are sound",
    "divergence": "the loss rose and did not come back; the weights from before step {onset} are sound",
    "nonfinite": "the numbers ran out of range; the weights from before step {onset} are sound",
    "refused": "that checkpoint does not restore what it holds; an older one may",
    "rollback": "a person knows better",
}
_ANY_BELIEF: Final = "the state from before step {onset} is sound"


def _done(event: RolledBack) -> str:
    done = f"attempt {event.attempt} from {_start(event)} {_where(event.where)}, at {rate_text(event.lr_scale)}"
    if event.lr_ramp is not None:
        ramp = event.lr_ramp
        done += f", held for {count(ramp.hold_steps, 'step')}, then back to {ramp.to:g} over {ramp.ramp_steps:,}"
    if event.skip_batches:
        done += f"; {left_out(sum(skip.count for skip in event.skip_batches))} in all"
    if event.quarantine:
        done += f"; {', '.join(event.quarantine)} set aside in quarantine/"
    return done


def batches_text(batches: tuple[BatchPosition, ...]) -> str:
    """``epoch 0, batches 126-128``: global batches, each run of neighbours as one."""
    runs: list[list[int]] = []
    for one in batches:
        if runs and runs[-1][0] == one.epoch and runs[-1][2] + 1 == one.batch:
            runs[-1][2] = one.batch
        else:
            runs.append([one.epoch, one.batch, one.batch])
    named = [f"epoch {e}, {f'batch {a}' if a == b else f'batches {a}-{b}'}" for e, a, b in runs]
    return "; ".join([*named[:4], *(["..."] if len(named) > 4 else [])])


def _of_observed(event: WouldHaveDone) -> Iterator[Detail]:
    if event.diagnosis is not None:
        yield from _of_diagnosis(event.diagnosis)
    if event.reason:
        yield "because", event.reason.removeprefix(_OBSERVED)
    yield "done", "nothing: recovery.mode is observe"


def _of_supervisor(event: SupervisorStarted) -> Iterator[Detail]:
    if event.free_since is not None and event.time - event.free_since > BEAT_EVERY_S:
        span = f"from {local_clock(event.free_since)} to {local_clock(event.time)}"
        yield "", f"no sign of a supervisor {span}, {duration(event.time - event.free_since)}"
    if event.changed:
        yield "changed", f"config.yaml: {named(event.changed)}"


def _of_hang(event: HangSeen) -> Iterator[Detail]:
    if event.stacks not in event.reason:
        yield "look at", event.stacks


def _of_continued(event: Continued) -> Iterator[Detail]:
    if reason := event.reason.removeprefix(_SAYS_NO_MORE.get(event.cause, "")).removeprefix("; "):
        yield "because", reason
    if event.lr_scale != 1:
        yield "rate", rate_text(event.lr_scale)


def _of_segment(event: SegmentStarted) -> Iterator[Detail]:
    if event.start is not None and event.start.took_s:
        yield "start took", _start_took(event.start)
    left_out = event.start.left_out if event.start is not None else ()
    for one in left_out[:_MOST_BATCHES]:
        yield "left out", f"batch {one.batch} of epoch {one.epoch}: {_sources(one)}"
    if len(left_out) > _MOST_BATCHES:
        yield "", f"and {len(left_out) - _MOST_BATCHES:,} more: higgsfield log --json"


def _start_took(start: Start) -> str:
    """The whole and its parts, each rounded as the whole is told, so that they add up to it."""
    took_s = start.took_s | {"imports": start.waited_s + start.took_s.get("imports", 0.0)}
    whole_s = sum(took_s.values())
    unit_s = next(unit_s for below_s, unit_s in _ROUNDED if whole_s < below_s)
    parts = {part: round(seconds / unit_s) * unit_s for part, seconds in took_s.items()}
    named = [f"{part} {duration(seconds)}" for part, seconds in parts.items() if seconds]
    return f"{duration(sum(parts.values()))}{': ' if named else ''}{', '.join(named)}"


def _sources(one: LeftOutBatch) -> str:
    """``line 33-40, 45 of FILE``: where the text of a batch stands."""
    spans: dict[tuple[str, str], list[str]] = {}
    for rows in one.rows:
        span = f"{rows.first}-{rows.last}" if rows.last > rows.first else f"{rows.first}"
        spans.setdefault((rows.unit, rows.file), []).append(span)
    said = [f"{unit} {_first_of(of_file)} of {file}" for (unit, file), of_file in spans.items()]
    return "; ".join(said) or f"samples {_first_of([str(sample) for sample in one.samples])}"


def _first_of(named: list[str]) -> str:
    more = len(named) - _MOST_NAMED
    return ", ".join(named[:_MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")


def _of_left(event: WorkerLeft) -> Iterator[Detail]:
    """The error of a start that did not end in order, where its sentence does not have it."""
    error = event.error
    if error is None or event.outcome in (Outcome.DONE, Outcome.LEFT, Outcome.VERDICT):
        return
    said = clipped(" ".join(error.message.split()), _LONGEST_ERROR)
    if said and said[:_COMPARED] not in event.reason:
        yield "", said if event.outcome is Outcome.ENDED else f"{error.type}: {said}"


def _of_given_up(event: GaveUp) -> Iterator[Detail]:
    for text in event.tried:
        yield "tried", text
    if event.error is not None and event.error not in event.reason:
        yield from (("", line) for line in _last_frames(event.error))


def _last_frames(error: str) -> list[str]:
    """The end of an error, from the beginning of a frame on where it is a traceback; without lines of mere marks."""
    lines = [line for line in error.rstrip().splitlines() if set(line.strip()) - set("^~")]
    frames = [at for at, line in enumerate(lines) if line.lstrip().startswith("File ")]
    begin = next((at for at in frames if len(lines) - at <= _MOST_LINES), len(lines) - _MOST_LINES)
    return lines if len(lines) <= _MOST_LINES else ["...", *lines[begin:]]


def _of_stopped(event: Stopped) -> Iterator[Detail]:
    yield "", f"the newest checkpoint is at step {event.saved_step}" if event.saved_step else "nothing was saved yet"


_DETAILS: Final[dict[type, Callable[..., Iterator[Detail]]]] = {
    RolledBack: _of_rollback,
    Continued: _of_continued,
    WouldHaveDone: _of_observed,
    SupervisorStarted: _of_supervisor,
    HangSeen: _of_hang,
    SegmentStarted: _of_segment,
    WorkerLeft: _of_left,
    GaveUp: _of_given_up,
    Stopped: _of_stopped,
}
