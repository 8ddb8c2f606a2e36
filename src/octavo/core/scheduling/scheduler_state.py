"""The state of a scheduler: its settings, its requests by status, and the steps in flight.

`admission`, `planning`, `preemption`, `results` and `failures` are functions on it. Its own methods move requests
between the queues, and note why one waits.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

from octavo.core import events as ev
from octavo.core.in_flight import InFlightStep
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.policy import Policy
from octavo.core.request import Request, Status
from octavo.core.tenants import Tenants

TURN_TOKENS = 4
"""Tokens of each sequence that a request computes before it gives way to another tenant once more."""
PATIENCE_STEPS = 64
"""Steps for which a request lets other tenants pass while none of its own tenant runs."""


class SchedulerState:
    """What a scheduler is made with, the queues of its unfinished requests, and its counters.

    max_num_batched_tokens    limit of positions per step, decode windows included
    max_num_seqs              limit of running sequences: the rows of the cache
    decode_window             limit of tokens that the device decodes per sequence in one step
    num_speculative_tokens    limit of drafts per forward pass of a sequence; 0: no speculation
    num_watermark_blocks      blocks that an admission leaves free for running requests to grow into
    max_num_scheduled_tokens  current limit of positions per step, lowered after a step ran out of memory. A group that
                              exceeds it runs in a step of its own
    confined_to               the only requests planned at present; empty: all requests are
    tee                       reports the commands that change the scheduler, before it acts on them
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_num_batched_tokens: int = 8192,
        decode_window: int = 1,
        num_speculative_tokens: int = 0,
        num_watermark_blocks: int = 0,
        policy: Policy | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = cache.rows.num_rows
        self.max_num_batched_tokens = self.max_num_scheduled_tokens = max_num_batched_tokens
        self.decode_window = decode_window
        self.num_speculative_tokens = num_speculative_tokens
        self.num_watermark_blocks = num_watermark_blocks
        self.policy = policy or Policy()
        self.events, self.tee = cache.events, cache.tee
        self.requests: dict[str, Request] = {}  # all unfinished requests
        self.running: list[Request] = []  # this and the next two are in the policy's order
        self.swapped: list[Request] = []
        self.waiting: list[Request] = []
        self.tenants = Tenants()
        self.in_flight: deque[InFlightStep] = deque()  # planned, without a result yet
        self.confined_to: frozenset[Request] = frozenset()
        self.num_rows_taken = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self._num_arrivals = 0
        self._counted: tuple[int, ...] = cache.counters()

    # -- queues --------------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        insort(self.waiting, request)
        self.tenants.wait(request)

    def requeue(self, request: Request) -> None:
        """Free a request's blocks in either tier and append it to the waiting queue, without a reason yet."""
        for seq in request.sequences:
            self.cache.free(seq)
        request.status, request.wait_reason, request.shared_on_device = Status.WAITING, "", {}
        self.enqueue(request)

    def start(self, request: Request) -> None:
        request.status, request.wait_reason = Status.RUNNING, ""
        if request.waits_since >= 0:
            request.turn_ends, request.waits_since = len(request.sequences[0].token_ids) + TURN_TOKENS, -1
        insort(self.running, request)
        self.take_rows(request, request.width)

    def take_rows(self, request: Request, num: int) -> None:
        self.num_rows_taken += num
        self.tenants.present[request.tenant].num_rows += num

    def leave_queue(self, request: Request) -> None:
        """Remove a request from its queue. A running request also releases its rows."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self.take_rows(request, -request.width)
            for seq in request.sequences:
                self.cache.rows.release(seq)
        elif request.status is Status.SWAPPED:
            self.swapped.remove(request)
        else:
            self.waiting.remove(request)
            self.tenants.stop_waiting(request)

    @property
    def max_long_prefills(self) -> int:
        """Long prefills of a tenant at the same time: more where each computes less of itself in a step."""
        policy = self.policy
        return policy.max_long_partial_prefills * max(1, policy.long_prefill_token_threshold // self.cache.max_chunk)

    # -- who is next ---------------------------------------------------------------------------------------------------

    def first_swapped(self) -> Request | None:
        """Return the first swapped request that others wait behind."""
        return next((request for request in self.swapped if not self.lets_pass(request)), None)

    def first_waiting(self) -> Request | None:
        """Return the first waiting request that may be admitted."""
        if self.confined_to:
            return next((request for request in self.waiting if request in self.confined_to), None)
        return self.waiting[0] if self.waiting else None

    def lets_pass(self, request: Request) -> bool:
        """Whether other tenants pass a request that waits for rows or blocks, or that gave way."""
        return request.waits_since >= 0 and self.tenants.several and not self.is_overdue(request)

    def is_overdue(self, request: Request) -> bool:
        """Whether a request has let others pass for so long that all other tenants give way to it."""
        if request.waits_since < 0 or self.tenants.present[request.tenant].num_rows:
            return False
        return self.num_steps - request.waits_since >= PATIENCE_STEPS

    # -- room, and why one waits ---------------------------------------------------------------------------------------

    def watermark(self) -> int:
        return self.num_watermark_blocks if self.running else 0  # else a request as large as the pool would never run

    def headroom(self, request: Request) -> int:
        """Return the blocks that must stay free when a preempted request resumes, for it and all others to grow.

        It is 0 if nothing else runs, or the request might wait for ever.
        """
        if not request.num_preemptions or not self.running:
            return 0
        left = max(s.max_length - len(s.token_ids) for s in request.sequences)
        positions = min(self.policy.headroom(request), left)
        return self.cache.blocks_for(positions) * (self.num_rows_taken + request.width)

    def set_wait_reason(
        self,
        request: Request,
        reason: str,
        needs: int,
        free: int = 0,
        evictable: int = 0,
        in_windows: int = 0,
        in_states: int = 0,
    ) -> bool:
        """Set the reason why a request waits, and emit it if it changed. Always returns False."""
        if reason in ("blocks", "rows") and request.status is Status.WAITING and request.waits_since < 0:
            request.waits_since = self.num_steps
        if request.wait_reason != reason:
            request.wait_reason = reason
            if self.events.active:
                self.events.emit(ev.Waiting(request.request_id, reason, needs, free, evictable, in_windows, in_states))
        return False

    def wait_for_blocks(self, request: Request, needs: int, in_windows: int = 0, in_states: int = 0) -> bool:
        pool = self.cache.pool
        free = max(0, pool.num_free - self.watermark())
        return self.set_wait_reason(request, "blocks", needs, free, pool.num_cached, in_windows, in_states)
