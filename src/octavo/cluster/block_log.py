"""`BlockLog`: which blocks an engine caches, and what has changed since a front last asked."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.engine.kv_events import BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch

NUM_KEPT = 4096
"""Changes that a front may lag behind; after more it gets the whole cache."""
CONNECT_S = 10.0
"""How long to wait for the connection to an engine that has started."""
_BATCH = msgspec.msgpack.Decoder(KVEventBatch)


class BlockLog:
    """The hashes of the cached blocks, and the last changes. `sequence` counts the changes."""

    def __init__(self) -> None:
        self.sequence = 0
        self._cached: set[int] = set()
        self._changes: deque[tuple[list[int], list[int]]] = deque(maxlen=NUM_KEPT)

    def apply(self, events: Iterable[KVCacheEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._change(event.block_hashes, [])
            elif isinstance(event, BlockRemoved):
                self._change([], event.block_hashes)
            else:
                self.clear()

    def clear(self) -> None:
        self._changes.clear()  # a front that lags behind now gets the whole cache
        self._cached.clear()
        self.sequence += 1

    def _change(self, stored: list[int], removed: list[int]) -> None:
        self.sequence += 1
        self._changes.append((stored, removed))
        self._cached.update(stored)
        self._cached.difference_update(removed)

    def since(self, sequence: int) -> tuple[bool, list[int], list[int]]:
        """(is the whole, stored, removed) for a front that knows the cache as of `sequence`."""
        num_missed = self.sequence - sequence
        if not 0 <= num_missed <= len(self._changes):
            return True, list(self._cached), []
        last: dict[int, bool] = {}  # a block may leave and come back
        for stored, removed in list(self._changes)[len(self._changes) - num_missed :]:
            last.update(dict.fromkeys(stored, True))
            last.update(dict.fromkeys(removed, False))
        return False, [h for h, is_stored in last.items() if is_stored], [h for h, kept in last.items() if not kept]


class EventSocket:
    """Reads an engine's KV cache events into a log, over a Unix socket in a private directory."""

    def __init__(self, log: BlockLog) -> None:
        self._log = log
        self._directory = Path(tempfile.mkdtemp(prefix="octavo-"))
        self.endpoint = f"ipc://{self._directory}/kv"
        self._task: asyncio.Task[None] | None = None
        self._connected = asyncio.Event()

    def open(self) -> None:
        """Call it before each start of an engine, which binds the socket."""
        self._connected.clear()
        self._directory.mkdir(mode=0o700, exist_ok=True)
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name="octavo-kv-events")

    async def _read(self) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        watch = asyncio.create_task(self._watch(socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)))
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.subscribe(b"")
            socket.connect(self.endpoint)
            while True:
                frames = await socket.recv_multipart()
                with contextlib.suppress(msgspec.DecodeError, IndexError):
                    self._log.apply(_BATCH.decode(frames[2]).events)
        finally:
            watch.cancel()
            socket.disable_monitor()
            socket.close()
            context.destroy(linger=0)

    async def _watch(self, monitor: Any) -> None:
        """Remove the directory after each connection, which outlives it: a process that is killed leaves none."""
        while True:
            await monitor.recv_multipart()
            shutil.rmtree(self._directory, ignore_errors=True)
            self._connected.set()

    async def connected(self) -> None:
        """Wait for the connection to an engine: earlier events are lost, and would only make the router's choice
        worse."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), CONNECT_S)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        shutil.rmtree(self._directory, ignore_errors=True)
