"""Admission control: limits on queued requests and prompt tokens, and no new requests during shutdown."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.serve.openai.errors import ApiError, shutting_down

MAX_RETRY_AFTER_S = 120
RATE_WINDOW = 64
"""Finished requests over which the completion rate is measured."""


class Ticket:
    """An admitted request. `started`: the engine has produced its first output."""

    __slots__ = ("num_tokens", "started", "tenant", "width")

    def __init__(self, width: int, num_tokens: int, tenant: int) -> None:
        self.width = width
        self.num_tokens = num_tokens
        self.tenant = tenant
        self.started = False


class Admission:
    """Counts requests and refuses those beyond the limits at once.

    max_num_seqs           sequences that run together
    max_num_queued_reqs    sequences admitted beyond those
    max_num_queued_tokens  prompt tokens of requests without an output yet. None: no limit
    on_refusal             called with the error code of each refusal
    multi_tenant           attribute: there are several keys. A tenant with requests here gets more only while as much
                           stays free for others as it uses itself.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int | None,
        max_num_queued_reqs: int | None,
        max_num_queued_tokens: int | None,
        on_refusal: Callable[[str], None] = lambda code: None,
    ) -> None:
        self._on_refusal = on_refusal
        self._max_num_seqs = max_num_seqs
        self._max_num_queued_reqs = max_num_queued_reqs
        self._max_num_queued_tokens = max_num_queued_tokens
        self.multi_tenant = False
        self.num_requests = 0
        self.num_rejected = 0
        self._sequences: Counter[int] = Counter()  # by tenant
        self._queued_tokens: Counter[int] = Counter()
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._end_times: deque[float] = deque(maxlen=RATE_WINDOW)

    @property
    def num_sequences(self) -> int:
        return self._sequences.total()

    @property
    def num_queued_tokens(self) -> int:
        return self._queued_tokens.total()

    @property
    def is_full(self) -> bool:
        """Whether a request of one sequence would be refused now, from any tenant."""
        return self._exceeded_limit(1, 1, None) is not None

    @contextmanager
    def admit(self, width: int, num_tokens: int, tenant: int = 0) -> Iterator[Ticket]:
        """Context manager of an admitted request. Raises `ApiError`: 429 if the queue is full, 503 while draining."""
        if self.draining:
            self._on_refusal("shutting_down")
            raise shutting_down()
        if (limit := self._exceeded_limit(width, num_tokens, tenant)) is not None:
            self.num_rejected += 1
            self._on_refusal("queue_full")
            raise ApiError(429, "queue_full", f"{limit}; try again later", retry_after_s=self.retry_after_s())
        ticket = Ticket(width, num_tokens, tenant)
        self.num_requests += 1
        self._sequences[tenant] += width
        self._queued_tokens[tenant] += num_tokens
        self._empty.clear()
        try:
            yield ticket
        finally:
            self.start(ticket)
            self.num_requests -= 1
            self._sequences[tenant] -= width
            self._end_times.append(time.monotonic())
            if not self.num_requests:
                self._empty.set()

    def start(self, ticket: Ticket) -> None:
        """Marks the request as running: its prompt no longer counts as queued."""
        if not ticket.started:
            ticket.started = True
            self._queued_tokens[ticket.tenant] -= ticket.num_tokens

    def _exceeded_limit(self, width: int, num_tokens: int, tenant: int | None) -> str | None:
        """The limit that one more request would exceed, if any."""
        max_queued, max_running = self._max_num_queued_reqs, self._max_num_seqs
        if max_queued is not None and max_running is not None:
            name = f"{max_running} sequences run and {max_queued} may wait"
            if (text := self._exceeded(self._sequences, width, tenant, max_running + max_queued, name)) is not None:
                return text
        if (limit := self._max_num_queued_tokens) is not None:
            return self._exceeded(self._queued_tokens, num_tokens, tenant, limit, f"{limit} prompt tokens may wait")
        return None

    def _exceeded(self, counts: Counter[int], more: int, tenant: int | None, limit: int, name: str) -> str | None:
        free = limit - counts.total() - more
        if free < 0:
            return f"the queue is full: {name}"
        if self.multi_tenant and tenant is not None and counts[tenant] > 0 and counts[tenant] + more > free:
            return f"the queue is full for this key: {name}, and other keys keep as much room as this key uses"
        return None

    def retry_after_s(self) -> int:
        """Seconds until about a tenth of the admitted requests will have finished, at the recent rate."""
        times = self._end_times
        interval_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(interval_s * self.num_requests / 10)))

    async def drained(self) -> None:
        """Waits until no request is left."""
        await self._empty.wait()
