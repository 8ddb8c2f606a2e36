"""Rate limits for debug queries: the engine answers them between steps, so they delay requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from octavo.serve.job_queue import JobQueue

T = TypeVar("T")

PAUSE_PER_COST, MAX_PAUSE_S = 20, 1.0
"""Pause after a query, as a multiple of the time that it took the engine, and its upper limit."""
INTERVAL_S = 0.01
MAX_WAITING = 64
"""Queries of all tenants that may wait."""


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


class EngineQueries:
    """Queries about one request or block: one at a time, in turns between tenants, `INTERVAL_S` apart."""

    def __init__(self) -> None:
        self._jobs: JobQueue[Any] = JobQueue(1, MAX_WAITING, "too many debug queries wait", spare=False)

    async def run(self, query: Callable[[], Awaitable[T]], tenant: int) -> T:
        """Returns the result of `query`. Raises `ApiError` 429 if too many wait."""

        async def job() -> T:
            try:
                return await query()
            finally:
                await asyncio.sleep(INTERVAL_S)

        result: T = await self._jobs.run(job, tenant, 1)
        return result
