"""torch.compile, through training.extra: a compiled model is saved, resumed and proved like any other."""

import signal
from collections.abc import Callable

import pytest

from tests.trainer_room.rig import Rig, same_end

pytestmark = pytest.mark.training


def test_a_compiled_run_that_was_killed_ends_bitwise_the_same(make_rig: Callable[..., Rig]) -> None:
    """With the backend that traces and does not call a C++ compiler, which takes minutes."""
    told = {"training": {"extra": {"torch_compile": True, "torch_compile_backend": "aot_eager"}, "max_steps": 6}}
    whole, cut = make_rig("whole", **told), make_rig("cut", **told)
    whole.finish()
    cut.start(die_at=[5, "end", signal.SIGKILL, 0])
    cut.ends(-signal.SIGKILL)
    cut.finish(restart=1)
    same_end(whole, cut)
