"""The table of symptoms: each row fires on what it is of, and not on its neighbour; a healthy run is called healthy."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor.cli import main
from supervisor.config_history import by_key
from supervisor.diagnosis import HARMLESS, OF_VERDICTS, SHAPES, SPECIFIC, diagnose, explain
from supervisor.evidence import Evidence
from supervisor.journal import (
    Continued,
    Diagnosis,
    Event,
    GaveUp,
    HangSeen,
    JobSeen,
    NodeStruck,
    ResumeRequested,
    RolledBack,
    RunCreated,
    WorkerLeft,
)
from supervisor.report.diagnosis_text import diagnosis_lines
from supervisor.report.texts import details_of
from tests.supervisor_room.stage import Stage, config
from worker.contract.exit_report import PROOF_ERROR, ErrorDetail, Outcome
from worker.contract.loss_history import BatchPosition, Probe, Record, Start

STEPS = 1000
SCALER = ("the fp16 scaler skipped this step",)


def start(checkpoint: str | None = None, probe: float = 1.0, **versions: str) -> Start:
    return Start(
        checkpoint=checkpoint,
        max_steps=STEPS,
        lr=1.0,
        lr_expected=1.0,
        optimizer_steps=0,
        rng_digests=("r",),
        next_samples=(1,),
        probe=Probe(expected=1.0 if checkpoint else None, found=probe),
        versions=versions,
    )


def steps(first: int, last: int, attempt: int = 1, begun: Start | None = None, **fields: Any) -> list[Record]:
    """Steps like each other, one batch each in epochs of 100; ``begun`` starts a segment. A field may be a function."""
    made = []
    for step in range(first, last + 1):
        told = {name: value(step) if callable(value) else value for name, value in fields.items()}
        plain = {"loss": 2.0, "grad_norm": 1.0, "lr": 1e-5, "tokens_per_s": 1000.0, "step_s": 1.0, "data_wait_s": 0.01}
        made.append(
            Record(
                segment=attempt,
                attempt=attempt,
                restart=0,
                step=step,
                epoch=step / 100,
                time=float(step),
                data=BatchPosition(epoch=(step - 1) // 100, batch=(step - 1) % 100),
                start=begun if step == first else None,
                **plain | told,
            )
        )
    return made


def nonfinite(
    step: int, attempt: int = 1, verdict: str = "nonfinite", loss: bool = True, **fields: Any
) -> list[Record]:
    begin = fields.pop("begun", None)
    named = {"loss": "inf", "grad_norm": "nan"} if loss else {"grad_norm": "nan"}
    odd = {"loss": None if loss else 2.0, "grad_norm": None, "nonfinite": named, "verdict": verdict, "onset_step": step}
    return steps(step, step, attempt, begin, **odd | fields)


def spike(onset: int, last: int, attempt: int = 1, begun: Start | None = None, **fields: Any) -> list[Record]:
    odd: dict[str, Any] = {"loss": 9.0, "onset_step": onset, "level": 2.0, "grad_norm": 20.0}
    streak = steps(onset, last, attempt, begun, verdict="pending", **odd | fields)
    return [*streak[:-1], streak[-1].model_copy(update={"verdict": "spike"})]


def of(
    *records: Sequence[Record],
    events: Sequence[Event] = (),
    name: str = "adamw",
    rate: float | None = 1e-5,
    **given: Any,
) -> Evidence:
    """Evidence of a trained model that is trained further; ``given`` are sections, as ``training={...}``."""
    optimizer = {"name": name, "learning_rate": rate}
    training = {"max_steps": STEPS, "optimizer": optimizer, "batch_size": 32} | given.pop("training", {})
    model = {"path": "m", "config": None} | given.pop("model", {})
    settings = config(Path(), model=model, training=training, **given)
    return Evidence(settings, [one for some in records for one in some], events)


def begun(attempt: int, cause: str, scale: float = 1.0) -> Continued:
    return Continued(attempt=attempt, cause=cause, where="new_job", lr_scale=scale)  # type: ignore[arg-type]


FRESH = start()
CALM = steps(1, 400, begun=FRESH)
SCRATCH: dict[str, Any] = {"path": None, "config": {"model_type": "llama", "vocab_size": 256}}

HISTORIES: dict[str, Callable[[], Evidence]] = {
    "healthy": lambda: of(CALM),
    "at the same batch": lambda: of(
        CALM, spike(401, 403), steps(391, 400, 2, start("checkpoint-390"), lr=5e-6), spike(401, 403, 2, lr=5e-6)
    ),
    "not finite at regular distances": lambda: of(
        CALM,
        nonfinite(401, verdict="skipped"),
        steps(402, 500),
        nonfinite(501),
        data={"shuffle": False},
    ),
    "infinite from one step to the next": lambda: of(CALM, nonfinite(401)),
    "another level from one step to the next": lambda: of(CALM, spike(401, 403, grad_norm=5.0)),
    "on one rank alone": lambda: of(
        CALM,
        nonfinite(401, loss=False, nonfinite_ranks=(3,)),
        events=[NodeStruck(attempt=1, node="gpu7", evidence="")],
        cluster={"gpus_per_node": 8},
    ),
    "after a resume that came out differently": lambda: of(
        CALM, steps(401, 410, 2, start("checkpoint-400", probe=1.002)), spike(411, 413, 2)
    ),
    "at once after a resume": lambda: of(CALM, spike(401, 403, 2, start("checkpoint-400")), events=[begun(2, "crash")]),
    "a proof that failed": lambda: of(CALM, events=[refusal(2), begun(3, "refused")]),
    "a proof that had failed": lambda: of(
        CALM, steps(381, 500, 3, start("checkpoint-380")), events=[refusal(2), begun(3, "refused")]
    ),
    "other settings than the checkpoint's": lambda: of(CALM, events=[changed(2)]),
    "before any update": lambda: of(nonfinite(1, begun=FRESH, lr=0.0)),
    "not finite from the first steps": lambda: of(steps(1, 9, begun=FRESH), nonfinite(10)),
    "above the optimizer's rate": lambda: of(CALM, spike(401, 403), name="lion", rate=2e-5),
    "above the rate of the batch": lambda: of(CALM, spike(401, 403), rate=2e-4),
    "soon after a short warmup": lambda: of(
        steps(1, 30, begun=FRESH), spike(31, 33), training={"schedule": {"warmup": 5}}
    ),
    "the gradient norm first": lambda: of(
        steps(1, 390, begun=FRESH), steps(391, 400, grad_norm=300.0), spike(401, 403)
    ),
    "not finite after hours": lambda: of(
        steps(1, 396, begun=FRESH), steps(397, 400, grad_norm=lambda step: 2.0 ** (step - 396)), nonfinite(401)
    ),
    "the loss left its band": lambda: of(CALM, spike(401, 403)),
    "not finite": lambda: of(steps(1, 150, begun=FRESH), nonfinite(151, loss=False)),
    "the loss scale only falls": lambda: of(
        CALM,
        steps(401, 420, verdict="skipped", warnings=SCALER, loss_scale=lambda step: 2.0 ** (416 - step)),
        training={"precision": "fp16"},
    ),
    "fp16 overflows that the scaler caught": lambda: of(
        CALM,
        steps(401, 402, verdict="skipped", warnings=SCALER, loss_scale=512.0),
        steps(403, 500, loss_scale=512.0),
        training={"precision": "fp16"},
    ),
    "stuck high": lambda: of(steps(1, 300, begun=FRESH, loss=5.5), model=SCRATCH, name="sgd", rate=2e-5),
    "a rebound": lambda: of(steps(1, 400, begun=FRESH), steps(401, 800, loss=2.3)),
    "the evaluation gets worse": lambda: evaluated(*FALLS, *RISES),
    "slow: waiting for data": lambda: of(steps(1, 300, begun=FRESH, data_wait_s=0.4)),
    "slower than before": lambda: of(
        CALM,
        steps(401, 600, tokens_per_s=500.0),
        events=[JobSeen(job_id="1", state="RUNNING", nodes=(node,)) for node in ("n1", "n2")],
    ),
    "its last start ended badly": lambda: of(
        events=[WorkerLeft(attempt=1, outcome=Outcome.CRASHED, error=ErrorDetail(type="E", message="boom"))]
    ),
    "nothing is learned": lambda: of(CALM, steps(401, 419, **BLANK), unlearned(420)),
    "no finite loss": lambda: of(steps(1, 15, begun=FRESH, **BLANK)),
    "nothing yet": lambda: of(),
}


def evaluated(*eval_losses: float, loss: Callable[[int], float] = lambda step: 2.0 - step / 1000) -> Evidence:
    """A run that is evaluated each 50 steps."""
    told = {50 * number: each for number, each in enumerate(eval_losses, 1)}
    return of(steps(1, max(told), begun=FRESH, loss=loss, eval_loss=told.get))


FALLS = (3.0, 2.5, 2.2, 2.0, 1.9)
RISES = (1.92, 1.94, 1.96, 1.98, 2.0, 2.02, 2.04)


BLANK: dict[str, Any] = {"loss": None, "grad_norm": 0.0, "nonfinite": {"loss": "nan"}, "verdict": "pending"}
"""A step of which no label is left."""


def unlearned(step: int, **fields: Any) -> list[Record]:
    return steps(step, step, **BLANK | {"verdict": "nonfinite", "onset_step": step - 19} | fields)


def refusal(attempt: int) -> WorkerLeft:
    error = ErrorDetail(type=PROOF_ERROR, message="no", what="probe loss", expected="1.0", found="2.0")
    return WorkerLeft(attempt=attempt, outcome=Outcome.REFUSED, error=error)


def changed(attempt: int) -> WorkerLeft:
    """Refused because a person changed what no resume can change."""
    error = ErrorDetail(type="RefusedError", message="no", what="global_batch", expected="12", found="8")
    return WorkerLeft(attempt=attempt, outcome=Outcome.REFUSED, error=error)


def symptoms(evidence: Evidence) -> list[str]:
    return [one.symptom for one in diagnose(evidence)]


@pytest.mark.parametrize("symptom", HISTORIES)
def test_each_history_is_known_by_its_symptom_and_no_other(symptom: str) -> None:
    found = symptoms(HISTORIES[symptom]())
    is_harmless = symptom in {row.symptom for row in HARMLESS}
    assert found == (["healthy", symptom] if is_harmless else [symptom])
    told = diagnose(HISTORIES[symptom]())
    assert len(told) == 1 or not any("nothing is wrong" in one.cause for one in told)


def test_every_row_of_the_table_has_its_history() -> None:
    rows = [row.symptom for table in (OF_VERDICTS, SPECIFIC, SHAPES, HARMLESS) for row in table]
    assert len(rows) == len(set(rows))
    assert {*rows, "healthy", "nothing yet"} == HISTORIES.keys()


@pytest.mark.parametrize("symptom", HISTORIES)
def test_every_finding_has_its_figures_and_one_next_step(symptom: str) -> None:
    for one in diagnose(HISTORIES[symptom]()):
        assert one.evidence
        assert all(line and "None" not in line for line in (*one.evidence, one.next, one.cause))
        assert Diagnosis.model_validate_json(one.model_dump_json()) == one


# -- neighbours that must not be taken for each other ------------------------------------------------------------------

AGAIN = (CALM, spike(401, 403), steps(391, 400, 2, start("checkpoint-390"), lr=5e-6))


@pytest.mark.parametrize(
    ("name", "evidence", "is_not"),
    [
        ("other batches", of(*AGAIN, steps(401, 409, 2, lr=5e-6), spike(410, 412, 2, lr=5e-6)), "at the same batch"),
        ("the same rate again", of(CALM, spike(401, 403), CALM[390:], spike(401, 403, 2)), "at the same batch"),
        (
            "it crept there again",
            of(
                *AGAIN[:2],
                steps(391, 400, 2, start("checkpoint-390"), lr=5e-6, loss=lambda s: 2.0 + (s - 390) / 9),
                spike(401, 403, 2, lr=5e-6),
            ),
            "at the same batch",
        ),
        (
            "once is no distance",
            of(CALM, nonfinite(401, verdict="skipped"), steps(402, 500)),
            "not finite at regular distances",
        ),
        (
            "a rollback to before it",
            of(CALM, nonfinite(401), steps(391, 400, 2, start("checkpoint-390")), nonfinite(401, 2)),
            "not finite at regular distances",
        ),
        ("grew before", HISTORIES["not finite after hours"](), "infinite from one step to the next"),
        (
            "it goes on growing",
            of(CALM, spike(401, 403, loss=lambda s: 3.0 ** (s - 399), grad_norm=5.0)),
            "another level from one step to the next",
        ),
        ("a gradient alone", of(CALM, nonfinite(401, loss=False)), "infinite from one step to the next"),
        (
            "all ranks",
            of(CALM, nonfinite(401, nonfinite_ranks=(0, 1)), cluster={"gpus_per_node": 2}),
            "on one rank alone",
        ),
        ("there is one rank", of(CALM, nonfinite(401, nonfinite_ranks=(0,))), "on one rank alone"),
        (
            "a rollback's own resume",
            of(CALM, spike(401, 403, 2, start("checkpoint-400")), events=[begun(2, "spike", 0.5)]),
            "at once after a resume",
        ),
        (
            "long after the resume",
            of(
                CALM,
                steps(401, 500, 2, start("checkpoint-400", probe=1.002)),
                spike(501, 503, 2),
                events=[begun(2, "crash")],
            ),
            "after a resume that came out differently",
        ),
        (
            "refused for its data",
            of(CALM, events=[WorkerLeft(attempt=1, outcome=Outcome.REFUSED)]),
            "a proof that failed",
        ),
        ("updates were made", of(steps(1, 1, begun=FRESH), nonfinite(2)), "before any update"),
        ("a long warmup", of(steps(1, 30, begun=FRESH), spike(31, 33)), "soon after a short warmup"),
        ("long after it", of(CALM, spike(401, 403), training={"schedule": {"warmup": 5}}), "soon after a short warmup"),
        ("Lion at its own rate", of(CALM, spike(401, 403), name="lion", rate=4e-6), "above the optimizer's rate"),
        (
            "adapters take more",
            of(CALM, spike(401, 403), rate=1e-4, model={"lora": {"r": 8}}),
            "above the rate of the batch",
        ),
        (
            "norm and loss together",
            of(steps(1, 390, begun=FRESH), steps(391, 400, grad_norm=300.0, loss=3.9), spike(401, 403)),
            "the gradient norm first",
        ),
        ("healed by itself", HISTORIES["fp16 overflows that the scaler caught"](), "the loss scale only falls"),
        (
            "it learns, slowly",
            of(steps(1, 300, begun=FRESH, loss=lambda s: 5.5 - s / 500), model=SCRATCH),
            "stuck high",
        ),
        (
            "observed, every 20 steps",
            of(CALM, *(steps(at, at + 18, **BLANK) + unlearned(at + 19, observed=True) for at in range(401, 501, 20))),
            "not finite at regular distances",
        ),
        (
            "one batch without labels",
            of(CALM, steps(401, 401, **BLANK), steps(402, 410), steps(411, 429, **BLANK)),
            "no finite loss",
        ),
        ("low and flat", of(steps(1, 300, begun=FRESH, loss=1.2)), "stuck high"),
        (
            "a wavering near zero",
            of(steps(1, 30, begun=FRESH, loss=5.6), steps(31, 400, loss=0.0093), steps(401, 800, loss=0.0108)),
            "a rebound",
        ),
        ("noise", of(steps(1, 800, begun=FRESH, loss=lambda s: 2.0 + 0.3 * (s % 7) / 7)), "a rebound"),
        (
            "four evaluations since the best",
            evaluated(*FALLS, 2.1, 2.2, 2.3, 2.4),
            "the evaluation gets worse",
        ),
        ("one of the last five is near the best", evaluated(*FALLS, *RISES, 1.91), "the evaluation gets worse"),
        ("a flat end", evaluated(*FALLS, *[1.94] * 20), "the evaluation gets worse"),
        (
            "evaluations that waver",
            evaluated(*FALLS, *(2.0 + (0.1 if n % 2 else -0.03) for n in range(20))),
            "the evaluation gets worse",
        ),
        (
            "evaluations that waver near zero",
            evaluated(5.6, 1.0, 0.05, *(0.06 + n / 1000 for n in range(9))),
            "the evaluation gets worse",
        ),
        (
            "the training loss rises as well",
            evaluated(*FALLS, *RISES, loss=lambda step: 2.0 + step / 10_000),
            "the evaluation gets worse",
        ),
        (
            "a step that waited once",
            of(steps(1, 300, begun=FRESH, data_wait_s=lambda s: 9.0 if s == 7 else 0.0)),
            "slow: waiting for data",
        ),
    ],
)
def test_a_neighbour_is_not_taken_for_it(name: str, evidence: Evidence, is_not: str) -> None:
    assert is_not not in symptoms(evidence)


def test_evaluations_that_get_worse_are_told_beside_the_best_of_them() -> None:
    [said] = diagnose(evaluated(*FALLS, *RISES))
    assert said.evidence == (
        "evaluation loss 2.04 at step 600; the best at step 250: 1.9; 7 evaluations since then",
        "the training loss was 1.8 then and is 1.45 now",
    )
    assert "take the weights in best/" in said.next


def test_a_crash_that_training_went_on_after_is_over() -> None:
    left = WorkerLeft(attempt=1, outcome=Outcome.CRASHED)
    assert symptoms(of(CALM, events=[left])) == ["its last start ended badly"]
    assert symptoms(of(CALM, steps(401, 500, 2, start("checkpoint-400")), events=[left])) == ["healthy"]


def test_what_is_to_be_tried_after_a_start_that_ended_badly_is_what_the_log_says() -> None:
    call = '  File "/x/worker/own_script.py", line 86, in run\n    script(self)\n'
    trace = f'Traceback (most recent call last):\n{call}  File "/w/broken.py", line 4, in main\nIndexError: 9'
    error = ErrorDetail(type="IndexError", message="9", traceback=trace)
    left = WorkerLeft(attempt=1, outcome=Outcome.CRASHED, error=error, reason="the worker crashed: rank 0 on n: 9")
    over = GaveUp(reason="the same crash twice before any step: IndexError: 9", error=trace)

    def tried(*events: Event) -> str:
        [one] = diagnose(of(events=events))
        assert one.symptom == "its last start ended badly"
        return one.next

    assert tried(left) == "mend /w/broken.py, line 4"
    assert tried(left, over) == "mend /w/broken.py, line 4; then higgsfield resume r"
    assert ("try", "mend /w/broken.py, line 4") in details_of(over), "and the log"
    memory = WorkerLeft(attempt=1, outcome=Outcome.OUT_OF_MEMORY)
    assert "a smaller training.batch_size" in tried(memory)
    by_slurm = GaveUp(reason="out of memory again, without a new healthy checkpoint: Slurm says OUT_OF_MEMORY")
    assert "a smaller training.batch_size" in tried(left.model_copy(update={"error": None}), by_slurm)
    killed = left.model_copy(update={"error": None, "reason": "the worker ended: rank 0 on n was killed by signal 9"})
    assert "most often memory ran out" in tried(killed)
    assert "jobs/ has the job's stderr" in tried(WorkerLeft(attempt=1, outcome=Outcome.VANISHED))
    hung = HangSeen(attempt=1, phase="training", quiet_s=60.0, limit_s=30.0, stacks="attempts/1")
    assert "look at the stacks" in tried(hung)
    data = WorkerLeft(attempt=1, outcome=Outcome.REFUSED, error=ErrorDetail(type="DataError", message="no"))
    assert tried(data).startswith("logs/train.log has the whole of it")


def test_what_is_to_be_tried_goes_by_the_configuration() -> None:
    def tried(evidence: Evidence) -> str:
        return diagnose(evidence)[0].next

    blown = (CALM, spike(401, 403))
    assert tried(of(*blown, training={"max_grad_norm": None})) == "training.max_grad_norm: 1.0; clipping is off"
    assert tried(of(*blown)) == "training.optimizer.learning_rate: 5e-06, half of it"
    assert tried(of(*blown, name="lion", rate=2e-5)) == "training.optimizer.learning_rate: 4e-06, where lion begins"
    assert tried(of(*blown, rate=2e-4)) == "training.optimizer.learning_rate: 2e-05"
    sgd = HISTORIES["stuck high"]()
    assert tried(sgd) == "training.optimizer.learning_rate: 0.01; sgd at 2e-05 hardly moves"
    assert tried(HISTORIES["slow: waiting for data"]()) == "nothing"
    assert diagnose(HISTORIES["slow: waiting for data"]())[1].next == "data.workers: 4"


def test_data_workers_of_an_own_script_are_an_argument_of_its_trainer() -> None:
    slow = HISTORIES["slow: waiting for data"]()
    own = slow.config.model_copy(update={"training": slow.config.training.model_copy(update={"entrypoint": "my:main"})})
    said = diagnose(replace(slow, config=own))[1]
    assert said.next.startswith("more dataloader_num_workers in the script (data.workers, where it takes")
    assert "worker" not in said.evidence[0]


def test_what_a_person_changed_is_to_be_put_back_and_is_over_once_the_run_went_on() -> None:
    refused, now = changed(2), HISTORIES["other settings than the checkpoint's"]()
    [said] = diagnose(now)
    assert said.cure is None
    assert said.evidence == ("attempt 2: global_batch is 8 and was 12",)
    assert "disk" not in said.next
    values = by_key(now.config) | {"training.batch_size": 48}
    made = RunCreated(run_id="r", config_digest="d", versions={}, config=values)
    [said] = diagnose(replace(now, events=[made, begun(1, "first"), begun(2, "resumed"), refused]))
    assert said.next.startswith("put back what was changed (training.batch_size: 48 -> 32) and resume")
    assert explain(now, 2) == diagnose(now)[0]
    assert symptoms(of(CALM, steps(401, 500, 3, start("checkpoint-400")), events=[refused])) == ["healthy"]


def test_other_software_after_a_resume_is_named() -> None:
    before = steps(1, 400, begun=start(torch="2.9"))
    after = spike(401, 403, 2, start("checkpoint-400", torch="2.13"))
    [said] = diagnose(of(before, after, events=[begun(2, "crash")]))
    assert said.evidence[-1] == "the software changed: torch 2.9 became 2.13"


def test_the_newest_verdict_comes_first_and_a_cause_once() -> None:
    hot = spike(401, 403)
    later = steps(401, 600, 2, start("checkpoint-400"), lr=5e-6)
    found = diagnose(of(CALM, hot, later, nonfinite(601, 2, lr=5e-6)))
    assert [one.symptom for one in found] == ["infinite from one step to the next", "the loss left its band"]
    twice = of(CALM, hot, later, spike(601, 603, 2), steps(601, 700, 3))
    assert symptoms(twice) == ["the loss left its band"]


def test_each_attempt_has_its_own_explanation() -> None:
    evidence = HISTORIES["at the same batch"]()
    said = [explain(evidence, attempt) for attempt in (1, 2, 3)]
    assert [one and one.symptom for one in said] == ["the loss left its band", "at the same batch", None]
    refused = explain(HISTORIES["a proof that failed"](), 2)
    assert refused is not None
    assert refused.symptom == "a proof that failed"


def test_what_was_believed_is_in_the_journal_also_when_the_answer_was_begun_by_another(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.spike(38, onset=36)
    [told] = [event for event in stage.events if isinstance(event, RolledBack)]
    assert told.diagnosis is not None
    assert (told.diagnosis.symptom, told.diagnosis.cure) == ("above the optimizer's rate", "tenth-rate")

    lines = stage.run_dir.journal.read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if json.loads(line)["event"] == "RolledBack")
    stage.train(60)
    stage.run_dir.journal.write_text("".join(lines[:at]))
    stage.start_supervisor()
    stage.look()
    [again] = [event for event in stage.events if isinstance(event, RolledBack)]
    assert again.diagnosis == told.diagnosis


def test_a_persons_rollback_needs_no_explanation_and_a_spoilt_history_stops_no_answer(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.train(38, "spike", onset=36, loss=9.0)
    stage.leave(Outcome.VERDICT)
    stage.run_dir.data_report.mkdir()  # a folder where a file should be
    stage.settle()
    [told] = [event for event in stage.events if isinstance(event, RolledBack)]
    assert told.diagnosis is not None


def spoil(stage: Stage, how: str) -> None:
    run = stage.run_dir
    match how:
        case "no history":
            run.history.unlink()
        case "torn history":
            run.history.write_bytes(run.history.read_bytes()[:-300])
        case "torn journal":
            run.journal.write_bytes(run.journal.read_bytes()[:-20])
        case "no data report":
            run.data_report.write_text("{")
        case "spoilt config":
            run.config.write_text("run: [")
        case "history of another tool":
            run.history.write_text('[\n{"loss": 1}\n]\n')


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("no history", 0),
        ("torn history", 0),
        ("torn journal", 0),
        ("no data report", 0),
        ("spoilt config", 2),
        ("history of another tool", 2),
    ],
)
def test_any_run_can_be_diagnosed_and_none_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, code: int
) -> None:
    stage = Stage(tmp_path)
    stage.settle()
    stage.start_job()
    stage.spike(38, onset=36)
    stage.train(60)
    spoil(stage, how)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["diagnose", str(stage.run_dir.path)]) == code
    printed = capsys.readouterr()
    assert (printed.out != "", printed.err.count("\n")) == (code == 0, 0 if code == 0 else 1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# -- never an exception, whatever a history holds ----------------------------------------------------------------------

numbers = st.one_of(st.none(), st.sampled_from([0.0, 1e-300, 1e300, -1.0]), st.floats(0.1, 100.0))


@st.composite
def a_history(draw: st.DrawFn) -> list[Record]:
    made, step, segment = [], 0, 1
    for _ in range(draw(st.integers(0, 15))):
        if draw(st.integers(0, 9)) == 0:
            segment, step = segment + 1, draw(st.integers(0, step))
        step += 1
        verdict = draw(
            st.sampled_from(["ok"] * 6 + ["skipped", "pending", "suspect", "spike", "divergence", "nonfinite"])
        )
        is_first = not made or made[-1].segment != segment
        made.append(
            Record(
                segment=segment,
                attempt=segment,
                restart=0,
                step=step,
                epoch=0.0,
                time=0.0,
                loss=draw(numbers),
                grad_norm=draw(numbers),
                lr=draw(numbers),
                loss_scale=draw(numbers),
                tokens_per_s=draw(numbers),
                step_s=draw(numbers),
                data_wait_s=draw(numbers),
                level=draw(numbers),
                verdict=verdict,
                onset_step=draw(st.one_of(st.none(), st.integers(1, max(1, step)))) if verdict != "ok" else None,
                nonfinite={"loss": "nan"} if verdict == "nonfinite" else {},
                warnings=SCALER if verdict == "skipped" and draw(st.booleans()) else None,
                nonfinite_ranks=draw(st.one_of(st.none(), st.just((1,)))),
                data=draw(
                    st.one_of(st.none(), st.builds(BatchPosition, epoch=st.integers(0, 3), batch=st.integers(0, 9)))
                ),
                start=draw(st.one_of(st.none(), st.just(start("checkpoint-1")))) if is_first else None,
            )
        )
    return made


@settings(max_examples=40, deadline=None)
@given(
    a_history(),
    st.sampled_from([of(), of(name="lion", rate=None), of(training={"max_grad_norm": None}), of(model=SCRATCH)]),
)
def test_no_history_whatever_makes_it_stumble(records: list[Record], evidence: Evidence) -> None:
    known = replace(evidence, records=records)
    found = diagnose(known)
    assert found
    assert list(diagnosis_lines("r", found, 80))
    for attempt in range(1, 5):
        explain(known, attempt)


# -- beside the loss, and before the numbers failed --------------------------------------------------------------------


def test_a_healthy_loss_beside_crashes_is_not_called_a_run_without_trouble() -> None:
    crashes: list[Event] = [Continued(attempt=n, cause="crash", resume_step=100, where="new_job") for n in (2, 3)]
    hung = Continued(attempt=4, cause="hang", resume_step=100, where="new_job")
    [said] = diagnose(of(CALM, events=[Continued(attempt=1, cause="first", where="new_job"), *crashes, hung]))
    assert (said.symptom, said.cause) == ("healthy", "the loss is healthy")
    assert said.evidence[-1] == "the run was interrupted by other things than its loss: crash 2 times, hang"


def test_a_verdict_at_the_first_step_of_a_warmup_whose_rate_is_nothing_is_compared_all_the_same() -> None:
    records = [*nonfinite(1, begun=FRESH, lr=0.0), *nonfinite(1, 2, begun=FRESH, lr=1e-5)]
    assert diagnose(of(records))[0].symptom == "at the same batch"


def test_a_slower_stretch_is_told_beside_the_steps_that_were_faster_and_a_loss_that_is_healthy() -> None:
    healthy, slower = diagnose(of(CALM, steps(401, 600, tokens_per_s=500.0)))
    assert healthy.cause == "the loss is healthy"
    assert slower.evidence == ("500 tokens a second over the last 100 steps, 1,000 over steps 1 to 100",)


def test_the_steps_at_which_the_loss_only_left_its_level_are_not_called_not_finite() -> None:
    left = steps(5, 6, loss=400.0, grad_norm=2000.0, lr=5.0, verdict="pending")
    [said] = diagnose(of(steps(1, 4), left, nonfinite(7, loss=False, onset_step=5, lr=7.5)))
    assert said.evidence[:2] == (
        "step 7 from scratch, at rate 7.5: gradient norm nan",
        "the loss left its level before, from step 5",
    )


def test_what_a_person_has_set_since_is_not_advised_again_and_what_it_cured_is_said() -> None:
    failed = [*steps(1, 4, begun=FRESH, lr=9e3), *nonfinite(5, lr=9e3)]
    now = of(failed, name="sgd", rate=0.1, model=SCRATCH)
    then = by_key(now.config) | {"training.optimizer.learning_rate": 9e3}
    made = RunCreated(run_id="r", config_digest="d", config=then, versions={})
    asked = ResumeRequested(by="ada", changed={"training.optimizer.learning_rate": (9e3, 0.1)})
    before, events = [made, begun(1, "first")], [made, begun(1, "first"), asked, begun(2, "resumed")]
    cause = "the learning rate is too high for the optimizer"
    change = "training.optimizer.learning_rate: 9000 -> 0.1"

    def first(given: Evidence, told: Sequence[Event]) -> Diagnosis:
        return diagnose(replace(given, events=told))[0]

    as_it_was = of(failed, name="sgd", rate=9e3, model=SCRATCH)
    assert first(as_it_was, before).next == "training.optimizer.learning_rate: 0.1, where sgd begins"
    for told in (before, events):  # set in the file, or resumed with it
        one = first(now, told)
        assert (one.cause, one.next, one.cure) == (f"{cause}; changed since: {change}", "nothing", None)
    again = replace(now, records=[*failed, *steps(1, 300, 2, FRESH, lr=0.1)])
    one = first(again, events)
    assert (one.cause, one.next) == (f"{cause}; cured by {change}", "nothing")
    assert one.evidence[-1] == "300 steps without a verdict since that was changed"
    rolled = RolledBack(cause="nonfinite", where="new_job", kind="nonfinite", verdict_step=5, onset_step=5, from_step=5,
                        to_step=0, diagnosis=explain(replace(now, events=events), 1))  # fmt: skip
    assert "try" not in dict(details_of(rolled))
    worse = replace(again, records=[*again.records[:-1], *nonfinite(300, 2, lr=0.1)])
    assert not any("cured" in one.cause for one in diagnose(replace(worse, events=events)))


# -- the data, or a rate that nothing gets through ---------------------------------------------------------------------


def twice(step: int, rate: float, again: int = 0, **given: Any) -> Evidence:
    """From scratch, not finite at the batch of ``step``; and once more, or at step ``again``, at half the rate."""
    [first] = nonfinite(step, loss=False, lr=rate)
    [last] = nonfinite(again or step, 2, loss=False, lr=rate / 2)
    one = [*steps(1, first.step - 1, begun=FRESH, lr=rate), first]
    other = [*steps(1, last.step - 1, 2, FRESH, lr=rate / 2), last.model_copy(update={"data": first.data})]
    return of(
        one, other, rate=rate, events=[begun(1, "first"), begun(2, "nonfinite", 0.5)], **{"model": SCRATCH} | given
    )


def resumed(rate: float, before: float) -> Evidence:
    """Not finite at step 402, and again after a resume at step 400 at half of ``rate``; ``before`` until then."""
    first = [*steps(1, 400, begun=FRESH, lr=before), *steps(401, 401, lr=rate), *nonfinite(402, loss=False, lr=rate)]
    again = [*steps(401, 401, 2, start("checkpoint-400"), lr=rate / 2), *nonfinite(402, 2, loss=False, lr=rate / 2)]
    events = [begun(1, "first"), begun(2, "nonfinite", 0.5)]
    return of(first, again, rate=rate, events=events, model=SCRATCH)


@pytest.mark.parametrize(
    ("evidence", "symptom"),
    [
        (twice(3, 2e5), "above the optimizer's rate"),
        (twice(3, 1e15, name="sgd"), "above the optimizer's rate"),
        (twice(3, 2.0, model={"path": "m", "config": None}), "above the rate of the batch"),
        (twice(3, 2.0, name="torch.optim:Other"), "not finite from the first steps"),
        (twice(3, 2e-4), "at the same batch"),
        (twice(30, 2.0), "at the same batch"),  # no such rate lets 29 steps go well
        (resumed(2.0, before=2.0), "at the same batch"),
        (resumed(2.0, before=2e-4), "above the optimizer's rate"),
        (twice(5, 2e5, again=3), "at the same batch"),  # after other steps, as two batches are left out
    ],
)
def test_the_same_batch_at_the_same_step_tells_nothing_at_a_rate_that_is_far_too_high(
    evidence: Evidence, symptom: str
) -> None:
    assert symptoms(evidence) == [symptom]
