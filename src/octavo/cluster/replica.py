"""`EngineReplica`: an engine process, and the streams of the fronts that use it. It carries tokens and makes no text.

It keeps no request: the front that sent one also has its prompt, its tokens so far and its seed. When the engine dies
or hangs, every stream ends with `EngineFailed` at once, and its front goes on elsewhere. `Supervisor` then starts the
next engine here. When this process dies, the engine process notices its broken lifeline and exits, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, replace
from typing import Any, TypeAlias

import msgspec

from octavo.cluster.block_log import BlockLog, EventSocket
from octavo.cluster.messages import REFUSED, Report, fingerprint
from octavo.config import EngineArgs
from octavo.engine.process import ipc
from octavo.engine.process.supervisor import EngineTimeouts, Supervisor
from octavo.engine.request_update import RequestUpdate
from octavo.engine.stats import EngineStats, StatsSnapshot
from octavo.errors import EngineError, OctavoError

HEARTBEAT_S = 1.0
"""A stream without tokens carries an empty message so often."""
FRONT_S = 10.0
"""A front that has asked for no report for so long is gone. Its streams end, because nobody reads them."""

_COMMAND = msgspec.msgpack.Decoder(ipc.AddRequest)
_encode = msgspec.msgpack.Encoder().encode
Item: TypeAlias = RequestUpdate | ipc.RequestError | ipc.EngineFailed


class _Stream:
    def __init__(self, front: str) -> None:
        self.front = front
        self.items: asyncio.Queue[Item] = asyncio.Queue()


class EngineReplica:
    """One replica. All methods are for one event loop."""

    def __init__(self, args: EngineArgs, timeouts: EngineTimeouts | None = None) -> None:
        self._fingerprint = fingerprint(args)
        self._blocks = BlockLog()
        self._socket = EventSocket(self._blocks)
        events = {"enable_kv_cache_events": True, "endpoint": self._socket.endpoint}
        self.supervisor = Supervisor(
            asdict(replace(args, kv_events_config=events)),
            on_ready=self._on_ready,
            on_step=self._on_step,
            on_down=self._on_down,
            on_failed=self._on_failed,
            timeouts=timeouts,
        )
        self._ready: ipc.Ready | None = None
        self._stats = StatsSnapshot(EngineStats(), None)
        self._streams: dict[str, _Stream] = {}
        self._fronts: dict[str, float] = {}  # when each front last asked for a report
        self._numbers = itertools.count()
        self._replies: dict[int, asyncio.Future[ipc.RpcReply | None]] = {}

    async def start(self) -> None:
        """Start the engine and wait until it accepts requests. Raises the root cause if it does not start."""
        self._socket.open()
        try:
            await self.supervisor.start()
            await self._socket.connected()
        except BaseException:
            self._socket.close()
            raise

    def check(self) -> None:
        """Raises `EngineError` if there will be no further engine here."""
        health = self.supervisor.health()
        if health.state == "failed":
            raise EngineError(f"the engine has failed: {health.reason}")

    def close(self) -> None:
        self._socket.close()
        self.supervisor.close()

    # -- for the fronts ------------------------------------------------------------------------------------------------

    async def generate(self, front: str, command: bytes) -> AsyncGenerator[bytes, None]:
        """Run one request, an encoded `AddRequest`; yields encoded `StepReport`s of its own, or one `EngineFailed`.

        The first message is empty: the engine has the request. So is one after a while without news. Closing the
        generator aborts the request.
        """
        add = _COMMAND.decode(command)
        if (problem := self._problem(add.request_id)) is not None:
            yield _encode(problem)
            return
        stream = self._streams[add.request_id] = _Stream(front)
        self._fronts.setdefault(front, time.monotonic())
        self._send(add)
        finished = False
        try:
            yield b""
            while not finished:
                items = await self._new_items(stream)
                if failed := [item for item in items if isinstance(item, ipc.EngineFailed)]:
                    finished = True
                    yield _encode(failed[0])
                    return
                updates = [item for item in items if isinstance(item, RequestUpdate)]
                errors = [item for item in items if isinstance(item, ipc.RequestError)]
                finished = bool(errors) or any(update.finished for update in updates)
                yield _encode(ipc.StepReport(updates, errors, [])) if items else b""
        finally:
            del self._streams[add.request_id]
            if not finished:
                self._send(ipc.AbortRequest(add.request_id))

    def _problem(self, request_id: str) -> ipc.EngineFailed | None:
        if not self.supervisor.is_up:
            return ipc.EngineFailed(REFUSED, f"the engine is {self.supervisor.health().state}")
        if request_id in self._streams:  # the engine would take two of one name for a broken connection
            return ipc.EngineFailed(REFUSED, f"a request {request_id!r} is running already")
        return None

    async def _new_items(self, stream: _Stream) -> list[Item]:
        """All that is new of a stream; [] after a while without."""
        try:
            items = [await asyncio.wait_for(stream.items.get(), HEARTBEAT_S)]
        except TimeoutError:
            if time.monotonic() - self._fronts.get(stream.front, 0.0) > FRONT_S:
                raise EngineError("the front that sent the request is gone") from None
            return []
        while not stream.items.empty():
            items.append(stream.items.get_nowait())
        return items

    def stop(self, request_id: str, index: int) -> None:
        """End one sample at a stop string, which its front has found."""
        if request_id in self._streams:
            self._send(ipc.StopSample(request_id, index))

    async def query(self, query: bytes) -> bytes:
        """Ask the engine an encoded `Query`; returns an encoded `RpcReply`, or b"" if the engine is down."""
        if not self.supervisor.is_up:
            return b""
        number = next(self._numbers)
        future = self._replies[number] = asyncio.get_running_loop().create_future()
        self._send(ipc.RpcCall(number, msgspec.msgpack.decode(query)))
        try:
            reply = await future
            return b"" if reply is None else _encode(reply)
        finally:
            del self._replies[number]

    def report(self, front: str, since: int) -> bytes:
        """The replica's state, with the changes of its prefix cache after change number `since`."""
        self._fronts[front] = time.monotonic()
        report = Report(self._fingerprint, self.supervisor.health(), self._stats, self._ready)
        report.sequence = self._blocks.sequence
        report.is_whole, report.stored, report.removed = self._blocks.since(since)
        return _encode(report)

    # -- from the engine -----------------------------------------------------------------------------------------------

    def _send(self, command: ipc.Command) -> None:
        if self.supervisor.is_up:
            with contextlib.suppress(OctavoError):
                self.supervisor.send([ipc.encode_command(command)])

    def _on_ready(self, ready: ipc.Ready) -> None:
        self._ready = ready

    def _on_step(self, step: ipc.StepReport) -> None:
        if step.stats is not None:
            self._stats = step.stats
        items: list[Any] = [*step.updates, *step.errors]
        for item in items:
            if (stream := self._streams.get(item.request_id)) is not None:
                stream.items.put_nowait(item)
        for reply in step.replies:
            future = self._replies.get(reply.number)
            if future is not None and not future.done():
                future.set_result(reply)

    def _on_down(self) -> None:
        self._end_streams(f"the engine is gone: {self.supervisor.health().reason}")
        self._blocks.clear()
        self._socket.open()

    def _on_failed(self, error: OctavoError) -> None:
        self._end_streams(str(error))

    def _end_streams(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.items.put_nowait(ipc.EngineFailed("EngineError", reason))
        for future in self._replies.values():
            if not future.done():
                future.set_result(None)
