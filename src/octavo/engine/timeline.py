"""Timelines and descriptions of requests and of the KV cache, as plain data: answers to "why is my request slow?".

They are for people: field names are words, and the engine does not use them.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from octavo.core import events as ev
from octavo.core.cache.kv_stats import KVStats
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduler import Scheduler

MAX_ENTRIES = 64
"""Entries kept per request: the newest."""
MAX_FINISHED = 256
"""Finished requests whose timelines are kept."""


class RequestDescription(TypedDict, total=False):
    """A request as `GET /debug/requests/{id}` shows it; one that has finished has the first five entries only.

    waits_for       the reason why it waits, and `waiting`: that entry of the timeline
    place_in_line   number of requests ahead of it in its queue
    num_draft_tokens, num_accepted_tokens   its drafts, and those of them that were right; absent if it has had none
    """

    request_id: str
    status: str
    timeline: list[dict[str, Any]]
    num_draft_tokens: int
    num_accepted_tokens: int
    waits_for: str | None
    waiting: dict[str, Any] | None
    place_in_line: int | None
    num_prompt_tokens: int
    max_tokens: int | None
    priority: int
    num_cached_tokens: int
    sequences: list[dict[str, Any]]


class HeldBlocks(TypedDict):
    """Blocks that a request holds, on the device and on the host."""

    status: str
    num_blocks: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class KVDescription:
    """The pool, and the blocks that each request holds. `cost_s`: CPU seconds that the description took."""

    stats: KVStats
    requests: dict[str, HeldBlocks]
    cost_s: float

    def as_dict(self) -> dict[str, Any]:
        """As `GET /debug/kv` shows it."""
        return {**self.stats.as_dict(), "requests": self.requests, "cost_s": self.cost_s}


class Timelines:
    """Events of each request with their times, and counts of wait reasons; subscribe it to the scheduler's events.

    drafts   request -> its drafts, and those of them that were right; the engine writes it
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.wait_counts: Counter[str] = Counter()
        self.drafts: dict[str, tuple[int, int]] = {}
        self._clock = clock
        self.live: dict[str, deque[tuple[float, ev.Event]]] = {}
        self._finished: OrderedDict[str, deque[tuple[float, ev.Event]]] = OrderedDict()

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            return
        if isinstance(event, ev.Waiting):
            self.wait_counts[event.reason] += 1
        name: str = event.request_id  # type: ignore[union-attr]  # not subscribed to block events
        timeline = self.live.get(name)
        if timeline is None:
            if isinstance(event, ev.Unpinned):  # the pinning request has finished long ago
                timeline = self._finished.get(name)
            else:
                timeline = self.live[name] = deque(maxlen=MAX_ENTRIES)
                self.drafts.pop(name, None)
        if timeline is not None:
            timeline.append((self._clock(), event))
        if isinstance(event, ev.Finished):
            self._finished[name] = self.live.pop(name)
            if len(self._finished) > MAX_FINISHED:
                oldest, _ = self._finished.popitem(last=False)
                if oldest not in self.live:
                    self.drafts.pop(oldest, None)

    def of(self, request_id: str) -> list[dict[str, Any]]:
        """The entries of a request, oldest first; `at_s` is the time since the first entry kept."""
        entries = self.live.get(request_id) or self._finished.get(request_id) or ()
        begin = entries[0][0] if entries else 0.0
        return [
            {"at_s": round(at - begin, 6), "event": type(event).__name__.lower(), **_fields(event)}
            for at, event in entries
        ]


def _fields(event: ev.Event) -> dict[str, Any]:
    return {name: value for name, value in event._asdict().items() if name != "request_id"}


def describe_request(
    scheduler: Scheduler, timelines: Timelines, request_id: str, request: Request | None
) -> RequestDescription | None:
    """Describe a request; `request` is None once it has finished. Returns None for an id without a timeline."""
    timeline = timelines.of(request_id)
    drafts: RequestDescription = {}
    if request_id in timelines.drafts:
        drafts["num_draft_tokens"], drafts["num_accepted_tokens"] = timelines.drafts[request_id]
    if request is None:
        finished: RequestDescription = {"request_id": request_id, "status": "finished", "timeline": timeline, **drafts}
        return finished if timeline else None
    last_wait = next((entry for entry in reversed(timeline) if entry["event"] == "waiting"), None)
    description: RequestDescription = {
        "request_id": request_id,
        "status": request.status.value,
        "waits_for": request.wait_reason or None,
        "waiting": last_wait if request.wait_reason else None,
        "place_in_line": _queue_position(scheduler, request),
        "num_prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "num_cached_tokens": max(0, request.num_cached_tokens),
        "sequences": [_describe_sequence(s) for s in request.sequences],
        "timeline": timeline,
        **drafts,
    }
    return description


def _queue_position(scheduler: Scheduler, request: Request) -> int | None:
    """How many requests are ahead of it in its queue; None if it is in no queue."""
    for queue in (scheduler.waiting, scheduler.swapped):
        if request in queue:
            return queue.index(request)
    return None


def _describe_sequence(sequence: Sequence) -> dict[str, Any]:
    return {
        "index": sequence.index,
        "num_tokens": len(sequence.token_ids),
        "num_computed": sequence.num_computed,
        "num_in_flight": sequence.num_pending,
        "block_ids": list(sequence.block_ids),
        "window_block_ids": [list(table.block_ids) for table in sequence.windows],
        "state_block_ids": list(sequence.state),
        "num_blocks_sealed": len(sequence.seal_ids),
    }


def describe_kv(scheduler: Scheduler) -> KVDescription:
    begin = time.thread_time()
    held = {name: _blocks_of(request) for name, request in scheduler.requests.items()}
    return KVDescription(scheduler.stats(), held, round(time.thread_time() - begin, 6))


def _blocks_of(request: Request) -> HeldBlocks:
    # Ids of 0 and below are not held: the null block before a sliding window, blocks that a swap shares on the device.
    num_blocks = len({b for s in request.sequences for ids, _ in s.holdings for b in ids if b > 0})
    swapped = request.status is Status.SWAPPED
    return {
        "status": request.status.value,
        "num_blocks": 0 if swapped else num_blocks,
        "num_host_blocks": num_blocks if swapped else 0,
    }
