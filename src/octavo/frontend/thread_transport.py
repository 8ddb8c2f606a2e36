"""`ThreadTransport`: an `EngineClient`'s way to an engine on a thread of the same process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from octavo.engine.engine import Engine
from octavo.engine.engine_request import EngineRequest
from octavo.engine.process.thread import Delivery, EngineThread
from octavo.engine.query import GetStats, Query, Unpin
from octavo.engine.request_update import RequestUpdate
from octavo.engine.stats import Health, StatsSnapshot
from octavo.engine.text_processor import TextProcessor
from octavo.errors import ParameterError
from octavo.frontend.client_request import ClientRequest
from octavo.frontend.request_stream import RequestStream

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _LoopMailbox:
    """Passes the deliveries of a step to an event loop, with one wake-up. Mailboxes of one loop are equal."""

    loop: asyncio.AbstractEventLoop
    transport: ThreadTransport

    def __call__(self, deliveries: list[Delivery]) -> None:
        self.loop.call_soon_threadsafe(self.transport.receive, deliveries)


class ThreadTransport:
    """Readers on any number of event loops, and one engine.

    text   compiles grammars
    """

    router = None

    def __init__(self, engine: Engine, text: TextProcessor) -> None:
        self.engine = EngineThread(engine)
        self.max_model_len = engine.limits.max_model_len
        self._eos_token_ids = engine.limits.eos_token_ids
        self._text = text
        self.streams: dict[str, RequestStream] = {}  # of unfinished requests, by id
        self._lock = threading.RLock()  # guards `streams`

    @property
    def engines(self) -> Sequence[ThreadTransport]:
        return (self,)

    @property
    def is_running(self) -> bool:
        return self.engine.is_running

    async def start(self) -> None:
        """The engine accepts requests already."""

    async def submit(self, request: EngineRequest) -> RequestStream:
        compiling = self._text.submit_grammar(request.params, request.tenant)
        if compiling is not None:
            try:  # a cancelled caller must not cancel it for others
                request.grammar = await asyncio.shield(asyncio.wrap_future(compiling))
            finally:
                self._text.withdraw_grammar(compiling)
        stream = self._open(request)
        try:
            added = self.engine.add([request], _LoopMailbox(stream.loop, self))
        except BaseException:
            self._forget(stream)
            raise
        try:
            await asyncio.wrap_future(added)
        except BaseException:
            self.close_stream(stream)
            if request.pin:  # if the name was taken, the other pin stays
                self.engine.call_later(
                    lambda engine: added.cancelled() or added.exception() or engine.scheduler.unpin(request.request_id)
                )
            raise
        return stream

    def _open(self, request: EngineRequest) -> RequestStream:
        stream, name = RequestStream(ClientRequest(request, eos_token_ids=self._eos_token_ids)), request.request_id
        with self._lock:
            if name in self.streams:
                raise ParameterError(f"a request {name!r} is running already; ids must differ", param="request_id")
            self.streams[name] = stream
        return stream

    def _forget(self, stream: RequestStream) -> bool:
        """False if it was forgotten before."""
        with self._lock:
            is_known = self.streams.get(stream.new.request_id) is stream
            if is_known:
                del self.streams[stream.new.request_id]
        return is_known

    def receive(self, deliveries: list[Delivery]) -> None:
        """Apply what is new, on the event loop of the requests' readers."""
        for request, update in deliveries:
            stream = self.streams.get(request.request_id)
            if stream is None or stream.new is not request:
                continue  # its reader has left
            if isinstance(update, RequestUpdate):
                for index in stream.request.apply_update(update):
                    self.engine.stop(request, index)
                if stream.request.finished:
                    self._forget(stream)
                stream.notify()
            else:
                self._forget(stream)
                stream.fail(update)

    def close_stream(self, stream: RequestStream) -> None:
        if self._forget(stream):
            self.engine.discard([stream.new])

    async def abort(self, request_id: str) -> bool:
        return await asyncio.wrap_future(self.engine.abort(request_id))

    def discard_pin(self, request_id: str) -> None:
        self.engine.call_later(lambda engine: engine.scheduler.unpin(request_id))

    async def unpin(self, request_id: str) -> int | None:
        return await self.query(Unpin(request_id))

    async def query(self, query: Query[R], /) -> R:
        return await asyncio.wrap_future(self.engine.call(query.answer))

    async def stats(self) -> StatsSnapshot:
        return await self.query(GetStats())

    def health(self) -> Health:
        return Health("running" if self.is_running else "failed", self.engine.uptime_s)

    def close(self) -> None:
        self.engine.close()
