"""Timelines and descriptions of requests and of the KV cache, as plain data: answers to "why is my request slow?".

They are for people: field names are words, and the engine does not use them.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from octavo.core import events as ev
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduler import Scheduler

MAX_ENTRIES = 64
"""Entries kept per request: the newest."""
MAX_FINISHED = 256
"""Finished requests whose timelines are kept."""


class Timelines:
    """Events of each request with their times, and counts of wait reasons; subscribe it to the scheduler's events."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.wait_counts: Counter[str] = Counter()
        self._clock = clock
        self._live: dict[str, deque[tuple[float, ev.Event]]] = {}
        self._finished: OrderedDict[str, deque[tuple[float, ev.Event]]] = OrderedDict()

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            return
        if isinstance(event, ev.Waiting):
            self.wait_counts[event.reason] += 1
        name: str = event.request_id  # type: ignore[union-attr]  # not subscribed to block events
        timeline = self._live.get(name)
        if timeline is None:
            if isinstance(event, ev.Unpinned):  # the pinning request has finished long ago
                timeline = self._finished.get(name)
            else:
                timeline = self._live[name] = deque(maxlen=MAX_ENTRIES)
        if timeline is not None:
            timeline.append((self._clock(), event))
        if isinstance(event, ev.Finished):
            self._finished[name] = self._live.pop(name)
            if len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)

    def of(self, request_id: str) -> list[dict[str, Any]]:
        """The entries of a request, oldest first; `at_s` is the time since the first entry kept."""
        entries = self._live.get(request_id) or self._finished.get(request_id) or ()
        begin = entries[0][0] if entries else 0.0
        return [
            {"at_s": round(at - begin, 6), "event": type(event).__name__.lower(), **_fields(event)}
            for at, event in entries
        ]


def _fields(event: ev.Event) -> dict[str, Any]:
    return {name: value for name, value in event._asdict().items() if name != "request_id"}


def describe_request(
    scheduler: Scheduler, timelines: Timelines, request_id: str, request: Request | None
) -> dict[str, Any] | None:
    """Describe a request; `request` is None once it has finished. Returns None for an id without a timeline."""
    timeline = timelines.of(request_id)
    if request is None:
        return {"request_id": request_id, "status": "finished", "timeline": timeline} if timeline else None
    last_wait = next((entry for entry in reversed(timeline) if entry["event"] == "waiting"), None)
    return {
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
    }


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
        "num_blocks_sealed": len(sequence.seal_ids),
    }


def describe_kv(scheduler: Scheduler) -> dict[str, Any]:
    """Describe the pool and the blocks that each request holds. `cost_s`: CPU seconds that the description took."""
    begin = time.thread_time()
    held = {name: _blocks_of(request) for name, request in scheduler.requests.items()}
    stats = scheduler.stats().as_dict()
    return {**stats, "requests": held, "cost_s": round(time.thread_time() - begin, 6)}


def _blocks_of(request: Request) -> dict[str, Any]:
    # Ids of 0 and below are not held: the null block before a sliding window, blocks that a swap shares on the device.
    num_blocks = len({b for s in request.sequences for b in s.block_ids if b > 0})
    swapped = request.status is Status.SWAPPED
    return {
        "status": request.status.value,
        "num_blocks": 0 if swapped else num_blocks,
        "num_host_blocks": num_blocks if swapped else 0,
    }
