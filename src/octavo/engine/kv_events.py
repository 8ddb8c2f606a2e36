"""Which blocks an engine has cached, told over ZeroMQ in vLLM's format: for routers, which send a prompt to the engine
that has its beginning.

    core ── Sealed, Evicted ──▶ deque ── a thread ──▶ names ──▶ batches ──▶ PUB     topic | sequence | payload
     (the engine's thread)                                         └──▶ the last ones ──▶ ROUTER, for who missed some

The engine's thread pays for an append; digests, encoding and sending are the other thread's. A block goes by the hash
of its content and of all before it (`core.block_hash`), of which the last eight bytes travel, as an integer. Equal
content may lie in two blocks; it is stored with the first and removed with the last.

A payload is a MessagePack array `[time, events, rank]`, an event a map with its class's name as `type`. Sequence
numbers count from 0 in every engine, and what an engine says first is that nothing is cached: whoever sees the numbers
begin anew knows that an engine was restarted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from array import array
from collections import Counter, deque
from typing import TypeAlias

import msgspec
import zmq

from octavo.config import KVEventsConfig
from octavo.core import events as ev
from octavo.core.block_hash import block_hashes
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.types import SealId
from octavo.errors import ParameterError

logger = logging.getLogger("octavo.kv_events")

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""
LOOK_S = 0.05
"""How often the thread looks for replays to send, and for events that came between two steps."""
DEVICE = "GPU"
"""vLLM's word for the pool that the model reads from, whatever the device."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A run of blocks, each the child of the one before; the first is `parent_block_hash`'s, or begins a prompt.

    token_ids   of all of them, `block_size` each
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


Told: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    """`ts` is seconds since 1970."""

    ts: float
    events: list[Told]
    data_parallel_rank: int | None = 0


class Ledger:
    """From the core's events to those that are told: seal ids become names, and of equal blocks only one counts."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._names: dict[SealId, bytes] = {}  # of the blocks that can be found
        self._num_blocks: Counter[bytes] = Counter()

    def restart(self) -> AllBlocksCleared:
        self._names.clear()
        self._num_blocks.clear()
        return AllBlocksCleared()

    def digest(self, happened: list[Happened]) -> list[Told]:
        told: list[Told] = []
        was_reset = False
        for event, salt in happened:
            if event is None:
                told = [self.restart()]
            elif isinstance(event, ev.Sealed):
                self._store(event, salt, told)
            else:
                was_reset |= event.why == "reset"
                self._remove(event, told)
        if was_reset and not self._names:
            return [AllBlocksCleared()]
        return told

    def _store(self, event: ev.Sealed, salt: bytes, told: list[Told]) -> None:
        parent = self._names.get(event.parent_id)
        if event.parent_id and parent is None:
            return  # the block before it is gone, so no prompt comes to this one
        tokens = array("i")
        tokens.frombytes(event.token_ids)
        name = self._names[event.seal_id] = name_of(tokens, parent, salt)
        self._num_blocks[name] += 1
        if self._num_blocks[name] > 1:
            return
        last = told[-1] if told else None
        before = None if parent is None else number(parent)
        if not isinstance(last, BlockStored) or before is None or last.block_hashes[-1] != before:
            last = BlockStored([], before, [], self._block_size, None, DEVICE, None)
            told.append(last)
        last.block_hashes.append(number(name))
        last.token_ids += tokens.tolist()

    def _remove(self, event: ev.Evicted, told: list[Told]) -> None:
        name = self._names.pop(event.seal_id, None)
        if name is None:
            return
        self._num_blocks[name] -= 1
        if self._num_blocks[name]:
            return
        del self._num_blocks[name]
        last = told[-1] if told else None
        if not isinstance(last, BlockRemoved):
            last = BlockRemoved([], DEVICE)
            told.append(last)
        last.block_hashes.append(number(name))


Happened: TypeAlias = tuple[ev.Sealed | ev.Evicted | None, bytes]
"""An event, with the salt if it is of a prompt's first block. None: some were lost, or nothing has happened yet."""


def name_of(tokens: array[int], parent: bytes | None, salt: bytes) -> bytes:
    """Of a block, by the one before it."""
    return next(block_hashes(tokens, len(tokens), salt=salt, parent=parent))


def number(name: bytes) -> int:
    """As it travels: 64 bits."""
    return int.from_bytes(name[-8:], "big")


class KVEventPublisher:
    """Publishes what a cache has, until `close`. Raises `ParameterError` for an address that cannot be taken."""

    def __init__(self, cache: KVCacheManager, config: KVEventsConfig) -> None:
        self._pool = cache.pool
        self._config = config
        self._ledger = Ledger(cache.block_size)
        self._happened: deque[Happened] = deque([(None, b"")])
        self._wake = threading.Event()
        self._closing = False
        self._context = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._topic = config.topic.encode()
        self._sequence = itertools.count()
        self._last: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        try:
            self._publish = self._open(zmq.PUB, "endpoint", config.endpoint)
            replay = config.replay_endpoint
            self._replay = None if replay is None else self._open(zmq.ROUTER, "replay_endpoint", replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._unsubscribe = cache.events.subscribe(self._listen, blocks=True)
        self._thread = threading.Thread(target=self._work, name="octavo-kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What has happened is told, and the addresses are free again. A second call does nothing."""
        if not self._closing:
            self._unsubscribe()
            self._closing = True
            self._wake.set()
            self._thread.join()

    def _open(self, kind: int, name: str, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, self._config.hwm)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            if kind == zmq.ROUTER or self._config.binds:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            text = f"kv_events_config: {name} {endpoint!r} cannot be used: {error.strerror}; give another address"
            raise ParameterError(text, param="kv_events_config") from None
        return socket

    # -- on the engine's thread ----------------------------------------------------------------------------------------

    def _listen(self, event: ev.Event) -> None:
        if isinstance(event, ev.Sealed):
            salt = b""
            if not event.parent_id and (key := self._pool.key_of(event.block_id)) is not None:
                salt = key[0] if isinstance(key[0], bytes) else b""
            self._note((event, salt))
        elif isinstance(event, ev.Evicted):
            self._note((event, b""))
        elif isinstance(event, ev.Step) and self._happened:
            self._wake.set()

    def _note(self, happened: Happened) -> None:
        if len(self._happened) >= self._config.max_queue_size:  # to say too little is better than to say what is false
            self._happened.clear()
            self._happened.append((None, b""))
        self._happened.append(happened)

    # -- on its own ----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._closing:
                self._tell()
                self._send_again()
                self._wake.wait(LOOK_S)
                self._wake.clear()
            self._tell()
        finally:
            self._context.destroy(linger=1000)

    def _tell(self) -> None:
        happened = []
        with contextlib.suppress(IndexError):
            while True:
                happened.append(self._happened.popleft())
        told = self._ledger.digest(happened) if happened else []
        if told:
            sequence = next(self._sequence).to_bytes(8, "big")
            payload = self._encoder.encode(Batch(time.time(), told))
            self._last.append((sequence, payload))
            self._publish.send_multipart((self._topic, sequence, payload))

    def _send_again(self) -> None:
        """To who asks for all from a sequence number on, as long as it is kept."""
        while self._replay is not None and self._replay.poll(0):
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                logger.warning("a replay is asked for by an empty frame and eight bytes; this was something else")
                continue
            asker, _, start = frames
            for sequence, payload in self._last:
                if sequence >= start:
                    self._replay.send_multipart((asker, b"", self._topic, sequence, payload))
            self._replay.send_multipart((asker, b"", b"", END, b""))
