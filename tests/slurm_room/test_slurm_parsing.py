"""Slurm's words, as tables; CASES from public reports."""

from __future__ import annotations

import pytest

from slurm import parsing, reasons
from slurm.job import JobState, JobStatus, Reservation


@pytest.mark.parametrize(
    ("word", "reason", "state"),
    [
        ("RUNNING", "None", JobState.RUNNING),
        ("CANCELLED by 1000", "", JobState.CANCELLED),
        ("CANCELLED+", "", JobState.CANCELLED),
        ("COMPLETED", "", JobState.COMPLETED),
        ("NODE_FAIL", "", JobState.NODE_FAIL),
        ("PREEMPTED", "", JobState.PREEMPTED),
        ("OUT_OF_MEMORY", "", JobState.OUT_OF_MEMORY),
        ("OUT_OF_ME+", "", JobState.UNRECOGNISED),
        ("PENDING", "Priority", JobState.PENDING),
        ("PENDING", "BeginTime", JobState.PENDING),
        ("PENDING", "JobHeldUser", JobState.HELD),
        ("PENDING", "JobHeldAdmin", JobState.HELD),
        ("PENDING", "launch failed requeued held", JobState.HELD),
        ("PENDING", "launch_failed_requeued_held", JobState.HELD),
        ("PENDING", "job requeued in held state", JobState.HELD),
        ("REQUEUE_HOLD", "", JobState.HELD),
        ("SPECIAL_EXIT", "", JobState.HELD),
        ("REQUEUED", "", JobState.REQUEUED),
        ("RESIZING", "", JobState.RUNNING),
        ("STOPPED", "", JobState.SUSPENDED),
        ("STAGE_OUT", "", JobState.COMPLETING),
        ("REVOKED", "", JobState.UNRECOGNISED),
        ("running", "", JobState.UNRECOGNISED),
        ("UNRECOGNISED", "", JobState.UNRECOGNISED),
        ("", "", JobState.UNRECOGNISED),
        ("  ", "", JobState.UNRECOGNISED),
        ("SOMETHING_NEW", "", JobState.UNRECOGNISED),
    ],
)
def test_state(word: str, reason: str, state: JobState) -> None:
    assert parsing.state(word, reason) is state


def test_what_is_over_is_listed() -> None:
    over = {state.name for state in JobState if state.is_over}
    assert over == set(
        "COMPLETED FAILED CANCELLED TIMEOUT OUT_OF_MEMORY NODE_FAIL PREEMPTED BOOT_FAIL DEADLINE".split()  # noqa: SIM905
    )


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Submitted batch job 12", ("12", None)),
        ("Submitted batch job 3969755 on cluster nautilus\n", ("3969755", "nautilus")),
        ("75168975;clustername", ("75168975", "clustername")),
        ("15786755\n", ("15786755", None)),
        ("your quota is 12 jobs\nSubmitted batch job 7\n", ("7", None)),
    ],
)
def test_submitted(answer: str, expected: tuple[str, str | None]) -> None:
    assert parsing.submitted(answer) == expected


@pytest.mark.parametrize("answer", ["", "sbatch: error", "job"])
def test_submitted_without_an_id_is_an_error(answer: str) -> None:
    with pytest.raises(parsing.ParseError):
        parsing.submitted(answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("(null)", ()),
        ("None assigned", ()),
        ("n1", ("n1",)),
        ("linux[1,2]", ("linux1", "linux2")),
        ("nodeA,nodeB[001,003],nodeC", ("nodeA", "nodeB001", "nodeB003", "nodeC")),
        ("rack[0-1]_blade[0-1]", ("rack0_blade0", "rack0_blade1", "rack1_blade0", "rack1_blade1")),
        ("c438-[062,104]", ("c438-062", "c438-104")),
        (
            "ml-16-node-[001-002,004],ml-17-node-[001-003]",
            tuple(f"ml-16-node-{n}" for n in ("001", "002", "004")) + tuple(f"ml-17-node-00{n}" for n in (1, 2, 3)),
        ),
        ("n[8-11]", ("n8", "n9", "n10", "n11")),
    ],
)
def test_nodes(text: str, expected: tuple[str, ...]) -> None:
    assert parsing.nodes(text) == expected


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]"])
def test_cut_node_lists_are_errors(text: str) -> None:
    with pytest.raises(parsing.ParseError):
        parsing.nodes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("INVALID", None),
        ("Unknown", None),
        ("N/A", None),
        ("30", 1800),
        ("04:00", 240),
        ("01:00:00", 3600),
        ("1-00:00:00", 86400),
        ("2-06", 194400),
        ("1-01:30", 91800),
    ],
)
def test_duration(text: str, seconds: float | None) -> None:
    assert parsing.duration_s(text) == seconds


@pytest.mark.parametrize("text", ["a day", "1:2:3:4", "-5", "1d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(parsing.ParseError):
        parsing.duration_s(text)


@pytest.mark.parametrize(
    ("text", "moment"), [("N/A", None), ("NONE", None), ("Unknown", None), ("0", None), ("17", 17.0)]
)
def test_moment(text: str, moment: float | None) -> None:
    assert parsing.moment(text) == moment


@pytest.mark.parametrize(("text", "code"), [("0:0", 0), ("3:0", 3), ("0:9", 137), ("", None), ("N/A", None)])
def test_exit_code(text: str, code: int | None) -> None:
    assert parsing.exit_code(text) == code


@pytest.mark.parametrize(
    ("text", "code"), [("0", 0), ("768", 3), ("9", 137), ("137", 137), ("0:9", 137), ("N/A", None)]
)
def test_wait_status(text: str, code: int | None) -> None:
    assert parsing.wait_status(text) == code


@pytest.mark.parametrize("job_id", ["12.batch", "12.0", "715219_23.b+", "12.extern"])
def test_steps(job_id: str) -> None:
    assert parsing.is_step(job_id)


@pytest.mark.parametrize("job_id", ["12", "93+1", "123456_[9201-10000%500]", "ID_[60-89,91-94]", "56502501_[1%1]"])
def test_job_ids_are_text_and_no_steps(job_id: str) -> None:
    assert not parsing.is_step(job_id)
    row = f"{job_id}|PENDING|Priority||N/A|N/A|0|0|30:00|N/A|a name|"
    assert parsing.squeue(row)[0].job_id == job_id


def squeue_row(**changes: str) -> str:
    fields = {
        "jobid": "12",
        "state": "RUNNING",
        "reason": "None",
        "nodes": "n[1-2]",
        "start": "1700000000",
        "end": "1700000600",
        "restarts": "1",
        "code": "0",
        "limit": "1-00:00:00",
        "preempted": "N/A",
        "name": "hf-00112233",
    }
    return "|".join(value.ljust(20) for value in {**fields, **changes}.values()) + "|"


def test_squeue() -> None:
    (job,) = parsing.squeue(squeue_row() + "\n")
    assert (job.job_id, job.name, job.state, job.why, job.nodes) == (
        *("12", "hf-00112233", JobState.RUNNING, ""),
        ("n1", "n2"),
    )
    assert (job.restarts, job.starts_at, job.ends_at, job.limit_s) == (1, 1.7e9, 1.7e9 + 600, 86400)
    assert (job.source, job.preempted_at) == ("squeue", None)


def test_squeue_tells_of_a_preemption_and_of_no_limit() -> None:
    (job,) = parsing.squeue(squeue_row(preempted="1700000300", limit="UNLIMITED"))
    assert (job.preempted_at, job.limit_s) == (1.7e9 + 300, None)


def test_squeue_on_a_queue_of_nothing() -> None:
    assert parsing.squeue("") == []


def test_a_name_of_somebody_else_may_hold_anything() -> None:
    answer = "\n".join([squeue_row(name="a|b\nc"), squeue_row(jobid="13")])
    assert [(job.job_id, job.name) for job in parsing.squeue(answer)] == [("12", "a|b"), ("13", "hf-00112233")]


def test_an_unknown_word_is_kept_and_is_not_over() -> None:
    (job,) = parsing.squeue(squeue_row(state="NEW_WORD"))
    assert (job.state, job.why, job.state.is_over) == (JobState.UNRECOGNISED, "NEW_WORD", False)


def test_an_unreadable_row_is_neither_over_nor_healthy_and_spares_the_others() -> None:
    bad, good = parsing.squeue("\n".join([squeue_row(nodes="n[1-"), squeue_row(jobid="13")]))
    assert bad.state is JobState.UNRECOGNISED
    assert "n[1-" in bad.why
    assert good.state is JobState.RUNNING


RUNNING_JOB = (
    "JobId=1 JobName=hf-1 UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Restarts=2 ExitCode=0:0 "
    "StartTime=1700000000 EndTime=1700000600 PreemptEligibleTime=1700000000 PreemptTime={preempt} NodeList=n[1-2] "
    "Command=/a folder/with JobState=FAILED in it Comment=a0003 "
)


def test_scontrol() -> None:
    job = parsing.scontrol_job(RUNNING_JOB.format(preempt="None"))
    assert job == JobStatus("1", "hf-1", JobState.RUNNING, "", ("n1", "n2"), 2, 1.7e9, 1.7e9 + 600, source="scontrol")
    assert parsing.scontrol_job("") is None


@pytest.mark.parametrize(
    ("state", "preempt", "expected"),
    [("RUNNING", "1700000000", True), ("RUNNING", "None", False), ("COMPLETING", "1700000000", False)],
)
def test_only_a_running_job_with_a_preempt_time_is_being_preempted(state: str, preempt: str, expected: bool) -> None:
    answer = RUNNING_JOB.format(preempt=preempt).replace("JobState=RUNNING", f"JobState={state}")
    assert parsing.is_being_preempted(answer) is expected
    assert parsing.is_ending(answer) is (state == "COMPLETING")


def test_sacct_takes_the_newest_allocation_row() -> None:
    answer = "\n".join(
        [
            "12|REQUEUED|1700000000|1700000010|0:0|n1|hf-1",
            "12.batch|FAILED|1700000000|1700000010|1:0|n1|batch",
            "12|CANCELLED by 1000|1700000020|1700000030|0:15|n[1-2]|hf-1",
            "12.batch|FAILED|1700000020|1700000030|1:0|n1|batch",
            "12.0|FAILED|1700000020|1700000030|1:0|n1|python",
        ]
    )
    job = parsing.sacct(answer)["12"]
    assert (job.state, job.exit_code, job.nodes) == (JobState.CANCELLED, 143, ("n1", "n2"))


def test_sacct_after_a_requeue_that_worked() -> None:
    answer = "12|REQUEUED|||0:0||hf-1\n12|REQUEUED|||0:0||hf-1\n12|COMPLETED|||0:0|n1|hf-1\n12.0|FAILED|||1:0|n1|x\n"
    assert parsing.sacct(answer)["12"].state is JobState.COMPLETED


def test_cancelled_by() -> None:
    assert parsing.cancelled_by("CANCELLED by 1000") == "1000"
    assert parsing.cancelled_by("CANCELLED+") is None


def test_reservations() -> None:
    answer = (
        "ReservationName=maint StartTime=1700000000 EndTime=1700003600 Duration=01:00:00 Nodes=n[1-2] NodeCnt=2 "
        "Flags=MAINT,SPEC_NODES State=INACTIVE\n"
    )
    assert parsing.reservations(answer) == [
        Reservation("maint", 1.7e9, 1.7e9 + 3600, ("n1", "n2"), ("MAINT", "SPEC_NODES"))
    ]
    assert parsing.reservations("No reservations in the system\n") == []


def test_nodes_that_are_down_or_drain() -> None:
    answer = (
        "n1|down*|Not responding\nn2|draining|kernel: update, at noon|x\nn3|idle|none\nn3|idle|none\n"
        "n4|allocated~|none\nn5|drained*|d\nn6|idle*|none\n"
    )
    nodes = parsing.node_states(answer)
    assert [name for name, node in nodes.items() if node.is_down] == ["n1"]
    assert [name for name, node in nodes.items() if node.is_draining] == ["n2", "n5"]
    assert (nodes["n2"].why, nodes["n3"].why) == ("kernel: update, at noon|x", "")


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("QOSMaxJobsPerUserLimit", "no more jobs at once"),
        ("QOSMaxSubmitJobPerUserLimit", "submit no more jobs"),
        ("AssocGrpCpuLimit", "the account's jobs together"),
        ("QOSGrpNodeLimit", "everybody's jobs in this QOS"),
        ("PartitionNodeLimit", "will never start"),
        ("BadConstraints", "cluster.constraint"),
        ("Dependency", "an earlier job of this run"),
        ("DependencyNeverSatisfied", "never start"),
        ("ReqNodeNotAvail, Reserved for maintenance", "kept free for a maintenance"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "down, drained or reserved"),
        ("JobHeldAdmin", "an administrator holds it"),
        ("JobHeldUser", "held by its owner"),
        ("launch failed requeued held", "launch failed on a node"),
        ("launch_failed_requeued_held", "launch failed on a node"),
        ("SomethingNew", "Slurm gives this reason"),
    ],
)
def test_what_keeps_a_job_from_starting_is_said_in_words(why: str, words: str) -> None:
    job = JobStatus("1", "hf", parsing.state("PENDING", why), why)
    assert words in reasons.explain(job)


def test_a_hold_is_told_from_a_failed_launch_and_a_maintenance_from_a_busy_cluster() -> None:
    def job(why: str) -> JobStatus:
        return JobStatus("1", "hf", parsing.state("PENDING", why), why)

    assert reasons.is_held_by_failed_launch(job("launch failed requeued held"))
    assert not reasons.is_held_by_failed_launch(job("JobHeldUser"))
    assert reasons.waits_for_maintenance(job("ReqNodeNotAvail, Reserved for maintenance"))
    assert not reasons.waits_for_maintenance(job("Resources"))
    assert reasons.explain(JobStatus("1", "hf", JobState.RUNNING, "None")) == ""
    assert reasons.explain(JobStatus("1", "hf", JobState.SUSPENDED, "")) != ""


def test_the_message_timeout() -> None:
    assert parsing.message_timeout_s("MaxTasksPerNode = 512\nMessageTimeout          = 100 sec\nMinJobAge = 1\n") == 100
    assert parsing.message_timeout_s("") == 10


@pytest.mark.parametrize(("seconds", "text"), [(180, "00:03:00"), (86400, "1-00:00:00"), (95400, "1-02:30:00")])
def test_a_duration_is_written_as_slurm_reads_it(seconds: float, text: str) -> None:
    assert parsing.duration_text(seconds) == text
    assert parsing.duration_s(text) == seconds
