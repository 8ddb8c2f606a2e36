"""`Endpoint`, the ASGI application of one route: reads the body, calls the handler and sends its response.

All routes share it. The body is bounded while it is read. The handler is cancelled when the client disconnects, or when
it does not read the response. An error becomes an `ApiError` response, or an event once a stream has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from octavo.serve.http.body import Bodies, ClientDisconnected
from octavo.serve.http.context import (
    EventStream,
    HttpResponse,
    Receive,
    RequestContext,
    Scope,
    Send,
    encode,
)
from octavo.serve.openai.errors import ApiError, to_api_error

logger = logging.getLogger("octavo.serve")

SEND_TIMEOUT_S = 30.0
"""Time for which a client may leave its connection's buffers full before its request is aborted."""
LINGER_S = 1.0
"""Time for which the rest of a refused body is read and discarded, so that the client can read the response."""
ABORT = "octavo.abort"
"""The scope extension that closes the connection at once and drops its buffers."""

Handler = Callable[[RequestContext], Awaitable[HttpResponse | EventStream]]


class Endpoint:
    """The ASGI application of one route.

    body_limit  the route reads a JSON body of at most this many bytes; None: no body
    bodies      those of all routes
    active      collects requests that a shutdown may have to end
    streams     the response may last until the client disconnects
    """

    def __init__(
        self,
        route: str,
        handler: Handler,
        *,
        body_limit: Callable[[], int] | None = None,
        bodies: Bodies | None = None,
        active: set[ActiveRequest] | None = None,
        streams: bool = False,
    ) -> None:
        self._streams = streams
        self._route = route
        self._handler = handler
        self._body_limit = body_limit
        self._bodies = bodies or Bodies()
        self._active = active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope["state"]["context"]
        context.route = self._route
        try:
            await self._run(context, receive, send)
        finally:
            self._bodies.room.release(context)

    async def _run(self, context: RequestContext, receive: Receive, send: Send) -> None:
        try:
            if self._body_limit is not None:
                await self._bodies.read(context, receive, self._body_limit())
        except ClientDisconnected:
            context.status = 499
            return
        except Exception as error:
            api_error = _log_bug(error, context)
            await send_error(context, send, api_error)
            if api_error.close:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        await self._bodies.discard(context, receive)
                await send({"type": "http.response.body", "body": b""})
            return
        if self._body_limit is None and not self._streams:
            await self._respond(context, send)
            return
        task = asyncio.ensure_future(self._respond(context, send))
        disconnect = asyncio.ensure_future(_disconnected(receive))
        request = ActiveRequest(context, task, open_ended=self._streams)
        if self._active is not None:
            self._active.add(request)
        try:
            await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                context.status = 499
        finally:
            for future in (task, disconnect):
                future.cancel()
            await asyncio.gather(task, disconnect, return_exceptions=True)
            if self._active is not None:
                self._active.discard(request)

    async def _respond(self, context: RequestContext, send: Send) -> None:
        try:
            try:
                response = await self._handler(context)
                if isinstance(response, EventStream):
                    await self._stream(context, send, response)
                else:
                    await send_response(context, send, response)
            except asyncio.CancelledError:
                if context.shutdown_error is None:
                    raise
                raise context.shutdown_error from None
        except TimeoutError:
            logger.warning("request %s is aborted: the client does not read its response", context.request_id)
            context.status = 499
            if (abort := context.scope.get("extensions", {}).get(ABORT)) is not None:
                abort["call"]()
        except Exception as error:
            api_error = _log_bug(error, context)
            if (stream := context.stream) is None:
                await send_error(context, send, api_error)
                return
            with contextlib.suppress(TimeoutError):
                await _send_chunk(send, _sse_event(stream.error_event(api_error)) + stream.end_marker, more=False)

    async def _stream(self, context: RequestContext, send: Send, stream: EventStream) -> None:
        """Waits for the first event before it sends the status, so that an earlier failure gets an error status."""
        async with contextlib.aclosing(stream.events) as events:
            first = await anext(events, None)
            context.status, context.stream = 200, stream
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if first is not None:
                await _send_chunk(send, _sse_event(first))
                async with contextlib.aclosing(_with_keep_alives(events, stream.keep_alive_s)) as items:
                    async for item in items:
                        await _send_chunk(send, b": keep-alive\n\n" if item is None else _sse_event(item))
        await _send_chunk(send, stream.end_marker, more=False)


def _log_bug(error: Exception, context: RequestContext) -> ApiError:
    """The error's API error. An internal error is logged with its traceback.

    The API error has none: its frames would hold the body, until the collector finds that one of them holds the error.
    """
    api_error = to_api_error(error, context.request_id)
    if api_error.code == "internal_error":
        logger.error("request %s failed", context.request_id, exc_info=error)
    api_error.__context__ = None
    return api_error.with_traceback(None)


@dataclass(frozen=True, slots=True, eq=False)
class ActiveRequest:
    """A request in progress. `open_ended`: it lasts until the client disconnects."""

    context: RequestContext
    task: asyncio.Future[None]
    open_ended: bool = False

    def end(self, api_error: ApiError) -> None:
        """Ends the request: the client gets `api_error` as its response or as the last event of its stream."""
        self.context.shutdown_error = api_error
        self.task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_chunk(send: Send, data: bytes, *, more: bool = True) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send({"type": "http.response.body", "body": data, "more_body": more})


def _sse_event(item: Any) -> bytes:
    name, chunk = item if isinstance(item, tuple) else ("", item)
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", encode(chunk), b"\n\n"))


async def _with_keep_alives(events: AsyncGenerator[Any, None], silence_s: float) -> AsyncGenerator[Any, None]:
    """Yields the events, and None after every `silence_s` seconds without one; 0: never."""
    if not silence_s:
        async for item in events:
            yield item
        return
    while True:
        next_event = asyncio.ensure_future(anext(events, _END))
        try:
            while not (await asyncio.wait({next_event}, timeout=silence_s))[0]:
                yield None
            item = await next_event
        finally:
            if not next_event.done():
                next_event.cancel()
                await asyncio.gather(next_event, return_exceptions=True)
        if item is _END:
            return
        yield item


_END = object()


async def send_response(context: RequestContext, send: Send, response: HttpResponse, *, more: bool = False) -> None:
    context.status = response.status
    headers = {"content-type": response.content_type, "content-length": str(len(response.body)), **response.headers}
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
            }
        )
        await send({"type": "http.response.body", "body": response.body, "more_body": more})


async def send_error(context: RequestContext, send: Send, api_error: ApiError) -> None:
    """Sends an error response. One that closes the connection stays open for `Bodies.discard`."""
    response = HttpResponse(api_error.body(), api_error.status, headers=api_error.headers())
    open_end = api_error.close and api_error.status in (408, 413, 415, 429)
    await send_response(context, send, response, more=open_end)
