"""Rank 0 waits for a device that waits for another rank. It must stop waiting, and take no token of that.

Gloo notices the end of a rank by itself. A GPU does not: here, an event takes its place, which `abort` sets.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo.core.plan import StepPlan, StepResult
from octavo.errors import DeviceLostError
from octavo.runner.ranks import rank_group
from octavo.runner.ranks.communicator import Communicator
from octavo.runner.ranks.rank_group import RankGroup
from octavo.runner.ranks.ranked_executor import RankedExecutor, RankedHandle
from octavo.runner.ranks.status_board import LINE, PLAN
from tests.runner.handwritten_plans import Plan

SLEEP = (sys.executable, "-c", "import time; time.sleep(120)")
WRONG = StepResult([[7]])
TIMEOUT_S = 40.0


class Waiting:
    """The device of rank 0, its communicator, executor and the handle of a plan: it waits until collectives end."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.aborted.set()

    def submit(self, plan: StepPlan) -> Waiting:
        return self

    @property
    def done(self) -> bool:
        return self.aborted.is_set()

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        return WRONG if self.aborted.wait(timeout_s) else None

    def result(self) -> StepResult:
        self.aborted.wait(TIMEOUT_S)
        return WRONG

    def close(self) -> None:
        assert self.aborted.is_set(), "rank 0 would wait for its device"


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankedExecutor]:
    """Its other rank sleeps."""
    for name in ("HANG_S", "WARM_UP_S"):
        monkeypatch.setattr(rank_group, name, 0.5)
    waiting: Any = Waiting()
    group = RankGroup(2, {}, SLEEP)
    group.communicator = waiting
    executor = RankedExecutor(waiting, group)
    yield executor
    executor.close()


def submit(executor: RankedExecutor, number: int) -> RankedHandle:
    """A plan that both ranks have begun, and a signal to the other one."""
    handle = executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 1, 1, [3]))
    executor.group.board.numbers[LINE + PLAN] = 1
    (child,) = executor.group._children
    assert child.process is not None
    os.kill(child.process.pid, number)
    return handle


FAULTS = [
    (signal.SIGKILL, r"rank 1 was killed by SIGKILL, at plan 1"),
    (signal.SIGSTOP, r"rank 1 hangs: it stands at plan 1, after collective 0 for \d+ s"),
]


@pytest.mark.parametrize(("number", "text"), FAULTS)
def test_a_lost_rank_ends_the_wait_for_the_device(executor: RankedExecutor, number: int, text: str) -> None:
    handle = submit(executor, number)
    with pytest.raises(DeviceLostError, match=text):
        handle.result()
    with pytest.raises(DeviceLostError, match=text):
        executor.submit(StepPlan()).result()


@pytest.mark.parametrize(("number", "text"), FAULTS)
def test_no_column_of_an_aborted_plan_is_read(executor: RankedExecutor, number: int, text: str) -> None:
    handle = submit(executor, number)
    assert handle.poll(TIMEOUT_S) is None and handle.done
    with pytest.raises(DeviceLostError, match=text):
        handle.result()


def test_a_rank_that_ends_while_others_connect(executor: RankedExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fail` has no communicator to abort then."""
    group, waiting = executor.group, executor.group.communicator
    group.communicator = None

    def connect(*_: Any) -> Any:
        group.fail("planted")
        return waiting

    monkeypatch.setattr(rank_group, "Communicator", connect)
    group._children[0].started = True
    with pytest.raises(DeviceLostError, match="planted"):
        group.connect(torch.device("cpu"))
    assert waiting is not None
    waiting.abort()  # as `Communicator.close` does


def test_the_message_of_a_failing_rank_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may not be able to exit, because it waits for its GPU."""
    code = (
        "import sys, time; from octavo.engine.process.ipc import Lifeline\n"
        "from octavo.runner.ranks.rank_group import RankMember\n"
        "member = RankMember(Lifeline.inherited(int(sys.argv[-1])), lambda: None)\n"
        "member.fail(ValueError('planted')); time.sleep(120)"
    )
    monkeypatch.setattr(rank_group, "EXIT_S", 0.1)
    group = RankGroup(2, {}, (sys.executable, "-c", code))
    with group._changed:
        group._changed.wait_for(lambda: bool(group.failure), TIMEOUT_S)
    with pytest.raises(DeviceLostError, match="rank 1 failed: ValueError: planted"):
        group.check()
    group.close()


def test_close_returns_while_an_abort_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's waits for graphs, which a lost device does not free."""
    aborts = threading.Event()
    communicator: Any = SimpleNamespace(abort=aborts.wait)
    monkeypatch.setattr(rank_group, "EXIT_S", 0.1)
    group = RankGroup(2, {}, (sys.executable, "-c", "pass"))
    group.communicator = communicator
    with group._changed:
        group._changed.wait_for(lambda: bool(group.failure), TIMEOUT_S)
    group.close()
    assert group._watcher.is_alive()
    aborts.set()
    group._watcher.join(TIMEOUT_S)


def test_pushed_sums_end_before_nccl() -> None:
    """NCCL may wait for the work of its GPU, which waits for the pushed sums."""
    order: list[str] = []

    class Ending:
        def abort(self) -> None:
            order.append("NCCL")

        def stop_waiting(self) -> None:
            order.append("pushed sums")

    communicator: Any = Communicator.__new__(Communicator)
    communicator._group = communicator._buffers = Ending()
    communicator._is_host = False
    communicator.abort()
    assert order == ["pushed sums", "NCCL"]
