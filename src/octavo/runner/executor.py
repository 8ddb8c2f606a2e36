"""Executors of a model runner in this process: they queue plans, read their results, and recover from failed steps."""

from __future__ import annotations

import ctypes
import queue
import threading
import time

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import Capacity, GrammarBitmask
from octavo.errors import StepError
from octavo.runner.failures import device_lost, step_error
from octavo.runner.memory.budget import LESS_SWAP
from octavo.runner.memory.profile import Precompile
from octavo.runner.model_runner import ModelRunner
from octavo.runner.output_buffers import StepOutput
from octavo.runner.step import Step

WAIT_INTERVAL_S = 0.2
"""Longest single wait for a thread: the caller's thread handles signals between two waits."""
POLL_INTERVAL_S = 5e-5
"""Pause between two queries of the device in a wait with a timeout."""
CLOSE_TIMEOUT_S = 60.0
"""Longest wait for the running step in `ThreadedExecutor.close`."""


class StepHandle:
    """A submitted plan: its output so far, or the error that ended it.

    A plan with bitmask slices queues its sampling column by column, as the bitmasks arrive. The caller submits the next
    plan after the last of them, which keeps the stream order.

    is_queued   all its work is queued, or has failed
    """

    def __init__(self, executor: Executor, plan: StepPlan) -> None:
        self.plan = plan
        self.output: StepOutput | None = None
        self.step: Step | None = None
        self.error: BaseException | None = None
        self.is_queued = False
        self.bitmasks: list[GrammarBitmask | None] = []  # one a column, where a thread takes them
        self.num_read = 0
        self._executor = executor

    def put_bitmask(self, bitmask: GrammarBitmask | None) -> None:
        self._executor.put_bitmask(self, bitmask)

    @property
    def num_ready(self) -> int:
        """Columns that are full. An asynchronous error of the device is kept for `result`."""
        if self.output is None or self.error is not None:
            return self.num_read
        try:
            return self.output.num_ready
        except RuntimeError as error:
            self.error = error
            return self.num_read

    @property
    def done(self) -> bool:
        if self.output is not None and self.is_queued and self.error is None:
            is_ready = self.num_ready == len(self.output.events)
            return self.error is not None or (is_ready and self.output.swap_in_check.done)
        return self.error is not None

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        deadline = time.perf_counter() + timeout_s
        while (num_ready := self.num_ready) == self.num_read:
            if self.error is not None or not self._executor.wait(self, deadline):
                return None
        assert self.output is not None
        if num_ready == len(self.output.events) and self.is_queued:
            return None
        first, self.num_read = self.num_read, num_ready
        return self._read(self.output, first, num_ready)

    def result(self) -> StepResult:
        self._executor.wait_for_end(self)
        if self.error is None and self.output is not None and self.output.events:
            try:
                self.output.events[-1].synchronize()
                return self._read(self.output, self.num_read, len(self.output.events))
            except RuntimeError as error:  # as in `num_ready`
                self.error = error
        raised = step_error(self.error or StepError("result() was called before put_bitmask()"))
        self._executor.recover(self.error)
        raise raised from self.error

    def _read(self, output: StepOutput, first: int, last: int) -> StepResult:
        corrupt = output.swap_in_check.take()
        result = output.read(first, last)
        result.corrupt = corrupt
        return result


class Executor:
    """Queues plans on the device as they are submitted, and the device runs them in order.

    After a failure all plans fail until the caller has seen it. precompile: compiles the kernels at its start.
    """

    def __init__(self, runner: ModelRunner, precompile: Precompile | None = None) -> None:
        self.runner = runner
        self._precompile = precompile
        self._failed = False
        self._closed = False

    def start(self) -> Capacity:
        """Compile kernels, capture graphs, and time swaps and the shortest pass."""
        runner, state, move_s = self.runner, self.runner.state, 0.0
        runner.capture(self._precompile)
        num_blocks, num_host_blocks = (len(pool) - 1 for pool in (state.kv, state.swapper.host_kv))
        if num_host_blocks:
            with runner.platform.startup_errors("moving blocks to the host", lambda _: LESS_SWAP):
                move_s = state.measure_swap()
        return Capacity(num_blocks, num_host_blocks, move_s, runner.measure_pass())

    def submit(self, plan: StepPlan) -> StepHandle:
        assert not self._closed
        handle = StepHandle(self, plan)
        self._start(handle)
        return handle

    def _start(self, handle: StepHandle) -> None:
        self._execute(handle)

    def _execute(self, handle: StepHandle) -> None:
        """Queue a plan up to its first bitmask."""
        try:
            if self._failed:
                raise StepError("a step before it failed")
            handle.step = self.runner.execute(handle.plan)
            handle.output = handle.step.output  # before its columns are computed: readers wait for them
        except Exception as error:
            self._fail(handle, error)
        if not handle.plan.bitmask_slices:
            self._advance(handle, None)

    def _advance(self, handle: StepHandle, bitmask: GrammarBitmask | None) -> None:
        """Queue it up to its next bitmask."""
        if handle.error is None and handle.step is not None:
            try:
                handle.step.advance(bitmask)
            except Exception as error:
                self._fail(handle, error)
        if handle.step is None or handle.step.is_queued:
            self._end(handle)

    def _fail(self, handle: StepHandle, error: Exception) -> None:
        self._failed = True
        handle.error = error
        self._end(handle)

    def _end(self, handle: StepHandle) -> None:
        handle.step = None  # it keeps the pass's tensors alive
        handle.is_queued = True

    def put_bitmask(self, handle: StepHandle, bitmask: GrammarBitmask | None) -> None:
        self._advance(handle, bitmask)

    def wait(self, handle: StepHandle, deadline: float) -> bool:
        """Wait a while for a column of a plan. Returns False at the deadline, and if none can come."""
        if handle.output is None or not handle.output.events or time.perf_counter() >= deadline:
            return False
        if not handle.is_queued and handle.num_read < len(handle.output.events):
            try:  # the device waits for the next bitmask, so do not sleep
                handle.output.events[-1].synchronize()
            except RuntimeError as error:
                handle.error = error
        else:
            time.sleep(POLL_INTERVAL_S)
        return True

    def wait_for_end(self, handle: StepHandle) -> None:
        """Wait until the work of a plan is queued."""

    def recover(self, error: BaseException | None) -> None:
        """Accept plans again after a failure that the caller has seen, with all later plans dropped.

        Raises `DeviceLostError` if the device no longer answers. CUDA's worst errors, such as a write to an invalid
        address, end all use of the device by the process.
        """
        self._failed = False
        platform = self.runner.platform
        platform.release_memory()
        try:
            platform.synchronize()
        except RuntimeError as cause:
            raise device_lost(cause) from error or cause

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._stop()
            platform = self.runner.platform
            platform.release_memory()
            try:
                platform.synchronize()
                self.runner.close()
            except RuntimeError:
                # Before torch frees pinned memory it asks the device for its last use. A lost device would abort the
                # process, also at interpreter exit. So the runner is never freed: its memory ends with the process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.runner))
            del self.runner  # frees the weights and the KV pool even if the executor stays referenced

    def _stop(self) -> None:
        """Finish the submitted plans."""


class ThreadedExecutor(Executor):
    """For a device that computes within its calls: one thread runs the plans, while the caller plans the next step."""

    def __init__(self, runner: ModelRunner, precompile: Precompile | None = None) -> None:
        super().__init__(runner, precompile)
        self._changed = threading.Condition()  # a column, a bitmask, or the end of a plan
        self._queue: queue.SimpleQueue[StepHandle | None] = queue.SimpleQueue()
        runner.output_buffers.on_column = self._notify
        self.thread = threading.Thread(target=self._work, name="octavo-runner", daemon=True)
        self.thread.start()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> None:
        while (handle := self._queue.get()) is not None:
            self._execute(handle)
            while not handle.is_queued:
                self._advance(handle, self._next_bitmask(handle))
            self._notify()
            del handle  # its tensors are freed while the thread waits

    def _next_bitmask(self, handle: StepHandle) -> GrammarBitmask | None:
        """The next bitmask of a plan; waits for `put_bitmask`."""
        with self._changed:
            while not handle.bitmasks and handle.error is None:
                if self._closed:
                    message = "the executor was closed while the step waited for its grammar bitmask"
                    self._fail(handle, StepError(message))
                self._changed.wait(WAIT_INTERVAL_S)
        return handle.bitmasks.pop(0) if handle.bitmasks else None

    def _start(self, handle: StepHandle) -> None:
        self._queue.put(handle)

    def put_bitmask(self, handle: StepHandle, bitmask: GrammarBitmask | None) -> None:
        handle.bitmasks.append(bitmask)
        self._notify()

    def wait(self, handle: StepHandle, deadline: float) -> bool:
        with self._changed:
            while not handle.is_queued and handle.num_ready == handle.num_read:
                remaining = deadline - time.perf_counter()
                if remaining <= 0:
                    return False
                self._changed.wait(min(remaining, WAIT_INTERVAL_S))
        return handle.num_ready != handle.num_read

    def wait_for_end(self, handle: StepHandle) -> None:
        with self._changed:
            while not handle.is_queued:
                self._changed.wait(WAIT_INTERVAL_S)

    def recover(self, error: BaseException | None) -> None:
        """See `Executor.recover`. Waits until all queued plans have failed."""
        if self._failed:
            marker = StepHandle(self, StepPlan())
            self._queue.put(marker)
            self.wait_for_end(marker)
        super().recover(error)

    def _stop(self) -> None:
        self._queue.put(None)
        self.thread.join(timeout=CLOSE_TIMEOUT_S)


def make_executor(runner: ModelRunner, precompile: Precompile | None = None) -> Executor:
    """The kind of executor that the runner's platform needs."""
    return ThreadedExecutor(runner, precompile) if runner.platform.is_host else Executor(runner, precompile)
