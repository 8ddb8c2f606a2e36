"""Control of Python's garbage collector, which would stop the process in the middle of a step.

A full collection visits every live object: tens of milliseconds once a model and a few thousand requests exist. Objects
of the engine are freed by reference count, because `RequestState.update` breaks the cycles of a finished request. So
collections find almost nothing. A reference cycle that remains is a leak for as long as the engine has work.
"""

from __future__ import annotations

import gc
import threading
from types import TracebackType


class GCPause:
    """Context manager that disables automatic garbage collection in the process and freezes the objects alive on entry.

    It is reentrant, also from several threads. Meanwhile only `collect_young` collects.
    """

    STEPS_PER_COLLECTION = 64

    def __init__(self) -> None:
        self._steps = 0
        self._was_enabled = False
        self._depth = 0
        self._lock = threading.RLock()

    def __enter__(self) -> GCPause:
        with self._lock:
            if not self._depth:
                self._was_enabled = gc.isenabled()
                gc.disable()
                gc.freeze()
            self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                gc.unfreeze()
                if self._was_enabled:
                    gc.enable()

    def collect_young(self) -> None:
        """Count a step; collect the youngest generation every `STEPS_PER_COLLECTION` steps.

        Objects that survive it, cycles included, are not visited again before the last exit.
        """
        self._steps += 1
        if self._depth and self._steps % self.STEPS_PER_COLLECTION == 0:
            gc.collect(0)
