"""A cheap HTTP/1.1 client for load tests that times each chunk of a response.

It usually shares the machine with the server that it measures. So chunks go from the socket through httptools' parser
to a callback, within the event loop's call for their arrival. No task wakes up for them, and the callback reads the
time of arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

CONNECT_S = 30.0
MAX_ERROR_BYTES = 4096

OnChunk = Callable[[bytes], None]
"""Called with each chunk of a body with status 200, on arrival."""


class LostConnectionError(ConnectionError):
    """The server accepted no connection, or closed it early. `unanswered`: before the first byte of a response.

    Callers count it as a failed request; it is not part of `octavo.errors`.
    """

    def __init__(self, message: str, *, unanswered: bool = False) -> None:
        super().__init__(message)
        self.unanswered = unanswered


@dataclass(slots=True)
class Response:
    """A response. `body` is complete without a callback; with a callback it has only the body of an error."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)


class HTTPClient:
    """Requests to one server, with one connection per concurrent request. Idle connections are reused."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        head = {"Host": parts.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Response:
        return await self._ask(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode("latin-1"), None)

    async def post(self, path: str, body: bytes, on_chunk: OnChunk | None = None) -> Response:
        """Send a JSON body and return the complete response. Raises `LostConnectionError`.

        Cancellation closes the connection, which makes the server abort the request.
        """
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        return await self._ask(f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body, on_chunk)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _ask(self, request: bytes, on_chunk: OnChunk | None) -> Response:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._exchange(connection, request, on_chunk)
                except LostConnectionError as error:  # the server may close an idle connection just before its reuse
                    if not error.unanswered:
                        raise
        return await self._exchange(await self._connect(), request, on_chunk)

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            text = f"no connection to {self._host}:{self._port} in {CONNECT_S:g} s"
            raise LostConnectionError(text) from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise LostConnectionError(f"no connection to {self._host}:{self._port}: {reason}") from None
        return connection

    async def _exchange(self, connection: _Connection, request: bytes, on_chunk: OnChunk | None) -> Response:
        try:
            response = await connection.ask(request, on_chunk)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return response


class _Connection(asyncio.Protocol):
    """A connection with one request at a time. The parser calls the `on_` methods."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._response: Response | None = None
        self._done: asyncio.Future[Response] | None = None
        self._on_chunk: OnChunk | None = None
        self._has_end = False  # whether headers give the body's length; otherwise the connection's end ends it

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, request: bytes, on_chunk: OnChunk | None) -> Response:
        self._parser = httptools.HttpResponseParser(self)
        self._response, self._on_chunk = None, on_chunk
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    # -- the transport's calls -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():  # data without a request
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(LostConnectionError(f"the response is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._response is None:
            self._fail(LostConnectionError("the server closed the connection without a response", unanswered=True))
        elif exc is None and self._response.status and not self._has_end and self._done is not None:
            if not self._done.done():
                self._done.set_result(self._response)
        else:
            self._fail(LostConnectionError("the connection ended before the response"))

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
            self._transport.abort()

    # -- the parser's calls --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._response = Response()
        self._has_end = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_end |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        assert self._response is not None
        self._response.status = self._parser.get_status_code()

    def on_body(self, chunk: bytes) -> None:
        assert self._response is not None
        if self._on_chunk is not None and self._response.status == 200:
            self._on_chunk(chunk)
        elif self._on_chunk is None or len(self._response.body) < MAX_ERROR_BYTES:
            self._response.body += chunk

    def on_message_complete(self) -> None:
        assert self._response is not None and self._done is not None
        if self._response.status == 100:  # "continue": the response follows
            return
        if not self._parser.should_keep_alive():
            with contextlib.suppress(RuntimeError):
                self._transport.close()
        if not self._done.done():
            self._done.set_result(self._response)
