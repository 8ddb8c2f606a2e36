"""The engine's side of the view: publishes the state of its pool and requests as a snapshot, then as deltas.

The publisher is on no hot path, and subscribes to no block events. It makes a frame between two steps, only on request,
by comparing the current state with the one published last:

    references, seals   the pool's two arrays, compared with copies of the last frame
    block tables        they only grow, except where their head is dropped or an event of the request reports a change
    states              compared with a copy of the last frame: a step may write into a copy, without an event

A block that changes several times between two frames is published once, in its latest state.
"""

from __future__ import annotations

import secrets
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np

from octavo.core import events as ev
from octavo.core.block_pool import BlockPool, group_of
from octavo.core.in_flight import InFlightStep
from octavo.core.request import Request, Sequence, Status
from octavo.core.scheduler import Scheduler
from octavo.view.live.messages import (
    MAX_EVENTS,
    MAX_REFS,
    MAX_WAITING,
    SEALED_BIT,
    BlockChange,
    Counts,
    Delta,
    Frame,
    Progress,
    RequestView,
    Seals,
    SequenceView,
    Snapshot,
    TableChange,
    Wait,
)

MAX_OLD_SEALS = 8192
"""Seals older than the first frame that a frame has at most: each takes about a microsecond to read."""


class _PublishedTable:
    """A block table as published last. `block_ids` is a copy, kept for states, and for sequences with siblings: beams
    are reordered and samples diverge without an event for their tables."""

    __slots__ = ("block_ids", "num_dropped", "num_entries", "uid")

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.num_entries = self.num_dropped = 0
        self.block_ids: list[int] | None = None

    def update(self, block_ids: list[int], num_dropped: int, *, copy: bool) -> None:
        self.num_entries, self.num_dropped = len(block_ids), num_dropped
        self.block_ids = block_ids[:] if copy else None

    def changed_from(self, block_ids: list[int], num_dropped: int) -> int | None:
        """The first table entry that differs from what was published; None if none does. For a request without events:
        its table has grown, or its head left the attention window. A shared tail is copied at admission."""
        if self.block_ids is not None:
            return None if block_ids == self.block_ids else 0
        if num_dropped != self.num_dropped:
            return self.num_dropped
        return None if len(block_ids) == self.num_entries else self.num_entries


class _PublishedSequence:
    """A sequence as published last, with its table of each group and its state."""

    __slots__ = ("num_computed", "num_tokens", "tables")

    def __init__(self, uids: Iterable[int]) -> None:
        self.tables = [_PublishedTable(uid) for uid in uids]
        self.num_tokens = self.num_computed = -1

    def update(self, sequence: Sequence) -> None:
        self.num_tokens, self.num_computed = len(sequence.token_ids), sequence.num_computed
        copied = 0 if sequence.request.only_sequence is None else 1 + len(sequence.windows)  # from this table on
        for group, (known, table) in enumerate(zip(self.tables, _tables(sequence), strict=False)):
            known.update(*table, copy=group >= copied)

    def is_unchanged(self, sequence: Sequence) -> bool:
        """Whether a sequence that is alone in its request, and has had no event, is as published: its tables grow only
        with what is computed."""
        return self.num_computed == sequence.num_computed and self.num_tokens == len(sequence.token_ids)


class _PlannedStep(NamedTuple):
    """A step of a frame to come. `drafted`: the step itself, if drafts make its numbers upper bounds."""

    at_s: float
    event: ev.Step
    num_sampled: int
    drafted: InFlightStep | None


class Publisher:
    """Makes the frames of one scheduler. It subscribes to events with the first frame, and unsubscribes in `stop`.

    clock   in seconds; the times of frames count from the first one, or from `begin_s`
    """

    def __init__(
        self, scheduler: Scheduler, *, clock: Callable[[], float] = time.monotonic, begin_s: float | None = None
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._begin_s = begin_s
        self._epoch = ""
        self._detach: Callable[[], None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._frame = 0
        self._num_uids = 0
        self._num_tokens = 0
        self._refs = np.zeros(0, dtype=np.int32)  # as published, with the null block
        self._seal_ids = np.zeros(0, dtype=np.int64)
        self._old_seals: Iterator[int] = iter(())  # blocks sealed before the first frame, not yet published
        self._dirty: set[str] = set()  # requests
        self._waits: dict[str, ev.Waiting] = {}
        self._requests: dict[str, RequestView] = {}  # as published
        self._sequences: dict[Sequence, _PublishedSequence] = {}
        self._queues: dict[str, list[str]] = {}
        self._stats: dict[str, Any] = {}
        self._events: deque[tuple[float, ev.Event] | dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._steps: deque[_PlannedStep] = deque(maxlen=MAX_EVENTS)
        self._num_events = self._num_steps = 0

    @property
    def is_subscribed(self) -> bool:
        return self._detach is not None

    @property
    def epoch(self) -> str:
        """Identifies the series of frames; "" before the first."""
        return self._epoch

    @property
    def last(self) -> str:
        """The last frame, as "EPOCH:NUMBER"."""
        return f"{self._epoch}:{self._frame}"

    def frame(self, after: str = "") -> Frame | None:
        """A delta if `after` ("EPOCH:NUMBER") is the last frame, else a snapshot. None if nothing has changed: such a
        frame is not counted."""
        if self._detach is None or after != self.last:
            return self._snapshot()
        delta = self._delta()
        if delta.is_empty:
            self._frame -= 1
            return None
        return delta

    def stop(self) -> None:
        """Unsubscribe from events: the last viewer has left."""
        if self._detach is not None:
            self._detach()
            self._detach = None
        self._reset()

    # -- events --------------------------------------------------------------------------------------------------------

    def _listen(self, event: ev.Event) -> None:
        """Runs within a step, so it only stores the event and its time. Most events never get into a frame; the others
        are encoded with it."""
        if isinstance(event, ev.Step):
            step = self._scheduler.in_flight[-1]  # the step of this event
            plan = step.plan
            self._num_steps += 1
            self._num_tokens += event.num_tokens - sum(map(plan.num_unverified, plan.drafts))
            self._steps.append(_PlannedStep(self._clock(), event, sum(plan.num_sampled), step if plan.drafts else None))
            for src, dst in plan.copies:
                self._add_event({"event": "copied", "time_s": self._time_s(), "src": src, "dst": dst})
            return
        self._dirty.add(event.request_id)  # type: ignore[union-attr]  # not subscribed to block events
        if isinstance(event, ev.Waiting):
            self._waits[event.request_id] = event
        elif isinstance(event, ev.Finished):
            self._waits.pop(event.request_id, None)
        self._add_event((self._clock(), event))

    def _add_event(self, event: tuple[float, ev.Event] | dict[str, Any]) -> None:
        self._num_events += 1
        self._events.append(event)

    # -- frames --------------------------------------------------------------------------------------------------------

    def _time_s(self) -> float:
        assert self._begin_s is not None
        return round(self._clock() - self._begin_s, 6)

    def _snapshot(self) -> Snapshot:
        begin = time.thread_time()
        scheduler, cache = self._scheduler, self._scheduler.cache
        self._reset()
        self._epoch = secrets.token_hex(8)
        if self._detach is None:
            self._detach = scheduler.events.subscribe(self._listen)
        if self._begin_s is None:
            self._begin_s = self._clock()
        self._refs, self._seal_ids = (column.copy() for column in self._pool_arrays())
        self._old_seals = iter(np.nonzero(self._seal_ids)[0])
        current = self._current()
        requests, _ = self._changed_requests(current)
        sequences, _, _, _ = self._changed_sequences(current)
        self._queues = self._current_queues()
        self._stats = cache.stats().as_dict()
        place = self._epoch, self._frame, self._time_s(), scheduler.num_steps
        sizes = cache.pool.num_blocks, cache.block_size, cache.swap_space.num_blocks
        blocks = pack_words(self._refs[1:], self._seal_ids[1:]), self._seals([]) or Seals()
        snapshot = Snapshot(*place, *sizes, *blocks, requests, sequences, dict(self._stats), self._counts())
        snapshot.windows, snapshot.state_blocks = list(cache.windows), cache.state_blocks
        snapshot.cost_s = round(time.thread_time() - begin, 6)
        return snapshot

    def _delta(self) -> Delta:
        begin = time.thread_time()
        self._frame += 1
        current = self._current()
        requests, removed = self._changed_requests(current)
        sequences, tables, progress, left = self._changed_sequences(current)
        blocks, seals = self._changed_blocks()
        place = self._epoch, self._frame, self._time_s(), self._scheduler.num_steps
        delta = Delta(*place, self._counts(), blocks, seals, requests, sequences, tables, progress, removed, left)
        self._add_events(delta)
        delta.counts = self._counts()
        if (queues := self._current_queues()) != self._queues:
            delta.queues = self._queues = queues
        stats = self._scheduler.stats().as_dict()
        delta.stats = {name: value for name, value in stats.items() if self._stats[name] != value}
        self._stats = stats
        delta.cost_s = round(time.thread_time() - begin, 6)
        return delta

    def _counts(self) -> Counts:
        scheduler = self._scheduler
        return Counts(len(scheduler.running), len(scheduler.waiting), len(scheduler.swapped), self._num_tokens)

    def _add_events(self, delta: Delta) -> None:
        begin_s = self._begin_s
        assert begin_s is not None
        delta.events = [e if isinstance(e, dict) else _event(round(e[0] - begin_s, 6), e[1]) for e in self._events]
        delta.num_omitted = self._num_events + self._num_steps - len(self._events) - len(self._steps)
        in_flight = self._scheduler.in_flight
        while self._steps and self._steps[0].drafted not in in_flight:  # drafts make sizes unknown before the result
            delta.steps.append(self._row(self._steps.popleft()))
        self._events.clear()
        self._num_events, self._num_steps = 0, len(self._steps)

    def _row(self, planned: _PlannedStep) -> list[int | float]:
        """A step of a frame. An engine that speculates adds the number of drafts that were right."""
        at_s, step, num_sampled, drafted = planned
        num_lost = 0
        if drafted is not None:
            num_lost = drafted.num_lost
            self._num_tokens += sum(map(drafted.plan.num_unverified, drafted.plan.drafts)) - num_lost
        sizes = round(at_s - (self._begin_s or 0.0), 6), step.num_tokens - num_lost, num_sampled - num_lost
        queues = step.num_running, step.num_waiting, step.num_swapped
        accepted = [0 if drafted is None else drafted.num_accepted] if self._scheduler.num_speculative_tokens else []
        return [step.step, *sizes, *queues, step.used, step.cached, step.free, *accepted]

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _pool_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """References and seal ids of all blocks, with the null block: views of the pool's own arrays."""
        pool = self._scheduler.cache.pool
        return np.frombuffer(pool.refs, dtype=np.int32), np.frombuffer(pool.seal_id, dtype=np.int64)

    def _changed_blocks(self) -> tuple[BlockChange | None, Seals | None]:
        """Changed state words, and seals: the new ones, and some of those older than the first frame."""
        refs, seal_ids = self._pool_arrays()
        ids = np.nonzero((refs != self._refs) | (seal_ids != self._seal_ids))[0]
        newly = ids[seal_ids[ids] != self._seal_ids[ids]]
        evicted = newly[self._seal_ids[newly] != 0]
        time_s, shown = self._time_s(), evicted[-MAX_EVENTS:]
        self._num_events += len(evicted) - len(shown)
        for block, seal in zip(shown.tolist(), self._seal_ids[shown].tolist(), strict=True):
            self._add_event({"event": "evicted", "time_s": time_s, "block_id": block, "seal_id": seal})
        self._refs[ids], self._seal_ids[ids] = refs[ids], seal_ids[ids]
        seals = self._seals(newly[seal_ids[newly] != 0].tolist())
        if not len(ids):
            return None, seals
        return BlockChange(ids.astype("<u4").tobytes(), pack_words(refs[ids], seal_ids[ids])), seals

    def _seals(self, blocks: list[int]) -> Seals | None:
        pool = self._scheduler.cache.pool
        blocks += [int(b) for b in islice(self._old_seals, MAX_OLD_SEALS) if pool.seal_id[b]]
        if not blocks:
            return None
        return Seals.of(blocks, [pool.seal_id[block] for block in blocks], *places_of(pool, blocks))

    # -- requests and sequences ----------------------------------------------------------------------------------------

    def _current(self) -> dict[str, Request]:
        """The requests to publish, in the order of the protocol."""
        scheduler = self._scheduler
        waiting = islice(scheduler.waiting, MAX_WAITING)
        current = {r.request_id: r for queue in (scheduler.running, scheduler.swapped, waiting) for r in queue}
        return current | {name: s.request for name, s in scheduler.cache.pins.items()}

    def _changed_requests(self, current: dict[str, Request]) -> tuple[list[RequestView], list[str]]:
        changed, published = [], self._requests
        removed = [name for name in published if name not in current]
        for name in removed:
            del published[name]
        for name, request in current.items():
            before = published.get(name)
            if before is None or name in self._dirty or request.only_sequence is None:
                view = self._view(request)
                if view != before:
                    published[name] = view
                    changed.append(view)
        return changed, removed

    def _view(self, request: Request) -> RequestView:
        wait = None
        if reason := request.wait_reason:
            event = self._waits.get(request.request_id)
            numbers = event[2:] if event is not None and event.reason == reason else ()
            wait = Wait(reason, *numbers)
        return RequestView(
            request.request_id,
            "pinned" if request.status is Status.FINISHED else request.status.value,
            len(request.prompt_token_ids),
            request.max_tokens or 0,
            request.width,
            request.priority,
            request.num_cached_tokens,
            request.num_preemptions,
            wait,
            tuple(table.uid for s in self._live(request) for table in self._published(s).tables),
        )

    def _live(self, request: Request) -> Iterable[Sequence]:
        pin = self._scheduler.cache.pins.get(request.request_id)
        return request.sequences if pin is None else (pin,)

    def _published(self, sequence: Sequence) -> _PublishedSequence:
        known = self._sequences.get(sequence)
        if known is None:
            first, cache = self._num_uids + 1, self._scheduler.cache
            self._num_uids += cache.num_groups + (cache.state_blocks > 0)
            known = self._sequences[sequence] = _PublishedSequence(range(first, self._num_uids + 1))
        return known

    def _changed_sequences(
        self, current: dict[str, Request]
    ) -> tuple[list[SequenceView], list[TableChange], Progress | None, list[int]]:
        """New sequences, changes of tables, progress, and uids of sequences that left while their requests stay."""
        new: list[SequenceView] = []
        tables: list[TableChange] = []
        grown: list[tuple[int, int, int]] = []
        seen: dict[Sequence, _PublishedSequence] = {}
        published, dirty = self._sequences, self._dirty
        for name, request in current.items():
            whole, seq = name in dirty, request.only_sequence
            if seq and not whole and (known := published.get(seq)) is not None and known.is_unchanged(seq):
                seen[seq] = known  # most waiting requests
                continue
            for sequence in self._live(request):
                known = seen[sequence] = self._published(sequence)
                num_tokens, num_computed = len(sequence.token_ids), sequence.num_computed
                is_new = known.num_tokens < 0
                has_grown = (known.num_tokens, known.num_computed) != (num_tokens, num_computed)
                for group, (before, (ids, dropped)) in enumerate(zip(known.tables, _tables(sequence), strict=False)):
                    if is_new:
                        table = before.uid, sequence.index, num_tokens, num_computed, _encode(ids), group
                        new.append(SequenceView(*table))
                        continue
                    start = 0 if whole else before.changed_from(ids, dropped)
                    if start is not None:
                        tables.append(TableChange(before.uid, start, _encode(ids[start:])))
                    if has_grown:
                        grown.append((before.uid, num_tokens, num_computed))
                known.update(sequence)
        lost = [t for s, t in self._sequences.items() if s not in seen and s.request.request_id in self._requests]
        left = [table.uid for each in lost for table in each.tables]
        assert not left or {uid for r in self._requests.values() for uid in r.sequences}.isdisjoint(left)
        self._sequences = seen
        self._dirty.clear()
        columns = np.array(grown, dtype="<u4").T
        return new, tables, Progress(*(column.tobytes() for column in columns)) if grown else None, left

    def _current_queues(self) -> dict[str, list[str]]:
        scheduler = self._scheduler
        return {
            "running": [r.request_id for r in scheduler.running],
            "swapped": [r.request_id for r in scheduler.swapped],
            "waiting": [r.request_id for r in islice(scheduler.waiting, MAX_WAITING)],
        }


def pack_words(refs: np.ndarray, seal_ids: np.ndarray) -> bytes:
    """State words u16[num] from references int32[num] and seal ids int64[num]."""
    words = np.minimum(refs, MAX_REFS).astype(np.uint16)
    words[seal_ids != 0] |= SEALED_BIT
    data: bytes = words.astype("<u2").tobytes()
    return data


def places_of(pool: BlockPool, blocks: Iterable[int]) -> tuple[list[int], list[int]]:
    """Of each sealed block: the seal id of the one that it follows, or 0 if it is a first block; and its group."""
    keys = [pool.key_of(block) or (b"", b"") for block in blocks]
    parents = [0 if isinstance(parent, bytes) else parent for parent, _ in keys]
    return parents, [group_of(content) for _, content in keys]


def _tables(sequence: Sequence) -> Iterator[tuple[list[int], int]]:
    """`Sequence.holdings`, and further empty ones: a sequence without blocks has no state, and may have no windows."""
    return chain(sequence.holdings, repeat(([], 0)))


def _encode(block_ids: list[int]) -> bytes:
    """i32[num_entries]. Mostly one or two entries, for which `array` is faster than numpy."""
    ids = array("i", block_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _event(time_s: float, event: ev.Event) -> dict[str, Any]:
    return {"event": type(event).__name__.lower(), "time_s": time_s, **event._asdict()}
