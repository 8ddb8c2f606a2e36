"""Who is let in: limits on what waits, and none at all while the server shuts down."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.serve.problems import Problem, shutting_down

MAX_RETRY_AFTER_S = 120
RATE_WINDOW = 64
"""Ends of requests from which the pace of the queue is read."""


class Ticket:
    """A request that was let in. `started` once the engine has given its first output."""

    __slots__ = ("num_tokens", "started", "width")

    def __init__(self, width: int, num_tokens: int) -> None:
        self.width = width
        self.num_tokens = num_tokens
        self.started = False


class Admission:
    """Counts requests, and refuses those beyond the limits at once.

    Up to `max_num_seqs` sequences are taken to run, and `max_num_queued_reqs` requests may be here beyond that;
    `max_num_queued_tokens` bounds the prompts of those that have had no output yet. None: no limit. `on_refusal` is
    told the code of each refusal.
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
        self.num_requests = 0
        self.num_sequences = 0
        self.num_queued_tokens = 0
        self.num_rejected = 0
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._ends: deque[float] = deque(maxlen=RATE_WINDOW)

    @property
    def is_full(self) -> bool:
        """Whether a request of one sequence would be refused now."""
        return self._over(1, 1) is not None

    @contextmanager
    def admit(self, width: int, num_tokens: int) -> Iterator[Ticket]:
        """Let a request in for as long as the context lasts. Raises `Problem`: 429 when full, 503 while draining."""
        if self.draining:
            self._on_refusal("shutting_down")
            raise shutting_down()
        if (limit := self._over(width, num_tokens)) is not None:
            self.num_rejected += 1
            self._on_refusal("queue_full")
            raise Problem(429, "queue_full", f"{limit}; try again later", retry_after_s=self.retry_after_s())
        ticket = Ticket(width, num_tokens)
        self.num_requests += 1
        self.num_sequences += width
        self.num_queued_tokens += num_tokens
        self._empty.clear()
        try:
            yield ticket
        finally:
            self.start(ticket)
            self.num_requests -= 1
            self.num_sequences -= width
            self._ends.append(time.monotonic())
            if not self.num_requests:
                self._empty.set()

    def start(self, ticket: Ticket) -> None:
        """It no longer waits."""
        if not ticket.started:
            ticket.started = True
            self.num_queued_tokens -= ticket.num_tokens

    def _over(self, width: int, num_tokens: int) -> str | None:
        """Which limit one more request would be over. An idle server takes any request."""
        if not self.num_requests:
            return None
        most, running = self._max_num_queued_reqs, self._max_num_seqs
        if most is not None and running is not None and self.num_sequences + width > running + most:
            return f"the queue is full: {running} sequences run and {most} may wait"
        most = self._max_num_queued_tokens
        if most is not None and self.num_queued_tokens + num_tokens > most:
            return f"the queue is full: prompts of {most} tokens may wait"
        return None

    def retry_after_s(self) -> int:
        """When about a tenth of those who are here will have left, at the pace of late."""
        pace_s = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) if len(self._ends) > 1 else 1.0
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(pace_s * self.num_requests / 10)))

    async def drained(self) -> None:
        """Returns when nobody is here."""
        await self._empty.wait()
