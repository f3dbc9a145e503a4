"""The agent's decisions as tables."""

import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.agent_report import error_of_trainer, left_because, outcome_of_trainer, tells_of_a_kill
from worker.agent_rules import (
    Asked,
    Continue,
    End,
    Fenced,
    Leave,
    Past,
    Running,
    Seen,
    Send,
    StartTrainer,
    Stay,
    TakeClaim,
    Task,
    Wait,
    agent_exit_code,
    ended_as,
    relaunched,
    start_rule,
    trainer_rule,
)
from worker.contract.claim import Claim
from worker.contract.directive import Directive
from worker.contract.exit_report import ErrorDetail, ExitReport, Outcome
from worker.contract.pulse import Hang

TASK = Task(job_id="7", name="hf-1", restart=1, rank=0, world=2, local_rank=0)
OTHER = TASK.model_copy(update={"rank": 1})


def claim(job_id: str = "7", restart: int = 1) -> Claim:
    return Claim(job_id=job_id, name="hf-1", restart=restart, host="n1", pid=1, started_ticks=1, time=0.0)


def directive(attempt: int = 3, **fields: Any) -> Directive:
    return Directive(attempt=attempt, **{"cause": "first", "reason": "", "time": 0.0, **fields})


def seen(attempt: int = 3, **fields: Any) -> Seen:
    return Seen(**{"directive": directive(attempt), "claim": claim(), **fields})


def over(outcome: Outcome, attempt: int = 3, **fields: Any) -> Past:
    return Past(attempt, outcome, **fields)


STARTS = [
    (
        "an attempt with a job of its own is not for who held an earlier one",
        TASK,
        Seen(directive=directive(new_job=True), held=2, held_claim=claim()),
        over(Outcome.VERDICT, 2),
        Asked(),
        Fenced,
    ),
    ("nothing is waited for where the run's folder is gone", TASK, Seen(is_gone=True), Past(), Asked(), Fenced),
    ("but for a fresh job", TASK, Seen(directive=directive(new_job=True)), Past(), Asked(), TakeClaim),
    (
        "which goes on with it",
        TASK,
        Seen(directive=directive(new_job=True), claim=claim(), held=3, held_claim=claim()),
        Past(),
        Asked(),
        StartTrainer,
    ),
    ("no directive yet", TASK, Seen(), Past(), Asked(), Wait),
    ("a free attempt is claimed by rank 0", TASK, seen(claim=None), Past(), Asked(), TakeClaim),
    ("the others wait for that", OTHER, seen(claim=None), Past(), Asked(), Wait),
    ("rank 0 takes over from a lower restart", TASK, seen(claim=claim(restart=0)), Past(), Asked(), TakeClaim),
    ("the others wait for that too", OTHER, seen(claim=claim(restart=0)), Past(), Asked(), Wait),
    ("another job's", TASK, seen(claim=claim("8")), Past(), Asked(), Fenced),
    ("another job's with a lower restart", OTHER, seen(claim=claim("8", 0)), Past(), Asked(), Fenced),
    ("a newer restart's", TASK, seen(claim=claim(restart=2)), Past(), Asked(), Fenced),
    (
        "the held attempt is taken over while the next one is free",
        TASK,
        seen(4, claim=None, held=3, held_claim=claim(restart=2)),
        over(Outcome.VERDICT),
        Asked(),
        Fenced,
    ),
    ("its twin's", TASK, seen(is_twin=True), Past(), Asked(), Fenced),
    ("its own", TASK, seen(), Past(), Asked(), StartTrainer),
    ("its own, other rank", OTHER, seen(), Past(), Asked(), StartTrainer),
    ("ended before", TASK, seen(ended_as=Outcome.CRASHED), Past(), Asked(), Wait),
    (
        "ended before, and is claimed all the same",
        TASK,
        seen(claim=None, ended_as=Outcome.ENDED),
        Past(),
        Asked(),
        TakeClaim,
    ),
    ("done before", TASK, seen(ended_as=Outcome.DONE), Past(), Asked(), Leave),
    ("interrupted, goes on", TASK, seen(is_restarted=True), Past(), Asked(), StartTrainer),
    (
        "interrupted, waits",
        TASK,
        seen(directive=directive(on_requeue="wait"), is_restarted=True),
        Past(),
        Asked(),
        Wait,
    ),
    ("not interrupted", TASK, seen(directive=directive(on_requeue="wait")), Past(), Asked(), StartTrainer),
    ("own trainer had a verdict", TASK, seen(), over(Outcome.VERDICT), Asked(), Wait),
    ("own trainer crashed", TASK, seen(), over(Outcome.CRASHED), Asked(), Wait),
    ("own trainer was refused", TASK, seen(), over(Outcome.REFUSED), Asked(), Wait),
    ("own trainer was ended", TASK, seen(), over(Outcome.ENDED), Asked(), Wait),
    ("own trainer ran out of memory", TASK, seen(), over(Outcome.OUT_OF_MEMORY), Asked(), Wait),
    ("an older directive comes back", TASK, seen(2), over(Outcome.VERDICT), Asked(), Wait),
    ("own trainer was done", TASK, seen(), over(Outcome.DONE), Asked(), Leave),
    ("done, even when preempted", TASK, seen(), over(Outcome.DONE), Asked(preempted=True), Leave),
    ("own trainer left", TASK, seen(), over(Outcome.LEFT), Asked(), Leave),
    ("own trainer was fenced by nothing we see", TASK, seen(), over(Outcome.FENCED), Asked(), Leave),
    ("fenced by a newer directive", TASK, seen(4), over(Outcome.FENCED), Asked(), StartTrainer),
    ("the answer to a verdict", TASK, seen(4), over(Outcome.VERDICT), Asked(), StartTrainer),
    ("a stop ends the waiting", TASK, seen(directive=directive(stop="now")), over(Outcome.VERDICT), Asked(), Leave),
    ("a stop before the start", TASK, seen(claim=None, directive=directive(stop="save")), Past(), Asked(), Leave),
    ("preempted before the start", TASK, seen(), Past(), Asked(preempted=True), Stay),
    ("preempted while waiting", TASK, seen(4), over(Outcome.VERDICT), Asked(preempted=True), Stay),
    ("preempted and left", TASK, seen(), over(Outcome.LEFT), Asked(preempted=True), Stay),
    ("preempted without a directive", TASK, Seen(), Past(), Asked(preempted=True), Stay),
    ("preempted, but the run is another's", TASK, seen(claim=claim("8")), Past(), Asked(preempted=True), Fenced),
    ("near the time limit", TASK, seen(4), over(Outcome.VERDICT), Asked(time_limit=True), Leave),
    ("orphaned", TASK, seen(), Past(), Asked(orphaned=True), Leave),
    ("relaunches left", TASK, seen(4), over(Outcome.VERDICT, relaunches=1), Asked(), StartTrainer),
    ("no relaunches left", TASK, seen(4, claim=None), over(Outcome.VERDICT, relaunches=2), Asked(), Leave),
    ("nor for the others", OTHER, seen(4, claim=None), over(Outcome.VERDICT, relaunches=2), Asked(), Leave),
    (
        "relaunches again after progress",
        TASK,
        seen(4, directive=directive(4, resume_from="checkpoint-20")),
        over(Outcome.VERDICT, relaunches=2, since_step=10),
        Asked(),
        StartTrainer,
    ),
]


@pytest.mark.parametrize(
    ("task", "files", "past", "asked", "move"), [row[1:] for row in STARTS], ids=[r[0] for r in STARTS]
)
def test_what_follows_without_a_trainer(task: Task, files: Seen, past: Past, asked: Asked, move: type) -> None:
    assert type(start_rule(task, files, past, asked, max_relaunches=2)) is move


@given(
    task=st.sampled_from([TASK, OTHER]),
    attempt=st.integers(1, 5),
    held_by=st.sampled_from([None, claim(), claim("8"), claim(restart=0), claim(restart=2)]),
    ended=st.sampled_from([None, *Outcome]),
    past=st.builds(Past, st.none() | st.integers(1, 5), st.sampled_from([None, *Outcome]), st.integers(0, 3)),
    asked=st.builds(Asked, st.booleans(), st.booleans(), st.booleans()),
    stop=st.sampled_from([None, "now", "save"]),
)
def test_a_trainer_starts_only_under_its_own_claim_in_a_new_attempt_that_nobody_ended(
    task: Task, attempt: int, held_by: Claim | None, ended: Outcome | None, past: Past, asked: Asked, stop: Any
) -> None:
    files = seen(directive=directive(attempt, stop=stop), claim=held_by, ended_as=ended)
    move = start_rule(task, files, past, asked, max_relaunches=2)
    if isinstance(move, StartTrainer):
        assert held_by == claim()
        assert ended is None
        assert attempt > (past.attempt or 0)
        assert stop is None
        assert asked == Asked()
        assert relaunched(past, files.directive or directive()).relaunches <= 2


def test_relaunches_are_counted_from_the_newest_progress() -> None:
    past, counts = Past(), []
    for attempt, resume_from in enumerate([None, "checkpoint-5", "checkpoint-5", None, "checkpoint-10"], start=1):
        past = relaunched(past, directive(attempt, resume_from=resume_from))
        counts.append((past.relaunches, past.since_step))
    assert counts == [(0, 0), (1, 5), (2, 5), (3, 5), (1, 10)]


def test_a_person_s_rollback_is_not_held_against_the_allocation() -> None:
    past = over(Outcome.FENCED, relaunches=2, since_step=10)
    asked = directive(4, cause="rollback", resume_from="checkpoint-5")
    assert isinstance(start_rule(TASK, seen(directive=asked), past, Asked(), max_relaunches=2), StartTrainer)
    assert relaunched(past, asked) == Past(4, relaunches=1, since_step=5)


HANG = Hang(phase="training", step=5, quiet_s=31.0, limit_s=30.0)


def held(**fields: Any) -> Seen:
    return seen(**{"held": 3, "held_claim": claim(), **fields})


RUNS = [
    ("nothing", held(), Running(3), Asked(), Continue()),
    ("no directive any more", Seen(held=3, held_claim=claim()), Running(3), Asked(), Continue()),
    ("preempted", held(), Running(3), Asked(preempted=True), Send(signal.SIGTERM)),
    ("preempted, sent", held(), Running(3, frozenset({signal.SIGTERM}), 59.0), Asked(preempted=True), Continue()),
    ("preempted for long", held(), Running(3, frozenset({signal.SIGTERM}), 60.0), Asked(preempted=True), "preempted"),
    ("time limit", held(), Running(3), Asked(time_limit=True), Send(signal.SIGUSR2)),
    ("another rank hangs", held(hanging=frozenset({1})), Running(3), Asked(), Send(signal.SIGUSR1)),
    ("its own hang", held(hanging=frozenset({0})), Running(3), Asked(), Continue()),
    ("time limit, sent", held(), Running(3, frozenset({signal.SIGUSR2})), Asked(time_limit=True), Continue()),
    ("stop save", held(directive=directive(stop="save")), Running(3), Asked(), Send(signal.SIGUSR2)),
    ("stop now", held(directive=directive(stop="now")), Running(3), Asked(), "stop"),
    ("a peer has just ended", held(), Running(3, peer_ended_for_s=9.9), Asked(), Continue()),
    ("a peer has ended", held(), Running(3, peer_ended_for_s=10.0), Asked(), "rank_died"),
    ("a newer attempt", held(attempt=4), Running(3), Asked(), "fenced"),
    ("a hang", held(directive=directive(4, cause="hang")), Running(3), Asked(), "hang"),
    ("the claim is gone", held(held_claim=None), Running(3), Asked(), "fenced"),
    ("and all of the run", Seen(held=3, is_gone=True), Running(3), Asked(), "fenced"),
    ("a newer restart's claim", held(held_claim=claim(restart=2)), Running(3), Asked(), "fenced"),
    ("another job's claim", held(held_claim=claim("8")), Running(3), Asked(), "fenced"),
    ("orphaned", held(), Running(3), Asked(orphaned=True), "parent_died"),
    ("no progress", held(), Running(3, hang=HANG), Asked(), "hang"),
    (
        "no progress, and another rank is gone",
        held(),
        Running(3, peer_ended_for_s=10.0, hang=HANG),
        Asked(),
        "rank_died",
    ),
]


@pytest.mark.parametrize(("files", "running", "asked", "move"), [row[1:] for row in RUNS], ids=[r[0] for r in RUNS])
def test_what_happens_to_a_running_trainer(files: Seen, running: Running, asked: Asked, move: Any) -> None:
    decided = trainer_rule(TASK, files, running, asked)
    assert (decided.what if isinstance(decided, End) else decided) == move


OUTCOMES = [
    (0, None, False, Outcome.DONE),
    (20, None, False, Outcome.VERDICT),
    (21, None, False, Outcome.LEFT),
    (22, None, False, Outcome.FENCED),
    (23, None, False, Outcome.REFUSED),
    (24, None, False, Outcome.OUT_OF_MEMORY),
    (1, None, True, Outcome.CRASHED),
    (-9, None, False, Outcome.CRASHED),
    (-9, None, True, Outcome.LEFT),
    (-15, None, False, Outcome.CRASHED),
    (-15, None, True, Outcome.LEFT),
    (-11, None, True, Outcome.CRASHED),
    (21, "rank_died", False, Outcome.ENDED),
    (1, "rank_died", False, Outcome.ENDED),
    (20, "rank_died", False, Outcome.VERDICT),
    (-9, "hang", False, Outcome.ENDED),
    (21, "fenced", True, Outcome.FENCED),
    (0, "fenced", False, Outcome.DONE),
    (-9, "stop", False, Outcome.LEFT),
    (-9, "preempted", True, Outcome.LEFT),
]


@pytest.mark.parametrize(("returncode", "end", "is_asked", "outcome"), OUTCOMES)
def test_what_a_trainers_exit_means(returncode: int, end: Any, is_asked: bool, outcome: Outcome) -> None:
    assert outcome_of_trainer(returncode, End(end, "") if end else None, is_asked) is outcome


def test_a_kill_is_for_want_of_memory_where_the_kernel_counted_one() -> None:
    assert outcome_of_trainer(-9, None, is_asked_to_leave=False, killed_for_memory=True) is Outcome.OUT_OF_MEMORY
    assert outcome_of_trainer(-9, None, is_asked_to_leave=True, killed_for_memory=True) is Outcome.OUT_OF_MEMORY
    assert outcome_of_trainer(1, None, is_asked_to_leave=False, killed_for_memory=True) is Outcome.OUT_OF_MEMORY
    assert outcome_of_trainer(20, None, is_asked_to_leave=False, killed_for_memory=True) is Outcome.VERDICT
    assert outcome_of_trainer(-9, End("hang", ""), is_asked_to_leave=False, killed_for_memory=True) is Outcome.ENDED
    told = error_of_trainer(Outcome.OUT_OF_MEMORY, -9, None, None, "", "tail")
    assert told is not None
    assert told.type == "OutOfMemory"
    of_torch = ErrorDetail(type="RuntimeError", message="DataLoader worker (pid 7) is killed by signal: Killed. ")
    kills = [(-9, None, True), (1, of_torch, True), (-11, None, False), (1, told, False), (1, None, False)]
    assert [tells_of_a_kill(code, known) for code, known, _ in kills] == [is_kill for *_, is_kill in kills]
    assert error_of_trainer(Outcome.OUT_OF_MEMORY, 1, of_torch, None, "", "tail") == of_torch


def test_why_a_trainer_left() -> None:
    assert left_because("time_limit", None, Asked(), is_stopped=True) == "stop"  # the agent sent SIGUSR2 for the stop
    assert left_because("time_limit", None, Asked(time_limit=True), is_stopped=True) == "time_limit"
    assert left_because("stop", None, Asked(), is_stopped=False) == "stop"
    assert left_because(None, None, Asked(preempted=True), is_stopped=False) == "preempted"
    assert left_because(None, None, Asked(time_limit=True), is_stopped=False) == "time_limit"
    assert left_because("preempted", End("stop", ""), Asked(), is_stopped=True) == "stop"


def test_the_error_is_the_trainers_own_where_it_left_one() -> None:
    own = ErrorDetail(type="ValueError", message="bad", traceback="line 1", what="loss", expected="1", found="2")
    assert error_of_trainer(Outcome.REFUSED, 23, own, None, "", "tail") == own
    assert error_of_trainer(Outcome.DONE, 0, None, None, "", "tail") is None
    crash = error_of_trainer(Outcome.CRASHED, 1, None, None, "", "Traceback\ntail\n")
    told = "exit code 1; the last line of its log: tail"
    assert crash == ErrorDetail(type="ExitCode", message=told, traceback="Traceback\ntail\n")
    mute = error_of_trainer(Outcome.CRASHED, 1, None, None, "", "")
    assert mute == ErrorDetail(type="ExitCode", message="exit code 1")
    killed = error_of_trainer(Outcome.CRASHED, -9, None, None, "", "tail")
    assert killed is not None
    assert (killed.type, killed.message) == ("Signal", "killed by signal 9 (Killed)")
    ended = error_of_trainer(Outcome.ENDED, -9, None, End("hang", "quiet"), "", "tail")
    assert ended == ErrorDetail(type="Ended", message="quiet", what="hang", traceback="tail")


def report(rank: int, outcome: Outcome) -> ExitReport:
    return ExitReport(attempt=1, restart=0, rank=rank, job_id="7", host="n", outcome=outcome, started=0.0, ended=1.0)


def test_how_an_attempt_ended() -> None:
    assert ended_as([], has_acted_verdict=False) is None
    assert ended_as([], has_acted_verdict=True) is Outcome.VERDICT
    left = report(0, Outcome.LEFT)
    assert ended_as([left, report(1, Outcome.LEFT)], has_acted_verdict=False) is None
    assert ended_as([left, report(1, Outcome.CRASHED)], has_acted_verdict=False) is Outcome.CRASHED
    assert ended_as([report(0, Outcome.DONE), report(1, Outcome.CRASHED)], has_acted_verdict=False) is Outcome.DONE
    assert ended_as([report(0, Outcome.CRASHED), report(1, Outcome.DONE)], has_acted_verdict=False) is Outcome.CRASHED


def test_the_agents_exit_code() -> None:
    zero = {outcome for outcome in Outcome if agent_exit_code(outcome) == 0}
    assert zero == {Outcome.DONE, Outcome.LEFT, Outcome.VERDICT, Outcome.FENCED}
    assert agent_exit_code(None) == 1
