"""The engine's end of the view: tells the state of its pool and requests as a snapshot, then as what has changed.

It keeps no second state and is on no hot path: of blocks no event is asked for. A frame is made between two steps, only
when somebody asks for it, and compares what there is with what was told:

    references, seals   two arrays of the pool's, each with the one of the last frame
    tables              append-only but for the head that is dropped, and for what a request's own events tell of

However often a block changes hands in between, it is told once, and what is told is so.
"""

from __future__ import annotations

import secrets
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core import events as ev
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

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

SEALS_A_FRAME = 8192
"""Seals of before the first look that a frame tells at most: each takes about a microsecond to read."""
STOP = "stop"

Query = Callable[["Engine", str], Any]


class _Told:
    """What was told of a sequence. `block_ids` is a copy, kept of those who have siblings: beams change places, and
    samples part, without a word of their tables."""

    __slots__ = ("block_ids", "num_computed", "num_dropped", "num_entries", "num_tokens", "uid")

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.num_tokens = self.num_computed = -1
        self.num_entries = self.num_dropped = 0
        self.block_ids: list[int] | None = None

    def note(self, sequence: Sequence) -> None:
        self.num_tokens, self.num_computed = len(sequence.token_ids), sequence.num_computed
        self.num_entries, self.num_dropped = len(sequence.block_ids), sequence.num_dropped
        self.block_ids = None if sequence.request.only_sequence is not None else sequence.block_ids[:]

    def is_still(self, sequence: Sequence) -> bool:
        """Nothing that no event tells of has changed, of a sequence alone in its request: tables grow with what is
        computed."""
        return self.num_computed == sequence.num_computed and self.num_tokens == len(sequence.token_ids)

    def changed_from(self, sequence: Sequence) -> int | None:
        """The first entry of its table that is not as it was told; None if all are. For one of a request that no event
        told of: it has grown, or its head fell behind the window. A tail that it shares is copied as it is admitted."""
        if self.block_ids is not None:
            return None if sequence.block_ids == self.block_ids else 0
        if sequence.num_dropped != self.num_dropped:
            return self.num_dropped
        return None if len(sequence.block_ids) == self.num_entries else self.num_entries


class Publisher:
    """Frames of one scheduler. Nothing is listened to before the first one, nor after `stop`.

    clock   seconds; frames tell them since the first one, or since `begin_s`
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
        self._refs = np.zeros(0, dtype=np.int32)  # as told, the null block's included
        self._seal_ids = np.zeros(0, dtype=np.int64)
        self._old_seals: Iterator[int] = iter(())  # blocks sealed before the first look, whose seals are yet to be told
        self._dirty: set[str] = set()  # requests
        self._waits: dict[str, ev.Waiting] = {}
        self._requests: dict[str, RequestView] = {}  # as told
        self._sequences: dict[Sequence, _Told] = {}
        self._lines: dict[str, list[str]] = {}
        self._stats: dict[str, Any] = {}
        self._happened: deque[tuple[float, ev.Event] | dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._steps: deque[tuple[float, ev.Step, int]] = deque(maxlen=MAX_EVENTS)  # with the tokens that are sampled
        self._num_events = self._num_steps = 0

    @property
    def is_listening(self) -> bool:
        return self._detach is not None

    @property
    def epoch(self) -> str:
        """Names the run of frames; "" before the first."""
        return self._epoch

    @property
    def last(self) -> str:
        """The frame that was told last."""
        return f"{self._epoch}:{self._frame}"

    def frame(self, after: str = "") -> Frame | None:
        """What has changed since the frame `after` ("EPOCH:NUMBER"), if that was the last one; else everything. None
        when nothing has changed: frames count only what is told."""
        if self._detach is None or after != self.last:
            return self._snapshot()
        delta = self._delta()
        if delta.is_empty:
            self._frame -= 1
            return None
        return delta

    def stop(self) -> None:
        """Nobody watches any more."""
        if self._detach is not None:
            self._detach()
            self._detach = None
        self._reset()

    # -- events --------------------------------------------------------------------------------------------------------

    def _listen(self, event: ev.Event) -> None:
        """Between any two steps: only what happened, and when, is kept. What it looks like in a frame is made with it,
        and most of what happens never gets into one."""
        if isinstance(event, ev.Step):
            plan = self._scheduler.in_flight[-1]  # that the event tells of
            self._num_steps += 1
            self._num_tokens += event.num_tokens
            self._steps.append((self._clock(), event, sum(plan.num_sampled)))
            for src, dst in plan.copies:
                self._note({"event": "copied", "time_s": self._time_s(), "src": src, "dst": dst})
            return
        self._dirty.add(event.request_id)  # type: ignore[union-attr]  # blocks' events are not asked for
        if isinstance(event, ev.Waiting):
            self._waits[event.request_id] = event
        elif isinstance(event, ev.Finished):
            self._waits.pop(event.request_id, None)
        self._note((self._clock(), event))

    def _note(self, happened: tuple[float, ev.Event] | dict[str, Any]) -> None:
        self._num_events += 1
        self._happened.append(happened)

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
        self._lines = self._lines_now()
        self._stats = cache.stats().as_dict()
        return Snapshot(
            self._epoch,
            self._frame,
            self._time_s(),
            scheduler.num_steps,
            cache.pool.num_blocks,
            cache.block_size,
            cache.swap_space.num_blocks,
            pack_words(self._refs[1:], self._seal_ids[1:]),
            self._seals_of([]) or Seals(),
            requests,
            sequences,
            dict(self._stats),
            self._counts(),
            cost_s=round(time.thread_time() - begin, 6),
        )

    def _delta(self) -> Delta:
        begin = time.thread_time()
        self._frame += 1
        current = self._current()
        requests, gone = self._changed_requests(current)
        sequences, tables, progress, gone_sequences = self._changed_sequences(current)
        blocks, seals = self._changed_blocks()
        delta = Delta(
            self._epoch,
            self._frame,
            self._time_s(),
            self._scheduler.num_steps,
            self._counts(),
            blocks=blocks,
            seals=seals,
            requests=requests,
            sequences=sequences,
            tables=tables,
            progress=progress,
            gone=gone,
            gone_sequences=gone_sequences,
        )
        self._tell_events(delta)
        if (lines := self._lines_now()) != self._lines:
            delta.lines = self._lines = lines
        stats = self._scheduler.stats().as_dict()
        delta.stats = {name: value for name, value in stats.items() if self._stats[name] != value}
        self._stats = stats
        delta.cost_s = round(time.thread_time() - begin, 6)
        return delta

    def _counts(self) -> Counts:
        scheduler = self._scheduler
        return Counts(len(scheduler.running), len(scheduler.waiting), len(scheduler.swapped), self._num_tokens)

    def _tell_events(self, delta: Delta) -> None:
        begin_s = self._begin_s
        assert begin_s is not None
        delta.events = [h if isinstance(h, dict) else _event(round(h[0] - begin_s, 6), h[1]) for h in self._happened]
        delta.steps = [_step(round(at - begin_s, 6), step, num_sampled) for at, step, num_sampled in self._steps]
        delta.num_left_out = self._num_events + self._num_steps - len(self._happened) - len(self._steps)
        self._happened.clear()
        self._steps.clear()
        self._num_events = self._num_steps = 0

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _pool_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """References and seal ids of all blocks, the null block included: views of the pool's own, to read at once."""
        pool = self._scheduler.cache.pool
        return np.frombuffer(pool.refs, dtype=np.int32), np.frombuffer(pool.seal_id, dtype=np.int64)

    def _changed_blocks(self) -> tuple[BlockChange | None, Seals | None]:
        """Words that have changed, and seals: the new ones, and some of before the first look."""
        refs, seal_ids = self._pool_arrays()
        ids = np.nonzero((refs != self._refs) | (seal_ids != self._seal_ids))[0]
        newly = ids[seal_ids[ids] != self._seal_ids[ids]]
        gone = newly[self._seal_ids[newly] != 0]
        time_s, told = self._time_s(), gone[-MAX_EVENTS:]
        self._num_events += len(gone) - len(told)
        for block, seal in zip(told.tolist(), self._seal_ids[told].tolist(), strict=True):
            self._note({"event": "evicted", "time_s": time_s, "block_id": block, "seal_id": seal})
        self._refs[ids], self._seal_ids[ids] = refs[ids], seal_ids[ids]
        seals = self._seals_of(newly[seal_ids[newly] != 0].tolist())
        if not len(ids):
            return None, seals
        return BlockChange(ids.astype("<u4").tobytes(), pack_words(refs[ids], seal_ids[ids])), seals

    def _seals_of(self, blocks: list[int]) -> Seals | None:
        pool = self._scheduler.cache.pool
        blocks += [int(b) for b in islice(self._old_seals, SEALS_A_FRAME) if pool.seal_id[b]]
        if not blocks:
            return None
        parents = [key[0] for key in map(pool.key_of, blocks) if key is not None]
        return Seals(
            np.array(blocks, dtype="<u4").tobytes(),
            np.array([pool.seal_id[block] for block in blocks], dtype="<f8").tobytes(),
            np.array([0 if isinstance(parent, bytes) else parent for parent in parents], dtype="<f8").tobytes(),
        )

    # -- requests and sequences ----------------------------------------------------------------------------------------

    def _current(self) -> dict[str, Request]:
        """Those to be told of, in the order of the protocol."""
        scheduler = self._scheduler
        waiting = islice(scheduler.waiting, MAX_WAITING)
        current = {r.request_id: r for line in (scheduler.running, scheduler.swapped, waiting) for r in line}
        return current | {name: s.request for name, s in scheduler.cache.pins.items()}

    def _changed_requests(self, current: dict[str, Request]) -> tuple[list[RequestView], list[str]]:
        changed, told = [], self._requests
        gone = [name for name in told if name not in current]
        for name in gone:
            del told[name]
        for name, request in current.items():
            before = told.get(name)
            if before is None or name in self._dirty or request.only_sequence is None:
                view = self._view(request)
                if view != before:
                    told[name] = view
                    changed.append(view)
        return changed, gone

    def _view(self, request: Request) -> RequestView:
        waits = None
        if reason := request.wait_reason:
            said = self._waits.get(request.request_id)
            numbers = said[2:] if said is not None and said.reason == reason else ()
            waits = Wait(reason, *numbers)
        return RequestView(
            request.request_id,
            "pinned" if request.status is Status.FINISHED else request.status.value,
            len(request.prompt_token_ids),
            request.max_tokens or 0,
            request.width,
            request.priority,
            request.num_cached_tokens,
            request.num_preemptions,
            waits,
            tuple(self._told_of(s).uid for s in self._live(request)),
        )

    def _live(self, request: Request) -> Iterable[Sequence]:
        pin = self._scheduler.cache.pins.get(request.request_id)
        return request.sequences if pin is None else (pin,)

    def _told_of(self, sequence: Sequence) -> _Told:
        told = self._sequences.get(sequence)
        if told is None:
            self._num_uids += 1
            told = self._sequences[sequence] = _Told(self._num_uids)
        return told

    def _changed_sequences(
        self, current: dict[str, Request]
    ) -> tuple[list[SequenceView], list[TableChange], Progress | None, list[int]]:
        """New ones, changes of tables, progress, and uids that are gone while their requests stay."""
        new: list[SequenceView] = []
        tables: list[TableChange] = []
        moved: list[tuple[int, int, int]] = []
        seen: dict[Sequence, _Told] = {}
        known, dirty = self._sequences, self._dirty
        for name, request in current.items():
            whole, solo = name in dirty, request.only_sequence
            if solo is not None and not whole and (told := known.get(solo)) is not None and told.is_still(solo):
                seen[solo] = told  # most of those who wait
                continue
            for sequence in self._live(request):
                told = seen[sequence] = self._told_of(sequence)
                num_tokens, num_computed = len(sequence.token_ids), sequence.num_computed
                if told.num_tokens < 0:
                    new.append(SequenceView(told.uid, sequence.index, num_tokens, num_computed, _ids(sequence)))
                    told.note(sequence)
                    continue
                start = 0 if whole else told.changed_from(sequence)
                if start is not None:
                    tables.append(TableChange(told.uid, start, _ids(sequence, start)))
                if (told.num_tokens, told.num_computed) != (num_tokens, num_computed):
                    moved.append((told.uid, num_tokens, num_computed))
                elif start is None:
                    continue
                told.note(sequence)
        gone = [t.uid for s, t in self._sequences.items() if s not in seen and s.request.request_id in self._requests]
        assert not gone or {uid for r in self._requests.values() for uid in r.sequences}.isdisjoint(gone)
        self._sequences = seen
        self._dirty.clear()
        columns = np.array(moved, dtype="<u4").T
        return new, tables, Progress(*(column.tobytes() for column in columns)) if moved else None, gone

    def _lines_now(self) -> dict[str, list[str]]:
        scheduler = self._scheduler
        return {
            "running": [r.request_id for r in scheduler.running],
            "swapped": [r.request_id for r in scheduler.swapped],
            "waiting": [r.request_id for r in islice(scheduler.waiting, MAX_WAITING)],
        }


def pack_words(refs: np.ndarray, seal_ids: np.ndarray) -> bytes:
    """u16[num] of int32[num] references and int64[num] seal ids."""
    words = np.minimum(refs, MAX_REFS).astype(np.uint16)
    words[seal_ids != 0] |= SEALED_BIT
    data: bytes = words.astype("<u2").tobytes()
    return data


def _ids(sequence: Sequence, start: int = 0) -> bytes:
    """i32[num_entries - start]. Mostly of one or two, where an array is made sooner than one of numpy's."""
    ids = array("i", sequence.block_ids[start:])
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _event(time_s: float, event: ev.Event) -> dict[str, Any]:
    return {"event": type(event).__name__.lower(), "time_s": time_s, **event._asdict()}


def _step(time_s: float, step: ev.Step, num_sampled: int) -> list[int | float]:
    lines = step.num_running, step.num_waiting, step.num_swapped
    return [step.step, time_s, step.num_tokens, num_sampled, *lines, step.used, step.cached, step.free]


def view_queries() -> dict[str, Query]:
    """What an engine can be asked for the view, by name.

    view         argument: the frame that is there, "EPOCH:NUMBER", or "" for everything, or "stop"
    view_block   argument: a block's id. Its name is a digest of the tokens in it, under a key of the process; with
                 the seal that it has now, and the epoch of the frames
    """
    taps: dict[int, Publisher] = {}  # of the one engine, once somebody has asked
    key = secrets.token_bytes(16)

    def view(engine: Engine, after: str) -> Frame | None:
        publisher = taps.get(id(engine))
        if after == STOP:
            if publisher is not None:
                publisher.stop()
            return None
        if publisher is None:
            publisher = taps[id(engine)] = Publisher(engine.scheduler)
        return publisher.frame(after)

    def view_block(engine: Engine, block: str) -> dict[str, Any]:
        # One that was asked for as the engine before this one had it: that may have had more of them.
        pool, number, publisher = engine.scheduler.cache.pool, int(block), taps.get(id(engine))
        found = pool.key_of(number) if number <= pool.num_blocks else None
        if found is None:
            return {"name": None, "token_ids": None}
        return {
            "name": blake2b(found[1], digest_size=16, key=key).hexdigest(),
            "token_ids": np.frombuffer(found[1], np.int32).tolist(),
            "seal_id": pool.seal_id[number],
            "epoch": "" if publisher is None else publisher.epoch,
        }

    return {"view": view, "view_block": view_block}
