"""The threaded executor: one thread, in order. After a failed step, queued plans fail and later ones run."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from octavo.core.plan import StepPlan, StepResult, TokenLogprobs
from octavo.engine.executor import GrammarBitmask
from octavo.errors import StepError
from octavo.runner.executor import ThreadedExecutor, make_executor
from octavo.runner.output_buffers import OutputBuffers, StepOutput
from octavo.runner.platform import CpuPlatform
from tests.runner.handwritten_plans import NextTokenModel, Plan, make_runner


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_a_started_executor_returns_its_capacity(num_host_blocks: int) -> None:
    executor = make_executor(make_runner(NextTokenModel(), CpuPlatform(), num_host_blocks))
    capacity = executor.start()
    executor.close()
    assert capacity[:2] == (8, num_host_blocks) and (capacity.move_s > 0) == (num_host_blocks > 0)


@pytest.mark.parametrize("fails", [False, True])
def test_a_handle_drops_its_step_at_its_end(fails: bool) -> None:
    """A step keeps the tensors of its passes alive."""
    model = NextTokenModel()
    model.fails = fails
    executor = make_executor(make_runner(model, CpuPlatform()))
    handle = executor.submit(Plan().give(0, (1, 2)).slice(0, 0, 1, 1, [3]))
    executor.wait_for_end(handle)
    assert handle.step is None and (handle.error is not None) == fails
    executor.close()


class FakeStep:
    def __init__(self, runner: FakeRunner, plan: StepPlan, output: StepOutput) -> None:
        self.runner, self.plan, self.output = runner, plan, output
        self.is_queued = False
        self.work = runner.work(plan, output)
        next(self.work)
        self.num_left = max(1, plan.num_bitmask_columns)

    def advance(self, bitmask: GrammarBitmask | None) -> None:
        if self.plan.num_bitmask_columns:
            self.runner.bitmasks.append(bitmask)
        self.num_left -= 1
        next(self.work, None)
        self.is_queued = not self.num_left


class FakeRunner:
    """Runs the actions registered for a plan's `step`, and records the order."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.columns: dict[int, list[list[list[int]]]] = {}
        self.raises: dict[int, BaseException] = {}
        self.bitmasks: list[Any] = []  # received by plans with bitmask slices
        self.gate: dict[int, threading.Event] = {}  # waited for before the last column

        self.platform = CpuPlatform()
        self.output_buffers = OutputBuffers(8, 2, self.platform)

    def execute(self, plan: StepPlan) -> Any:
        self.ran.append(plan.step)
        output = self.output_buffers.new_output(len(plan.rows))
        return FakeStep(self, plan, output)

    def close(self) -> None:
        pass

    def work(self, plan: StepPlan, output: StepOutput) -> Iterator[None]:
        columns = self.columns.get(plan.step, [[[plan.step]]])
        for i, column in enumerate(columns):
            if i < max(1, plan.num_bitmask_columns):
                yield
            if i == len(columns) - 1:
                if plan.step in self.gate:
                    assert self.gate[plan.step].wait(20)
                if plan.step in self.raises:
                    raise self.raises[plan.step]
            self.output_buffers.record_result(output, StepResult(column, {0: "bad"} if column == [[-1]] else {}))


def plan_of(step: int) -> StepPlan:
    plan = StepPlan(step)
    plan.rows, plan.host_tokens = [0], {0: array("i", [1])}
    return plan


@pytest.fixture
def runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def executor(runner: FakeRunner) -> Any:
    executor = ThreadedExecutor(runner)  # type: ignore[arg-type]
    yield executor
    for gate in runner.gate.values():
        gate.set()
    executor.close()


def test_plans_run_in_order_and_submit_does_not_wait(executor: ThreadedExecutor, runner: FakeRunner) -> None:
    runner.gate[0] = threading.Event()
    runs = [executor.submit(plan_of(i)) for i in range(5)]
    assert not any(r.done for r in runs)
    assert runs[0].poll() is None
    runner.gate[0].set()
    assert [r.result().tokens for r in reversed(runs)] == [[[4]], [[3]], [[2]], [[1]], [[0]]]
    assert runner.ran == list(range(5)) and all(r.done for r in runs)


def test_poll_returns_columns_one_by_one(executor: ThreadedExecutor, runner: FakeRunner) -> None:
    runner.columns[0] = [[[5, 6]], [[7]], [[]], [[-1]]]
    runner.gate[0] = threading.Event()
    run = executor.submit(plan_of(0))
    got: list[int] = []
    while len(got) < 3:
        part = run.poll(5.0)
        assert part is not None and not part.errors
        got += part.tokens[0]
    assert got == [5, 6, 7]
    while (part := run.poll(0.05)) is not None:  # maybe the empty column, then none
        assert part.tokens == [[]]
    runner.gate[0].set()
    result = run.result()
    assert result.tokens == [[-1]] and result.errors == {0: "bad"}
    assert run.done and run.poll(1.0) is None


def test_poll_waits_no_longer_than_its_timeout(executor: ThreadedExecutor, runner: FakeRunner) -> None:
    runner.gate[0] = threading.Event()
    run = executor.submit(plan_of(0))
    begin = time.monotonic()
    assert run.poll(0.05) is None
    assert 0.04 < time.monotonic() - begin < 60


def test_the_result_contains_all_unpolled_columns(executor: ThreadedExecutor, runner: FakeRunner) -> None:
    runner.columns[0] = [[[5]], [[6]], [[-1]], [[7, 8]]]
    result = executor.submit(plan_of(0)).result()
    assert result.tokens == [[5, 6, -1, 7, 8]] and result.errors == {0: "bad"}


def test_logprobs_are_joined_like_their_tokens(executor: ThreadedExecutor, runner: FakeRunner) -> None:
    def entry(i: int) -> TokenLogprobs:
        return TokenLogprobs(-float(i), i, [], [])

    results = [
        StepResult([[], []], prompt_logprobs={1: (4, [entry(1), entry(2)])}),
        StepResult([[5], []], logprobs={0: [entry(3)]}, prompt_logprobs={1: (6, [entry(4)])}),
        StepResult([[6], [9]], logprobs={0: [entry(5)], 1: [entry(6)]}),
    ]

    def work(plan: StepPlan, output: StepOutput) -> Iterator[None]:
        yield
        for result in results:
            runner.output_buffers.record_result(output, result)

    runner.work = work  # type: ignore[method-assign]
    plan = plan_of(0)
    plan.rows.append(1)
    result = executor.submit(plan).result()
    assert result.tokens == [[5, 6], [9]]
    assert result.logprobs == {0: [entry(3), entry(5)], 1: [entry(6)]}
    assert result.prompt_logprobs == {1: (4, [entry(1), entry(2), entry(4)])}


def test_plans_queued_before_a_failure_is_seen_fail_and_later_ones_run(
    executor: ThreadedExecutor, runner: FakeRunner
) -> None:
    runner.gate[1], runner.raises[1] = threading.Event(), ValueError("planted")
    runs = [executor.submit(plan_of(i)) for i in range(4)]
    runner.gate[1].set()
    assert runs[0].result().tokens == [[0]]
    assert not runs[1].poll(0.01)  # a failed step returns no columns
    with pytest.raises(StepError, match="ValueError: planted") as caught:
        runs[1].result()
    assert isinstance(caught.value.__cause__, ValueError)
    assert runner.ran == [0, 1]
    assert executor.submit(plan_of(9)).result().tokens == [[9]]  # submitted after the failure was seen
    for run in runs[2:]:
        with pytest.raises(StepError, match="a step before it failed"):
            run.result()
    assert runner.ran == [0, 1, 9]


def test_a_plan_submitted_before_the_failure_is_seen_fails(executor: ThreadedExecutor, runner: FakeRunner) -> None:
    runner.raises[0] = RuntimeError("planted")
    first = executor.submit(plan_of(0))
    while not first.done:
        time.sleep(0.001)
    late = executor.submit(plan_of(1))  # planned for the state after the first
    with pytest.raises(StepError):
        first.result()
    with pytest.raises(StepError):
        late.result()
    assert runner.ran == [0]
    runner.raises.clear()
    assert executor.submit(plan_of(2)).result().tokens == [[2]]


def test_a_plan_waits_for_its_bitmask_and_later_plans_wait_for_it(
    executor: ThreadedExecutor, runner: FakeRunner
) -> None:
    masked, later, bitmask = plan_of(0), plan_of(1), GrammarBitmask([0], np.zeros((1, 2), dtype=np.int32))
    masked.bitmask_slices, masked.num_sampled = [0], [1]
    first = executor.submit(masked)
    second = executor.submit(later)
    assert first.poll(0.1) is None and not first.done and not second.done
    first.put_bitmask(bitmask)
    assert first.result().tokens == [[0]] and second.result().tokens == [[1]]
    assert runner.bitmasks == [bitmask]
    again = executor.submit(masked)
    again.put_bitmask(None)  # all tokens allowed
    assert again.result().tokens == [[0]]


def test_each_column_of_a_decode_window_waits_for_its_bitmask(executor: ThreadedExecutor, runner: FakeRunner) -> None:
    plan = plan_of(0)
    plan.bitmask_slices, plan.num_sampled = [0], [3]
    runner.columns[0] = [[[4]], [[5]], [[6]]]
    run = executor.submit(plan)
    each = [GrammarBitmask([0], np.full((1, 2), i, dtype=np.int32)) for i in range(3)]
    assert run.poll(0.05) is None and not run.done
    for i, bitmask in enumerate(each[:2]):
        run.put_bitmask(bitmask)
        column = run.poll(20)
        assert column is not None and column.tokens == [[4 + i]] and not run.done
        assert run.poll(0.05) is None
    run.put_bitmask(each[2])
    assert run.result().tokens == [[6]] and runner.bitmasks == each


def test_close_ends_a_plan_that_waits_for_its_bitmask(runner: FakeRunner) -> None:
    executor = ThreadedExecutor(runner)  # type: ignore[arg-type]
    plan = plan_of(0)
    plan.bitmask_slices, plan.num_sampled = [0], [1]
    run = executor.submit(plan)
    begin = time.monotonic()
    executor.close()
    assert not executor.thread.is_alive() and time.monotonic() - begin < 60
    assert run.done and runner.bitmasks == []


def test_close_runs_queued_plans_and_frees_the_runner(runner: FakeRunner) -> None:
    executor = ThreadedExecutor(runner)  # type: ignore[arg-type]
    runs = [executor.submit(plan_of(i)) for i in range(3)]
    executor.close()
    executor.close()
    assert not executor.thread.is_alive()
    assert [r.result().tokens for r in runs] == [[[0]], [[1]], [[2]]]  # queued plans have run
    assert not hasattr(executor, "runner")
