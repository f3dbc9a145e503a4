"""A rehearsal as values: what is asked for, the short configuration, and what became of each fault and rate."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm.job import JobState
from supervisor import rehearse
from supervisor.journal import SupervisorStarted
from supervisor.lease import LostError
from supervisor.rehearsal import (
    STANDARD,
    FaultRow,
    RateRow,
    advice,
    fault_rows,
    length,
    parse_faults,
    parse_rates,
    rate_config,
    rate_row,
    rehearsal_config,
)
from supervisor.report.rehearsal_text import fault_lines, memory_lines, rate_lines
from supervisor.run_state import State
from supervisor.runs import RunError
from tests.supervisor_room.stage import Stage, config
from worker.contract.config import Config
from worker.contract.loss_history import Record, Verdict, record
from worker.contract.rehearsal import Fault, FaultKind, Inflicted, MemoryFound

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def long_run(tmp_path: Path) -> Config:
    schedule = {"name": "cosine", "warmup": 300}
    training = {"max_steps": 10_000, "schedule": schedule, "report_to": ["wandb"]}
    checkpoint = {"every_steps": 500, "healthy_after": 25}
    sections: dict[str, Any] = {"training": training, "checkpoint": checkpoint, "recovery": {"mode": "observe"}}
    return config(tmp_path, **sections)


# -- what is asked for


@pytest.mark.parametrize(
    ("words", "steps", "said"),
    [
        (["fire@40"], None, "fire@40: is no fault; there are spike, preempt, kill, hang, torn-save, supervisor"),
        (["kill"], None, "kill: says no step; write kill@80"),
        (["kill@0"], None, "kill@0: says no step"),
        (["kill@-4"], None, "kill@-4: says no step"),
        (["kill@1e3"], None, "kill@1e3: says no step"),
        (["kill@9"], None, "kill@9: comes too early; give it step 10 or later"),
        (["kill@40", "hang@49"], None, "hang@49: comes too soon after kill@40; give it step 50 or later"),
        (["kill@40", "kill@40"], None, "kill@40: comes too soon after kill@40"),
        (["kill@40"], 49, "kill@40: the rehearsal ends at step 49, and 10 steps have to come after the last fault"),
        (["kill@9995"], None, "kill@9995: the run ends at step 10000"),
    ],
)
def test_faults_that_cannot_be_are_one_line(long_run: Config, words: list[str], steps: int | None, said: str) -> None:
    with pytest.raises(RunError) as raised:
        length(long_run, parse_faults(words), steps)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_faults_come_in_the_order_of_their_steps_and_the_run_goes_on_after_the_last(long_run: Config) -> None:
    faults = parse_faults(["kill@80", "spike@40"])
    assert [fault.name for fault in faults] == ["spike@40", "kill@80"]
    assert length(long_run, faults, None) == 100
    assert length(long_run, faults, 90) == 90
    patient = long_run.model_copy(update={"spike": long_run.spike.model_copy(update={"patience": 30})})
    with pytest.raises(RunError, match="too soon after spike@40; give it step 77 or later"):
        length(patient, parse_faults(["spike@40", "kill@70"]), None)


@pytest.mark.parametrize("text", ["", "1e-5", "1e-5,1e-5", "1e-5,x", "1e-5,-1", "1e-5,nan", "0,1"])
def test_rates_that_are_none_are_one_line(text: str) -> None:
    with pytest.raises(RunError, match="write two different rates or more"):
        parse_rates(text)


# -- its configuration


def test_the_copy_is_the_run_in_short(long_run: Config) -> None:
    faults = parse_faults(STANDARD)
    short = rehearsal_config(long_run, "r-rehearsal-1", faults, 160, is_local=False)
    assert (short.model, short.data, short.ema) == (long_run.model, long_run.data, long_run.ema)
    assert short.supervisor.place == "foreground"  # it is supervised by the command alone
    assert short.training.optimizer == long_run.training.optimizer
    assert (short.run.name, short.training.max_steps, short.training.epochs) == ("r-rehearsal-1", 160, None)
    assert short.training.schedule.warmup == 5  # 3 % of the run, as before
    assert (short.checkpoint.every_steps, short.checkpoint.healthy_after) == (9, 4)
    assert (short.recovery.mode, short.recovery.hang_timeout_s, short.recovery.absent_grace_s) == ("act", 120.0, 120.0)
    assert short.recovery.node_strikes > len(faults)
    assert short.recovery.max_submissions_per_hour > len(faults)
    assert (short.notify, short.training.report_to, short.cluster.mail_user) == ((), (), None)
    assert Config.model_validate(short.model_dump()) == short


@pytest.mark.parametrize("words", [["spike@10", "kill@20"], ["torn-save@100"], ["spike@30", "torn-save@200"], STANDARD])
def test_before_each_fault_lies_a_healthy_checkpoint_and_after_it_another_save(
    long_run: Config, words: list[str]
) -> None:
    faults = parse_faults(words)
    steps = length(long_run, faults, None)
    checkpoint = rehearsal_config(long_run, "r", faults, steps, is_local=True).checkpoint
    ends = [*(fault.step for fault in faults[1:]), steps]
    for fault, end in zip(faults, ends, strict=True):
        saves = range(checkpoint.every_steps, steps + 1, checkpoint.every_steps)
        assert any(save + checkpoint.healthy_after <= fault.step for save in saves)
        assert any(fault.step <= save < end for save in saves)


def test_a_rate_is_held_and_its_first_verdict_ends_the_run(long_run: Config) -> None:
    short = rate_config(long_run, "r-lr-1", 1e-3, 100)
    assert short.training.optimizer.learning_rate == 1e-3
    assert (short.training.schedule.name, short.training.schedule.warmup) == ("constant", 3)
    assert (short.recovery.mode, short.recovery.spike.max_rollbacks) == ("act", 0)
    assert Config.model_validate(short.model_dump()) == short


# -- what became of each


def step(number: int, segment: int, time: float, verdict: Verdict = "ok", loss: float = 2.0) -> Record:
    fields = {"epoch": 0.0, "lr": 1.0, "grad_norm": 1.0, "onset_step": None if verdict == "ok" else number}
    return record(
        segment=segment, attempt=segment, restart=0, step=number, time=time, loss=loss, verdict=verdict, **fields
    )


def came(kind: FaultKind, at_step: int, time: float, error: str | None = None) -> Inflicted:
    return Inflicted(kind=kind, at_step=at_step, time=time, means="done so", error=error)


def row_of(kind: FaultKind, found: Inflicted | None, records: list[Record], *events: SupervisorStarted) -> FaultRow:
    fault = Fault(kind=kind, step=10)
    [row] = fault_rows([fault], {} if found is None else {fault: found}, events, records, "gave_up, it was tired")
    return row


KILLED = [step(n, 1, 100.0 + n) for n in range(1, 11)] + [step(n, 2, 113.0 + n) for n in range(9, 13)]
SPIKED = [
    *KILLED[:10],
    step(11, 1, 111.0, "pending"),
    step(12, 1, 112.0, "spike"),
    *[step(n, 2, 106.0 + n) for n in range(9, 15)],
]


def test_a_fault_costs_the_steps_made_again_and_the_time_until_training_was_further() -> None:
    row = row_of("kill", came("kill", 10, 110.5), KILLED)
    assert (row.survived, row.recovery_s, row.steps_repeated, row.cost_s) == (True, 11.5, 2, 13.5)
    assert (row.means, row.why) == ("done so", "")


def test_a_spike_is_survived_where_a_verdict_answered_it() -> None:
    row = row_of("spike", came("spike", 10, 110.5), SPIKED)
    assert (row.survived, row.steps_repeated, row.cost_s) == (True, 4, 8.5)
    row = row_of("spike", came("spike", 10, 110.5), KILLED)
    assert (row.survived, row.why) == (False, "the noise led to no verdict")


def test_a_fault_after_which_training_got_no_further_was_not_survived() -> None:
    row = row_of("kill", came("kill", 10, 110.5), KILLED[:-2])
    assert (row.survived, row.recovery_s, row.cost_s) == (False, 11.5, None)
    assert row.why == "the run did not get further: gave_up, it was tired"


def test_a_fault_that_never_came_or_could_not_be_done_was_not_survived() -> None:
    assert row_of("kill", None, KILLED).why == "it never came: gave_up, it was tired"
    row = row_of("preempt", came("preempt", 10, 110.5, error="requeue is disabled"), KILLED)
    assert (row.survived, row.why) == (False, "it could not be done: requeue is disabled")


def test_a_start_after_the_next_fault_is_not_this_ones_recovery() -> None:
    first, second = Fault(kind="hang", step=5), Fault(kind="kill", step=10)
    found = {first: came("hang", 5, 105.5), second: came("kill", 10, 110.5)}
    rows = fault_rows([first, second], found, [], KILLED, "finished")
    assert [row.survived for row in rows] == [False, True]


def test_a_supervisor_is_back_when_the_next_one_is_at_work() -> None:
    started = [SupervisorStarted(host="h", pid=1, time=time) for time in (90.0, 104.0)]
    row = row_of("supervisor", came("supervisor", 2, 102.5), KILLED, *started)
    assert (row.survived, row.recovery_s, row.steps_repeated, row.cost_s) == (True, 1.5, 0, 0.5)
    row = row_of("supervisor", came("supervisor", 2, 102.5), KILLED, started[0])
    assert (row.survived, row.recovery_s) == (False, None)


# -- rates


def rate(value: float, loss_end: float | None, verdict: str | None = None, state: State = "finished") -> RateRow:
    return RateRow(value, "r", "/r", state, 100, 5.0, loss_end, verdict)


def test_a_rate_is_told_by_its_first_and_last_losses() -> None:
    records = [step(n, 1, 100.0 + n, loss=float(n)) for n in range(1, 31)]
    row = rate_row(1e-5, "r", "/r", "finished", records)
    assert (row.loss_start, row.loss_end, row.steps, row.verdict) == (3.0, 25.5, 30, None)
    row = rate_row(1e-5, "r", "/r", "gave_up", SPIKED[:12])
    assert row.verdict == "spike at step 12"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([rate(1, 3.0), rate(2, 2.0)], "2 ends lowest of those that got through, and it is the highest"),
        ([rate(1, 2.0), rate(2, 3.0)], "1 ends lowest of those that got through, and it is the lowest"),
        ([rate(1, 3.0), rate(2, 2.0), rate(4, 2.5)], "2 ends lowest of those that got through, between"),
        ([rate(1, 3.0), rate(2, 2.0), rate(4, 9.0, "spike at step 7", "gave_up")], "only 2 times as much: a long run"),
        ([rate(1, 3.0, "spike at step 7", "gave_up")], "none of these rates got through"),
    ],
)
def test_the_advice_says_how_far_it_can_be_trusted(rows: list[RateRow], said: str) -> None:
    assert said in advice(rows)


# -- as a person reads it


def test_the_tables_are_told_whole() -> None:
    rows = [
        FaultRow("torn-save", 120, "SIGKILL to \x1b[2J", True, 0.94, 10, 1.4, ""),
        FaultRow("kill", 80, "", False, None, None, None, "it never came"),
    ]
    assert fault_lines(rows, 100) == [
        "fault           survived  training again  steps again  further than before",
        "torn-save@120   yes       after 0.9 s     10           after 1.4 s",
        "  SIGKILL to \\x1b[2J",
        "kill@80         NO",
        "  it never came",
        "",
        "1 of 2 faults survived.",
    ]
    facts: dict[str, Any] = {"rank": 0, "host": "n1", "device": "CPU", "peak_bytes": 4e8, "total_bytes": 16e9}
    found = MemoryFound(**facts, batch_size=4, largest_batch=256, limit="no more were tried")
    assert memory_lines([found]) == [
        "rank 0 on n1 (CPU): 400 MB of 16 GB resident at most, at training.batch_size 4",
        "  the largest batch that was seen to fit is 256; no more were tried",
    ]
    assert rate_lines([rate(1e-5, 2.5), rate(2e-5, None, "spike at step 3", "gave_up")], "take it", 80) == [
        "learning rate    steps loss, first      last",
        "1e-05              100           5       2.5",
        "2e-05              100           5            spike at step 3",
        "",
        "Take it.",
    ]


# -- its end


def interrupted(stage: Stage, monkeypatch: pytest.MonkeyPatch, supervise: Callable[[], None]) -> None:
    """A rehearsal that a SIGINT ends while its job runs; ``supervise`` is the last act of the clean-up."""
    monkeypatch.setattr(rehearse.Rehearsed, "start", lambda run: None)
    monkeypatch.setattr(rehearse, "_is_over", lambda run: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(rehearse, "supervise", lambda run_dir, out: supervise())
    stage.settle()
    stage.start_job()
    before = [signal.getsignal(number) for number in ENDING]
    try:
        with pytest.raises((KeyboardInterrupt, LostError)) as raised, rehearse.ended_by_signals():
            rehearse.carry_out([rehearse.Rehearsed(stage.run_dir, stage.scheduler)])
        left = [signal.getsignal(number) for number in ENDING]
        assert left == ([signal.SIG_IGN] * 3 if raised.type is KeyboardInterrupt else before)
    finally:
        for number, handler in zip(ENDING, before, strict=True):
            signal.signal(number, handler)


def test_signals_do_not_cut_its_clean_up_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = Stage(tmp_path)
    done = []

    def disturbed() -> None:
        for number in ENDING:
            os.kill(os.getpid(), number)
        done.append("all of it")

    interrupted(stage, monkeypatch, disturbed)
    assert done == ["all of it"]
    assert stage.scheduler.jobs[stage.job_id].state is JobState.CANCELLED
    assert "r: its job is cancelled" in capsys.readouterr().err


def test_it_does_not_say_that_its_job_is_cancelled_before_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost() -> None:
        raise LostError("somebody else supervises it")

    interrupted(Stage(tmp_path), monkeypatch, lost)
    assert "is cancelled" not in capsys.readouterr().err
