"""The seam over a `CudaRunner`: the caller's thread queues the work, and the device is the one that works it off."""

from __future__ import annotations

import time

from octavo.core.plan import StepPlan, StepResult
from octavo.engine.executor import Masks
from octavo.errors import StepError
from octavo.runner.cuda_runner import CudaRunner
from octavo.runner.landing import Landing

NAP_S = 5e-5
"""How long a wait that has a limit sleeps between two looks at the device."""
MAX_MESSAGE = 300


class CudaRunning:
    """A plan on the device, or what kept it from getting there; one with masked slices waits on the host for its masks.

    The next plan is submitted after they were put, so the order stays.
    """

    def __init__(self, executor: CudaExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan
        self._landing: Landing | None = None
        self._error: Exception | None = None
        self._num_read = 0
        if not plan.masked:
            self.put({})

    def put(self, masks: Masks) -> None:
        try:
            self._landing = self._executor.launch(self._plan, masks)
        except Exception as error:
            self._error = error

    @property
    def done(self) -> bool:
        if self._landing is None:
            return self._error is not None
        return self._landing.num_landed == len(self._landing.events)

    def poll(self, timeout_s: float = 0.0) -> StepResult | None:
        if self._landing is None:
            return None
        until = time.perf_counter() + timeout_s
        try:
            while (landed := self._landing.num_landed) == self._num_read:
                if time.perf_counter() >= until:
                    return None
                time.sleep(NAP_S)
        except RuntimeError:  # `result` will say it
            return None
        if landed == len(self._landing.events):
            return None
        first, self._num_read = self._num_read, landed
        return self._landing.read(first, landed)

    def result(self) -> StepResult:
        error = self._error
        if error is None and self._landing is not None:
            try:
                self._landing.events[-1].synchronize()
                return self._landing.read(self._num_read, len(self._landing.slice_ids))
            except RuntimeError as cause:  # what CUDA found out only now
                error = cause
        self._executor.recover()
        raise StepError(f"{type(error).__name__}: {_one_line(error)}") from error


class CudaExecutor:
    """Queues plans on the device as they come; a plan behind one that failed fails, too, until the caller knows."""

    def __init__(self, runner: CudaRunner) -> None:
        self.runner = runner
        self._failed = False
        self._closed = False

    def submit(self, plan: StepPlan) -> CudaRunning:
        assert not self._closed
        return CudaRunning(self, plan)

    def launch(self, plan: StepPlan, masks: Masks) -> Landing:
        if self._failed:
            raise StepError("a step before it failed")
        try:
            return self.runner.launch(plan, masks)
        except Exception:
            self._failed = True
            raise

    def recover(self) -> None:
        """The caller has seen a failure, and drops what was queued behind it."""
        self._failed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            del self.runner  # weights and pool, whoever still holds the executor


def _one_line(error: BaseException | None) -> str:
    """CUDA's messages go on with advice for debugging, compilers' with the source."""
    return " ".join(str(error).split())[:MAX_MESSAGE]
