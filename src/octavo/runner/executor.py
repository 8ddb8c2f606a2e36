"""Executor for a `ModelRunner` in this process: a queue, and one thread that runs its plans in order."""

from __future__ import annotations

import queue
import threading
import traceback
from collections import deque

import torch

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.errors import DeviceLostError, StepError, StepMemoryError
from octavo.runner.model_runner import ModelRunner

WAIT_INTERVAL_S = 0.2
"""Longest single wait: the caller's thread handles signals between two waits."""
OUT_OF_MEMORY_MESSAGES = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""Parts of error messages of torch on a CPU, CUDA's driver and its libraries, which have no error type for this."""
CLOSE_TIMEOUT_S = 60.0
"""Longest wait for the running step in `close`."""


class LocalStepHandle:
    """A submitted plan and its results so far."""

    def __init__(self, executor: LocalExecutor, plan: StepPlan) -> None:
        self.plan = plan
        self._executor = executor
        self._changed = threading.Condition()
        self._columns: deque[StepResult] = deque()
        self._error: BaseException | None = None
        self._done = False
        self._bitmasks: list[GrammarBitmask | None] = []  # one a column

    @property
    def done(self) -> bool:
        return self._done

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        with self._changed:
            self._changed.wait_for(lambda: self._columns or self._done, timeout_s)
            if self._done:
                return None
            return self._take_columns()

    def result(self) -> StepResult:
        with self._changed:
            while not self._done:
                self._changed.wait(WAIT_INTERVAL_S)
            if self._error is None:
                return self._take_columns() or StepResult([[] for _ in self.plan.rows])
        self._executor.recover()
        raise step_error(self._error) from self._error

    def put_bitmask(self, bitmask: GrammarBitmask | None) -> None:
        with self._changed:
            self._bitmasks.append(bitmask)
            self._changed.notify_all()

    def wait_for_bitmask(self, column: int) -> GrammarBitmask | None:
        """The bitmask of a column; waits for `put_bitmask`. Called on the executor's thread."""
        with self._changed:
            while len(self._bitmasks) <= column:
                if self._executor.closed:
                    raise StepError("the executor was closed while the step waited for its grammar bitmask")
                self._changed.wait(WAIT_INTERVAL_S)
            return self._bitmasks[column]

    def _take_columns(self) -> StepResult | None:
        """All columns that are ready, as one result."""
        if not self._columns:
            return None
        result = self._columns.popleft()
        if self._columns:
            result.tokens = [list(t) for t in result.tokens]
        while self._columns:
            append_columns(result, self._columns.popleft())
        return result

    def add_column(self, column: StepResult) -> None:
        with self._changed:
            self._columns.append(column)
            self._changed.notify_all()

    def finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._error, self._done = error, True
            self._changed.notify_all()


MAX_MESSAGE = 300
"""Characters of an error message: CUDA's go on with advice for debugging, compilers' with source code."""


def step_error(error: BaseException) -> StepError:
    """The `StepError` for an error in a step.

    If memory ran out, the frames of the error are cleared: they keep the step's tensors alive.
    """
    kind = StepMemoryError if is_out_of_memory(error) else StepError
    if kind is StepMemoryError:
        clear_tracebacks(error)
    return kind(f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_MESSAGE]}")


def device_lost(cause: BaseException) -> DeviceLostError:
    """The error that ends the engine, with the first line of CUDA's message: the others are debugging advice."""
    message = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return DeviceLostError(f"the GPU no longer answers this process, only a new process can use it: {message}")


def clear_tracebacks(error: BaseException | None) -> None:
    """Drop the local variables in the frames of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if the error or one of its causes is a lack of memory: handling one may raise another error."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(message in str(error) for message in OUT_OF_MEMORY_MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def append_columns(result: StepResult, column: StepResult) -> None:
    """Append later columns of the same step to a result."""
    for tokens, more in zip(result.tokens, column.tokens, strict=True):
        tokens += more  # type: ignore[operator]
    result.errors |= column.errors
    result.corrupt += column.corrupt
    for i, logprobs in column.logprobs.items():
        result.logprobs.setdefault(i, []).extend(logprobs)
    for i, (position, entries) in column.prompt_logprobs.items():
        result.prompt_logprobs.setdefault(i, (position, []))[1].extend(entries)


class LocalExecutor:
    """Runs plans in order on its own thread, while the caller plans the next step."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._queue: queue.SimpleQueue[LocalStepHandle | None] = queue.SimpleQueue()
        self._failed = False  # all plans in the queue fail until the caller has seen the error
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="octavo-runner", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, plan: StepPlan) -> LocalStepHandle:
        assert not self._closed
        handle = LocalStepHandle(self, plan)
        self._queue.put(handle)
        return handle

    def recover(self) -> None:
        """Accept plans again after a failure that the caller has seen. Waits until all queued plans have failed."""
        if self._failed:
            marker = LocalStepHandle(self, StepPlan())
            self._queue.put(marker)
            with marker._changed:
                marker._changed.wait_for(lambda: marker._done)
            self._failed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout=CLOSE_TIMEOUT_S)
            del self.runner  # frees the weights and the KV pool even if the executor stays referenced

    def _work(self) -> None:
        while (handle := self._queue.get()) is not None:
            if self._failed:
                handle.finish(StepError("a step before it failed"))
                continue
            try:
                self.runner.run(handle.plan, handle.add_column, handle.wait_for_bitmask)
            except Exception as error:
                self._failed = True
                handle.finish(error)
            else:
                handle.finish(None)
