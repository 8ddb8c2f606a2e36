"""Questions that callers have for the engine. It answers them between two steps, so their number is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from typing import Any

from octavo.serve.openai.errors import ApiError

SHARE, MAX_PAUSE_S = 20, 1.0
"""The engine is left alone for so many times as long as its last answer took, but no longer than this."""
INTERVAL_S = 0.01
MAX_WAITING = 32
"""Questions of one tenant that wait for their turn."""


class CoalescedQuery:
    """A question about the whole engine. Callers that come while it is being asked share the next answer, so no answer
    is older than the request for it. `ask`: the answer has `cost_s`, the engine's seconds."""

    def __init__(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._ask = ask
        self._turn = asyncio.Lock()
        self._free_at = 0.0
        self._next: asyncio.Future[dict[str, Any]] | None = None

    async def get(self) -> dict[str, Any]:
        if self._next is None:
            self._next = asyncio.ensure_future(self._work())
            self._next.add_done_callback(lambda done: done.cancelled() or done.exception())  # all callers may have gone
        return await asyncio.shield(self._next)

    async def _work(self) -> dict[str, Any]:
        async with self._turn:
            await asyncio.sleep(self._free_at - time.monotonic())
            self._next = None
            answer = await self._ask()
            self._free_at = time.monotonic() + min(SHARE * answer["cost_s"], MAX_PAUSE_S)
            return answer


class TenantRateLimiter:
    """Questions about one request or block: one at a time for each tenant, and one in `interval_s` at most."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lines: dict[Hashable, _TenantQueue] = {}

    @contextlib.asynccontextmanager
    async def of(self, tenant: Hashable) -> AsyncGenerator[None, None]:
        """Raises `ApiError` where too many questions of this tenant wait."""
        line = self._lines.setdefault(tenant, _TenantQueue())
        if line.num_waiting >= MAX_WAITING:
            text = f"{MAX_WAITING} questions of this key wait for the engine, the limit; ask again later"
            raise ApiError(429, "too_many_questions", text, retry_after_s=1)
        line.num_waiting += 1
        try:
            async with line.turn:
                await asyncio.sleep(line.free_at - time.monotonic())
                try:
                    yield
                finally:
                    line.free_at = time.monotonic() + self._interval_s
        finally:
            line.num_waiting -= 1


class _TenantQueue:
    """The questions of one tenant."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.num_waiting = 0
        self.free_at = 0.0
