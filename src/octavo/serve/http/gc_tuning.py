"""Python's garbage collector, kept from searching a large answer again and again while it is made.

A full collection looks at every object alive: 200 ms on the event loop while a response of 130,000 log-probabilities is
put together. What requests allocate dies by reference count, so nearly all of those looks find nothing. Young objects
are collected as ever; all of them only while no request runs, or after long.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable

YOUNG, MIDDLE, NEVER = 10_000, 5, 1 << 30
"""Objects before the youngest are looked at, and such looks before the older ones are: a few milliseconds each."""
CHECK_S = 1.0
DUE, OVERDUE = 20, 2000
"""Looks at the older ones, half a second of allocations, before an idle server looks at all, and before any does."""


@contextlib.asynccontextmanager
async def defer_full_gc(is_idle: Callable[[], bool]) -> AsyncIterator[None]:
    """What is here now is never looked at. Not reentrant: the collector is the process's."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    task = asyncio.create_task(_collect(is_idle), name="octavo-garbage")
    try:
        yield
    finally:
        task.cancel()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _collect(is_idle: Callable[[], bool]) -> None:
    while True:
        await asyncio.sleep(CHECK_S)
        count = gc.get_count()[2]
        if count >= OVERDUE or (count >= DUE and is_idle()):
            gc.collect()
