"""Begins an attempt: quarantine first, then the directive, then the outcome."""

import shutil
from collections.abc import Collection

from supervisor.believed import believed
from supervisor.job_policy import waits_after_requeue
from supervisor.journal import (
    AttemptDecided,
    Continued,
    Diagnosis,
    Plan,
    RolledBack,
)
from supervisor.supervised_run import SupervisedRun
from worker.contract.directive import Directive, publish_directive, read_directive
from worker.contract.files import UnusableFileError, sync_folder
from worker.contract.run_dir import RunDir, checkpoint_step


def begin_attempt(run: SupervisedRun, plan: AttemptDecided) -> None:
    """Do what an attempt begins with, and note it as begun; each part may have been done before."""
    number = run.state.attempt + 1
    for name in plan.quarantine:
        _quarantine(run.run_dir, name, run.state.attempt)
    _prune_quarantine(run.run_dir, run.config.checkpoint.keep_quarantined, run.state.pinned)
    published = published_directive(run)
    if published is None or published.attempt < number:
        publish_directive(run.run_dir.directive, directive_of(run, plan, number))
    run.record(outcome_event(plan, diagnosis_of(run, plan)), attempt=number)


def diagnosis_of(run: SupervisedRun, plan: AttemptDecided) -> Diagnosis | None:
    """What is believed of the verdict that ``plan`` answers; None where it answers none, or a person's word."""
    if plan.rollback is None or plan.cause == "rollback":
        return None
    return believed(run.run_dir, run.state.attempt, plan.rollback.verdict_step)


def published_directive(run: SupervisedRun) -> Directive | None:
    """The directive as it stands; None where there is none, or one that was spoilt and is to be written again."""
    try:
        return read_directive(run.run_dir.directive)
    except UnusableFileError:
        return None


def directive_of(run: SupervisedRun, plan: Plan, number: int) -> Directive:
    """What the worker is told of an attempt."""
    return Directive(
        attempt=number,
        pinned=run.state.pinned,
        accept_level=plan.accept_level,
        resume_from=plan.resume_from,
        on_requeue="wait" if waits_after_requeue(run.config.recovery) else "continue",
        new_job=plan.where == "new_job",
        lr_scale=plan.lr_scale,
        lr_ramp=plan.lr_ramp,
        skip_batches=plan.skip_batches,
        reset_moments=plan.reset_moments,
        rewarm_steps=plan.rewarm_steps,
        reset_from=plan.reset_from,
        rehearse=run.state.rehearse,
        cause=plan.cause,
        reason=plan.reason,
        time=run.clock(),
    )


def outcome_event(plan: AttemptDecided, diagnosis: Diagnosis | None = None) -> RolledBack | Continued:
    """What is noted of an attempt once its directive is out."""
    shared = plan.model_dump(exclude={"event", "rollback", "time", "attempt", "term"})
    if plan.rollback is not None:
        return RolledBack(**shared, **plan.rollback.model_dump(), diagnosis=diagnosis)
    return Continued(**shared)


def _quarantine(run_dir: RunDir, name: str, attempt: int) -> None:
    """Move a checkpoint of the abandoned branch aside; one that is gone was moved before."""
    source = run_dir.checkpoints / name
    run_dir.quarantine.mkdir(exist_ok=True)
    target = run_dir.quarantine / f"a{attempt}-{name}"
    if source.exists() and not target.exists():
        source.rename(target)
        sync_folder(run_dir.checkpoints)
        sync_folder(run_dir.quarantine)


def _prune_quarantine(run_dir: RunDir, keep: int, pinned: Collection[int]) -> None:
    """Remove all quarantined checkpoints but the ``keep`` newest (of the latest attempt, of the highest step) and the
    pinned."""
    if not run_dir.quarantine.exists():
        return
    ranked = []
    for folder in run_dir.quarantine.iterdir():
        attempt, _, name = folder.name.partition("-")
        step = checkpoint_step(name)
        if step is not None and step not in pinned and attempt[1:].isdigit():
            ranked.append((int(attempt[1:]), step, folder))
    for _, _, folder in sorted(ranked, reverse=True)[keep:]:
        shutil.rmtree(folder, ignore_errors=True)


def publish_pins(run: SupervisedRun) -> None:
    """Let the worker's retention know which checkpoints are pinned; a directive to come says so by itself.

    So is the one that a person's rollback goes to, for the attempt may have to wait for the end of a job that saves.
    """
    asked, directive = run.state.rollback_asked, published_directive(run)
    pinned = run.state.pinned if asked is None or not asked.to else tuple(sorted({*run.state.pinned, asked.to}))
    if directive is not None and directive.pinned != pinned:
        publish_directive(run.run_dir.directive, directive.model_copy(update={"pinned": pinned}))
