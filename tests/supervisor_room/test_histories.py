"""Histories of the training: verdicts, rollbacks, crashes and refusals, and what is in the journal afterwards."""

from pathlib import Path

import pytest

from slurm.job import JobState
from supervisor.journal import Finished, GaveUp, RolledBack, VerdictSeen
from supervisor.runs import standing
from tests.supervisor_room.stage import CRASHED, Stage
from worker.contract.exit_report import ErrorDetail, Outcome


def test_a_healthy_run_is_submitted_once_and_finishes(stage: Stage) -> None:
    stage.settle()
    assert stage.state == "queued"
    stage.start_job()
    stage.settle()
    stage.train(100)
    stage.settle()
    assert stage.state == "training"
    stage.leave(Outcome.DONE)
    stage.look()
    assert stage.state == "finished"
    assert stage.submissions == 1
    assert isinstance(stage.events[-1], Finished)
    assert stage.events[-1].final_step == 100
    assert stage.directive.stop == "now"
    assert stage.run_dir.history_csv.read_text().count("\n") == 101


def test_a_spike_rolls_back_to_the_newest_healthy_checkpoint_in_the_same_allocation(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    [rolled] = [event for event in stage.events if isinstance(event, RolledBack)]
    assert (rolled.from_step, rolled.to_step, rolled.onset_step, rolled.lr_scale) == (38, 30, 36, 0.5)
    assert rolled.where == "same_allocation"
    assert rolled.cost.steps_repeated == 8
    assert stage.directive.attempt == 2
    assert stage.directive.resume_from == "checkpoint-30"
    assert stage.directive.lr_scale == 0.5
    assert stage.submissions == 1


def test_checkpoints_past_the_target_go_to_quarantine(tmp_path: Path) -> None:
    stage = Stage(tmp_path, checkpoint={"every_steps": 10, "healthy_after": 15, "keep_quarantined": 5})
    stage.settle()
    stage.start_job()
    stage.train(41, "spike", onset=39, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    assert stage.directive.resume_from == "checkpoint-20"
    assert stage.run_dir.checkpoint_steps() == [10, 20]
    assert sorted(path.name for path in stage.run_dir.quarantine.iterdir()) == ["a1-checkpoint-30", "a1-checkpoint-40"]


def test_a_spike_before_any_checkpoint_starts_from_scratch_at_half_the_rate(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(8, "nonfinite", onset=7)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    assert (stage.directive.resume_from, stage.directive.lr_scale, stage.directive.cause) == (None, 0.5, "nonfinite")


def test_a_verdict_names_the_step_at_which_the_numbers_failed_beside_that_of_the_level(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(6)
    stage.train(7, "suspect", loss=400.0)
    stage.train(8, "nonfinite", onset=8, left_level=7)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    [verdict] = [event for event in stage.events if isinstance(event, VerdictSeen)]
    assert verdict.reason.startswith("from step 7 the loss left its level; not finite at step 8: a non-finite gradient")


def test_progress_refills_the_budget(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(8, "spike", onset=6, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    stage.claim()
    stage.train(16)
    stage.settle()
    run = stage.watched.run.state
    assert (run.healthy_step, run.rollbacks, run.rollbacks_since_progress, run.relaunches_in_job) == (10, 1, 0, 0)


def test_the_third_relaunch_without_progress_takes_a_fresh_job_after_the_old_one_is_over(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    old = stage.job_id
    for _ in range(3):
        stage.train(8, "spike", onset=6, loss=9.0)
        stage.leave(Outcome.VERDICT)
        stage.settle()
        if stage.directive.attempt < 4:
            stage.claim()
    cancelled = stage.names.index("Cancelled")
    submitted = [i for i, name in enumerate(stage.names) if name == "Submitted"]
    assert submitted[0] < cancelled < submitted[1]
    assert stage.job_id != old


def test_a_crash_goes_on_in_the_same_allocation(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.leave(Outcome.CRASHED, error=CRASHED)
    stage.settle()
    assert (stage.directive.attempt, stage.directive.resume_from, stage.directive.cause) == (
        2,
        "checkpoint-20",
        "crash",
    )
    assert stage.submissions == 1


def test_the_same_crash_twice_before_any_step_gives_up_with_its_traceback(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    for _ in range(2):
        stage.leave(Outcome.CRASHED, error=CRASHED)
        stage.settle()
        if stage.state != "gave_up":
            stage.claim()
    assert stage.state == "gave_up"
    assert isinstance(stage.events[-1], GaveUp)
    assert "train.py" in (stage.events[-1].error or "")


def test_two_different_crashes_before_any_step_do_not_give_up(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.leave(Outcome.CRASHED, error=CRASHED)
    stage.settle()
    stage.claim()
    stage.leave(Outcome.CRASHED, error=ErrorDetail(type="ValueError", message="other"))
    stage.settle()
    assert stage.state != "gave_up"


FULL = ErrorDetail(type="OSError", message="[Errno 122] Disk quota exceeded", traceback=CRASHED.traceback)
STALE = ErrorDetail(
    type="ExitCode", message="exit code 1; the last line of its log: r/rank-0.error.json: [Errno 116] Stale file handle"
)
KILLED = ErrorDetail(type="Signal", message="killed by signal 9 (Killed)")


def pauses(stage: Stage, outcome: Outcome, error: ErrorDetail, num_steps: int = 0) -> list[float]:
    """For how long each attempt stood until the next was decided, where all end in the same way until it gives up."""
    stood = []
    while stage.state != "gave_up":
        if num_steps:
            stage.train(num_steps)
            stage.settle()
        attempt, since = stage.directive.attempt, stage.watched.run.state.decided_at
        stage.leave(outcome, error=error)
        for _ in range(400):
            stage.look()
            if stage.state == "gave_up" or stage.directive.attempt != attempt:
                break
        if stage.state != "gave_up":
            stood.append(stage.watched.run.state.decided_at - since)
            stage.settle()
            stage.start_job()
            stage.settle()
    return stood


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome.CRASHED, FULL),
        (Outcome.CRASHED, STALE),
        (Outcome.CRASHED, ErrorDetail(type="OSError", message="[Errno 28] the disk took only part of a record: 'h'")),
        (
            Outcome.CRASHED,
            ErrorDetail(type="SafetensorError", message="I/O error: Read-only file system (os error 30)"),
        ),
        (
            Outcome.REFUSED,
            ErrorDetail(type="DataError", message="data.train: a.txt cannot be read (Stale file handle)"),
        ),
    ],
)
def test_an_error_of_the_disk_is_waited_out_for_as_long_as_attempts_last(
    tmp_path: Path, outcome: Outcome, error: ErrorDetail
) -> None:
    stage = Stage(tmp_path, recovery={"max_submissions_per_hour": 100, "node_strikes": 100})
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stood = pauses(stage, outcome, error)
    assert len(stood) == 10
    for expected, found in zip([5, 15, 60, 150, 150, 150, 150, 150, 150], stood[1:], strict=True):
        assert expected <= found <= expected + 15  # seconds of looks, and of a job that is cancelled
    assert isinstance(stage.events[-1], GaveUp)
    assert "10 attempts without a new healthy checkpoint" in stage.events[-1].reason


def test_an_error_of_the_disk_after_steps_is_answered_at_once_the_first_time(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.leave(Outcome.CRASHED, error=FULL)
    before = stage.now
    stage.settle()
    assert stage.directive.attempt == 2
    assert stage.watched.run.state.decided_at - before <= 2


def test_a_start_that_is_killed_again_and_again_before_any_step_pauses_and_after_steps_does_not(
    tmp_path: Path,
) -> None:
    for num_steps, expected in ((0, [0, 5, 15, 60, 150]), (8, [0, 0, 0, 0, 0])):
        recovery = {"max_attempts_without_progress": 6, "max_submissions_per_hour": 100}
        stage = Stage(tmp_path / str(num_steps), recovery=recovery)
        stage.settle()
        stage.start_job()
        stood = pauses(stage, Outcome.CRASHED, KILLED, num_steps)
        for least, found in zip(expected, stood, strict=True):
            assert least <= found <= least + 15


def test_status_says_when_it_is_tried_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.settle()
    stage.start_job()
    stage.train(25)
    stage.settle()
    stage.leave(Outcome.CRASHED, error=FULL)
    stage.settle()
    stage.claim()
    stage.leave(Outcome.CRASHED, error=FULL)
    stage.look()
    monkeypatch.setattr("supervisor.runs.time.time", lambda: stage.now)
    reason = standing(stage.run_dir, in_detail=False)["reason"]
    assert reason.startswith("tried again in ")
    assert "Disk quota exceeded" in reason


def test_a_restore_that_does_not_prove_itself_takes_the_next_older_checkpoint_at_the_same_rate(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    stage.claim()
    proof = ErrorDetail(type="ProofError", message="probe loss", what="probe", expected="1.0", found="2.0")
    stage.leave(Outcome.REFUSED, error=proof)
    stage.settle()
    assert (stage.directive.cause, stage.directive.resume_from, stage.directive.lr_scale) == (
        "refused",
        "checkpoint-20",
        0.5,
    )


def test_a_refusal_that_would_come_again_gives_up_with_its_message(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.leave(Outcome.REFUSED, error=ErrorDetail(type="DataError", message="data.train: no file"))
    stage.settle()
    assert stage.state == "gave_up"
    assert "data.train: no file" in stage.events[-1].reason


def test_changed_settings_are_no_bad_checkpoint(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    stage.claim()
    changed = ErrorDetail(type="RefusedError", message="max_steps", what="max_steps", expected="100", found="200")
    stage.leave(Outcome.REFUSED, error=changed)
    stage.settle()
    assert stage.state == "gave_up"
    assert stage.run_dir.checkpoint_steps() == [10, 20, 30]


def test_out_of_memory_by_slurm_s_word_alone_is_tried_once_more_too(stage: Stage) -> None:
    stage.settle()
    for _ in range(2):
        stage.start_job()
        stage.train(8)
        stage.settle()
        stage.scheduler.set_state(stage.job_id, JobState.OUT_OF_MEMORY)
        stage.settle()
    assert stage.state == "gave_up"
    assert stage.submissions == 2


def test_out_of_memory_is_tried_once_more_after_progress(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    stage.train(8)
    stage.settle()
    for _ in range(2):
        stage.leave(Outcome.OUT_OF_MEMORY, error=ErrorDetail(type="OutOfMemoryError", message="2 GiB"))
        stage.settle()
        if stage.state != "gave_up":
            stage.claim()
            stage.train(9)
            stage.settle()
    assert stage.state == "gave_up"
    assert stage.directive.attempt == 2


def test_attempts_without_progress_are_counted(tmp_path: Path) -> None:
    stage = Stage(tmp_path, recovery={"max_attempts_without_progress": 3, "max_submissions_per_hour": 100})
    for _ in range(8):
        stage.settle()
        if stage.state != "gave_up" and stage.watched.run.state.has_live_job:
            stage.start_job()
            stage.scheduler.set_state(stage.job_id, JobState.FAILED)
    assert stage.state == "gave_up"
    assert stage.submissions == 3


def test_scales_multiply_over_rollbacks_and_stop_at_the_floor_and_the_budget(stage: Stage) -> None:
    stage.settle()
    stage.start_job()
    scales = []
    for again in range(5):
        stage.train(8, "spike", onset=6, loss=9.0 * 2**again)
        stage.leave(Outcome.VERDICT)
        stage.settle()
        if stage.directive.attempt == 4:  # two relaunches in one allocation, then a fresh job
            assert stage.submissions == 2
        stage.start_job()
        stage.settle()
        scales.append(stage.directive.lr_scale)
    assert scales == [0.5, 0.25, 0.125, 0.0625, 0.03125]
    stage.train(8, "spike", onset=6, loss=999.0)
    stage.leave(Outcome.VERDICT)
    stage.settle()
    assert stage.state == "gave_up"
    assert isinstance(stage.events[-1], GaveUp)
    assert "5 rollbacks" in stage.events[-1].reason
    assert [text.split(" of the configured rate")[0][-3:] for text in stage.events[-1].tried[:2]] == ["0.5", ".25"]
    assert len(stage.events[-1].tried) == 5
    assert stage.scheduler.jobs[stage.job_id].state is JobState.CANCELLED
