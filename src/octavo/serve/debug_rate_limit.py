"""Rate limits for debug queries: the engine answers them between steps, so they delay requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from typing import Any

from octavo.serve.openai.errors import ApiError

PAUSE_PER_COST, MAX_PAUSE_S = 20, 1.0
"""Pause after a query, as a multiple of the time that it took the engine, and its upper limit."""
INTERVAL_S = 0.01
MAX_WAITING = 32
"""Queries of one tenant that may wait."""


class CoalescedQuery:
    """A query about the whole engine, shared by concurrent callers.

    Callers that arrive during a query share the next one, so a result is never older than the call for it. The result
    of `query` has `cost_s`: the engine's time for it in seconds.
    """

    def __init__(self, query: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._query = query
        self._lock = asyncio.Lock()
        self._free_at = 0.0
        self._next: asyncio.Future[dict[str, Any]] | None = None

    async def get(self) -> dict[str, Any]:
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())  # no caller may be left
        return await asyncio.shield(self._next)

    async def _run(self) -> dict[str, Any]:
        async with self._lock:
            await asyncio.sleep(self._free_at - time.monotonic())
            self._next = None
            result = await self._query()
            self._free_at = time.monotonic() + min(PAUSE_PER_COST * result["cost_s"], MAX_PAUSE_S)
            return result


class TenantRateLimiter:
    """Limits queries about one request or block: one at a time per tenant, at least `interval_s` apart."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._queues: dict[Hashable, _TenantQueue] = {}

    @contextlib.asynccontextmanager
    async def acquire(self, tenant: Hashable) -> AsyncGenerator[None, None]:
        """Waits for the tenant's turn. Raises `ApiError` 429 if `MAX_WAITING` of its queries wait already."""
        queue = self._queues.setdefault(tenant, _TenantQueue())
        if queue.num_waiting >= MAX_WAITING:
            text = f"{MAX_WAITING} queries of this key are waiting, the limit is {MAX_WAITING}; try again later"
            raise ApiError(429, "too_many_questions", text, retry_after_s=1)
        queue.num_waiting += 1
        try:
            async with queue.lock:
                await asyncio.sleep(queue.free_at - time.monotonic())
                try:
                    yield
                finally:
                    queue.free_at = time.monotonic() + self._interval_s
        finally:
            queue.num_waiting -= 1


class _TenantQueue:
    """The queries of one tenant."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.num_waiting = 0
        self.free_at = 0.0
