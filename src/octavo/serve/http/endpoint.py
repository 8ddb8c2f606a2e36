"""One HTTP exchange, from the body to the last byte: `Endpoint`, an ASGI application for one route.

Every route's answer goes out here, so that what holds for one holds for all: the body is bounded while it is read, the
work ends when the client has gone, a reader that does not read is given up, and an error is a `ApiError`'s body, or an
event once the stream has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.serve.http.json_worker import JsonWorker
from octavo.serve.openai.errors import ApiError, to_api_error
from octavo.serve.tenants import DEFAULT_TENANT, Tenant

logger = logging.getLogger("octavo.serve")

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

SLOW_READER_S = 30.0
"""Seconds that a client may leave its connection full before its request is aborted."""
BODY_WINDOW_S = 30.0
MIN_BODY_BYTES_PER_S = 1024
LINGER_S = 1.0
"""How long the rest of a body that is refused is read and thrown away, so that the answer arrives before the end."""
ABORT = "octavo.abort"
"""The extension of a scope that cuts the connection, with what is still in its buffers."""

encode = msgspec.json.encode


@dataclass(slots=True)
class RequestContext:
    """A request and its state.

    request_id  our own, which names it in the engine, in logs, and in the response's id
    tenant      the holder of its key
    route       the path's pattern, once it is known
    ending      why the server ends it, if it does
    """

    scope: Scope
    request_id: str
    tenant: Tenant = DEFAULT_TENANT
    route: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    status: int = 0
    streaming: EventStream | None = None
    ending: ApiError | None = None

    @property
    def salt(self) -> bytes:
        """Of its tenant."""
        return self.tenant.salt

    @property
    def path_params(self) -> Mapping[str, str]:
        params: Mapping[str, str] = self.scope.get("path_params", {})
        return params

    @property
    def trace(self) -> dict[str, str]:
        """The headers that say which trace of the caller's this is part of."""
        given = {name: self.header(name.encode()) for name in ("traceparent", "tracestate")}
        return {name: value for name, value in given.items() if value is not None}

    def header(self, name: bytes) -> str | None:
        return next((v.decode("latin-1") for k, v in self.scope["headers"] if k == name), None)


@dataclass(slots=True)
class HttpResponse:
    """A whole answer."""

    body: bytes
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class EventStream:
    """An answer of events: chunks, or (event name, chunk). `closing` comes last; `last_words` before it if it fails."""

    events: AsyncGenerator[Any, None]
    closing: bytes = b"data: [DONE]\n\n"
    keep_alive_s: float = 0.0
    last_words: Callable[[ApiError], Any] = ApiError.as_dict


Handler = Callable[[RequestContext], Awaitable[HttpResponse | EventStream]]


def json_response(value: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(encode(value), status)


class Endpoint:
    """`body_limit`: the route takes a JSON object, of so many bytes at most. `running`: where exchanges stand that a
    shutdown may have to end. `streams`: the answer may go on for as long as the client is there."""

    def __init__(
        self,
        route: str,
        handler: Handler,
        *,
        bodies: JsonWorker,
        body_limit: Callable[[], int] | None = None,
        running: set[ActiveRequest] | None = None,
        streams: bool = False,
    ) -> None:
        self._streams = streams
        self._route = route
        self._handler = handler
        self._body_limit = body_limit
        self._bodies = bodies
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context: RequestContext = scope["state"]["context"]
        context.route = self._route
        try:
            if self._body_limit is not None:
                context.body = await self._bodies.parse(await read_body(scope, receive, self._body_limit()))
        except _ClientDisconnected:
            context.status = 499
            return
        except Exception as error:
            problem = _answer_to(error, context)
            await send_error(context, send, problem)
            if problem.close:
                await _linger(receive)
                await send({"type": "http.response.body", "body": b""})
            return
        if self._body_limit is None and not self._streams:
            await self._answer(context, send)
            return
        work = asyncio.ensure_future(self._answer(context, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        running = ActiveRequest(context, work, endless=self._streams)
        if self._running is not None:
            self._running.add(running)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                context.status = 499
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            if self._running is not None:
                self._running.discard(running)

    async def _answer(self, context: RequestContext, send: Send) -> None:
        try:
            try:
                reply = await self._handler(context)
                if isinstance(reply, EventStream):
                    await self._stream(context, send, reply)
                else:
                    await send_response(context, send, reply)
            except asyncio.CancelledError:
                if context.ending is None:
                    raise
                raise context.ending from None
        except TimeoutError:
            logger.warning("request %s: its reader takes nothing; it is aborted", context.request_id)
            context.status = 499
            if (abort := context.scope.get("extensions", {}).get(ABORT)) is not None:
                abort["call"]()
        except Exception as error:
            problem = _answer_to(error, context)
            if (stream := context.streaming) is None:
                await send_error(context, send, problem)
                return
            with contextlib.suppress(TimeoutError):
                await _put(send, _event(stream.last_words(problem)) + stream.closing, more=False)

    async def _stream(self, context: RequestContext, send: Send, stream: EventStream) -> None:
        """The first event comes before the status: a request that fails until then has a status that says so."""
        async with contextlib.aclosing(stream.events) as events:
            first = await anext(events, None)
            context.status, context.streaming = 200, stream
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            async with asyncio.timeout(SLOW_READER_S):
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            if first is not None:
                await _put(send, _event(first))
                async with contextlib.aclosing(_with_comments(events, stream.keep_alive_s)) as items:
                    async for item in items:
                        await _put(send, b": keep-alive\n\n" if item is None else _event(item))
        await _put(send, stream.closing, more=False)


def _answer_to(error: Exception, context: RequestContext) -> ApiError:
    """What its client is told; a bug of ours is told to the log."""
    problem = to_api_error(error, context.request_id)
    if problem.code == "internal_error":
        logger.error("request %s failed", context.request_id, exc_info=error)
    return problem


@dataclass(frozen=True, slots=True, eq=False)
class ActiveRequest:
    """An exchange that is being answered. `endless`: until its client goes."""

    context: RequestContext
    work: asyncio.Future[None]
    endless: bool = False

    def end(self, problem: ApiError) -> None:
        """The client gets `problem` as its answer, or as the end of its stream."""
        self.context.ending = problem
        self.work.cancel()


class _ClientDisconnected(Exception):  # noqa: N818 - nothing is wrong
    """The client has gone before its body was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """A body of JSON. Raises `ApiError`: 415 for another kind, 413 beyond `limit` bytes, 408 for one that trickles."""
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        raise ApiError(415, "unsupported_encoding", "bodies are not decompressed; send it plain", close=True)
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "unsupported_media_type", "the body must be application/json; say so in Content-Type")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    num_bytes = 0
    window_end, window_bytes = time.monotonic() + BODY_WINDOW_S, 0
    while True:
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(0.0, window_end - time.monotonic())):
                message = await receive()
        except TimeoutError:
            if num_bytes - window_bytes < BODY_WINDOW_S * MIN_BODY_BYTES_PER_S:
                raise ApiError(408, "request_timeout", "the body comes too slowly", close=True) from None
            window_end, window_bytes = time.monotonic() + BODY_WINDOW_S, num_bytes
            continue
        if message["type"] == "http.disconnect":
            raise _ClientDisconnected
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes > limit:
            raise _too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body is larger than {limit} bytes, the most taken here", close=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _linger(receive: Receive) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await _disconnected(receive)


async def _put(send: Send, data: bytes, *, more: bool = True) -> None:
    async with asyncio.timeout(SLOW_READER_S):
        await send({"type": "http.response.body", "body": data, "more_body": more})


def _event(item: Any) -> bytes:
    name, chunk = item if isinstance(item, tuple) else ("", item)
    head = f"event: {name}\n".encode() if name else b""
    return b"".join((head, b"data: ", encode(chunk), b"\n\n"))


async def _with_comments(events: AsyncGenerator[Any, None], silence_s: float) -> AsyncGenerator[Any, None]:
    """The events, and None whenever none has come for `silence_s`; 0: never."""
    if not silence_s:
        async for item in events:
            yield item
        return
    while True:
        coming = asyncio.ensure_future(anext(events, _END))
        try:
            while not (await asyncio.wait({coming}, timeout=silence_s))[0]:
                yield None
            item = await coming
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
        if item is _END:
            return
        yield item


_END = object()


async def send_response(context: RequestContext, send: Send, reply: HttpResponse, *, more: bool = False) -> None:
    context.status = reply.status
    headers = {"content-type": reply.content_type, "content-length": str(len(reply.body)), **reply.headers}
    async with asyncio.timeout(SLOW_READER_S):
        await send(
            {
                "type": "http.response.start",
                "status": reply.status,
                "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()],
            }
        )
        await send({"type": "http.response.body", "body": reply.body, "more_body": more})


async def send_error(context: RequestContext, send: Send, problem: ApiError) -> None:
    """One that closes the connection leaves the response open for `_linger`."""
    reply = HttpResponse(problem.body(), problem.status, headers=problem.headers())
    open_end = problem.close and problem.status in (408, 413, 415)
    await send_response(context, send, reply, more=open_end)


def new_request_id() -> str:
    return secrets.token_hex(16)
