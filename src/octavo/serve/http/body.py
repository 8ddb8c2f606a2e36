"""Request bodies, from their first byte until they are parsed: bounded one by one and in sum, parsed in turns."""

from __future__ import annotations

import asyncio
import contextlib
import io
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from octavo.serve.http.context import Receive, RequestContext
from octavo.serve.job_queue import JobQueue
from octavo.serve.openai.errors import ApiError
from octavo.turns import Room

T = TypeVar("T")

BODY_RATE_WINDOW_S = 30.0
MIN_BODY_BYTES_PER_S = 1024
PAUSE = "octavo.pause"
"""The scope extension that stops reading the connection until the next part is received."""
MAX_BYTES = 256 << 20
"""Limit of all bodies that are read or wait to be parsed."""
LARGE_BYTES = 256 << 10
"""Larger bodies are parsed one at a time. The event loop spends at most half of its time on them. They are in pages of
their own, which return to the system: the heap keeps what was between other objects."""
LARGE_PART_BYTES = 64 << 10
PART_BYTES_PER_S = 128 << 20
"""Rate of larger parts of all bodies, those discarded included. uvloop reads 256 KiB of each connection in a turn."""


class ClientDisconnected(Exception):  # noqa: N818 - not an error
    """The client disconnected before its body was complete."""


class Bodies:
    """The bodies of requests in progress."""

    def __init__(self) -> None:
        self.room: Room[RequestContext] = Room(MAX_BYTES, self._drop)
        self._tasks: dict[RequestContext, asyncio.Task[Any]] = {}  # that read a body, or wait to parse it
        self._queue: JobQueue[Any] = JobQueue(1, MAX_BYTES, "too many large bodies wait", spare=False)
        self._parts: JobQueue[None] = JobQueue(1, MAX_BYTES, "", spare=False)
        self._free_at = 0.0

    async def read(self, context: RequestContext, receive: Receive, limit: int) -> None:
        """Reads the body of a JSON request into the context.

        Raises `ApiError`: 415 for other media types and encodings, 413 beyond `limit` bytes, 408 below
        `MIN_BODY_BYTES_PER_S`, 429 if bodies of others need the room.
        """
        length = check_headers(context, limit)
        with self._droppable(context):
            if length and not self.room.take(context, context.tenant.number, length):
                raise _no_room()
            context.body = await self._read(context, receive, limit, length)

    async def _read(self, context: RequestContext, receive: Receive, limit: int, length: int) -> bytes | memoryview:
        size = length or limit
        is_large = size > LARGE_BYTES
        store: Any = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if is_large else io.BytesIO()
        num_bytes = 0
        window_end, window_bytes = time.monotonic() + BODY_RATE_WINDOW_S, 0
        while True:
            try:
                async with asyncio.timeout(max(0.0, window_end - time.monotonic())):
                    message = await receive()
            except TimeoutError:
                if num_bytes - window_bytes < BODY_RATE_WINDOW_S * MIN_BODY_BYTES_PER_S:
                    raise ApiError(408, "request_timeout", "the body arrives too slowly", close=True) from None
                window_end, window_bytes = time.monotonic() + BODY_RATE_WINDOW_S, num_bytes
                continue
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            part = message.pop("body", b"")
            num_bytes += len(part)
            if num_bytes > limit:
                raise _too_large(limit)
            if part and not length and not self.room.take(context, context.tenant.number, len(part)):
                raise _no_room()
            store.write(part)
            if not message.get("more_body", False):
                return memoryview(store)[:num_bytes] if is_large else store.getvalue()
            num_new, part = len(part), b""  # a body that stalls holds none
            await self._pause(context, num_new)

    async def discard(self, context: RequestContext, receive: Receive) -> None:
        """Reads the rest of a refused body, until the client disconnects."""
        while (message := await receive())["type"] != "http.disconnect":
            await self._pause(context, len(message.pop("body", b"")))

    async def _pause(self, context: RequestContext, num_bytes: int) -> None:
        """Waits until the part after one of this size may be read."""
        if num_bytes > LARGE_PART_BYTES:
            if (pause := context.scope.get("extensions", {}).get(PAUSE)) is not None:
                pause["call"]()
            await self._parts.run(lambda: asyncio.sleep(num_bytes / PART_BYTES_PER_S), context.tenant.number, 0)

    @contextlib.contextmanager
    def _droppable(self, context: RequestContext) -> Iterator[None]:
        """Context manager: raises `ApiError` 429 as soon as bodies of others need the room."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[context] = task
        try:
            yield
        except asyncio.CancelledError:
            if context in self._tasks:
                raise
            task.uncancel()
            raise _no_room() from None
        finally:
            self._tasks.pop(context, None)

    def _drop(self, context: RequestContext) -> None:
        if (task := self._tasks.pop(context, None)) is not None:
            task.cancel()

    async def parse(self, context: RequestContext, parse: Callable[[bytes], T]) -> T:
        """Parses a body that was read, and forgets it."""
        body, context.body = context.body, b""
        try:
            if len(body) <= LARGE_BYTES:
                return parse(bytes(body))

            async def job() -> T:
                await asyncio.sleep(self._free_at - time.monotonic())
                begin = time.monotonic()
                try:
                    return parse(bytes(body))
                finally:
                    self._free_at = 2 * time.monotonic() - begin

            with self._droppable(context):
                value: T = await self._queue.run(job, context.tenant.number, len(body))
                return value
        finally:
            self.room.release(context)


def check_headers(context: RequestContext, limit: int) -> int:
    """Returns the length of the body that the headers declare, 0 for none. Raises `ApiError` as `Bodies.read` does."""
    headers = dict(context.scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        raise ApiError(415, "unsupported_encoding", "compressed bodies are not supported", close=True)
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        raise ApiError(415, "unsupported_media_type", "Content-Type must be application/json")
    length = headers.get(b"content-length", b"")
    num_bytes = int(length) if length.isdigit() else 0
    if num_bytes > limit:
        raise _too_large(limit)
    return num_bytes


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the body has more than {limit} bytes, the limit", close=True)


def _no_room() -> ApiError:
    text = f"bodies of more than {MAX_BYTES >> 20} MiB arrive at the same time; try again later"
    return ApiError(429, "too_many_bodies", text, retry_after_s=1, close=True)
