"""KV cache events over ZeroMQ in vLLM's format, for routers that send a prompt to the engine that caches its prefix.

    core ── Sealed, Evicted ──▶ deque ── thread ──▶ block hashes ──▶ batches ──▶ PUB     topic | sequence | payload
     (engine thread)                                                     └──▶ last batches ──▶ ROUTER, for replays

The engine thread only appends to a deque; hashing, encoding and sending happen on the other thread. A block's hash is
the last eight bytes of the digest of its content and of all blocks before it (`core.types.block_hashes`), as an
integer. Two blocks may have equal content: it is stored with the first and removed with the last. The events are those
of the full group: blocks of window groups have no content of their own, and are found by the full ones.

A payload is a MessagePack array `[time, events, rank]`; an event is a map with its class name as `type`. Sequence
numbers start at 0 in every engine, and the first event of an engine is AllBlocksCleared: a subscriber that sees the
numbers restart knows that the engine was restarted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec
import zmq

from octavo.config import KVEventsConfig
from octavo.core import events as ev
from octavo.core.block_pool import group_of
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.types import SealId, block_hashes, block_key
from octavo.errors import ParameterError
from octavo.router.prefix_index import PrefixIndex

logger = logging.getLogger("octavo.kv_events")

END_SEQUENCE = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""
MAX_REQUEST_BYTES = 1024
"""Limit of a frame of a replay request; a client that sends more is disconnected."""
POLL_INTERVAL_S = 0.05
"""How often the thread checks for replay requests, and for events between two steps."""
DEVICE = "GPU"
"""vLLM's name for the pool that the model reads from, on any device."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A run of blocks, each the child of the previous one. The first is the child of `parent_block_hash`, or begins a
    prompt if that is None.

    token_ids   token ids of all blocks, `block_size` each
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    pass


KVCacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    """Events in order; `ts` is in seconds since 1970."""

    ts: float
    events: list[KVCacheEvent]
    data_parallel_rank: int | None = 0


class KVEventTranslator:
    """Translates core events into KV cache events: seal ids become digests, and blocks of equal content count once."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._digests: dict[SealId, bytes] = {}  # of the cached blocks
        self._num_blocks: Counter[bytes] = Counter()

    def clear(self) -> AllBlocksCleared:
        self._digests.clear()
        self._num_blocks.clear()
        return AllBlocksCleared()

    def translate(self, core_events: list[CoreEvent]) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        was_reset = False
        for event, salt in core_events:
            if event is None:
                events = [self.clear()]
            elif isinstance(event, ev.Sealed):
                self._store(event, salt, events)
            else:
                was_reset |= event.why == "reset"
                self._remove(event, events)
        if was_reset and not self._digests:
            return [AllBlocksCleared()]
        return events

    def _store(self, event: ev.Sealed, salt: bytes, events: list[KVCacheEvent]) -> None:
        parent = self._digests.get(event.parent_id)
        if event.parent_id and parent is None:
            return  # its parent was evicted, so no prompt can reach this block
        tokens = array("i")
        tokens.frombytes(event.token_ids)
        digest = self._digests[event.seal_id] = block_digest(tokens, parent, salt)
        self._num_blocks[digest] += 1
        if self._num_blocks[digest] > 1:
            return
        last = events[-1] if events else None
        parent_hash = None if parent is None else block_key(parent)
        if not isinstance(last, BlockStored) or parent_hash is None or last.block_hashes[-1] != parent_hash:
            last = BlockStored([], parent_hash, [], self._block_size, None, DEVICE, None)
            events.append(last)
        last.block_hashes.append(block_key(digest))
        last.token_ids += tokens.tolist()

    def _remove(self, event: ev.Evicted, events: list[KVCacheEvent]) -> None:
        digest = self._digests.pop(event.seal_id, None)
        if digest is None:
            return
        self._num_blocks[digest] -= 1
        if self._num_blocks[digest]:
            return
        del self._num_blocks[digest]
        last = events[-1] if events else None
        if not isinstance(last, BlockRemoved):
            last = BlockRemoved([], DEVICE)
            events.append(last)
        last.block_hashes.append(block_key(digest))


CoreEvent: TypeAlias = tuple[ev.Sealed | ev.Evicted | None, bytes]
"""A core event, with the salt if its block begins a prompt. None: events were lost, or none has happened yet."""


def block_digest(tokens: array[int], parent: bytes | None, salt: bytes) -> bytes:
    """The digest of a block, from its parent's."""
    return next(block_hashes(tokens, len(tokens), salt=salt, parent=parent))


class CoreEventQueue:
    """The cache events of an engine, until they are taken. `put` runs on the engine thread, `take` on any one.

    max_size   of the queue; on overflow it is emptied, and begins with None again
    on_step    called after each step that left events
    """

    def __init__(
        self, cache: KVCacheManager, max_size: int = sys.maxsize, on_step: Callable[[], object] = lambda: None
    ) -> None:
        self._pool = cache.pool
        self._max_size, self._on_step = max_size, on_step
        self._events: deque[CoreEvent] = deque([(None, b"")])
        self.close = cache.events.subscribe(self.put, blocks=True)

    def put(self, event: ev.Event) -> None:
        if isinstance(event, ev.Sealed):
            if group_of(event.token_ids):
                return
            salt = b""
            if not event.parent_id and (key := self._pool.key_of(event.block_id)) is not None:
                salt = key[0] if isinstance(key[0], bytes) else b""
            self._append((event, salt))
        elif isinstance(event, ev.Evicted):
            self._append((event, b""))
        elif isinstance(event, ev.Step) and self._events:
            self._on_step()

    def _append(self, core_event: CoreEvent) -> None:
        if len(self._events) >= self._max_size:  # lost events must not leave stale blocks
            self._events.clear()
            self._events.append((None, b""))
        self._events.append(core_event)

    def take(self) -> list[CoreEvent]:
        core_events = []
        with contextlib.suppress(IndexError):
            while True:
                core_events.append(self._events.popleft())
        return core_events


def update_index(index: PrefixIndex, replica: int, events: Iterable[KVCacheEvent]) -> None:
    """Tell an index what a replica's cache has stored and removed."""
    for event in events:
        if isinstance(event, BlockStored):
            index.store(replica, event.block_hashes)
        elif isinstance(event, BlockRemoved):
            index.remove(replica, event.block_hashes)
        else:
            index.clear(replica)


class CacheFeed:
    """What an engine's cache stores and removes, for a router in its client's process. Token ids are left out."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._queue = CoreEventQueue(cache)
        self._translator = KVEventTranslator(cache.block_size)

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call."""
        core_events = self._queue.take()
        events = self._translator.translate(core_events) if core_events else []
        for event in events:
            if isinstance(event, BlockStored):
                event.token_ids = []
        return events


class KVEventPublisher:
    """Publishes the events of a KV cache until `close`. Raises `ParameterError` for an address that cannot be used."""

    def __init__(self, cache: KVCacheManager, config: KVEventsConfig) -> None:
        self._config = config
        self._translator = KVEventTranslator(cache.block_size)
        self._wake = threading.Event()
        self._closing = False
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._topic = config.topic.encode()
        self._sequence = itertools.count()
        self._recent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        try:
            self._publish = self._open(zmq.PUB, "endpoint", config.endpoint)
            replay = config.replay_endpoint
            self._replay = None if replay is None else self._open(zmq.ROUTER, "replay_endpoint", replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._queue = CoreEventQueue(cache, config.max_queue_size, self._wake.set)
        self._thread = threading.Thread(target=self._run, name="octavo-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish the remaining events and release the addresses. A second call does nothing."""
        if not self._closing:
            self._queue.close()
            self._closing = True
            self._wake.set()
            self._thread.join()

    def _open(self, kind: int, name: str, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, self._config.hwm)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        try:
            if kind == zmq.ROUTER or self._config.binds:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            text = f"kv_events_config: {name} {endpoint!r} cannot be used: {error.strerror}; use another address"
            raise ParameterError(text, param="kv_events_config") from None
        return socket

    # -- on the publisher thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._publish_events()
                self._serve_replays()
                self._wake.wait(POLL_INTERVAL_S)
                self._wake.clear()
            self._publish_events()
        finally:
            self._context.destroy(linger=1000)

    def _publish_events(self) -> None:
        core_events = self._queue.take()
        events = self._translator.translate(core_events) if core_events else []
        if events:
            sequence = next(self._sequence).to_bytes(8, "big")
            payload = self._encoder.encode(KVEventBatch(time.time(), events, self._config.data_parallel_rank))
            self._recent.append((sequence, payload))
            self._publish.send_multipart((self._topic, sequence, payload))

    def _serve_replays(self) -> None:
        """Send the recent batches from the requested sequence number on."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning(
                    "bad replay request with %d frames; expected an empty frame and eight bytes", len(frames)
                )
                continue
            client, _, start = frames
            for sequence, payload in self._recent:
                if sequence >= start:
                    self._replay.send_multipart((client, b"", self._topic, sequence, payload))
            self._replay.send_multipart((client, b"", b"", END_SEQUENCE, b""))
