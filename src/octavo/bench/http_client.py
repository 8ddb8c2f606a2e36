"""A client for load: HTTP/1.1 that costs little, and tells when every piece of an answer came.

It shares the machine with the server that it measures more often than not. So pieces go from the socket through
httptools' parser to a callback, in the call that the event loop makes when they arrive: no task wakes up for them, and
the time that the callback reads is the time of arrival.
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
MOST_REASON_BYTES = 4096

Take = Callable[[bytes], None]
"""Called with each piece of a body of status 200, as it comes."""


class LostConnectionError(ConnectionError):
    """The server took no connection, or closed it before the answer was whole. `unanswered`: nothing of one had come.

    A failure among others to whoever counts them, so it does not stand in `octavo.errors`.
    """

    def __init__(self, message: str, *, unanswered: bool = False) -> None:
        super().__init__(message)
        self.unanswered = unanswered


@dataclass(slots=True)
class Answer:
    """What came. `body` is all of it without a callback; with one, what an error says."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)


class HTTPClient:
    """Requests to one server, over as many connections as are under way at a time; they are kept and used again."""

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

    async def get(self, path: str) -> Answer:
        return await self._ask(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n".encode("latin-1"), None)

    async def post(self, path: str, body: bytes, take: Take | None = None) -> Answer:
        """The answer to a JSON body, when it is whole. Raises `LostConnectionError`.

        Cancelled, it closes its connection, which is how a server learns that nobody waits any more.
        """
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        return await self._ask(f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body, take)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _ask(self, request: bytes, take: Take | None) -> Answer:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    return await self._exchange(connection, request, take)
                except LostConnectionError as error:  # a server may close what was idle just as it is used again
                    if not error.unanswered:
                        raise
        return await self._exchange(await self._connect(), request, take)

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

    async def _exchange(self, connection: _Connection, request: bytes, take: Take | None) -> Answer:
        try:
            answer = await connection.ask(request, take)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return answer


class _Connection(asyncio.Protocol):
    """One request after another. The parser calls the methods that begin with `on_`."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._take: Take | None = None
        self._has_end = False  # the answer says where it ends; of another the connection's end is its own

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, request: bytes, take: Take | None) -> Answer:
        self._parser = httptools.HttpResponseParser(self)
        self._answer, self._take = None, take
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._done

    # -- the transport's calls -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():  # nobody asked for it
            self._transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(error.__context__ or error)
        except httptools.HttpParserError as error:
            self._fail(LostConnectionError(f"the answer is no HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is None:
            self._fail(LostConnectionError("the server closed the connection without an answer", unanswered=True))
        elif exc is None and self._answer.status and not self._has_end and self._done is not None:
            if not self._done.done():
                self._done.set_result(self._answer)
        else:
            self._fail(LostConnectionError("the connection ended before the answer"))

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
            self._transport.abort()

    # -- the parser's calls --------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._answer = Answer()
        self._has_end = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_end |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        assert self._answer is not None
        self._answer.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        assert self._answer is not None
        if self._take is not None and self._answer.status == 200:
            self._take(piece)
        elif self._take is None or len(self._answer.body) < MOST_REASON_BYTES:
            self._answer.body += piece

    def on_message_complete(self) -> None:
        assert self._answer is not None and self._done is not None
        if self._answer.status == 100:  # "go on": the answer is still to come
            return
        if not self._parser.should_keep_alive():
            with contextlib.suppress(RuntimeError):
                self._transport.close()
        if not self._done.done():
            self._done.set_result(self._answer)
