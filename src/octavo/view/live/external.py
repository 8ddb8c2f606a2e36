"""The prefix cache of a vLLM, SGLang or Octavo server, reconstructed from its KV events.

The events name neither requests nor references nor block ids. So every stored block is shown as cached, with an id that
is assigned here. The numbers of running and waiting requests come from the server's /metrics, if an address is given.

Both encodings are decoded: events as maps with their class's name as `type` (vLLM since June 2026, SGLang), and as
arrays with the name first (before that). A batch of events may also be an array or a map. Nothing that arrives is
trusted: malformed messages are counted and dropped.

A publisher's messages are numbered. If it has a replay socket, the pool requests the messages that it buffered before
the connection, and those that a gap in the numbers shows to be missing. Published messages wait until they are there.

    SUB     12  13      17  18 ...           17 is held, and 18 not received
    DEALER         14 15 16 17 18 end        17 came with the replay, so the held one is dropped

Replayed messages have a topic (vLLM 0.26) or none (before that, and SGLang).
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import secrets
import time
import urllib.request
from collections import deque
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zmq

from octavo.engine.query import Query
from octavo.errors import ParameterError
from octavo.view.live.messages import MAX_EVENTS, SEALED_BIT, BlockChange, Counts, Delta, Frame, Seals, Snapshot
from octavo.view.live.queries import BlockContent, GetBlock, GetFrame

FIRST_BLOCKS = 1024
"""Initial size of the pool while its real size is unknown. It doubles when it is full."""
MAX_BLOCKS = 1 << 22
MAX_MESSAGES = 1000
"""Processed per frame, at most."""
MAX_QUEUED_MESSAGES = 100_000
"""Queued while there are no viewers; later ones are lost."""
REPLAY_S = 2.0
"""Without a message from the replay socket, after which the missing ones count as lost."""
END = b"\xff" * 8
"""The sequence number of the message that ends a replay: -1."""
METRICS_S = 1.0
METRICS_BYTES = 4 << 20
QUEUE_METRIC = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
POOL_METRIC = re.compile(r'^vllm:cache_config_info\{.*?num_gpu_blocks="([0-9]+)"', re.MULTILINE)
DEVICE = (None, "GPU", "gpu")
"""Media that are the pool itself. Blocks stored on others are not shown."""

Hash = tuple[int, int | bytes]
"""A data-parallel rank, and a block's hash there."""


class _Stored(NamedTuple):
    block: int
    seal: int
    parent: int


class _MalformedError(Exception):
    pass


class ExternalPool:
    """The pool that a publisher's events describe. `query` serves a `Hub` as an engine does.

    endpoint   where it publishes, such as tcp://127.0.0.1:5557
    metrics    address of its /metrics, or None
    replay     its replay socket (`replay_endpoint`), or None

    Raises `ParameterError` for an invalid address.
    """

    def __init__(self, endpoint: str, metrics: str | None = None, *, replay: str | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._connect(zmq.SUB, "attach", endpoint)
        self._replay_endpoint = replay
        self._replay_socket: zmq.Socket[bytes] | None = None  # of the replay that is going on
        self._replay_rank: int | None = None
        self._replay_deadline = 0.0
        self._held: list[bytes] | None = None
        if replay is not None:
            self._start_replay(0, None)
        self._metrics = metrics
        self._metrics_at = -METRICS_S
        self._key = secrets.token_bytes(16)
        self._begin_s = time.monotonic()
        self.num_malformed = self.num_lost = 0
        self._block_size = 16
        self._num_known = 0  # blocks, from its metrics
        self._running = self._waiting = 0
        self._last: dict[int, int] = {}  # rank -> number of the last message processed
        self._published: dict[int, int] = {}  # rank -> number of the last message published
        self._clear()

    def _connect(self, kind: int, name: str, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 256 << 20)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ParameterError(
                f"{name} {endpoint!r} is no address: {error.strerror}; use one such as tcp://127.0.0.1:5557", param=name
            ) from None
        return socket

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _clear(self) -> None:
        self._stored: dict[Hash, _Stored] = {}
        self._hashes: dict[int, Hash] = {}
        self._num_seals = self._num_evicted = 0
        self._resize(max(FIRST_BLOCKS, self._num_known))

    def _resize(self, num_blocks: int) -> None:
        """Begin a new epoch, with this number of blocks."""
        self._num_blocks = num_blocks
        self._words = np.zeros(num_blocks + 1, dtype=np.uint16)
        for stored in self._stored.values():
            self._words[stored.block] = SEALED_BIT
        self._free = [b for b in range(num_blocks, 0, -1) if not self._words[b]]
        self._epoch, self._frame = secrets.token_hex(8), 0
        self._needs_snapshot = True
        self._changed: dict[int, None] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._counts = Counts()

    # -- queries -------------------------------------------------------------------------------------------------------

    async def query(self, query: Query[Any]) -> Any:
        """Answer a query of the view."""
        if isinstance(query, GetBlock):
            found = self._hashes.get(query.block_id)
            digest = None if found is None else blake2b(repr(found).encode(), digest_size=16, key=self._key).hexdigest()
            return BlockContent(digest)
        if not isinstance(query, GetFrame):
            return None  # the socket stays connected: messages of the meantime would be lost for good
        self._receive()
        await asyncio.to_thread(self._read_metrics)
        return self._frame_after(query.after)

    def _frame_after(self, after: str) -> Frame | None:
        last, now_s = f"{self._epoch}:{self._frame}", round(time.monotonic() - self._begin_s, 6)
        counts = Counts(self._running, self._waiting)
        if self._needs_snapshot or after != last:
            self._needs_snapshot = False
            self._changed.clear()
            self._counts = counts
            place, sizes = (self._epoch, self._frame, now_s, 0), (self._num_blocks, self._block_size, 0)
            words, seals = self._words[1:].astype("<u2").tobytes(), _seals(list(self._stored.values()))
            return Snapshot(*place, *sizes, words, seals, [], [], self._stats(), counts)
        if not self._changed and not self._events and counts == self._counts:
            return None
        ids = np.array(sorted(self._changed), dtype="<u4")
        sealed = [self._stored[self._hashes[b]] for b in self._changed if b in self._hashes]
        self._changed.clear()
        self._frame += 1
        self._counts = counts
        events = list(self._events)
        self._events.clear()
        return Delta(
            self._epoch,
            self._frame,
            now_s,
            0,
            counts,
            blocks=BlockChange(ids.tobytes(), self._words[ids].astype("<u2").tobytes()) if len(ids) else None,
            seals=_seals(sealed) if sealed else None,
            stats=self._stats(),
            events=events,
        )

    def _stats(self) -> dict[str, Any]:
        num_cached = len(self._stored)
        return {
            "num_blocks": self._num_blocks,
            "block_size": self._block_size,
            "num_used": 0,
            "num_cached": num_cached,
            "num_free": self._num_blocks - num_cached,
            "num_sealed": self._num_seals,
            "num_evicted": self._num_evicted,
            "num_lost": self.num_lost,
            "num_malformed": self.num_malformed,
        }

    # -- messages ------------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        for _ in range(MAX_MESSAGES):
            try:
                parts, is_late = self._next()
            except zmq.Again:
                return
            try:
                self._process(parts, is_late)
            except (_MalformedError, msgspec.MsgspecError, TypeError, ValueError, IndexError, KeyError, OverflowError):
                self.num_malformed += 1

    def _next(self) -> tuple[list[bytes], bool]:
        """A message, and whether it was replayed or held for a replay. Raises `zmq.Again` if there is none yet."""
        if self._replay_socket is not None:
            try:
                parts = self._replay_socket.recv_multipart(zmq.NOBLOCK)
                self._replay_deadline = time.monotonic() + REPLAY_S
                if parts[-2:-1] != [END]:
                    return [b"", *parts[-2:]], True
            except zmq.Again:
                if time.monotonic() < self._replay_deadline:
                    raise
            self._replay_socket.close()
            self._replay_socket = None
        if self._held is not None:
            held, self._held = self._held, None
            return held, True
        return self._socket.recv_multipart(zmq.NOBLOCK), False

    def _start_replay(self, sequence: int, rank: int | None) -> None:
        """Request the buffered messages from this one on, on a new socket: replies do not name the request."""
        assert self._replay_endpoint is not None
        self._replay_socket = self._connect(zmq.DEALER, "replay", self._replay_endpoint)
        self._replay_socket.send_multipart((b"", sequence.to_bytes(8, "big")))
        self._replay_rank, self._replay_deadline = rank, time.monotonic() + REPLAY_S

    def _process(self, parts: list[bytes], is_late: bool = False) -> None:
        if len(parts) != 3 or len(parts[1]) != 8:
            raise _MalformedError
        sequence = int.from_bytes(parts[1], "big")
        batch = msgspec.msgpack.decode(parts[2])
        if isinstance(batch, dict):
            batch = [batch.get("ts"), batch["events"], batch.get("data_parallel_rank")]
        _, events, *more = batch
        rank = int(more[0] or 0) if more else 0
        if not is_late:
            if sequence <= self._published.get(rank, -1):  # a restarted server counts from 0, and has nothing cached
                self._clear_rank(rank)
                self._last[rank] = -1 if self._replay_endpoint is not None else sequence - 1
            self._published[rank] = sequence
        elif self._replay_socket is not None and self._replay_rank not in (None, rank):
            return
        last = self._last.get(rank, sequence - 1)
        if sequence <= last:
            return
        if sequence > last + 1:
            if self._replay_endpoint is not None and not is_late:
                self._held = parts
                self._start_replay(last + 1, rank)
                return
            self.num_lost += sequence - last - 1
        self._last[rank] = sequence
        for event in events:
            kind, fields = _fields(event)
            if kind == "BlockStored" and fields["medium"] in DEVICE:
                self._store(rank, fields)
            elif kind == "BlockRemoved" and fields["medium"] in DEVICE:
                for block_hash in fields["block_hashes"]:
                    self._remove((rank, block_hash))
            elif kind == "AllBlocksCleared":
                self._clear_rank(rank)

    def _store(self, rank: int, fields: dict[str, Any]) -> None:
        size = int(fields["block_size"])
        if size != self._block_size:
            if not 0 < size <= 1 << 16:
                raise _MalformedError
            self._block_size, self._needs_snapshot = size, True
        parent_hash = fields["parent_block_hash"]
        parent = 0
        if parent_hash is not None:
            known = self._stored.get((rank, parent_hash))
            parent = known.seal if known is not None else -1  # unknown: no seal is negative
        for block_hash in fields["block_hashes"]:
            if not isinstance(block_hash, int | bytes):
                raise _MalformedError
            stored = self._stored.get((rank, block_hash))
            if stored is None:
                if not self._free:
                    if self._num_blocks >= MAX_BLOCKS:
                        raise _MalformedError
                    self._resize(2 * self._num_blocks)
                self._num_seals += 1
                stored = self._stored[rank, block_hash] = _Stored(self._free.pop(), self._num_seals, parent)
                self._hashes[stored.block] = rank, block_hash
                self._words[stored.block] = SEALED_BIT
                self._changed[stored.block] = None
            parent = stored.seal

    def _remove(self, block_hash: Hash) -> None:
        stored = self._stored.pop(block_hash, None)
        if stored is None:
            return
        del self._hashes[stored.block]
        self._words[stored.block] = 0
        self._free.append(stored.block)
        self._changed[stored.block] = None
        self._num_evicted += 1
        time_s = round(time.monotonic() - self._begin_s, 6)
        self._events.append({"event": "evicted", "time_s": time_s, "block_id": stored.block, "seal_id": stored.seal})

    def _clear_rank(self, rank: int) -> None:
        for block_hash in [block_hash for block_hash in self._stored if block_hash[0] == rank]:
            self._remove(block_hash)

    # -- metrics -------------------------------------------------------------------------------------------------------

    def _read_metrics(self) -> None:
        """Read /metrics once a second, with a short timeout. Errors are ignored until the next time."""
        if self._metrics is None or time.monotonic() - self._metrics_at < METRICS_S:
            return
        self._metrics_at = time.monotonic()
        with contextlib.suppress(OSError, ValueError, OverflowError, http.client.HTTPException):
            with urllib.request.urlopen(self._metrics, timeout=0.5) as response:
                text = response.read(METRICS_BYTES).decode("utf-8", "replace")
            counts = {"running": 0.0, "waiting": 0.0}
            for name, number in QUEUE_METRIC.findall(text):
                counts[name] += float(number)
            self._running, self._waiting = int(counts["running"]), int(counts["waiting"])
            found = POOL_METRIC.search(text)
            if found is not None and 0 < int(found[1]) <= MAX_BLOCKS and int(found[1]) != self._num_known:
                self._num_known = int(found[1])
                if len(self._stored) <= self._num_known < self._num_blocks or self._num_blocks < self._num_known:
                    self._reassign_blocks()

    def _reassign_blocks(self) -> None:
        """Give the stored blocks new ids in a pool of the known size."""
        stored = {}
        for block, (block_hash, old) in enumerate(self._stored.items(), 1):
            stored[block_hash] = old._replace(block=block)
        self._stored = stored
        self._hashes = {each.block: block_hash for block_hash, each in stored.items()}
        self._resize(self._num_known)


def _fields(event: Any) -> tuple[str, dict[str, Any]]:
    """An event's class and the fields that are used, from either encoding."""
    if isinstance(event, dict):
        kind, decoded = event["type"], event
    else:
        kind = event[0]
        names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
        decoded = dict(zip(names if kind == "BlockStored" else ("block_hashes", "medium"), event[1:], strict=False))
    fields = {"medium": None, "parent_block_hash": None, "block_size": 0} | decoded
    if kind != "AllBlocksCleared" and not isinstance(fields.get("block_hashes"), list):
        raise _MalformedError
    return kind, fields


def _seals(stored: list[_Stored]) -> Seals:
    return Seals.of([s.block for s in stored], [s.seal for s in stored], [s.parent for s in stored])
