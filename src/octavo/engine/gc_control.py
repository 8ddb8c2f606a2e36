"""Python's garbage collector, kept from stopping the world in the middle of a step.

A full collection looks at every object alive: tens of milliseconds once a model and a few thousand requests are there.
What an engine allocates dies by reference count: where an ended request is told of for the last time, the cycles that
it is in are broken (`RequestState.forget`). So nearly all of those looks find nothing; and a cycle that is left is
memory lost for as long as the engine has work.
"""

from __future__ import annotations

import gc
import threading
from types import TracebackType


class QuietGarbage:
    """While it is entered, nothing is collected but by `breathe`, and what was alive before is not looked at. It may be
    entered again inside, and by several threads. The collector that it stops is the process's.
    """

    STEPS_A_BREATH = 64

    def __init__(self) -> None:
        self._steps = 0
        self._was_enabled = False
        self._depth = 0
        self._lock = threading.RLock()

    def __enter__(self) -> QuietGarbage:
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

    def breathe(self) -> None:
        """Call it once a step: every `STEPS_A_BREATH` it collects the young objects, of which there are few. What
        outlives that, cycles included, is not looked at again before the last exit."""
        self._steps += 1
        if self._depth and self._steps % self.STEPS_A_BREATH == 0:
            gc.collect(0)
