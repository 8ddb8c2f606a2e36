"""The HTTP server: uvicorn with limits on connections and headers, and with a graceful shutdown.

uvicorn's parser accepts headers of any size and waits for them without a limit. `LimitedHttpProtocol` bounds both.

After the first SIGTERM, SIGINT or SIGHUP the server keeps listening: /health is answered and new requests get 503. It
stops when all running requests have ended or `shutdown_timeout` has passed. Another SIGTERM or SIGINT stops it at once.
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
from octavo.serve.http.body import PAUSE
from octavo.serve.http.context import Receive, RequestContext, Scope, Send, new_request_id
from octavo.serve.http.endpoint import ABORT, LINGER_S, SEND_TIMEOUT_S, send_error
from octavo.serve.http.middleware import OPEN_PATHS, sanitize_request_id
from octavo.serve.metrics import StatsLogger
from octavo.serve.openai.errors import ApiError, shutting_down

logger = logging.getLogger("octavo.serve")

HEADER_TIMEOUT_S = 10.0
MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 100
FEED_BYTES = 16 * 1024
"""Bytes that are parsed before limits are checked: each byte may be a chunk of its own."""
KEEP_ALIVE_S = 5
BACKLOG = 4096
NUM_LISTENERS = 16
"""Connections that are accepted in one turn of the event loop: uvloop accepts one for each listening file. With one, a
health check waits behind a flood of connections for as many turns."""
STATS_PERIOD_S = 10.0
FINAL_EVENT_S = 1.0
"""Time for ended requests to send their final error to their clients."""
MAX_OPEN_FILES = 65_536
MIN_OPEN_FILES = 96
"""Open files that a server needs: 39 when idle, `NUM_LISTENERS` that it closes in a turn, as many as that for a
restarted engine, and connections."""
PROBE_TIMEOUT_S = 2.0
"""Header timeout of a connection beyond the limit."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One HTTP/1.1 connection, with limits.

    Headers must arrive within `HEADER_TIMEOUT_S` (else 408) and within the size limits (else 431). A connection beyond
    `max_connections` gets 503, except for /health and /ready. `probes` holds the connections beyond the limit, oldest
    first. When there are more than `max_probes`, the oldest is closed, so that health checks are always answered.

    A request to upgrade to another protocol (Java's client sends one for HTTP/2) is answered in HTTP/1.1. Pipelined
    requests are answered in order.
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
        self._num_header_bytes = 0  # of headers, trailers and chunk sizes, less half of the body
        self._body_parts: list[bytes] = []
        self._num_pipelined_bytes = 0  # bytes received while another request waits
        self._in_headers = True
        self._refused = False
        self._current: RequestResponseCycle | None = None  # being answered; `self.cycle` is the last received
        self._header_timer: asyncio.TimerHandle | None = None
        self._flush_timer: asyncio.TimerHandle | None = None
        if len(self.connections) - len(self._probes) > self._max_connections:
            self._probes[self] = None
            if len(self._probes) > self._max_probes:
                oldest = next(iter(self._probes))
                del self._probes[oldest]
                oldest.transport.abort()
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_header_timer()
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._disconnect_current()
        self._probes.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        for start in range(0, len(data), FEED_BYTES):
            part = data[start : start + FEED_BYTES]
            self._num_header_bytes += len(part)
            try:
                self._feed(part)
            except httptools.HttpParserError:
                self.send_400_response("")
                return
            self._pass_body()
            self._num_header_bytes = max(0, self._num_header_bytes)
            if self._num_header_bytes > MAX_HEADER_BYTES:
                self._refuse(_headers_too_large())
            if self._refused:
                return
        self._num_pipelined_bytes = self._num_pipelined_bytes + len(data) if self.pipeline else 0
        if self.pipeline and self._num_pipelined_bytes <= MAX_HEADER_BYTES:
            self.flow.resume_reading()  # else a disconnect would not be noticed

    def _feed(self, data: bytes) -> None:
        """Feeds the parser. It stops after headers with an Upgrade; another one takes them without that header, and the
        rest: the first would take no body, and nothing after a Connection with close."""
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as stop:
                if not self._asks_for_upgrade():
                    return
                rest = rest[stop.args[0] :]
                version = self.parser.get_http_version().encode()
                first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
                lines = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self.parser.feed_data(b"\r\n".join([first, *lines, b"\r\n"]))

    def _asks_for_upgrade(self) -> bool:
        """Whether the headers have an Upgrade. The parser stops after a CONNECT as well."""
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self.scope["extensions"] = {ABORT: {"call": self.transport.abort}, PAUSE: {"call": self.flow.pause_reading}}
        self._in_headers = True
        self._num_header_bytes = 0
        self._start_header_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_header_timer()
        if self._refused or self._asks_for_upgrade():
            return
        num_bytes = sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
            self._refuse(_headers_too_large())
            return
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and (codings != [b"chunked"] or self.parser.get_http_version() == "1.0"):
            text = "the only supported transfer coding is chunked, once and in HTTP/1.1"
            self._refuse(ApiError(400, "unsupported_transfer_encoding", text, close=True))
            return
        is_probe = self in self._probes
        if is_probe and self.url.partition(b"?")[0] not in OPEN_PATHS:
            self._refuse(self._too_many_connections())
            return
        super().on_headers_complete()
        if is_probe:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._num_header_bytes -= 3 * len(body) // 2
        self._body_parts.append(body)

    def _pass_body(self) -> None:
        """Passes the received parts on as one: there may be very many."""
        body, self._body_parts = b"".join(self._body_parts), []
        if body and not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._pass_body()
        if not self._refused and not self._asks_for_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._current = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._abort_if_unread()

    def _abort_if_unread(self, previous: int | None = None) -> None:
        """Aborts the connection if its client reads nothing for `SEND_TIMEOUT_S`: closing would wait for it forever."""
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        if self._current is not None and not self._current.response_complete:
            return  # the next response has its own timeout
        num_unsent = self.transport.get_write_buffer_size()
        if previous is not None and num_unsent >= previous:
            self.transport.abort()
        elif num_unsent:
            self._flush_timer = self.loop.call_later(SEND_TIMEOUT_S, self._abort_if_unread, num_unsent)

    def _disconnect_current(self) -> None:
        """Marks the current request as disconnected; uvicorn marks only the last received one."""
        cycle = self._current
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def send_400_response(self, msg: str) -> None:
        """The response to malformed HTTP, contradictory lengths included."""
        self._refuse(ApiError(400, "invalid_http", "not a valid HTTP request", close=True))

    def timeout_keep_alive_handler(self) -> None:
        self._stop_header_timer()
        super().timeout_keep_alive_handler()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            timeout_s = PROBE_TIMEOUT_S if self in self._probes else HEADER_TIMEOUT_S
            self._header_timer = self.loop.call_later(timeout_s, self._on_header_timeout)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        timeout = ApiError(408, "request_timeout", "the request's headers arrive too slowly", close=True)
        self._refuse(self._too_many_connections() if self in self._probes else timeout)

    def _too_many_connections(self) -> ApiError:
        text = f"{self._max_connections} connections are open, the limit; try again later"
        return ApiError(503, "too_many_connections", text, retry_after_s=1, close=True)

    def _refuse(self, api_error: ApiError) -> None:
        """Sends an error and closes. Discards input for `LINGER_S` first, else the client might lose the response."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_header_timer()
        self._disconnect_current()
        cycle = self._current
        if cycle is None or cycle.response_complete or not cycle.response_started:  # never inside another response
            body = api_error.body()
            request_id = new_request_id()
            logger.debug("request %s refused: %d %s", request_id, api_error.status, api_error.code)
            shown_id = sanitize_request_id(dict(self.headers or ()).get(b"x-request-id", b"")) or request_id
            headers = {**api_error.headers(), "content-length": str(len(body)), "x-request-id": shown_id}
            lines = b"".join(f"{name}: {value}\r\n".encode("latin-1") for name, value in headers.items())
            self.transport.write(STATUS_LINE[api_error.status] + lines + b"\r\n" + body)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _headers_too_large() -> ApiError:
    text = f"the headers, or sizes of small chunks, exceed the limit of {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} lines"
    return ApiError(431, "headers_too_large", text, close=True)


def uvicorn_config(asgi: Any, settings: ServeArgs, *, max_connections: int | None = None) -> uvicorn.Config:
    default_max, max_probes = connection_limits(raise_file_limit())
    protocol = functools.partial(
        LimitedHttpProtocol,
        max_connections=default_max if max_connections is None else max_connections,
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
    """Answers every request with 503, also /health, while the model is being loaded.

    async with Starting(settings).on(sock): ...
    """

    def __init__(self, settings: ServeArgs) -> None:
        super().__init__(uvicorn_config(self._refuse, settings))

    @staticmethod
    async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext(scope, new_request_id())
        text = "the server is starting and loads its model; try again later"
        headers = {"x-request-id": context.request_id}
        api_error = ApiError(503, "starting", text, retry_after_s=5, close=True, headers=headers)
        await send_error(context, send, api_error)

    @contextlib.asynccontextmanager
    async def on(self, sock: socket.socket) -> AsyncIterator[None]:
        """Context manager: serves on a duplicate of the socket, which keeps listening. Later connections wait in its
        backlog for the next server."""
        serving = asyncio.ensure_future(self.serve(sockets=[sock.dup()]))
        try:
            yield
        finally:
            self.should_exit = True
            await serving

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the launcher handles signals


class HTTPServer(uvicorn.Server):
    """Serves an `App` until a signal. The first one starts a graceful shutdown, the second one stops at once.

    on_ready         called with the address once the server accepts requests
    max_connections  default: derived from the limit of open files
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
        """Serves on a listening socket."""
        settings = self._app.service.settings
        log = None if settings.disable_log_stats else asyncio.ensure_future(self._log_stats())
        ready = asyncio.ensure_future(self._announce(sock))
        try:
            await self.serve(sockets=[sock, *(sock.dup() for _ in range(NUM_LISTENERS - 1))])
        finally:
            for task in (log, ready, self._draining):
                if task is not None:
                    task.cancel()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # it is under nohup
                loop.add_signal_handler(number, self.stop, number)
        yield  # the handlers stay: a signal during the clean-up does not interrupt it

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Signal handler. First call: refuses new requests and stops when all have ended. Second call: stops now, but
        not for SIGHUP, of which a terminal that closes may send several."""
        if number == signal.SIGHUP and self._draining is not None:
            return
        self._num_signals += 1
        if self._num_signals == 1:
            self._draining = asyncio.ensure_future(self._drain())
            return
        for request in list(self._app.active_requests):
            request.end(shutting_down())
        self.force_exit = self.should_exit = True

    async def _drain(self) -> None:
        admission, timeout_s = self._app.service.admission, self._app.service.settings.shutdown_timeout
        admission.draining = True
        if admission.num_requests:
            logger.info("shutting down when %d requests have ended, at most %g s", admission.num_requests, timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await admission.drained()
                # The engine has finished them; their last events may still be unsent.
                if tasks := [request.task for request in self._app.active_requests if not request.open_ended]:
                    await asyncio.wait(tasks)
        for request in list(self._app.active_requests):
            request.end(shutting_down())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_EVENT_S):
                await admission.drained()
                await asyncio.sleep(0)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        self.config.timeout_graceful_shutdown = 1
        self.should_exit = True

    async def _announce(self, sock: socket.socket) -> None:
        while not self.started:
            await asyncio.sleep(0.01)
        self._on_ready(socket_url(sock, tls=self._app.service.settings.ssl_certfile is not None))

    async def _log_stats(self) -> None:
        service = self._app.service
        stats_logger = StatsLogger(service.metrics, service.limits.device)
        while True:
            await asyncio.sleep(STATS_PERIOD_S)
            with contextlib.suppress(OctavoError):
                line = stats_logger.line(await service.backend.stats())
                if line is not None:
                    logger.info("%s", line)


def raise_file_limit() -> int:
    """Raises this process's limit of open files as far as allowed and returns it. Shells start with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    target = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, target), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def connection_limits(num_files: int) -> tuple[int, int]:
    """Maximal connections and probes for a limit of open files. The rest is reserved for the server and for an engine
    restart. Raises `OctavoError` if the limit is too low."""
    if num_files < MIN_OPEN_FILES:
        text = f"the limit of open files is {num_files}; a server needs {MIN_OPEN_FILES}"
        raise OctavoError(f"{text}; raise the limit: ulimit -n 4096")
    reserved, probes = min(96, 56 + num_files // 4), min(64, num_files // 8)
    return num_files - reserved - probes, probes


def bind(host: str, port: int, uds: str | None = None) -> socket.socket:
    """Binds and listens. Done before the model is loaded, so that a second server on the address fails at once.

    Raises `OSError` with the address as its filename.
    """
    if uds is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if Path(uds).is_socket():
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                    client.connect(uds)  # in use: binding fails below
            except OSError:
                Path(uds).unlink(missing_ok=True)
        address: Any = uds
    else:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, _, _, address = found[0]
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)  # with SO_REUSEADDR, another process could bind it until it listens
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
