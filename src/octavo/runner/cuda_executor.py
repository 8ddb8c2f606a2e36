"""The executor of a `CudaModelRunner`: the caller's thread queues the work, and the device does it in order."""

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
"""How long a wait that has a limit sleeps between two looks at the device."""


class CudaStepHandle:
    """A plan on the device, or what kept it from getting there; one with masked slices waits on the host for the masks
    of each column.

    The next plan is submitted after they were put, so the order stays.
    """

    def __init__(self, executor: CudaExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._landing: StepOutput | None = None
        self._error: Exception | None = None
        self._check = NO_SWAP_IN_CHECK
        self._num_read = 0
        self._num_waits = max(1, plan.num_bitmask_columns)
        try:
            self._finish = executor.launch(plan)
            self._check = executor.runner.check
        except Exception as error:
            self._error = error
        if not plan.bitmask_slices:
            self.put_bitmask(None)

    def put_bitmask(self, masks: GrammarBitmask | None) -> None:
        self._num_waits -= 1
        if self._error is None:
            try:
                self._landing = self._executor.finish(self._finish, masks)
            except Exception as error:
                self._error = error

    @property
    def done(self) -> bool:
        if self._landing is None or self._error is not None:
            return self._error is not None
        try:
            landed = self._landing.num_landed == len(self._landing.events)
            return landed and not self._num_waits and self._check.done
        except RuntimeError as error:  # what CUDA found out only now; `result` will say it
            self._error = error
            return True

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        if self._landing is None or self._error is not None:
            return None
        until = time.perf_counter() + timeout_s
        try:
            if self._num_waits:  # the device, in its turn, waits for what comes of this column: no naps
                self._landing.events[-1].synchronize()
            while (landed := self._landing.num_landed) == self._num_read:
                if time.perf_counter() >= until:
                    return None
                time.sleep(POLL_INTERVAL_S)
        except RuntimeError as error:  # likewise
            self._error = error
            return None
        if landed == len(self._landing.events) and not self._num_waits:
            return None
        first, self._num_read = self._num_read, landed
        return self._read(first, landed)

    def _read(self, first: int, last: int) -> StepResult:
        assert self._landing is not None
        corrupt = self._check.take()
        result = self._landing.read(first, last)
        result.corrupt = corrupt
        return result

    def result(self) -> StepResult:
        error = self._error
        if error is None and self._landing is not None:
            try:
                self._landing.events[-1].synchronize()
                return self._read(self._num_read, len(self._landing.slice_ids))
            except RuntimeError as cause:  # likewise
                error = cause
        told = step_error(error or StepError("it was asked for what it gives before it had its masks"))
        self._executor.recover(error)
        raise told from error


class CudaExecutor:
    """Queues plans on the device as they come; a plan behind one that failed fails, too, until the caller knows."""

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

    def finish(self, finish: Finish, masks: GrammarBitmask | None) -> StepOutput:
        try:
            return finish(masks)
        except Exception:
            self._failed = True
            raise

    def recover(self, error: Exception | None) -> None:
        """The caller has seen a failure, and drops what was queued behind it. Raises `DeviceLostError` where the device
        answers no more: CUDA's worst errors, such as a write to nobody's memory, end all that a process has there."""
        self._failed = False
        self.runner.release_memory()
        try:
            self.runner.probe()
        except RuntimeError as cause:
            raise device_lost(cause) from error or cause

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.runner.release_memory()
            try:
                self.runner.probe()
            except RuntimeError:
                # To free pinned memory, torch asks the device when it was used last. One that does not answer would end
                # the process there and then, at the interpreter's end, too. The memory goes back with the process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.runner))
            del self.runner  # weights and pool, whoever still holds the executor
