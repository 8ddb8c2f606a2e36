"""Tunes Python's garbage collector: full collections run only while the server is idle.

A full collection visits every live object. It takes 200 ms on the event loop while a response of 130,000
log-probabilities is built. Objects of requests are freed by reference counting, so nearly all full collections find
nothing. Generations 0 and 1 are collected as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable

THRESHOLDS = 10_000, 5, 1 << 30
"""Allocations before a collection of generation 0, such collections before one of generation 1 (a few milliseconds
each), and never an automatic full collection."""
CHECK_S = 1.0
MIN_IDLE, MIN_BUSY = 20, 2000
"""Generation-1 collections before a full one: on an idle server (half a second of allocations), and on a busy one."""


@contextlib.asynccontextmanager
async def defer_full_gc(is_idle: Callable[[], bool]) -> AsyncIterator[None]:
    """Context manager. Objects alive at entry are never visited (`gc.freeze`). Not reentrant: the collector is
    process-wide."""
    previous = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    task = asyncio.create_task(_collect(is_idle), name="octavo-gc")
    try:
        yield
    finally:
        task.cancel()
        gc.set_threshold(*previous)
        gc.unfreeze()


async def _collect(is_idle: Callable[[], bool]) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        count = gc.get_count()[2]
        if count >= MIN_BUSY or (count >= MIN_IDLE and is_idle()):
            gc.collect()
