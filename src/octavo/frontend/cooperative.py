"""Cooperative work on the event loop: long work runs in short time slices, so that other tasks get their turn.

Work is a generator. It yields its results, and `YIELD_POINT` wherever it may be interrupted: at least once a
millisecond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

SLICE_S = 0.003
"""Longest time slice before other tasks run, in seconds."""
YIELD_POINT: Any = object()


async def iter_cooperatively(work: Iterable[Any]) -> AsyncIterator[Any]:
    """Yield the results of `work`; let other tasks run after each time slice."""
    begin = time.monotonic()
    for item in work:
        if item is not YIELD_POINT:
            yield item
        elif time.monotonic() - begin > SLICE_S:
            await asyncio.sleep(0)
            begin = time.monotonic()


async def run_cooperatively(work: Iterable[Any]) -> list[Any]:
    """Return all results of `work`."""
    return [item async for item in iter_cooperatively(work)]
