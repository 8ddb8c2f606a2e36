"""The executor of several ranks: rank 0's own, whose plans and bitmasks also go to the others."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import Capacity, GrammarBitmask, RankPlace, StepHandle
from octavo.errors import DeviceLostError, EngineError, StepError
from octavo.runner.executor import Executor
from octavo.runner.ranks.plan_ring import PlanReader
from octavo.runner.ranks.rank_group import RankGroup
from octavo.runner.ranks.status_board import StatusBoard

if TYPE_CHECKING:
    from octavo.runner.model_runner import ModelRunner

PLAN, BITMASK, NO_BITMASK, CLOSE = b"p", b"b", b"n", b"c"
"""First bytes of messages in the ring."""
CHECK_INTERVAL_S = 5e-5


class RankedExecutor:
    """Any failure of a step ends the group: `DeviceLostError`. The ranks' memories have parted then."""

    def __init__(self, local: Executor, group: RankGroup) -> None:
        self._local: Executor | None = local
        self.group = group
        self._num_plans = 0

    @property
    def local(self) -> Executor:
        assert self._local is not None, "the executor is closed"
        return self._local

    @property
    def runner(self) -> ModelRunner:
        return self.local.runner

    def start(self) -> Capacity:
        with self.group.start_errors():
            return self.local.start()

    def submit(self, plan: StepPlan) -> RankedHandle:
        self._num_plans += 1
        handle = RankedHandle(self, plan, self._num_plans)
        try:
            self.group.send(PLAN + plan.encode())
            self.group.board.begin_plan()
            if plan.swap_ins:
                self.group.board.set_checked(self._num_plans)
            handle.local = self.local.submit(plan)
        except DeviceLostError as error:
            handle.error = error
        return handle

    def describe(self) -> str:
        """Where the ranks are, for people."""
        return str(self.group.board)

    def places(self) -> list[RankPlace]:
        """Where each rank is, for the statistics."""
        return self.group.board.places()

    @property
    def failure(self) -> str:
        """Why the group has ended; "" while it lives."""
        return self.group.failure

    def lost(self, error: EngineError, number: int) -> DeviceLostError:
        """The error for a failed plan. It names the rank that failed first."""
        if not self.group.wait_for_failure():
            self.group.fail(f"rank 0 failed in plan {number}: {error}")
        return DeviceLostError(self.group.failure)

    def close(self) -> None:
        if self._local is not None:
            with contextlib.suppress(DeviceLostError):
                self.group.send(CLOSE)
            self._local.close()
            self._local = None
            self.group.close()


class RankedHandle:
    """A plan that all ranks compute."""

    def __init__(self, executor: RankedExecutor, plan: StepPlan, number: int) -> None:
        self._executor, self._number = executor, number
        self._has_swap_ins = bool(plan.swap_ins)
        self.local: StepHandle | None = None
        self.error: DeviceLostError | None = None

    @property
    def done(self) -> bool:
        return self.local is None or self.error is not None or self.local.done

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        if self.local is None or self.error is not None:
            return None
        result = self.local.poll(timeout_s)
        return result if result is None or self._is_right() else None

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        if self.local is None or self.error is not None:
            return
        try:
            self._executor.group.send(NO_BITMASK if masks is None else BITMASK + masks.encode())
        except DeviceLostError as error:
            self.error = error
        self.local.put_bitmask(masks)  # the local step must end in any case

    def result(self) -> StepResult:
        if self.local is None or self.error is not None:
            raise DeviceLostError(self._executor.group.failure)
        try:
            result = self.local.result()
        except (StepError, DeviceLostError) as error:
            self.error = self._executor.lost(error, self._number)
            raise self.error from error
        if not self._is_right():
            raise DeviceLostError(self._executor.group.failure)
        self._executor.group.board.set_results(self._number)
        return result

    def _is_right(self) -> bool:
        """Wait until all ranks have compared the blocks that the plan swaps in. False: the group has ended.

        Then the sums of ranks were aborted, perhaps those of this plan.
        """
        group = self._executor.group
        while not group.failure and self._has_swap_ins and group.board.num_checked() < self._number:
            time.sleep(CHECK_INTERVAL_S)
        self._has_swap_ins = False
        if group.failure:
            self.error = DeviceLostError(group.failure)
        return self.error is None


def follow(executor: Executor, reader: PlanReader, board: StatusBoard) -> None:
    """Run the plans of rank 0 until it closes the executor. Any failure is raised: it ends this rank."""
    num_plans = 0
    while (message := receive(reader))[:1] != CLOSE:
        assert message[:1] == PLAN, message[:1]
        plan = StepPlan.decode(message[1:])
        num_plans += 1
        board.begin_plan()
        step = executor.runner.execute(plan)
        output = step.output
        while not step.is_queued:
            bitmask = None
            if step.num_bitmasks:
                if (message := receive(reader))[:1] == CLOSE:
                    return
                bitmask = GrammarBitmask.decode(message[1:]) if message[:1] == BITMASK else None
            step.advance(bitmask)
        if plan.swap_ins:
            if corrupt := output.swap_in_check.take():
                raise StepError(f"{len(corrupt)} swapped blocks came back corrupted; check this host's memory")
            board.set_checked(num_plans)


def receive(reader: PlanReader) -> bytes:
    message = reader.receive()
    assert message is not None
    return message
