"""A stock vLLM, SGLang, or another Octavo, seen through its KV events: which blocks it has cached, and how they hang
together.

The events name no requests, no references and no places. So every block that is stored is shown as cached, in a place
that is made up here; who runs and who waits comes from the server's /metrics, if that is given.

Both encodings are understood: events as maps with their class's name as `type` (vLLM since June 2026, SGLang), and as
arrays with the name first (before that); and so is a batch of them, as an array or as a map. Nothing that arrives is
trusted: what is malformed is counted and left out.

A publisher's messages are numbered. Where it has a replay socket, it is asked for those from before we came that it
keeps, and for those that a gap in the numbers shows to be missing; until they are there, what is published waits.

    SUB     12  13      17  18 ...           17 is held, and 18 not received
    DEALER         14 15 16 17 18 end        17 is known by then: held back no longer, and left out

A replay's messages have a topic, too (vLLM 0.26), or none (before that, and SGLang).
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

from octavo.errors import ParameterError
from octavo.view.live.messages import MAX_EVENTS, SEALED_BIT, BlockChange, Counts, Delta, Frame, Seals, Snapshot
from octavo.view.live.publisher import STOP

FIRST_BLOCKS = 1024
"""Places that there are at first, while nobody says how many; when they are full there are twice as many."""
MAX_BLOCKS = 1 << 22
MAX_MESSAGES = 1000
"""Taken in between two frames."""
MAX_HELD = 100_000
"""That wait while nobody looks; those after them are lost."""
REPLAY_S = 2.0
"""Without a word from the replay socket: then what is missing is lost."""
END = b"\xff" * 8
"""The number of the message that ends a replay: -1."""
METRICS_S = 1.0
METRICS_BYTES = 4 << 20
LINE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)
POOL = re.compile(r'^vllm:cache_config_info\{.*?num_gpu_blocks="([0-9]+)"', re.MULTILINE)
DEVICE = (None, "GPU", "gpu")
"""Media that are the pool itself; what is stored elsewhere is not shown."""

Hash = tuple[int, int | bytes]
"""A rank, and a block's name there."""


class _Stored(NamedTuple):
    block: int
    seal: int
    parent: int


class _Malformed(Exception):  # noqa: N818 - it is counted, and shown to nobody
    pass


class ExternalPool:
    """What a publisher's events come to. `ask` is as an engine's, for a `Hub`.

    endpoint   where it publishes, such as tcp://127.0.0.1:5557
    metrics    address of its /metrics, or None
    replay     of the socket that tells again what it published (`replay_endpoint`), or None

    Raises `ParameterError` for an address that is none.
    """

    def __init__(self, endpoint: str, metrics: str | None = None, *, replay: str | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._connected(zmq.SUB, "attach", endpoint)
        self._replay = replay
        self._asked: zmq.Socket[bytes] | None = None  # a replay, that goes on until it ends or nothing is said
        self._asked_rank: int | None = None
        self._silent_at = 0.0
        self._held: list[bytes] | None = None
        if replay is not None:
            self._ask_from(0, None)
        self._metrics = metrics
        self._metrics_at = -METRICS_S
        self._key = secrets.token_bytes(16)
        self._begin_s = time.monotonic()
        self.num_malformed = self.num_lost = 0
        self._block_size = 16
        self._num_known = 0  # blocks, as its metrics say
        self._running = self._waiting = 0
        self._last: dict[int, int] = {}  # rank -> number of the last message that is taken in
        self._heard: dict[int, int] = {}  # of the last that was published while we listened
        self._clear()

    def _connected(self, kind: int, name: str, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, 256 << 20)
        socket.setsockopt(zmq.RCVHWM, MAX_HELD)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ParameterError(
                f"{name} {endpoint!r} is no address: {error.strerror}; it looks like tcp://127.0.0.1:5557", param=name
            ) from None
        return socket

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _clear(self) -> None:
        self._stored: dict[Hash, _Stored] = {}
        self._names: dict[int, Hash] = {}
        self._num_seals = self._num_evicted = 0
        self._start_anew(max(FIRST_BLOCKS, self._num_known))

    def _start_anew(self, num_blocks: int) -> None:
        """From a snapshot on, with so many places."""
        self._num_blocks = num_blocks
        self._words = np.zeros(num_blocks + 1, dtype=np.uint16)
        for stored in self._stored.values():
            self._words[stored.block] = SEALED_BIT
        self._free = [b for b in range(num_blocks, 0, -1) if not self._words[b]]
        self._epoch, self._frame = secrets.token_hex(8), 0
        self._is_new = True
        self._touched: dict[int, None] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._counts = Counts()

    # -- questions -----------------------------------------------------------------------------------------------------

    async def query(self, name: str, argument: str) -> Any:
        if name == "view_block":
            hash_ = self._names.get(int(argument))
            digest = None if hash_ is None else blake2b(repr(hash_).encode(), digest_size=16, key=self._key).hexdigest()
            return {"name": digest, "token_ids": None}
        if argument == STOP:
            return None  # what comes meanwhile waits, or it would be missing for ever
        self._take_in()
        await asyncio.to_thread(self._read_metrics)
        return self._frame_after(argument)

    def _frame_after(self, after: str) -> Frame | None:
        last, now = f"{self._epoch}:{self._frame}", round(time.monotonic() - self._begin_s, 6)
        counts = Counts(self._running, self._waiting)
        if self._is_new or after != last:
            self._is_new = False
            self._touched.clear()
            self._counts = counts
            return Snapshot(
                self._epoch,
                self._frame,
                now,
                0,
                self._num_blocks,
                self._block_size,
                0,
                self._words[1:].astype("<u2").tobytes(),
                _seals(list(self._stored.values())),
                [],
                [],
                self._stats(),
                counts,
            )
        if not self._touched and not self._events and counts == self._counts:
            return None
        ids = np.array(sorted(self._touched), dtype="<u4")
        sealed = [self._stored[self._names[b]] for b in self._touched if b in self._names]
        self._touched.clear()
        self._frame += 1
        self._counts = counts
        events = list(self._events)
        self._events.clear()
        return Delta(
            self._epoch,
            self._frame,
            now,
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

    # -- what arrives --------------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        for _ in range(MAX_MESSAGES):
            try:
                parts, again = self._next()
            except zmq.Again:
                return
            try:
                self._take(parts, again)
            except (_Malformed, msgspec.MsgspecError, TypeError, ValueError, IndexError, KeyError, OverflowError):
                self.num_malformed += 1

    def _next(self) -> tuple[list[bytes], bool]:
        """A message, and whether it comes from a replay or waited for one. Raises `zmq.Again` if there is none yet."""
        if self._asked is not None:
            try:
                parts = self._asked.recv_multipart(zmq.NOBLOCK)
                self._silent_at = time.monotonic() + REPLAY_S
                if parts[-2:-1] != [END]:
                    return [b"", *parts[-2:]], True
            except zmq.Again:
                if time.monotonic() < self._silent_at:
                    raise
            self._asked.close()
            self._asked = None
        if self._held is not None:
            held, self._held = self._held, None
            return held, True
        return self._socket.recv_multipart(zmq.NOBLOCK), False

    def _ask_from(self, sequence: int, rank: int | None) -> None:
        """For all that is kept from this message on. A new socket each time: answers do not say what they answer."""
        assert self._replay is not None
        self._asked = self._connected(zmq.DEALER, "replay", self._replay)
        self._asked.send_multipart((b"", sequence.to_bytes(8, "big")))
        self._asked_rank, self._silent_at = rank, time.monotonic() + REPLAY_S

    def _take(self, parts: list[bytes], again: bool = False) -> None:
        if len(parts) != 3 or len(parts[1]) != 8:
            raise _Malformed
        sequence = int.from_bytes(parts[1], "big")
        batch = msgspec.msgpack.decode(parts[2])
        if isinstance(batch, dict):
            batch = [batch.get("ts"), batch["events"], batch.get("data_parallel_rank")]
        _, events, *more = batch
        rank = int(more[0] or 0) if more else 0
        if not again:
            if sequence <= self._heard.get(rank, -1):  # it counts anew: it was started again, and has nothing
                self._forget(rank)
                self._last[rank] = -1 if self._replay is not None else sequence - 1
            self._heard[rank] = sequence
        elif self._asked is not None and self._asked_rank not in (None, rank):
            return
        last = self._last.get(rank, sequence - 1)
        if sequence <= last:
            return
        if sequence > last + 1:
            if self._replay is not None and not again:
                self._held = parts
                self._ask_from(last + 1, rank)
                return
            self.num_lost += sequence - last - 1
        self._last[rank] = sequence
        for event in events:
            kind, fields = _fields(event)
            if kind == "BlockStored" and fields["medium"] in DEVICE:
                self._store(rank, fields)
            elif kind == "BlockRemoved" and fields["medium"] in DEVICE:
                for name in fields["block_hashes"]:
                    self._remove((rank, name))
            elif kind == "AllBlocksCleared":
                self._forget(rank)

    def _store(self, rank: int, fields: dict[str, Any]) -> None:
        size = int(fields["block_size"])
        if size != self._block_size:
            if not 0 < size <= 1 << 16:
                raise _Malformed
            self._block_size, self._is_new = size, True
        before = fields["parent_block_hash"]
        parent = 0
        if before is not None:
            known = self._stored.get((rank, before))
            parent = known.seal if known is not None else -1  # it is not there: no seal is negative
        for name in fields["block_hashes"]:
            if not isinstance(name, int | bytes):
                raise _Malformed
            stored = self._stored.get((rank, name))
            if stored is None:
                if not self._free:
                    if self._num_blocks >= MAX_BLOCKS:
                        raise _Malformed
                    self._start_anew(2 * self._num_blocks)
                self._num_seals += 1
                stored = self._stored[rank, name] = _Stored(self._free.pop(), self._num_seals, parent)
                self._names[stored.block] = rank, name
                self._words[stored.block] = SEALED_BIT
                self._touched[stored.block] = None
            parent = stored.seal

    def _remove(self, name: Hash) -> None:
        stored = self._stored.pop(name, None)
        if stored is None:
            return
        del self._names[stored.block]
        self._words[stored.block] = 0
        self._free.append(stored.block)
        self._touched[stored.block] = None
        self._num_evicted += 1
        at = round(time.monotonic() - self._begin_s, 6)
        self._events.append({"event": "evicted", "time_s": at, "block_id": stored.block, "seal_id": stored.seal})

    def _forget(self, rank: int) -> None:
        for name in [name for name in self._stored if name[0] == rank]:
            self._remove(name)

    # -- metrics -------------------------------------------------------------------------------------------------------

    def _read_metrics(self) -> None:
        """Now and then, and briefly: a server that does not answer is left alone until the next time."""
        if self._metrics is None or time.monotonic() - self._metrics_at < METRICS_S:
            return
        self._metrics_at = time.monotonic()
        with contextlib.suppress(OSError, ValueError, OverflowError, http.client.HTTPException):
            with urllib.request.urlopen(self._metrics, timeout=0.5) as answer:
                text = answer.read(METRICS_BYTES).decode("utf-8", "replace")
            lines = {"running": 0.0, "waiting": 0.0}
            for name, number in LINE.findall(text):
                lines[name] += float(number)
            self._running, self._waiting = int(lines["running"]), int(lines["waiting"])
            found = POOL.search(text)
            if found is not None and 0 < int(found[1]) <= MAX_BLOCKS and int(found[1]) != self._num_known:
                self._num_known = int(found[1])
                if len(self._stored) <= self._num_known < self._num_blocks or self._num_blocks < self._num_known:
                    self._place_again()

    def _place_again(self) -> None:
        """In a pool of the size that it has."""
        stored = {}
        for block, (name, old) in enumerate(self._stored.items(), 1):
            stored[name] = old._replace(block=block)
        self._stored = stored
        self._names = {each.block: name for name, each in stored.items()}
        self._start_anew(self._num_known)


def _fields(event: Any) -> tuple[str, dict[str, Any]]:
    """An event's class and what is read of it, from either encoding."""
    if isinstance(event, dict):
        kind, given = event["type"], event
    else:
        kind = event[0]
        names = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
        given = dict(zip(names if kind == "BlockStored" else ("block_hashes", "medium"), event[1:], strict=False))
    fields = {"medium": None, "parent_block_hash": None, "block_size": 0} | given
    if kind != "AllBlocksCleared" and not isinstance(fields.get("block_hashes"), list):
        raise _Malformed
    return kind, fields


def _seals(stored: list[_Stored]) -> Seals:
    return Seals(
        np.array([s.block for s in stored], dtype="<u4").tobytes(),
        np.array([s.seal for s in stored], dtype="<f8").tobytes(),
        np.array([s.parent for s in stored], dtype="<f8").tobytes(),
    )
