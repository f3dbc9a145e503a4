"""The pure parts: the rates, retention, endings, what files and signals ask."""

import errno
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.contract_room.disks import fill, small_disk
from worker.beginning import prove_scaler
from worker.checkpoints import file_entries, kept_steps, retire
from worker.contract.claim import Claim, FencedError, check_claim, take_claim
from worker.contract.digest import digest_of as contract_digest_of
from worker.contract.directive import Directive, publish_directive, read_directive
from worker.contract.exit_report import NO_WORLD_ERROR, TrainerError
from worker.contract.files import UnusableFileError, encode, publish_message, read_message
from worker.contract.loss_history import HistoryWriter, Record, Verdict, read_history, surviving
from worker.contract.manifest import MANIFEST, Manifest
from worker.contract.recovery_config import CheckpointConfig
from worker.contract.run_dir import RunDir
from worker.documents import DataError
from worker.evaluation import evaluation_is_missing
from worker.interrupts import Ask, RunFiles, Signals
from worker.leaving import AskedToLeaveError, ProofError, RefusedError, VerdictError
from worker.probe import probe_samples, weights_are_finite
from worker.randomness import random_digest, random_states_aside
from worker.rates import configured_rates, hold_rates
from worker.resume import choose, prove_probe
from worker.segment import Segment, telling_records
from worker.staging import clear_own_staging, clear_staging
from worker.start import Start
from worker.tap import peak_memory_bytes
from worker.train import Progress, exit_code_of, refuse_other_disk, report
from worker.world import NoWorldError, interface_of, join_world, own_address, refuse_lonely_tasks


def trained(num_groups: int = 2) -> tuple[torch.optim.Optimizer, LambdaLR]:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": 0.3 / (one + 1)} for one in range(num_groups)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def run_rates(scale: Callable[[int], float], steps: int = 5) -> list[list[float]]:
    optimizer, schedule = trained()
    hold_rates(optimizer, schedule, configured_rates(optimizer), scale)
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def test_rates_are_peak_times_schedule_times_scale_and_one_is_neutral() -> None:
    plain_optimizer, plain_schedule = trained()
    plain = []
    for _ in range(5):
        plain.append([group["lr"] for group in plain_optimizer.param_groups])
        plain_optimizer.step()
        plain_schedule.step()
    assert run_rates(lambda step: 1.0) == plain
    assert run_rates(lambda step: 0.5) == [[rate * 0.5 for rate in rates] for rates in plain]
    assert run_rates(lambda step: 1.0 / step)[2] == pytest.approx([rate / 3 for rate in plain[2]])


def test_a_checkpoint_with_a_scaled_rate_does_not_scale_again() -> None:
    optimizer, schedule = trained()
    peaks = configured_rates(optimizer)
    hold_rates(optimizer, schedule, peaks, lambda step: 0.5)
    optimizer.step()
    schedule.step()
    saved = optimizer.state_dict(), schedule.state_dict()
    for _ in range(3):
        optimizer, schedule = trained()
        optimizer.load_state_dict(saved[0])
        schedule.load_state_dict(saved[1])
        rate_after = hold_rates(optimizer, schedule, peaks, lambda step: 0.5)
        assert [group["lr"] for group in optimizer.param_groups] == [peak / 2 * 0.5 for peak in peaks]
        assert schedule.get_last_lr()[0] == rate_after(1) == 0.3 / 2 * 0.5
        saved = optimizer.state_dict(), schedule.state_dict()


def test_a_schedule_without_a_base_rate_is_refused() -> None:
    optimizer, _ = trained()
    with pytest.raises(RefusedError, match="ReduceLROnPlateau has no base rate"):
        hold_rates(optimizer, ReduceLROnPlateau(optimizer), [0.1, 0.1], lambda step: 1.0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VerdictError("x"), 20),
        (AskedToLeaveError("x", what="stop"), 21),
        (FencedError("x"), 22),
        (ProofError("x"), 23),
        (DataError("x"), 23),
        (torch.OutOfMemoryError("x"), 24),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), 24),
        (MemoryError(), 24),
        (RuntimeError("x"), 1),
        (KeyboardInterrupt(), 1),
    ],
)
def test_every_ending_has_its_exit_code(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def manifest(step: int, weights_finite: bool = True) -> Manifest:
    return Manifest(
        step=step,
        attempt=1,
        segment=1,
        time=1.0,
        epoch=0.0,
        batches_into_epoch=0,
        samples_seen=0,
        world_size=1,
        batch_size=1,
        gradient_accumulation=1,
        max_steps=99,
        seed=1,
        config_digest="",
        data_digest="",
        lr_scale=1.0,
        weights_finite=weights_finite,
        probe_loss=1.0,
        optimizer_steps=step,
        versions={},
        files={},
    )


def record(step: int, **fields: object) -> Record:
    return Record.model_validate(
        {"segment": 1, "attempt": 1, "restart": 0, "step": step, "epoch": 0, "time": 1, **fields}
    )


def test_what_is_not_finite_never_pushes_the_last_healthy_one_out() -> None:
    rules = CheckpointConfig(keep=1, keep_healthy=1, healthy_after=5)
    late_nan = [manifest(10), manifest(20, weights_finite=False), manifest(30, weights_finite=False)]
    assert kept_steps(rules, late_nan, [record(30)], ()) == {10, 30}


def test_an_open_verdict_keeps_what_lies_before_its_onset() -> None:
    rules = CheckpointConfig(keep=2, keep_healthy=1, healthy_after=5)
    branch = [record(19, verdict="pending", onset_step=19), record(20, verdict="suspect", onset_step=19), record(21)]
    assert kept_steps(rules, [manifest(step) for step in (5, 10, 15, 18, 20)], branch, ()) == {15, 18, 20}


@given(st.sets(st.integers(1, 60), max_size=15), st.sets(st.integers(1, 60)), st.integers(1, 3), st.integers(0, 30))
def test_retention_keeps_the_newest_the_wanted_and_a_way_to_the_next_healthy(
    steps: set[int], wanted: set[int], keep: int, healthy_after: int
) -> None:
    rules = CheckpointConfig(keep=keep, keep_healthy=1, healthy_after=healthy_after)
    kept = kept_steps(rules, [manifest(step) for step in steps], [record(max(steps, default=0))], wanted)
    assert kept <= steps
    assert kept >= {*sorted(steps)[-keep:], *(wanted & steps)}
    assert len(kept - wanted) <= keep + 2


def test_only_foreign_staging_is_cleared(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for name in ("a1-r0-checkpoint-4", "a2-r0-checkpoint-4", "a2-r1-checkpoint-8", "a2-r10-tokens-0"):
        (run.staging / name).mkdir(parents=True)
    clear_staging(run, 2, 1)
    assert [entry.name for entry in run.staging.iterdir()] == ["a2-r1-checkpoint-8"]
    clear_own_staging(run, 2, 10)
    assert [entry.name for entry in run.staging.iterdir()] == ["a2-r1-checkpoint-8"]
    clear_own_staging(run, 2, 1)
    assert list(run.staging.iterdir()) == []


def test_what_could_not_be_removed_when_it_was_retired_goes_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, rules = RunDir(tmp_path), CheckpointConfig(keep=1, keep_healthy=1, healthy_after=0)
    run.staging.mkdir()
    for step in (10, 20, 30):
        checkpoint(run, step)
    with monkeypatch.context() as busy:
        busy.setattr("os.unlink", failing(os.unlink, "optimizer.pt"))
        assert retire(run, 1, 0, rules, [record(30)], ()) == [10, 20]
    assert run.checkpoint_steps() == [30]
    assert [path.name for path in run.staging.rglob("*.*")] == ["optimizer.pt"] * 2
    assert [one.getMessage().partition(" cannot be removed now")[0] for one in caplog.records] == [
        str(run.checkpoint(step)) for step in (10, 20)
    ]
    assert all("[Errno 16] Device or resource busy: 'optimizer.pt'" in one.getMessage() for one in caplog.records)
    clear_staging(run, 1, 1)
    assert list(run.staging.iterdir()) == []


def failing(original: Callable[..., None], name: str) -> Callable[..., None]:
    """``os.unlink``, where a file of this name is busy."""

    def unlink(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name == name:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        original(path, *args, **kwargs)

    return unlink


@pytest.mark.parametrize("is_replaced", [True, False])
def test_best_weights_whose_successor_was_never_published_go_back(tmp_path: Path, is_replaced: bool) -> None:
    run = RunDir(tmp_path)
    former = run.staging / "a1-r0-best-former"
    former.mkdir(parents=True)
    (former / "best.json").write_text("former")
    if is_replaced:
        run.best.mkdir()
        (run.best / "best.json").write_text("new")
    clear_staging(run, 1, 1)
    assert (run.best / "best.json").read_text() == ("new" if is_replaced else "former")
    assert list(run.staging.iterdir()) == []


def test_from_scratch_is_only_what_was_asked_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert choose(run, 1, None, sizes_only=False) is None
    with pytest.raises(RefusedError, match="checkpoint-8 was to be resumed from"):
        choose(run, 1, "checkpoint-8", sizes_only=False)
    with pytest.raises(RefusedError, match="'latest' is no checkpoint's name"):
        choose(run, 1, "latest", sizes_only=False)


def test_the_probe_is_exact_on_the_same_platform_and_tolerant_elsewhere() -> None:
    prove_probe(2.0, 2.0, is_same_platform=True)
    prove_probe(2.0, 2.001, is_same_platform=False)
    prove_probe(None, None, is_same_platform=False)
    for expected, found, is_same in [(2.0, 2.0000001, True), (2.0, 2.1, False), (2.0, None, False)]:
        with pytest.raises(ProofError, match="probe loss"):
            prove_probe(expected, found, is_same_platform=is_same)


def test_a_devices_random_state_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    device = [torch.tensor([7], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.random, "get_rng_state", lambda: device[0])
    monkeypatch.setattr(torch.cuda.random, "set_rng_state", lambda state: device.__setitem__(0, state))
    before = random_digest()
    with random_states_aside():
        device[0] = torch.tensor([8], dtype=torch.uint8)
        assert random_digest() != before
    assert random_digest() == before


def test_the_peak_memory_is_the_one_that_torch_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_memory_bytes() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert peak_memory_bytes() == torch.cuda.max_memory_allocated() == 0
    told = {"allocated_bytes": {"all": {"peak": 7, "current": 3}}, "num_ooms": 0}
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "memory_stats_as_nested_dict", lambda device=None: told)
    assert peak_memory_bytes() == torch.cuda.max_memory_allocated() == 7


def test_a_loss_scale_never_begins_anew() -> None:
    prove_scaler(None, {"optimizer.pt"})
    prove_scaler(torch.amp.GradScaler("cpu"), {"optimizer.pt", "scaler.pt"})
    with pytest.raises(ProofError, match=r"scaler\.pt in the checkpoint is False"):
        prove_scaler(torch.amp.GradScaler("cpu"), {"optimizer.pt"})


def test_what_is_done_aside_leaves_no_trace() -> None:
    before = random_digest()
    with random_states_aside():
        torch.rand(3)
        assert random_digest() != before
    assert random_digest() == before


def test_one_of_several_tasks_may_not_think_that_it_is_alone() -> None:
    start = Start(attempt=1, restart=0, job_id="1", name="hf-1", rank=0, world=1, local_rank=0)
    refuse_lonely_tasks(start, {"SLURM_NTASKS": "1"})
    refuse_lonely_tasks(start, {})
    with pytest.raises(RefusedError, match="Slurm started 2 tasks"):
        refuse_lonely_tasks(start, {"SLURM_NTASKS": "2"})


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_whose_peer_never_comes_find_no_world(tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.world._AGAIN_TIMEOUT_S", 0.5)
    world = {"rank": rank, "world": 2, "local_rank": rank, "same_allocation": True}
    start = Start(attempt=2, restart=0, job_id="1", name="hf-1", **world)
    with pytest.raises(NoWorldError, match="2 ranks found no world") as caught:
        join_world(RunDir(tmp_path), start, {}, 60.0)
    assert type(caught.value).__name__ == NO_WORLD_ERROR
    assert exit_code_of(caught.value) == 1


def test_this_host_has_an_address_and_an_interface_for_it() -> None:
    assert interface_of(own_address())
    assert interface_of("203.0.113.77") is None


def files_of(folder: Path, **fields: object) -> tuple[RunDir, RunFiles]:
    run = RunDir(folder)
    direct(run, **fields)
    claim = Claim(job_id="17", name="hf-1", restart=0, host="h", pid=1, started_ticks=1, time=1.0)
    take_claim(run.claim(1), claim)
    directive = read_directive(run.directive)
    assert directive is not None
    return run, RunFiles(run, directive, lambda: check_claim(run.claim(1), "17", 0))


def direct(run: RunDir, attempt: int = 1, **fields: object) -> None:
    told = {"attempt": attempt, "cause": "first", "reason": "a test", "time": 1.0, **fields}
    publish_directive(run.directive, Directive.model_validate(told))


def test_what_is_asked_by_files_is_seen_at_the_next_look(tmp_path: Path) -> None:
    run, files = files_of(tmp_path)
    assert files.look() is Ask.NOTHING
    run.save_file.touch()
    assert files.look() is Ask.SAVE
    files.saved()
    assert files.look() is Ask.NOTHING
    run.stop_file.touch()
    assert files.look() is Ask.STOP
    direct(run, stop="now", pinned=(4,))
    assert files.look() is Ask.STOP_NOW
    assert files.directive.pinned == (4,)


def test_where_the_disk_answers_slowly_looks_take_a_hundredth_of_the_time(tmp_path: Path) -> None:
    now, (run, files) = [0.0], files_of(tmp_path)
    files._clock = lambda: now.append(now[-1] + 0.001) or now[-1]  # type: ignore[func-returns-value]
    for _ in range(8):
        assert files.look() is Ask.NOTHING
    run.save_file.touch()
    run.claim(1).unlink()
    while files.look() is Ask.NOTHING:
        files.recheck()
        assert now[-1] < 0.2
    assert now[-1] == pytest.approx(0.016 + 0.099, abs=0.003)
    with pytest.raises(FencedError):
        files.recheck()


def test_a_quick_disk_is_looked_at_twenty_times_a_second(tmp_path: Path) -> None:
    now, (run, files) = [0.0], files_of(tmp_path)
    files._clock = lambda: now[0]
    for _ in range(8):
        assert files.look() is Ask.NOTHING
    run.stop_file.touch()
    now[0] = 0.049
    assert files.look() is Ask.NOTHING
    now[0] = 0.051
    assert files.look() is Ask.STOP


def test_a_look_that_was_held_up_makes_none_of_the_others_rarer(tmp_path: Path) -> None:
    now, (run, files) = [0.0], files_of(tmp_path)
    files._clock = lambda: now[0]
    for _ in range(8):
        now[0] += 0.001
        assert files.look() is Ask.NOTHING
    files._took_s.append(60.0)
    run.stop_file.touch()
    now[0] += 0.06
    assert files.look() is Ask.STOP


def test_a_folder_of_that_name_asks_for_nothing(tmp_path: Path) -> None:
    run, files = files_of(tmp_path)
    run.stop_file.mkdir()
    run.save_file.touch()
    assert files.look() is Ask.SAVE
    run.save_file.unlink()
    run.save_file.mkdir()
    files.saved()
    assert files.look() is Ask.NOTHING


def test_a_save_that_cannot_be_removed_is_obeyed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    run, files = files_of(tmp_path)
    monkeypatch.setattr(Path, "unlink", refuse)
    for touched in (1, 2):
        run.save_file.touch()
        os.utime(run.save_file, (touched, touched))
        assert files.look() is Ask.SAVE
        files.saved()
        assert files.look() is Ask.NOTHING


def test_who_is_fenced_once_stays_fenced(tmp_path: Path) -> None:
    run, files = files_of(tmp_path)
    files.check()
    publish_message(
        run.claim(1), Claim(job_id="17", name="hf-1", restart=1, host="h", pid=1, started_ticks=1, time=1.0)
    )
    for _ in range(2):
        assert files.look() is Ask.FENCED
        with pytest.raises(FencedError):
            files.check()


def test_a_directive_that_cannot_be_read_is_no_news_and_a_claim_that_cannot_is_no_refusal(tmp_path: Path) -> None:
    run, files = files_of(tmp_path)
    run.directive.write_text("{", encoding="utf-8")
    assert files.look() is Ask.NOTHING
    run.claim(1).write_text("{", encoding="utf-8")
    with pytest.raises(OSError, match=r"claim\.json"):
        files.check()


def test_what_ended_a_trainer_is_said_where_its_own_save_has_filled_the_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as run_dir:
        run = RunDir(run_dir)
        place, staged = run.error(1, 0, 0), run.staged(1, 0, 4)
        for folder in (place.parent, staged):
            folder.mkdir(parents=True)
        fill(staged)
        start = Start(attempt=1, restart=0, job_id="17", name="hf-1", rank=0, world=1, local_rank=0)
        report(run, start, Progress(), VerdictError("a spike", what="spike"))
        error = read_message(place, TrainerError)
        assert error is not None
        assert error.error is not None
        assert (error.error.what, staged.exists()) == ("spike", False)


def test_a_folder_of_checkpoints_on_another_file_system_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small") as elsewhere:
        run = RunDir(tmp_path / "run")
        run.path.mkdir()
        refuse_other_disk(run)
        run.checkpoints.symlink_to(elsewhere)
        with pytest.raises(RefusedError, match="checkpoints is on another file system"):
            refuse_other_disk(run)


def test_signals_are_flags_and_the_handlers_before_come_back() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a script may
    try:
        signals = Signals()
        signal.raise_signal(signal.SIGUSR2)
        assert signals.asked is Ask.TIME_LIMIT
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR2)
        assert signals.asked is Ask.PREEMPTED
        signals.restore()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        signal.raise_signal(signal.SIGUSR2)  # nobody handled it before: it ends nothing
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def checkpoint(run: RunDir, step: int, attempt: int = 1, without: str = "") -> None:
    """A checkpoint folder that is whole in its own words."""
    folder = run.checkpoint(step)
    folder.mkdir(parents=True)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"):
        if name != without:
            (folder / name).write_text(f"{name} {step}", encoding="utf-8")
    told = manifest(step).model_copy(update={"attempt": attempt, "files": file_entries(folder)})
    publish_message(folder / MANIFEST, told)


def chosen(run: RunDir, attempt: int, named: str | None) -> tuple[str, list[str]]:
    found = choose(run, attempt, named, sizes_only=False)
    assert found is not None
    return found.folder.name, [one.checkpoint for one in found.passed_over]


def test_an_attempt_goes_on_from_its_own_newest_checkpoint_else_from_the_named_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step, attempt in ((9000, 1), (10000, 1), (10500, 2), (11000, 1)):
        checkpoint(run, step, attempt)
    assert chosen(run, 1, "checkpoint-9000") == ("checkpoint-11000", [])
    assert chosen(run, 2, "checkpoint-9000") == ("checkpoint-10500", [])
    assert chosen(run, 3, "checkpoint-10000") == ("checkpoint-10000", [])


@pytest.mark.parametrize("missing", ["optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_checkpoint_that_would_begin_afresh_is_passed_over(tmp_path: Path, missing: str) -> None:
    run = RunDir(tmp_path)
    checkpoint(run, 500)
    checkpoint(run, 1000, without=missing)
    checkpoint(run, 1500)
    (run.checkpoint(1500) / "trainer_state.json").write_bytes(b"")
    assert chosen(run, 1, "checkpoint-500") == ("checkpoint-500", ["checkpoint-1500", "checkpoint-1000"])
    assert run.checkpoint_steps() == [500, 1000, 1500]


@pytest.mark.parametrize("unreadable", ["optimizer.pt", MANIFEST])
def test_a_checkpoint_that_the_disk_does_not_give_back_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    run = RunDir(tmp_path)
    for step in (500, 1000):
        checkpoint(run, step)
    bad = run.checkpoint(1000) / unreadable

    def digest_of(path: Path) -> str:
        if path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return contract_digest_of(path)

    monkeypatch.setattr("worker.resume.digest_of", digest_of)
    monkeypatch.setattr("worker.resume._AGAIN_AFTER_S", (0.0, 0.0))
    found = choose(run, 1, None, sizes_only=False)
    assert found is not None
    assert found.folder.name == "checkpoint-500"
    assert [one.reason for one in found.passed_over] == [
        f"{unreadable} cannot be read ([Errno 5] Input/output error: '{bad}')"
    ]
    assert run.checkpoint_steps() == [500, 1000]
    assert bad.exists()


@pytest.mark.parametrize("unreadable", ["worker.resume.digest_of", "worker.contract.manifest.read_message"])
def test_a_disk_that_does_not_answer_for_a_moment_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    run, slept_s = RunDir(tmp_path), list[float]()
    for step in (500, 1000):
        checkpoint(run, step)
    is_digest = unreadable.endswith("digest_of")
    original: Any = contract_digest_of if is_digest else read_message

    def read(path: Path, *args: Any) -> Any:
        if len(slept_s) < 2:
            away = OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            raise away if is_digest else UnusableFileError(path, f"cannot be read ({away})")
        return original(path, *args)

    monkeypatch.setattr(unreadable, read)
    monkeypatch.setattr("worker.resume.time.sleep", slept_s.append)
    assert chosen(run, 1, None) == ("checkpoint-1000", [])
    assert slept_s == [1.0, 5.0]


def test_a_bad_checkpoint_is_never_passed_over_for_a_newer_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    checkpoint(run, 500)
    checkpoint(run, 1000)
    (run.checkpoint(500) / MANIFEST).unlink()
    with pytest.raises(RefusedError, match="checkpoint-500: it has no manifest"):
        choose(run, 2, "checkpoint-500", sizes_only=False)


@pytest.mark.parametrize(
    ("learned", "expected"),
    [([40, 40], 1), ([31, 40], 1), ([30, 1, 40], 2), ([0, 8, 8, 8, 40], 4), ([3], 1), ([None] * 9, 4)],
)
def test_a_probe_takes_the_fewest_samples_with_something_to_tell(learned: list[int | None], expected: int) -> None:
    samples = [{"input_ids": torch.ones(50)} for _ in learned]
    for sample, number in zip(samples, learned, strict=True):
        if number is not None:
            sample["labels"] = torch.where(torch.arange(50) < number, 7, -100)
    trainer: Any = SimpleNamespace(
        train_dataset=samples,
        data_collator=lambda batch: {name: torch.stack([one[name] for one in batch]) for name in batch[0]},
        _get_collator_with_removed_columns=lambda collator, description: collator,
    )
    assert probe_samples(trainer) == expected


class Missing(TrainerCallback):
    """Notes, at each save and after each evaluation, whether one is missing at this step."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, bool]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.noted.append((state.global_step, evaluation_is_missing(args, state)))

    on_evaluate = on_save


class Linear(torch.nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return {"loss": (super().forward(x) - labels).square().mean(), "logits": x}


@pytest.mark.parametrize(("delay", "missing"), [(0, [2, 4]), (2, [4])])
def test_an_evaluation_at_the_end_of_an_epoch_is_missing_until_it_is_made(
    tmp_path: Path, delay: int, missing: list[int]
) -> None:
    """Two steps an epoch, from the Trainer itself and after a resume in the middle of one."""
    args = TrainingArguments(
        tmp_path, use_cpu=True, report_to=[], disable_tqdm=True, max_steps=5, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, eval_strategy="epoch", eval_delay=delay, save_strategy="steps", save_steps=1,
    )  # fmt: skip
    rows: Any = [{"x": torch.ones(1), "labels": torch.ones(1)}] * 8
    for resumed in (None, str(tmp_path / "checkpoint-1")):
        notes = Missing()
        trainer = Trainer(Linear(1, 1), args, train_dataset=rows, eval_dataset=rows, callbacks=[notes])
        trainer.train(resume_from_checkpoint=resumed)
        assert [step for step, is_missing in notes.noted if is_missing] == missing
        assert [(step, False) in notes.noted for step in missing] == [True] * len(missing)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_in_all_weights(value: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2).bfloat16())
    assert weights_are_finite(model)
    for parameter in model.parameters():
        for index in range(parameter.numel()):
            before = parameter.detach().clone()
            with torch.no_grad():
                parameter.view(-1)[index] = value
            assert not weights_are_finite(model)
            with torch.no_grad():
                parameter.copy_(before)
    assert weights_are_finite(model)


VERDICTS = st.sampled_from(["ok", "ok", "pending", "skipped", "spike", "nonfinite"])


@given(st.lists(st.tuples(st.integers(1, 12), VERDICTS), max_size=25), st.integers(0, 12), st.integers(0, 12))
def test_the_telling_records_are_those_that_a_whole_reading_finds(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, Verdict]], begin: int, oldest: int
) -> None:
    path = tmp_path_factory.mktemp("history") / "loss_history.json"
    with HistoryWriter(path, lambda: None) as writer:
        for step, verdict in steps:
            writer.append(record(step, verdict=verdict, warnings=('a "verdict": "spike"',)))
    before = [one for one in surviving(read_history(path)) if one.step <= begin]
    telling = [one for one in before if one.verdict != "ok"]
    assert telling_records(path, 0, begin) == (telling, before[-1:])
    from_oldest, last = telling_records(path, oldest, begin)
    assert [one for one in from_oldest if one.step >= oldest] == [one for one in telling if one.step >= oldest]
    assert all(one in telling for one in from_oldest)
    assert last == before[-1:]


def test_a_long_history_is_opened_by_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 20,000, with the oldest checkpoint at 18,500: a handful of records is parsed, a fraction of them read."""
    run = RunDir(tmp_path)
    lines = [encode(record(step, loss=3.0).model_dump(mode="json", exclude_none=True)) for step in range(1, 20_001)]
    run.history.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    for step in (18_500, 20_000):
        run.checkpoint(step).mkdir(parents=True)
    parsed, read = [], []
    parse, pread = Record.model_validate_json, os.pread
    monkeypatch.setattr(Record, "model_validate_json", lambda line: parsed.append(line) or parse(line))
    monkeypatch.setattr(os, "pread", lambda *args: read.append(pread(*args)) or read[-1])
    start = Start(attempt=2, restart=0, job_id="1", name="hf-test", rank=0, world=1, local_rank=0)
    segment = Segment(run, start, 20_000, lambda: None, run.checkpoint(20_000))
    assert [one.step for one in segment.branch()] == [20_000]
    assert len(parsed) < 5
    assert sum(map(len, read)) < run.history.stat().st_size / 5
