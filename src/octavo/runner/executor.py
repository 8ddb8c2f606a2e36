"""The seam over a `ModelRunner` in this process: a queue, and one thread that works it off in order."""

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
"""How long one wait lasts before the caller's thread may see a signal."""
NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
"""In the messages of errors that torch, on a CPU, CUDA's driver and its libraries have no type of their own for."""
CLOSE_TIMEOUT_S = 60.0
"""How long closing waits for the step that runs."""


class LocalStepHandle:
    """A plan in the queue, or what came of it so far."""

    def __init__(self, executor: LocalExecutor, plan: StepPlan) -> None:
        self.plan = plan
        self._executor = executor
        self._landed = threading.Condition()
        self._columns: deque[StepResult] = deque()
        self._error: BaseException | None = None
        self._done = False
        self._masks: list[GrammarBitmask | None] = []  # column by column

    @property
    def done(self) -> bool:
        return self._done

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        with self._landed:
            self._landed.wait_for(lambda: self._columns or self._done, timeout_s)
            if self._done:
                return None
            return self._gather()

    def result(self) -> StepResult:
        with self._landed:
            while not self._done:
                self._landed.wait(WAIT_INTERVAL_S)
            if self._error is None:
                return self._gather() or StepResult([[] for _ in self.plan.rows])
        self._executor.recover()
        raise step_error(self._error) from self._error

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        with self._landed:
            self._masks.append(masks)
            self._landed.notify_all()

    def wait_for_masks(self, column: int) -> GrammarBitmask | None:
        """On the executor's thread."""
        with self._landed:
            while len(self._masks) <= column:
                if self._executor.closed:
                    raise StepError("the executor was closed before the step had all it waits for")
                self._landed.wait(WAIT_INTERVAL_S)
            return self._masks[column]

    def _gather(self) -> StepResult | None:
        """All columns that have landed, as one."""
        if not self._columns:
            return None
        whole = self._columns.popleft()
        if self._columns:
            whole.tokens = [list(t) for t in whole.tokens]
        while self._columns:
            append(whole, self._columns.popleft())
        return whole

    def land(self, column: StepResult) -> None:
        with self._landed:
            self._columns.append(column)
            self._landed.notify_all()

    def end(self, error: BaseException | None) -> None:
        with self._landed:
            self._error, self._done = error, True
            self._landed.notify_all()


MAX_MESSAGE = 300
"""Of an error: CUDA's messages go on with advice for debugging, compilers' with the source."""


def step_error(error: BaseException) -> StepError:
    """What the engine is told of what went wrong in a step. Of a lack of memory nothing else is kept: what the step had
    already made hangs on the error's frames."""
    kind = StepMemoryError if is_out_of_memory(error) else StepError
    if kind is StepMemoryError:
        clear_tracebacks(error)
    return kind(f"{type(error).__name__}: {' '.join(str(error).split())[:MAX_MESSAGE]}")


def device_lost(cause: BaseException) -> DeviceLostError:
    """What an engine dies of. CUDA's own words come last; its further lines are advice for debugging."""
    words = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return DeviceLostError(f"the GPU does not answer this process any more, only a new one can use it: {words}")


def clear_tracebacks(error: BaseException | None) -> None:
    """What was made in them is let go, though the error is kept."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it is a lack of memory, or what came of one: what failed may have failed once more on its way out."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def append(whole: StepResult, column: StepResult) -> None:
    """What comes later of the same step."""
    for mine, more in zip(whole.tokens, column.tokens, strict=True):
        mine += more  # type: ignore[operator]
    whole.errors |= column.errors
    whole.corrupt += column.corrupt
    for i, logprobs in column.logprobs.items():
        whole.logprobs.setdefault(i, []).extend(logprobs)
    for i, (position, entries) in column.prompt_logprobs.items():
        whole.prompt_logprobs.setdefault(i, (position, []))[1].extend(entries)


class LocalExecutor:
    """Runs plans one after another on a thread of its own, so that the next one is planned meanwhile."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._queue: queue.SimpleQueue[LocalStepHandle | None] = queue.SimpleQueue()
        self._failed = False  # a step failed: what was queued behind it fails too, until the caller knows
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="octavo-runner", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        return self._closed

    def submit(self, plan: StepPlan) -> LocalStepHandle:
        assert not self._closed
        running = LocalStepHandle(self, plan)
        self._queue.put(running)
        return running

    def recover(self) -> None:
        """The caller has seen a failure. What it had queued since is worked off, failing, before it goes on."""
        if self._failed:
            marker = LocalStepHandle(self, StepPlan())
            self._queue.put(marker)
            with marker._landed:
                marker._landed.wait_for(lambda: marker._done)
            self._failed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(timeout=CLOSE_TIMEOUT_S)
            del self.runner  # weights and pool, whoever still holds the executor

    def _work(self) -> None:
        while (running := self._queue.get()) is not None:
            if self._failed:
                running.end(StepError("a step before it failed"))
                continue
            try:
                self.runner.run(running.plan, running.land, running.wait_for_masks)
            except Exception as error:
                self._failed = True
                running.end(error)
            else:
                running.end(None)
