"""Work on the event loop in slices: a caller who asks for a large answer keeps nobody else waiting for it.

Work is a generator. It yields its results, and `BREATH` wherever it may be interrupted, at least every millisecond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

SLICE_S = 0.003
"""How long work may go on before others have their turn."""
BREATH: Any = object()


async def sliced(work: Iterable[Any]) -> AsyncIterator[Any]:
    """The results of the work."""
    begin = time.monotonic()
    for item in work:
        if item is not BREATH:
            yield item
        elif time.monotonic() - begin > SLICE_S:
            await asyncio.sleep(0)
            begin = time.monotonic()


async def done(work: Iterable[Any]) -> list[Any]:
    return [item async for item in sliced(work)]
