"""Answers to "why is my request slow?": what a request does, waits for and holds, and what happened to it, as plain
data. Read by people, so named for them; nothing decides anything by it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.core import events as ev
from octavo.core.request import Request, Sequence, Status

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

NUM_ENTRIES = 64
"""The longest timeline kept of a request: its newest entries."""
NUM_FINISHED = 256
"""Requests remembered after their end."""


class Timelines:
    """What happened to each request, and when. Subscribe it. Also counts what requests had to wait for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.waits: Counter[str] = Counter()
        self._clock = clock
        self._live: dict[str, deque[tuple[float, ev.Event]]] = {}
        self._ended: OrderedDict[str, deque[tuple[float, ev.Event]]] = OrderedDict()

    def __call__(self, event: ev.Event) -> None:
        if isinstance(event, ev.Step):
            return
        if isinstance(event, ev.Waiting):
            self.waits[event.reason] += 1
        name: str = event.request_id  # type: ignore[union-attr]  # it asks for no blocks' events
        timeline = self._live.get(name)
        if timeline is None:
            if isinstance(event, ev.Unpinned):  # long after the end of the request that pinned it
                timeline = self._ended.get(name)
            else:
                timeline = self._live[name] = deque(maxlen=NUM_ENTRIES)
        if timeline is not None:
            timeline.append((self._clock(), event))
        if isinstance(event, ev.Finished):
            self._ended[name] = self._live.pop(name)
            if len(self._ended) > NUM_FINISHED:
                self._ended.popitem(last=False)

    def of(self, request_id: str) -> list[dict[str, Any]]:
        """Oldest first; `at_s` counts from the first entry that is kept."""
        entries = self._live.get(request_id) or self._ended.get(request_id) or ()
        begin = entries[0][0] if entries else 0.0
        return [{"at_s": round(at - begin, 6), "event": _name(event), **_fields(event)} for at, event in entries]


def _name(event: ev.Event) -> str:
    return type(event).__name__.lower()


def _fields(event: ev.Event) -> dict[str, Any]:
    return {name: value for name, value in event._asdict().items() if name != "request_id"}


def describe_request(engine: Engine, request_id: str) -> dict[str, Any] | None:
    """One request. None if nobody has heard of it, or it ended long ago."""
    timeline, state = engine.timelines.of(request_id), engine.get_state(request_id)
    if state is None:
        return {"request_id": request_id, "status": "finished", "timeline": timeline} if timeline else None
    request = state.request
    last_wait = next((entry for entry in reversed(timeline) if entry["event"] == "waiting"), None)
    return {
        "request_id": request_id,
        "status": request.status.value,
        "waits_for": request.wait_reason or None,
        "waiting": last_wait if request.wait_reason else None,
        "place_in_line": _place(engine, request),
        "num_prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        "priority": request.priority,
        "num_cached_tokens": max(0, request.num_cached_tokens),
        "sequences": [_sequence(s) for s in request.sequences],
        "timeline": timeline,
    }


def _place(engine: Engine, request: Request) -> int | None:
    """How many stand before it in the line that it stands in."""
    for line in (engine.scheduler.waiting, engine.scheduler.swapped):
        if request in line:
            return line.index(request)
    return None


def _sequence(sequence: Sequence) -> dict[str, Any]:
    return {
        "index": sequence.index,
        "num_tokens": len(sequence.token_ids),
        "num_computed": sequence.num_computed,
        "num_in_flight": sequence.num_pending,
        "block_ids": list(sequence.block_ids),
        "num_blocks_sealed": len(sequence.seal_ids),
    }


def describe_kv(engine: Engine) -> dict[str, Any]:
    """The pool, and who holds how much of it and of the host's blocks. `cost_s`: seconds that this took the engine."""
    begin = time.thread_time()
    held = {name: _held_by(request) for name, request in engine.scheduler.requests.items()}
    stats = engine.scheduler.stats().as_dict()
    return {**stats, "requests": held, "cost_s": round(time.thread_time() - begin, 6)}


def _held_by(request: Request) -> dict[str, Any]:
    # Neither the null block is held, behind an attention window, nor what a swap left on the device, below 0.
    num_blocks = len({b for s in request.sequences for b in s.block_ids if b > 0})
    swapped = request.status is Status.SWAPPED
    return {
        "status": request.status.value,
        "num_blocks": 0 if swapped else num_blocks,
        "num_host_blocks": num_blocks if swapped else 0,
    }
