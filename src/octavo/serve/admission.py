"""Admission control: limits on queued requests and prompt tokens, and no new requests during shutdown."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.serve.openai.errors import ApiError, shutting_down
from octavo.turns import Room

MAX_RETRY_AFTER_S = 120
RATE_WINDOW = 64
"""Finished requests over which the completion rate is measured."""


class Ticket:
    """An admitted request.

    dropped  it has left the queue in favour of a tenant that holds less
    on_drop  called at that moment
    """

    __slots__ = ("dropped", "on_drop")

    def __init__(self) -> None:
        self.dropped = False
        self.on_drop: Callable[[], object] = bool


class Admission:
    """Counts requests and refuses those beyond the limits at once.

    A tenant may fill the queue while no other needs it. Then its newest requests are dropped, but only those of which a
    prompt has no output yet.

    max_num_seqs           sequences that run together
    max_num_queued_reqs    sequences admitted beyond those
    max_num_queued_tokens  prompt tokens of requests of which a prompt has no output yet. None: no limit
    on_refusal             called with the error code of each refusal
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
        is_limited = max_num_seqs is not None and max_num_queued_reqs is not None
        max_sequences = (max_num_seqs or 0) + (max_num_queued_reqs or 0) if is_limited else math.inf
        self._sequences: Room[Ticket] = Room(max_sequences, self._drop)
        self._queued_tokens: Room[Ticket] = Room(max_num_queued_tokens or math.inf, self._drop)
        self._limits = (
            (self._sequences, f"{max_num_seqs} sequences run and {max_num_queued_reqs} may wait"),
            (self._queued_tokens, f"{max_num_queued_tokens} prompt tokens may wait"),
        )
        self.num_requests = 0
        self.num_rejected = 0
        self.draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._end_times: deque[float] = deque(maxlen=RATE_WINDOW)

    @property
    def num_sequences(self) -> int:
        return self._sequences.total

    @property
    def num_queued_tokens(self) -> int:
        return self._queued_tokens.total

    @property
    def is_full(self) -> bool:
        """Whether a request of one sequence would be refused now, unless another one is dropped for it."""
        return any(room.total >= room.limit for room, _ in self._limits)

    @contextmanager
    def admit(self, width: int, num_tokens: int, tenant: int = 0) -> Iterator[Ticket]:
        """Context manager of an admitted request. Raises `ApiError`: 429 if the queue is full, 503 while draining."""
        if self.draining:
            self._on_refusal("shutting_down")
            raise shutting_down()
        for (room, limit), amount in zip(self._limits, (width, num_tokens), strict=True):
            if not room.would_fit(tenant, amount):
                raise self._refusal(f"the queue is full: {limit}")
        ticket = Ticket()
        self._sequences.take(ticket, tenant, width)
        self._queued_tokens.take(ticket, tenant, num_tokens)
        self.num_requests += 1
        self._empty.clear()
        try:
            yield ticket
        finally:
            self._sequences.release(ticket)
            self._queued_tokens.release(ticket)
            self.num_requests -= 1
            self._end_times.append(time.monotonic())
            if not self.num_requests:
                self._empty.set()

    def start(self, ticket: Ticket) -> None:
        """Marks all prompts of the request as running: they no longer count as queued, and it is not dropped."""
        self._sequences.keep(ticket)
        self._queued_tokens.release(ticket)

    def check(self, ticket: Ticket) -> None:
        """Raises `ApiError` 429 if the request was dropped."""
        if ticket.dropped:
            raise self._refusal("the queue is full, and other tenants hold less of it")

    def _drop(self, ticket: Ticket) -> None:
        ticket.dropped = True
        self._sequences.release(ticket)
        self._queued_tokens.release(ticket)
        ticket.on_drop()

    def _refusal(self, reason: str) -> ApiError:
        self.num_rejected += 1
        self._on_refusal("queue_full")
        return ApiError(429, "queue_full", f"{reason}; try again later", retry_after_s=self.retry_after_s())

    def retry_after_s(self) -> int:
        """Seconds until about a tenth of the admitted requests will have finished, at the recent rate."""
        times = self._end_times
        interval_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 1.0
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(interval_s * self.num_requests / 10)))

    async def drained(self) -> None:
        """Waits until no request is left."""
        await self._empty.wait()
