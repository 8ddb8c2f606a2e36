"""Executor for a `CudaModelRunner`: the caller's thread queues kernels, and the device runs them in order."""

from __future__ import annotations

import ctypes
import time

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import GrammarBitmask
from octavo.errors import StepError
from octavo.runner.checksums import NO_SWAP_IN_CHECK
from octavo.runner.cuda_model_runner import CudaModelRunner, Finish
from octavo.runner.executor import device_lost, step_error
from octavo.runner.output_buffers import StepOutput

POLL_INTERVAL_S = 5e-5
"""Pause between two queries of the device in a wait with a timeout."""


class CudaStepHandle:
    """A submitted plan: its output, or the error that prevented its launch.

    A plan with bitmask slices queues its sampling column by column, as the bitmasks arrive. The caller submits the next
    plan after the last of them, which keeps the stream order.
    """

    def __init__(self, executor: CudaExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._output: StepOutput | None = None
        self._error: Exception | None = None
        self._swap_in_check = NO_SWAP_IN_CHECK
        self._num_read = 0
        self._num_missing_bitmasks = max(1, plan.num_bitmask_columns)
        try:
            self._finish = executor.launch(plan)
            self._swap_in_check = executor.runner.swap_in_check
        except Exception as error:
            self._error = error
        if not plan.bitmask_slices:
            self.put_bitmask(None)

    def put_bitmask(self, bitmask: GrammarBitmask | None) -> None:
        self._num_missing_bitmasks -= 1
        if self._error is None:
            try:
                self._output = self._executor.finish(self._finish, bitmask)
            except Exception as error:
                self._error = error

    @property
    def done(self) -> bool:
        if self._output is None or self._error is not None:
            return self._error is not None
        try:
            is_ready = self._output.num_ready == len(self._output.events)
            return is_ready and not self._num_missing_bitmasks and self._swap_in_check.done
        except RuntimeError as error:  # an asynchronous CUDA error; `result` raises it
            self._error = error
            return True

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        if self._output is None or self._error is not None:
            return None
        deadline = time.perf_counter() + timeout_s
        try:
            if self._num_missing_bitmasks:  # the device waits for the next bitmask, so do not sleep
                self._output.events[-1].synchronize()
            while (num_ready := self._output.num_ready) == self._num_read:
                if time.perf_counter() >= deadline:
                    return None
                time.sleep(POLL_INTERVAL_S)
        except RuntimeError as error:  # as in `done`
            self._error = error
            return None
        if num_ready == len(self._output.events) and not self._num_missing_bitmasks:
            return None
        first, self._num_read = self._num_read, num_ready
        return self._read(first, num_ready)

    def _read(self, first: int, last: int) -> StepResult:
        assert self._output is not None
        corrupt = self._swap_in_check.take()
        result = self._output.read(first, last)
        result.corrupt = corrupt
        return result

    def result(self) -> StepResult:
        error = self._error
        if error is None and self._output is not None:
            try:
                self._output.events[-1].synchronize()
                return self._read(self._num_read, len(self._output.slice_ids))
            except RuntimeError as cause:  # as in `done`
                error = cause
        raised = step_error(error or StepError("result() was called before put_bitmask()"))
        self._executor.recover(error)
        raise raised from error


class CudaExecutor:
    """Queues plans on the device as they are submitted. After a failure all plans fail until the caller has seen it."""

    def __init__(self, runner: CudaModelRunner) -> None:
        self.runner = runner
        self._failed = False
        self._closed = False

    def submit(self, plan: StepPlan) -> CudaStepHandle:
        assert not self._closed
        return CudaStepHandle(self, plan)

    def launch(self, plan: StepPlan) -> Finish:
        if self._failed:
            raise StepError("a step before it failed")
        try:
            return self.runner.launch(plan)
        except Exception:
            self._failed = True
            raise

    def finish(self, finish: Finish, bitmask: GrammarBitmask | None) -> StepOutput:
        try:
            return finish(bitmask)
        except Exception:
            self._failed = True
            raise

    def recover(self, error: Exception | None) -> None:
        """Accept plans again after a failure that the caller has seen, with all later plans dropped.

        Raises `DeviceLostError` if the device no longer answers. CUDA's worst errors, such as a write to an invalid
        address, end all use of the device by the process.
        """
        self._failed = False
        self.runner.release_memory()
        try:
            self.runner.check_device()
        except RuntimeError as cause:
            raise device_lost(cause) from error or cause

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.runner.release_memory()
            try:
                self.runner.check_device()
            except RuntimeError:
                # Before torch frees pinned memory it asks the device for its last use. A lost device would abort the
                # process, also at interpreter exit. So the runner is never freed: its memory ends with the process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.runner))
            del self.runner  # frees the weights and the KV pool even if the executor stays referenced
