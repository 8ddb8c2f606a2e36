"""Who is let in: limits on what waits, and none at all while the server shuts down."""

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
"""Ends of requests from which the pace of the queue is read."""


class Ticket:
    """A request that was let in. `started` once the engine has given its first output."""

    __slots__ = ("num_tokens", "started", "tenant", "width")

    def __init__(self, width: int, num_tokens: int, tenant: int) -> None:
        self.width = width
        self.num_tokens = num_tokens
        self.tenant = tenant
        self.started = False


class Admission:
    """Counts requests, and refuses those beyond the limits at once.

    Up to `max_num_seqs` sequences are taken to run, and `max_num_queued_reqs` requests may be here beyond that;
    `max_num_queued_tokens` bounds the prompts of those that have had no output yet. None: no limit. `on_refusal` is
    called with the code of each refusal.

    several: an attribute, whether there are several tenants (keys). Then one that has a request here gets more only as
    long as as much stays free for others as it has itself.
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
        self.several = False
        self.num_requests = 0
        self.num_rejected = 0
        self._sequences: Counter[int] = Counter()  # by tenant
        self._queued_tokens: Counter[int] = Counter()
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._ends: deque[float] = deque(maxlen=RATE_WINDOW)

    @property
    def num_sequences(self) -> int:
        return self._sequences.total()

    @property
    def num_queued_tokens(self) -> int:
        return self._queued_tokens.total()

    @property
    def is_full(self) -> bool:
        """Whether a request of one sequence would be refused now, whoever sent it."""
        return self._over(1, 1, None) is not None

    @contextmanager
    def admit(self, width: int, num_tokens: int, tenant: int = 0) -> Iterator[Ticket]:
        """Let a request in for as long as the context lasts. Raises `ApiError`: 429 when full, 503 while draining."""
        if self.draining:
            self._on_refusal("shutting_down")
            raise shutting_down()
        if (limit := self._over(width, num_tokens, tenant)) is not None:
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
            self._ends.append(time.monotonic())
            if not self.num_requests:
                self._empty.set()

    def start(self, ticket: Ticket) -> None:
        """It no longer waits."""
        if not ticket.started:
            ticket.started = True
            self._queued_tokens[ticket.tenant] -= ticket.num_tokens

    def _over(self, width: int, num_tokens: int, tenant: int | None) -> str | None:
        """Which limit one more request would be over."""
        most, running = self._max_num_queued_reqs, self._max_num_seqs
        if most is not None and running is not None:
            name = f"{running} sequences run and {most} may wait"
            if (text := self._beyond(self._sequences, width, tenant, running + most, name)) is not None:
                return text
        if (most := self._max_num_queued_tokens) is not None:
            return self._beyond(self._queued_tokens, num_tokens, tenant, most, f"prompts of {most} tokens may wait")
        return None

    def _beyond(self, counts: Counter[int], more: int, tenant: int | None, limit: int, name: str) -> str | None:
        free = limit - counts.total() - more
        if free < 0:
            return f"the queue is full: {name}"
        if self.several and tenant is not None and counts[tenant] > 0 and counts[tenant] + more > free:
            return f"the queue is full for this key: {name}, and as much as it has itself stays free for others"
        return None

    def retry_after_s(self) -> int:
        """When about a tenth of those who are here will have left, at the pace of late."""
        pace_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else 1.0
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(pace_s * self.num_requests / 10)))

    async def drained(self) -> None:
        """Returns when nobody is here."""
        await self._empty.wait()
