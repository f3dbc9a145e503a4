"""Whatever happens, in whatever order and however often: a run ends, or it makes progress."""

from collections import Counter
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm.job import JobState
from supervisor.bad_nodes import MAX_EXCLUSIONS
from supervisor.journal import Continued, ProgressMade, RolledBack
from tests.supervisor_room.stage import CRASHED
from tests.supervisor_room.world import World
from worker.contract.exit_report import NO_WORLD_ERROR, ErrorDetail, Outcome

MAX_STEPS = 400
PROOF = ErrorDetail(type="ProofError", message="probe loss", what="probe", expected="1.0", found="2.0")
MEMORY = ErrorDetail(type="OutOfMemoryError", message="2 GiB")
BROKEN_NODE = ErrorDetail(type="AcceleratorError", message="CUDA error: uncorrectable ECC error encountered")
DISK = ErrorDetail(type="OSError", message="[Errno 122] Disk quota exceeded")
ALONE = ErrorDetail(type=NO_WORLD_ERROR, message="2 ranks found no world")
OTHER_CRASH = CRASHED.model_copy(update={"type": "ValueError"})

faults = st.one_of(
    st.tuples(
        st.just("spike"), st.sampled_from(["spike", "divergence", "nonfinite"]), st.sampled_from([6.0, 6.5, 90.0])
    ),
    st.tuples(
        st.just("leave"), st.just(Outcome.CRASHED), st.sampled_from([CRASHED, OTHER_CRASH, BROKEN_NODE, ALONE, DISK])
    ),
    st.tuples(st.just("hang")),
    st.tuples(st.just("leave"), st.just(Outcome.ENDED), st.none()),
    st.tuples(st.just("leave"), st.just(Outcome.OUT_OF_MEMORY), st.just(MEMORY)),
    st.tuples(st.just("leave"), st.just(Outcome.REFUSED), st.sampled_from([PROOF, DISK])),
    st.tuples(
        st.just("lose_job"),
        st.sampled_from([JobState.FAILED, JobState.NODE_FAIL, JobState.PREEMPTED, JobState.TIMEOUT]),
    ),
)
moves = st.tuples(st.integers(0, 25), faults)
spike_settings = st.fixed_dictionaries(
    {
        "skip": st.sampled_from(["repeat", "always", "never"]),
        "skip_before": st.integers(0, 6),
        "max_rollbacks": st.integers(0, 20),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.lists(moves, min_size=1, max_size=8), spike_settings)
@example([(3, ("spike", "spike", 6.0))], {"skip": "never", "skip_before": 0, "max_rollbacks": 20})
@example([(0, ("leave", Outcome.CRASHED, BROKEN_NODE))], {"skip": "never", "skip_before": 0, "max_rollbacks": 20})
@example([(0, ("leave", Outcome.CRASHED, DISK))], {"skip": "never", "skip_before": 0, "max_rollbacks": 20})
@example([(3, ("hang",)), (0, ("hang",))], {"skip": "never", "skip_before": 0, "max_rollbacks": 20})
@example([(23, ("spike", "spike", 6.0))], {"skip": "repeat", "skip_before": 5, "max_rollbacks": 20})
def test_any_faults_again_and_again_end_in_time(turns: list[Any], spike: dict[str, Any]) -> None:
    """The same turns come over and over: so many steps, then that fault."""
    world = World(
        MAX_STEPS,
        {
            "checkpoint": {"every_steps": 10, "healthy_after": 5},
            "recovery": {"spike": spike, "max_submissions_per_hour": 1000},
        },
    )
    recovery = world.config.recovery
    in_a_row = recovery.max_attempts_without_progress + MAX_EXCLUSIONS * recovery.node_strikes  # those are given back
    most = (MAX_STEPS // 10 + 2) * in_a_row
    for turn in range(20 * most):
        if world.run.is_over:
            break
        world.now += 300
        steps, (name, *arguments) = turns[turn % len(turns)]
        if world.trains:
            world.train(steps)
        if world.trains:
            getattr(world, name)(*arguments)
        world.settle()
    assert world.run.is_over
    assert world.run.attempt <= most
    assert _most_attempts_in_a_row(world) <= in_a_row


def _most_attempts_in_a_row(world: World) -> int:
    """Attempts without progress in between."""
    progress, counted = 0, Counter[int]()
    for event in world.events:
        progress += isinstance(event, ProgressMade)
        counted[progress] += isinstance(event, Continued | RolledBack)
    return max(counted.values())


def test_the_world_is_the_real_thing() -> None:
    """It finishes without faults, rolls back after one, and gives up on one that always comes."""
    world = World(MAX_STEPS, {"checkpoint": {"every_steps": 10, "healthy_after": 5}})
    world.train(36)
    world.settle()
    world.spike("spike", 9.0)
    world.settle()
    [told] = world.rollbacks
    assert (told.to_step, told.lr_scale, told.batches[0].batch) == (30, 0.5, 36)
    world.train(MAX_STEPS)
    world.settle()
    assert (world.run.state, world.run.final_step) == ("finished", MAX_STEPS)
    lost = World(MAX_STEPS, {})
    while not lost.run.is_over:
        lost.spike("nonfinite", 0.0)
        lost.settle()
    assert (lost.run.state, len(lost.rollbacks)) == ("gave_up", 5)
