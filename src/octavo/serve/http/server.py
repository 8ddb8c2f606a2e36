"""The HTTP server: uvicorn with limits on connections and headers, and with a graceful shutdown.

uvicorn's parser accepts headers of any size and waits for them without a limit. `LimitedHttpProtocol` bounds both.

After the first SIGTERM or SIGINT the server keeps listening: /health is answered and new requests get 503. It stops
when all running requests have ended or `shutdown_timeout` has passed. The second signal stops it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from octavo.errors import OctavoError
from octavo.serve.app import App
from octavo.serve.args import ServeArgs
from octavo.serve.http.endpoint import (
    ABORT,
    LINGER_S,
    SLOW_READER_S,
    Receive,
    RequestContext,
    Scope,
    Send,
    new_request_id,
    send_error,
)
from octavo.serve.http.middleware import OPEN_PATHS, printable_id
from octavo.serve.metrics import StatsLogger
from octavo.serve.openai.errors import ApiError, shutting_down

logger = logging.getLogger("octavo.serve")

HEADER_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
KEEP_ALIVE_S = 5
BACKLOG = 4096
STATS_PERIOD_S = 10.0
LAST_WORDS_S = 1.0
"""What answers that are cut short get, to say so to their clients."""
MAX_OPEN_FILES = 65_536
MIN_OPEN_FILES = 64
"""Open files without which no server starts: 24 at rest, as many for an engine in a lost one's place, connections."""
PROBE_S = 2.0
"""What a connection beyond the limit gets to say what it wants."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """A connection. Its headers must be complete in `HEADER_TIMEOUT_S`, 408, and within limits, 431. One beyond
    `max_connections` gets 503, unless it asks for /health or /ready: `probes` are those connections, oldest first. One
    more of them than `max_probes` ends the oldest, so that a probe is answered whatever the others do.

    It speaks HTTP/1.1 and nothing else: who asks for another protocol beside (Java's client does, for HTTP/2) is
    answered in this one. Requests that come before the one ahead of them is answered wait their turn.
    """

    def __init__(
        self,
        *args: Any,
        max_connections: int = MAX_OPEN_FILES,
        max_probes: int = 64,
        probes: dict[LimitedHttpProtocol, None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._max_connections, self._max_probes = max_connections, max_probes
        self._probes = {} if probes is None else probes

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._num_idle_bytes = 0  # that have come since there was a request or a part of a body: headers, and trailers
        self._num_ahead_bytes = 0  # that have come while another request waits for its turn
        self._in_headers = True
        self._refused = False
        self._answering: RequestResponseCycle | None = None  # `self.cycle` is the one that came last
        self._timer: asyncio.TimerHandle | None = None
        self._leaving: asyncio.TimerHandle | None = None
        if len(self.connections) - len(self._probes) > self._max_connections:
            self._probes[self] = None
            if len(self._probes) > self._max_probes:
                oldest = next(iter(self._probes))
                del self._probes[oldest]
                oldest.transport.abort()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._leaving is not None:
            self._leaving.cancel()
        self._leave()
        self._probes.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._num_idle_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
            return
        if self._num_idle_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())
            return
        self._num_ahead_bytes = self._num_ahead_bytes + len(data) if self.pipeline else 0
        if self.pipeline and self._num_ahead_bytes <= MAX_HEADER_BYTES:
            self.flow.resume_reading()  # else nobody would see the client go

    def _feed(self, data: bytes) -> None:
        """The parser stops behind headers that ask for another protocol, and takes what follows for that. It is told
        them again without."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                if not self._asks_for_upgrade():
                    return
                version = self.parser.get_http_version().encode()
                first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
                lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
                data = b"\r\n".join([first, *lines, b"", data[stop.args[0] :]])

    def _asks_for_upgrade(self) -> bool:
        """Not by a CONNECT, which the parser stops behind as well, and which is a request that nothing answers to."""
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}}
        self._in_headers = True
        self._num_idle_bytes = 0
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # behind a body they are trailers, of which nothing is read
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        if self._asks_for_upgrade():
            return
        num_bytes = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())
            return
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self.parser.get_http_version() == "1.0"):
            text = "of transfer codings there is chunked alone, once and in HTTP/1.1; send the body plain"
            self._refuse(ApiError(400, "unsupported_transfer_encoding", text, close=True))
            return
        is_probe = self in self._probes
        if is_probe and self.url.partition(b"?")[0] not in OPEN_PATHS:
            self._refuse(self._too_many())
            return
        super().on_headers_complete()
        if is_probe:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused and not self._asks_for_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._see_it_taken()

    def _see_it_taken(self, before: int | None = None) -> None:
        """Most of an answer may still be here, and a connection that is closed waits for its reader for ever."""
        if self._leaving is not None:
            self._leaving.cancel()
        if self._answering is not None and not self._answering.response_complete:
            return  # the next answer is on its way, and looks after its reader itself
        left = self.transport.get_write_buffer_size()
        if before is not None and left >= before:
            self.transport.abort()
        elif left:
            self._leaving = self.loop.call_later(SLOW_READER_S, self._see_it_taken, left)

    def _leave(self) -> None:
        """Whoever is being answered has gone; uvicorn tells so of the request that came last."""
        cycle = self._answering
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """What the parser cannot read; also two lengths that contradict each other."""
        self._refuse(ApiError(400, "invalid_http", "this is no HTTP request", close=True))

    def timeout_keep_alive_handler(self) -> None:
        self._stop_timer()
        super().timeout_keep_alive_handler()

    def _start_timer(self) -> None:
        if self._timer is None:
            limit_s = PROBE_S if self in self._probes else HEADER_TIMEOUT_S
            self._timer = self.loop.call_later(limit_s, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        slow = ApiError(408, "request_timeout", "the request's headers come too slowly", close=True)
        self._refuse(self._too_many() if self in self._probes else slow)

    def _too_many(self) -> ApiError:
        text = f"{self._max_connections} connections are open, as many as may be; try again later"
        return ApiError(503, "too_many_connections", text, retry_after_s=1, close=True)

    def _refuse(self, problem: ApiError) -> None:
        """Answer and close; but first throw away for a moment what still comes, or the answer would be lost with it."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        self._leave()
        cycle = self._answering
        if cycle is None or cycle.response_complete or not cycle.response_started:  # never into the middle of another
            body = problem.body()
            request_id = new_request_id()
            logger.debug("request %s is refused: %d %s", request_id, problem.status, problem.code)
            shown_id = printable_id(dict(self.headers or ()).get(b"x-request-id", b"")) or request_id
            headers = {**problem.headers(), "content-length": str(len(body)), "x-request-id": shown_id}
            lines = b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items())
            self.transport.write(STATUS_LINE[problem.status] + lines + b"\r\n" + body)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _headers_too_large() -> ApiError:
    text = f"headers may have {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} lines"
    return ApiError(431, "headers_too_large", text, close=True)


def uvicorn_config(asgi: Any, settings: ServeArgs, *, max_connections: int | None = None) -> uvicorn.Config:
    most, max_probes = connection_limits(raise_file_limit())
    protocol = functools.partial(
        LimitedHttpProtocol,
        max_connections=most if max_connections is None else max_connections,
        max_probes=max_probes,
        probes={},
    )
    return uvicorn.Config(
        asgi,
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        backlog=BACKLOG,
        root_path=settings.root_path,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.ssl_ca_certs else ssl.CERT_NONE,
    )


class StartupServer(uvicorn.Server):
    """Answers in the place of an `App` whose model is still being loaded: 503, also to /health, on a listening socket.

    async with Starting(settings).on(sock): ...
    """

    def __init__(self, settings: ServeArgs) -> None:
        super().__init__(uvicorn_config(self._refuse, settings))

    @staticmethod
    async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext(scope, new_request_id())
        text = "the server is starting; its model is being loaded"
        headers = {"x-request-id": context.request_id}
        problem = ApiError(503, "starting", text, retry_after_s=5, close=True, headers=headers)
        await send_error(context, send, problem)

    @contextlib.asynccontextmanager
    async def on(self, sock: socket.socket) -> AsyncIterator[None]:
        """While this is entered. The socket goes on listening behind it; who comes in between waits for a moment."""
        serving = asyncio.ensure_future(self.serve(sockets=[sock.dup()]))
        try:
            yield
        finally:
            self.should_exit = True
            await serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # whoever starts it has its own way


class HTTPServer(uvicorn.Server):
    """Serves an `App` until told to leave, twice if need be.

    on_ready         called with the address once requests are taken
    max_connections  as many as there may be open files, unless it is given
    """

    def __init__(
        self, app: App, on_ready: Callable[[str], None] = lambda url: None, *, max_connections: int | None = None
    ) -> None:
        super().__init__(uvicorn_config(app.asgi, app.service.settings, max_connections=max_connections))
        self._app = app
        self._on_ready = on_ready
        self._num_signals = 0
        self._draining: asyncio.Task[None] | None = None

    async def run_on(self, sock: socket.socket) -> None:
        """On a listening socket."""
        settings = self._app.service.settings
        log = None if settings.disable_log_stats else asyncio.ensure_future(self._log_stats())
        ready = asyncio.ensure_future(self._tell_ready(sock))
        try:
            await self.serve(sockets=[sock])
        finally:
            for task in (log, ready, self._draining):
                if task is not None:
                    task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT)
        for number in handled:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """The first time: no new work, and the end when what runs has ended. The second time: now."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._draining = asyncio.ensure_future(self._drain())
            return
        for running in list(self._app.running):
            running.end(shutting_down())
        self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        admission, timeout_s = self._app.service.admission, self._app.service.settings.shutdown_timeout
        admission.draining = True
        if admission.num_requests:
            logger.info("shutting down when %d requests have ended, at most %g s", admission.num_requests, timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await admission.drained()
                # They have run, and the last of what they say may still be on its way to those who read it.
                if ending := [running.work for running in self._app.running if not running.endless]:
                    await asyncio.wait(ending)
        for running in list(self._app.running):
            running.end(shutting_down())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await admission.drained()
                await asyncio.sleep(0)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self.config.timeout_graceful_shutdown = 1
        self.should_exit = True

    async def _tell_ready(self, sock: socket.socket) -> None:
        while not self.started:
            await asyncio.sleep(0.01)
        self._on_ready(socket_url(sock, tls=self._app.service.settings.ssl_certfile is not None))

    async def _log_stats(self) -> None:
        service = self._app.service
        line = StatsLogger(service.metrics, service.limits.device)
        while True:
            await asyncio.sleep(STATS_PERIOD_S)
            with contextlib.suppress(OctavoError):
                text = line.tell(await service.backend.stats())
                if text is not None:
                    logger.info("%s", text)


def raise_file_limit() -> int:
    """How many files this process may have open, after it was raised as far as it may be: shells begin at 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def connection_limits(num_files: int) -> tuple[int, int]:
    """How many connections there may be where a process may have so many open files, and how many probes beside them.
    The rest is for the server itself: an engine that takes a lost one's place needs some. Raises `OctavoError`."""
    if num_files < MIN_OPEN_FILES:
        text = f"this process may have {num_files} open files, a server needs {MIN_OPEN_FILES}"
        raise OctavoError(f"{text}; raise the limit: ulimit -n 4096")
    own, probes = min(64, 24 + num_files // 4), min(64, num_files // 8)
    return num_files - own - probes, probes


def bind(host: str, port: int, uds: str | None = None) -> socket.socket:
    """A socket that listens, taken before a model is loaded: of two servers on one address the second knows at once.

    Raises `OSError`, with the address as its filename.
    """
    if uds is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if Path(uds).is_socket():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
                    caller.connect(uds)  # somebody listens: binding says so
            except OSError:
                Path(uds).unlink(missing_ok=True)
        address: Any = uds
    else:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)  # an address that is only bound can be bound once more
    except OSError as error:
        sock.close()
        raise OSError(error.errno, error.strerror, uds or f"{host}:{port}") from None
    return sock


def socket_url(sock: socket.socket, *, tls: bool = False) -> str:
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http{'s' if tls else ''}://{shown}:{port}"
