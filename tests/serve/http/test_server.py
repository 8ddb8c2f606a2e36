"""The server over sockets: header limits, graceful shutdown, and `octavo serve` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import mmap
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ParameterError
from octavo.log_setup import MAX_LINES
from octavo.serve.args import ServeArgs
from octavo.serve.http import body as body_module
from octavo.serve.http import endpoint
from octavo.serve.http import server as http_server
from octavo.serve.http.allowed_hosts import AllowedHosts
from octavo.serve.http.server import NUM_LISTENERS, bind
from tests.engine.process.engines import children_of
from tests.serve.in_process_server import Server, events_of, listening

C = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True}


async def test_one_turn_of_the_loop_accepts_many_connections(model: str) -> None:
    async with listening(model) as (_, http, port), contextlib.AsyncExitStack() as stack:
        for _ in range(NUM_LISTENERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        num_turns = 0
        while len(http.server_state.connections) < NUM_LISTENERS:
            await asyncio.sleep(0)
            num_turns += 1
        assert num_turns < NUM_LISTENERS


def request(body: dict[str, Any], path: str = C) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def send_raw(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Sends the parts; returns all received bytes until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = bytearray()

    async def listen() -> None:
        """Reads all the time: a client that still sends after the server has closed loses unread data."""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                answer.extend(data)

    hearing = asyncio.ensure_future(listen())
    try:
        for part in parts:
            writer.write(part)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
            await asyncio.sleep(pause_s)
        await asyncio.wait_for(hearing, 60)
        return bytes(answer)
    finally:
        writer.close()


def status_of(answer: bytes) -> tuple[int, str | None]:
    head, _, body = answer.partition(b"\r\n\r\n")
    code = re.search(rb'"code":"(\w+)"', body)
    return int(head.split()[1]), None if code is None else code[1].decode()


async def test_headers_have_a_timeout_and_a_size_limit(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every refusal has a request id."""
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", 0.3)
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
    refused = {
        b"hello\r\n\r\n": 400,
        b"\x16\x03\x01\x02\x00": 400,  # TLS
        b"GET /version HTTP/1.1\r\n\r\n": 400,
        b"": 408,
        get: 408,
        get + b"X: " + b"x" * 400_000: 431,  # refused before the headers are complete
        get + b"X: " + b"x" * 200_000 + b"\r\n\r\n": 431,
        get + b"X: 1\r\n" * 100 + b"\r\n": 431,
    }
    async with listening(model) as (server, _, port):
        begin = time.monotonic()
        slow = [asyncio.ensure_future(send_raw(port, get)) for _ in range(20)]
        fine = get + b"Connection: close\r\n" + b"X: 1\r\n" * 98 + b"\r\n"
        assert status_of(await send_raw(port, fine))[0] == 200
        for answer in await asyncio.gather(*slow):
            assert status_of(answer) == (408, "request_timeout") and b"connection: close" in answer
        assert 0.25 < time.monotonic() - begin < 60
        for raw, status in refused.items():
            answer = await send_raw(port, raw)
            assert status_of(answer)[0] == status, raw[:60]
            assert re.search(rb"\r\nx-request-id: [0-9a-f]{32}\r\n", answer), answer
        answer = await send_raw(port, get + b"X-Request-Id: mine\r\n" + b"X: 1\r\n" * 200 + b"\r\n")
        assert b"\r\nx-request-id: mine\r\n" in answer
        assert status_of(await send_raw(port, get, *[b"a: b\r\n"] * 50, pause_s=0.02))[0] == 408
        await server.complete()


async def test_only_chunked_transfer_coding_is_supported(model: str) -> None:
    async with listening(model) as (_, _, port):
        content = b'{"prompt": "Hello", "max_tokens": 1}'
        body = b"%x\r\n" % len(content) + content + b"\r\n0\r\n\r\n"
        head = b"Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nTransfer-Encoding: "

        async def status(coding: bytes, version: bytes = b"1.1") -> int:
            line = b"POST /v1/completions HTTP/" + version + b"\r\n"
            return status_of(await send_raw(port, line + head + coding + b"\r\n\r\n" + body))[0]

        for coding in (b"chunked", b"Chunked"):
            assert await status(coding) == 200, coding
        more = b"chunked\r\nTransfer-Encoding: chunked"
        for coding in (b"gzip, chunked", b"gzip,chunked", b"chunked, chunked", b"identity, chunked", b"gzip", more):
            assert await status(coding) == 400, coding
        assert await status(b"chunked", b"1.0") == 400


OURS = ("localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3", "[::1]:80", "a.localhost", "localhost.")
EVIL = ("evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example")
NO_HOST = (
    "",
    "a b",
    "localhost,evil",
    "[::1",
    "::1",
    "localhost:x",
    "localhost:99999",
    "user@localhost",
    "localhost/x",
)


async def test_only_allowed_hosts_are_accepted(model: str) -> None:
    async def status(port: int, *hosts: str, path: str = "/version", version: str = "1.1") -> int:
        lines = "".join(f"Host: {host}\r\n" for host in hosts)
        raw = f"GET {path} HTTP/{version}\r\n{lines}Connection: close\r\n\r\n"
        return status_of(await send_raw(port, raw.encode()))[0]

    async with listening(model) as (server, _, port):
        for host in OURS:
            assert await status(port, host) == 200, host
        for host in EVIL:
            for path in ("/version", "/metrics", "/debug/kv", "/view/", "/nope", "/ping"):
                assert await status(port, host, path=path) == 403, (host, path)
            assert await status(port, host, path="/health") == 200  # probes may use any Host
        for host in NO_HOST:
            assert await status(port, host) == await status(port, host, path="/health") == 400, host
        assert await status(port) == await status(port, "localhost", "localhost") == 400
        assert await status(port, version="1.0") == 200
        evil = request(LONG).replace(b"Host: localhost", b"Host: evil.example\r\nConnection: close")
        assert status_of(await send_raw(port, evil)) == (403, "wrong_host")
        assert server.app.service.admission.num_requests == 0
    async with listening(model, allowed_hosts=["llm.example.com", "*.internal"]) as (_, _, port):
        for host in ("llm.example.com", "LLM.example.com.", "a.internal"):
            assert await status(port, host) == 200
        assert await status(port, "b.com") == await status(port, "internal") == 403
    async with listening(model, allowed_hosts=["*"]) as (_, _, port):
        assert await status(port, "evil.example") == 200


def test_servers_that_accept_any_host() -> None:
    def takes(called: str, **options: Any) -> bool:
        arguments = {"host": "127.0.0.1", "uds": None, "has_keys": False, "names": ()} | options
        return AllowedHosts.for_server(**arguments).check({"headers": [(b"host", called.encode())]}) is None

    assert not takes("llm.example.com")
    assert takes("llm.example.com", has_keys=True) and takes(
        "a", uds="/run/octavo.sock"
    )  # out of a foreign page's reach
    assert not takes("llm.example.com", has_keys=True, names=("other",))
    for host in ("0.0.0.0", "::", ""):
        assert all(takes(called, host=host) for called in ("10.1.2.3", "[fd00::1]:80", socket.gethostname()))
        assert not takes("llm.example.com", host=host)
    assert takes("10.1.2.3", host="10.1.2.3") and not takes("10.1.2.4", host="10.1.2.3")
    assert takes("gpu-1", host="gpu-1") and not takes("gpu-2", host="gpu-1")
    for name in ("http://a", "a:80", "a b", "", "*."):
        with pytest.raises(ParameterError, match="allowed_hosts"):
            ServeArgs(allowed_hosts=[name])


async def test_connections_beyond_the_limit(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PROBE_TIMEOUT_S", 0.2)
    get = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    health = b"GET /health?a HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with listening(model, max_connections=3) as (_, http, port):
        here = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        while len(http.server_state.connections) < 3:
            await asyncio.sleep(0.002)
        answer = await send_raw(port, get)
        assert status_of(answer) == (503, "too_many_connections") and b"retry-after: 1" in answer
        assert status_of(await send_raw(port)) == (503, "too_many_connections")  # silent connections are closed
        assert b"200 OK" in await send_raw(port, health)
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        assert b"200 OK" in await send_raw(port, health)  # although all other connections are in use
        for _, writer in idle:
            writer.close()
        while len(http.server_state.connections) > 3:
            await asyncio.sleep(0.002)
        here[0][1].write(get)
        assert b"200 OK" in await here[0][0].read()  # open connections continue
        for _, writer in here:
            writer.close()
        while http.server_state.connections:
            await asyncio.sleep(0.002)
        assert b"200 OK" in await send_raw(port, get)


def test_open_file_limit_is_raised() -> None:
    code = "import resource as r; from octavo.serve.http.server import raise_file_limit as raised\n"
    code += "hard = min(r.getrlimit(r.RLIMIT_NOFILE)[1] % 2**63, 3000)\nr.setrlimit(r.RLIMIT_NOFILE, (200, hard))\n"
    code += "print(raised() == r.getrlimit(r.RLIMIT_NOFILE)[0] == hard)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"


async def test_connection_closed_within_a_body_gets_no_response(model: str) -> None:
    async with listening(model) as (server, _, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request({"prompt": "a"})[:-3])
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 50) == b""
        writer.close()
        await server.at_rest()


JAVAS = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAA\r\n"
WEBSOCKETS = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"


@pytest.mark.parametrize("asking", [JAVAS, WEBSOCKETS])
async def test_upgrade_requests_are_answered_in_http_1_1(model: str, asking: bytes) -> None:
    async with listening(model) as (server, _, port):
        want = (await server.complete("Hello"))["choices"][0]["text"]
        body = {"prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        post = request(body).replace(b"Host: localhost\r\n", b"Host: localhost\r\n" + asking)
        get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + asking + b"\r\n"
        end = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        head, _, content = post.partition(b"\r\n\r\n")
        # In one piece, the body separately, and byte by byte.
        for parts in ([post + get + post + end], [head + b"\r\n\r\n", content, get, end], [*_bytes(post), end]):
            answer = await send_raw(port, *parts, pause_s=0.0 if len(parts) > 9 else 0.05)
            num_posts = b"".join(parts).count(b"POST")
            assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"HTTP/1.1 ") == b"".join(parts).count(b"Host:")
            assert answer.count(json.dumps(want).encode()) == num_posts
        # The body is never parsed as a request.
        bad = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        smuggled = head.replace(b"Length: %d" % len(content), b"Length: %d" % len(bad)) + b"\r\n\r\n"
        answer = await send_raw(port, smuggled, bad, end, pause_s=0.05)
        assert (answer.count(b"HTTP/1.1 "), status_of(answer)) == (2, (400, "invalid_json"))
        assert b" 200 " not in await send_raw(port, b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n" + asking + b"\r\n")


@pytest.mark.parametrize("asking", [JAVAS, WEBSOCKETS])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_upgrade_request_that_closes_is_answered_and_closed(model: str, asking: bytes, version: bytes) -> None:
    async with listening(model) as (_, http, port):
        asking = asking.replace(b"Upgrade", b"Upgrade, close", 1).replace(b"Connection", b"CONNECTION")
        lines = b" HTTP/" + version + b"\r\nHost: localhost\r\n" + asking
        get = b"GET /health" + lines + b"\r\n"
        post = request({"prompt": "Hello", "max_tokens": 2}).replace(b" HTTP/1.1\r\nHost: localhost\r\n", lines)
        first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for parts in (
            [get],
            [post],
            _bytes(get),
            _bytes(post),
            [post + get],
            [first + post],
            [b"\r\n" + first, get + get],
        ):
            answer = await asyncio.wait_for(send_raw(port, *parts), 20)
            assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"HTTP/1.1 ") == 1 + (b"".join(parts).count(first))
            assert answer.count(b"connection: close") == 1
        answers = await asyncio.wait_for(asyncio.gather(*[send_raw(port, get) for _ in range(120)]), 50)
        assert {status_of(answer)[0] for answer in answers} == {200}
        assert not http.server_state.connections


@pytest.mark.parametrize("idle", [b"\r\n", b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_bytes_that_begin_no_request_do_not_keep_a_connection(
    model: str, monkeypatch: pytest.MonkeyPatch, idle: bytes
) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.5)
    async with listening(model) as (_, http, port):
        get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        answer = await asyncio.wait_for(send_raw(port, get, idle, b"\r\n", b"\r\n", pause_s=0.1), 20)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        async with asyncio.timeout(20):
            while http.server_state.connections:  # a refused one lingers
                await asyncio.sleep(0.05)


def _bytes(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


async def test_trailers_are_limited_and_ignored(model: str) -> None:
    async with listening(model) as (_, http, port):
        chunked = b"Host: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        content = b'{"prompt": "Hello", "max_tokens": 2}'
        body = b"%x\r\n" % len(content) + content + b"\r\n0\r\n"
        trailers = b"X-Request-Id: mine\r\n\r\n"
        end = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        answer = await send_raw(port, b"POST /v1/completions HTTP/1.1\r\n" + chunked + body + trailers, end)
        assert answer.count(b"HTTP/1.1 200 OK") == 2 and b"mine" not in answer
        for line in (b"a: b\r\n" * 2_000, b"a: " + b"b" * 16_000):  # many trailers, and an unterminated one
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\n" + chunked + b"0\r\n")
            await reader.readuntil(b"\r\n\r\n")
            (connection,) = http.server_state.connections
            for _ in range(100):
                writer.write(line)
                await asyncio.sleep(0.002)
            assert connection.headers is None or len(connection.headers) == 3
            assert connection._refused  # type: ignore[union-attr]
            writer.close()
            while http.server_state.connections:
                await asyncio.sleep(0.002)


def _slow(server: Server, seconds: float) -> None:
    """Delays every engine step."""
    engine = server.built.engine
    advance = engine.step

    def slowly(*args: Any) -> Any:
        time.sleep(seconds)
        return advance(*args)

    engine.step = slowly  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_with_pipelined_requests(model: str, stream: bool) -> None:
    async with listening(model) as (server, _, port):
        _slow(server, 0.05)
        for ahead in (request(LONG), request(LONG)[:-3], b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(LONG | {"stream": stream}) + ahead)
            while not server.app.service.admission.num_requests:
                await asyncio.sleep(0.002)
            writer.close()
            begin = time.monotonic()
            await server.at_rest()
            assert time.monotonic() - begin < 2.5  # the whole response takes at least five seconds


async def test_errors_are_never_written_inside_a_response(model: str) -> None:
    async with listening(model) as (server, _, port):
        _slow(server, 0.02)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(LONG | {"stream": True}))
        await reader.readuntil(b"data: ")
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nthis is no HTTP\r\n\r\n")
        rest = await asyncio.wait_for(reader.read(), 50)
        assert b"HTTP/1.1 " not in rest
        writer.close()
        await server.at_rest()


@pytest.mark.parametrize("closes", [b"", b"Connection: close\r\n"])
async def test_unread_complete_response_is_aborted(model: str, closes: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SEND_TIMEOUT_S", 0.3)
    async with listening(model) as (_, http, port):
        body = LONG | {"n": 4, "logprobs": 20, "temperature": 1}
        asking = request(body).replace(b"Host: localhost\r\n", b"Host: localhost\r\n" + closes)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect(("127.0.0.1", port))
            client.setblocking(False)
            while not http.server_state.connections:
                await asyncio.sleep(0.002)
            (connection,) = http.server_state.connections
            taking = connection.transport.get_extra_info("socket")
            taking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            client.send(asking)
            begin = time.monotonic()
            while http.server_state.connections:
                assert time.monotonic() - begin < 20
                await asyncio.sleep(0.01)


async def test_too_large_body_is_refused_before_it_has_arrived(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "LINGER_S", 0.2)
    async with listening(model, max_body_bytes=10_000) as (_, _, port):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        declared = head + b"Content-Length: 100000000\r\n\r\n"
        assert status_of(await send_raw(port, declared, b" " * 1_000_000)) == (413, "body_too_large")
        chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"
        answer = await send_raw(port, head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 20)
        assert status_of(answer) == (413, "body_too_large")


async def test_bodies_in_tiny_chunks_are_refused_early(model: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    content = b'{"prompt": "Hello", "max_tokens": 1}'
    async with listening(model) as (_, _, port):
        tiny = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
        assert status_of(await send_raw(port, head, tiny, b"0\r\n\r\n", pause_s=0.05))[0] == 200
        small = b"c\r\n            \r\n" * 2_000
        assert status_of(await send_raw(port, head, small, tiny + b"0\r\n\r\n", pause_s=0.05))[0] == 200
        assert status_of(await send_raw(port, head, b"1\r\n \r\n" * 20_000)) == (431, "headers_too_large")


async def test_stalled_bodies_leave_room_for_other_tenants(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys, tenants are addresses. A body takes its room when it begins. The newest one of the tenant that
    stalls most is refused."""
    monkeypatch.setattr(body_module, "MAX_BYTES", 100_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 40000\r\n\r\n"
    async with listening(model) as (server, _, port):
        stalled = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for (_, writer), taken in zip(stalled, (40_000, 80_000, 80_000), strict=True):
            writer.write(head + b" ")
            while server.app.bodies.room.total < taken:
                await asyncio.sleep(0.01)
        refused = await asyncio.wait_for(stalled[2][0].read(), 60)
        assert status_of(refused) == (429, "too_many_bodies")
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=("127.0.0.2", 0))
        writer.write(head + b" " * 39_960 + b'{"prompt": "Hello", "max_tokens": 1}    ')
        assert b" 200 OK" in await asyncio.wait_for(reader.readline(), 60)
        refused = await asyncio.wait_for(stalled[1][0].read(), 60)
        assert status_of(refused) == (429, "too_many_bodies") and server.app.bodies.room.total == 40_000
        for _, other in [*stalled, (reader, writer)]:
            other.close()
        await server.at_rest()
        while server.app.bodies.room.total:
            await asyncio.sleep(0.01)
        assert not server.app.bodies.room.used


async def test_a_large_body_leaves_no_memory_to_the_heap_or_to_the_collector(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when it is complete, too slow, refused in favour of another tenant, or left by its client."""
    stores: list[weakref.ref[mmap.mmap]] = []

    class Pages(mmap.mmap):
        def __init__(self, *args: Any) -> None:
            stores.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Pages)
    monkeypatch.setattr(body_module, "MAX_BYTES", 1_500_000)
    monkeypatch.setattr(body_module, "BODY_RATE_WINDOW_S", 0.5)
    monkeypatch.setattr(body_module, "MIN_BODY_BYTES_PER_S", 1 << 30)
    monkeypatch.setattr(endpoint, "LINGER_S", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    declared = head + b"Content-Length: 1000000\r\n\r\n"
    start, end = b" " * 700_000, b" " * 299_964 + b'{"prompt": "Hello", "max_tokens": 1}'
    async with listening(model, max_body_bytes=2_000_000) as (server, _, port):

        async def connect(data: bytes, address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            writer.write(data)
            await writer.drain()
            return reader, writer

        gc.collect()
        gc.disable()
        try:
            for data in (declared + start + end, head + b"Transfer-Encoding: chunked\r\n\r\nf4240\r\n" + start + end):
                reader, writer = await connect(data if data.startswith(declared) else data + b"\r\n0\r\n\r\n")
                assert b" 200 OK" in await asyncio.wait_for(reader.readline(), 60)
                writer.close()
            reader, writer = await connect(declared + start)
            assert status_of(await asyncio.wait_for(reader.read(), 60))[0] == 408
            writer.close()
            reader, writer = await connect(declared + start)
            await asyncio.sleep(0.1)
            writer.transport.abort()
            await server.at_rest()
            assert len(stores) == 4
            while any(store() is not None for store in stores):
                await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_tenants_large_bodies_arrive_in_turns(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before those of another tenant that are refused, of which the rest is discarded."""
    monkeypatch.setattr(body_module, "PART_BYTES_PER_S", 2 << 20)
    monkeypatch.setattr(endpoint, "LINGER_S", 60.0)
    content = b" " * 999_964 + b'{"prompt": "Hello", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nContent-Length: 1000000\r\n\r\n"
    refused = head.replace(b"application/json", b"application/json\r\nContent-Encoding: gzip")
    order: list[str] = []
    async with listening(model, max_body_bytes=2_000_000) as (_, http, port):

        async def send(data: bytes, address: str) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
            try:
                writer.write(data + content)
                await writer.drain()
                await asyncio.wait_for(reader.read(), 60)
                order.append(address)
            finally:
                writer.close()

        crowd = [asyncio.ensure_future(send(data, "127.0.0.1")) for data in [head, refused] * 4]
        await asyncio.sleep(0.1)
        await send(head, "127.0.0.2")
        assert len(order) < 4
        monkeypatch.setattr(body_module, "PART_BYTES_PER_S", 1 << 30)
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)
        while http.server_state.connections:
            await asyncio.sleep(0.01)


async def test_connections_broken_in_every_state(model: str) -> None:
    async with listening(model) as (server, _, port):
        want = (await server.complete("Hello"))["choices"][0]["text"]
        for i in range(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(LONG | {"stream": i % 2 == 0, "n": 1 + i % 3}))
            await writer.drain()
            if i % 4:
                await asyncio.sleep(0.0007 * (i % 7))
            if i % 3 == 0:
                writer.transport.abort()  # RST
            elif i % 3 == 1:
                writer.close()
            else:
                with contextlib.suppress(OSError):
                    writer.write_eof()  # half-closed
                await asyncio.wait_for(reader.read(), 50)
                writer.close()
        await server.at_rest()
        assert (await server.complete("Hello"))["choices"][0]["text"] == want


@pytest.mark.parametrize(("timeout", "finishes"), [(30.0, True), (0.0, False)])
@pytest.mark.parametrize("pings", [0.0, 5.0])
async def test_graceful_shutdown(model: str, timeout: float, finishes: bool, pings: float) -> None:
    async with listening(model, shutdown_timeout=timeout, sse_keep_alive_interval=pings) as (server, http, port):
        streams = [asyncio.ensure_future(send_raw(port, request(LONG | {"stream": True}))) for _ in range(8)]
        while server.app.service.admission.num_requests < 8:
            await asyncio.sleep(0.002)
        http.stop()  # the signal handler
        await asyncio.sleep(0.005)
        if finishes:
            assert status_of(await send_raw(port, request(LONG))) == (503, "shutting_down")
        for answer in await asyncio.gather(*streams):
            text = answer.partition(b"\r\n\r\n")[2].decode()
            frames = "".join(re.findall(r"^(?:data: .*)$", text, re.MULTILINE)).replace("data: ", "\n\ndata: ")
            events = events_of(frames.strip() + "\n\n") if frames else []
            if finishes:
                assert events[-1]["choices"][0]["finish_reason"] == "length"
            else:
                assert '"shutting_down"' in text
        for _ in range(5000):
            if http.should_exit:
                break
            await asyncio.sleep(0.01)
        assert http.should_exit
        await server.at_rest()


# -- as its users start it ---------------------------------------------------------------------------------------------


class Process:
    """`octavo serve`; `log` is what it has written so far."""

    def __init__(
        self, model: str, *args: str, port: int = 0, before: str = "", stderr: int | None = None, **environment: str
    ) -> None:
        command = [sys.executable, "-m", "octavo.cli.main", "serve", model, "--port", str(port), *args]
        if before:
            command = ["/bin/sh", "-c", f'{before}; exec "$@"', "sh", *command]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", **environment}
        self._log, path = tempfile.mkstemp()
        Path(path).unlink()
        weakref.finalize(self, os.close, self._log)
        self.process = subprocess.Popen(
            command, stderr=self._log if stderr is None else stderr, stdout=subprocess.DEVNULL, env=env
        )

    @property
    def log(self) -> str:
        return os.pread(self._log, 1 << 22, 0).decode()

    def wait_ready(self) -> str:
        """The server's URL."""
        while (found := re.search(r"serving on (http\S+)", self.log)) is None:
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        return found[1]

    def wait(self) -> int:
        return self.process.wait(60)

    @classmethod
    @contextlib.contextmanager
    def serving(cls, model: str, *args: str, **environment: str) -> Iterator[tuple[Process, str]]:
        """A server that is ready, and its URL."""
        server = cls(model, *args, **environment)
        try:
            yield server, server.wait_ready()
        finally:
            server.process.kill()
            server.wait()


@pytest.fixture(scope="module", params=[1, 2])
def num_engines(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def process(model: str, num_engines: int) -> Iterator[tuple[Process, str]]:
    arguments = ["--api-key", "one", "--served-model-name", "tiny", "--max-body-bytes", "1000000"]
    arguments += ["-dp", str(num_engines)]
    with Process.serving(model, *arguments, OCTAVO_API_KEY="two") as serving:
        yield serving


def call(url: str, body: dict[str, Any] | bytes | None = None, key: str | None = "two") -> tuple[int, bytes]:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def listening_ports(pid: int) -> list[int]:
    """The URL of a server process on TCP."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(path))
    rows = [line.split() for n in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{n}").read_text().splitlines()[1:]]
    listening = [(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if row[3] == "0A"]
    return [port for port, inode in listening if f"socket:[{inode}]" in links]


def test_large_body_is_answered(process: tuple[Process, str]) -> None:
    _, url = process
    for prompt in ([65] * 100, "Hello"):
        content = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
        status, body = call(f"{url}/v1/completions", content + b" " * 300_000)
        assert status == 200, body
        assert json.loads(body)["usage"]["completion_tokens"] == 2
    status, body = call(f"{url}/v1/completions", content[:-1] + b', "seed": 1.5}' + b" " * 300_000)
    assert (status, json.loads(body)["error"]["param"]) == (400, "seed")


def test_unterminated_string_does_not_block_the_server(process: tuple[Process, str]) -> None:
    _, url = process
    deep = b"[" * 70 + b'"' + b'\\"' * 50_000
    call_of = {"id": "a", "function": {"name": "f", "arguments": deep.decode()}}
    item = {"type": "function_call", "name": "f", "arguments": deep.decode()}
    begin = time.monotonic()
    for path, body in (
        ("completions", deep),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [call_of]}]}),
        ("responses", {"input": [item]}),
    ):
        assert call(f"{url}/v1/{path}", body)[0] == 400
    assert time.monotonic() - begin < 10  # each once froze the server for 27 s


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_server_from_the_command_line(process: tuple[Process, str], num_engines: int) -> None:
    server, url = process
    assert "KV cache size: " in server.log and "Maximum concurrency for 128 tokens per request" in server.log
    assert re.search(r"the server started in [\d.]+ s: tokenizer [\d.]+ s, engine process [\d.]+ s", server.log)
    assert call(f"{url}/v1/models", key=None)[0] == 401
    status, body = call(f"{url}/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 4})
    assert status == 200 and json.loads(body)["usage"]["completion_tokens"] == 4
    assert b"vllm:prompt_tokens_total" in call(f"{url}/metrics", key="one")[1]
    children = children_of(server.process.pid)  # the engines and the JSON worker
    assert len(children) == num_engines + 1
    port = int(url.rpartition(":")[2])
    assert listening_ports(server.process.pid) == [port] and not any(map(listening_ports, children))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    assert "Traceback" not in server.log
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)
    with pytest.raises(urllib.error.URLError):
        call(f"{url}/health")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_during_the_start_stops_the_server(model: str, number: signal.Signals) -> None:
    server = Process(model)
    try:
        while not (children := children_of(server.process.pid)):
            assert server.process.poll() is None
            time.sleep(0.02)
        begin = time.monotonic()
        server.process.send_signal(number)
        code = server.wait()
        assert time.monotonic() - begin < 60
        assert code == (130 if number is signal.SIGINT else 1)
        assert "Traceback" not in server.log
        while any(Path(f"/proc/{child}").exists() for child in children):
            assert time.monotonic() - begin < 60
            time.sleep(0.02)
    finally:
        server.process.kill()


def test_signals_end_no_stream(model: str, num_engines: int) -> None:
    """SIGHUP drains, however often it comes. SIGUSR1 and SIGUSR2 do nothing. Child processes ignore all three."""
    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP]
    with Process.serving(model, "--admin-key", "two", "-dp", str(num_engines)) as (server, url):
        children = children_of(server.process.pid)
        body = json.dumps(LONG | {"stream": True, "n": 16}).encode()
        headers = {"authorization": "Bearer two", "content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url + C, body, headers), timeout=60) as stream:
            stream.readline()
            for number in numbers:
                for pid in (*children, server.process.pid):
                    os.kill(pid, number)
            server.process.send_signal(signal.SIGHUP)
            text = stream.read().decode()
        assert text.count('"finish_reason":"length"') == 16 and text.endswith("data: [DONE]\n\n"), text[-500:]
        assert server.wait() == 0
        assert len(children) == num_engines + 1 and "died" not in server.log and "restart" not in server.log
        assert "ignored: SIGUSR1\n" in server.log and "ignored: SIGUSR2\n" in server.log
        assert "shutting down when 1 requests have ended" in server.log
        assert server.log.endswith("the server has stopped\n")


def test_nohup_ignores_a_hangup(model: str) -> None:
    with Process.serving(model, before='trap "" HUP') as (server, url):
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert call(f"{url}/ready")[0] == 200 and server.process.poll() is None


def test_unread_log_blocks_nothing(model: str, tmp_path: Path) -> None:
    """Lines beyond the pipe and the queue are dropped and counted. The server ends without its reader, too."""
    reader, writer = os.pipe()
    port = free_port()
    server = Process(model, "--max-model-len", "99", port=port, stderr=writer)
    os.close(writer)
    url = f"http://127.0.0.1:{port}"

    def connect() -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    try:
        log = os.read(reader, 1 << 16)
        while b"serving on" not in log:
            log += os.read(reader, 1 << 16)
        with contextlib.closing(connect()) as client:
            for _ in range(MAX_LINES + 2000):  # 150 bytes of log each
                client.request("GET", "/version")
                client.getresponse().read()
        begin = time.monotonic()
        assert call(f"{url}/health")[0] == 200
        assert time.monotonic() - begin < 1.0
        assert call(url + C, {"prompt": "Hello", "max_tokens": 2})[0] == 200
        log = b""
        while not (dropped := re.search(rb"WARNING .* \[octavo\] (\d+) log lines were dropped", log)):
            log += os.read(reader, 1 << 16)
        assert MAX_LINES + 2000 <= log.count(b"/version") + int(dropped[1]) <= MAX_LINES + 2002
        with contextlib.closing(connect()) as client:
            for _ in range(1000):
                client.request("GET", "/version")
                client.getresponse().read()
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - begin < 8.0
    finally:
        server.process.kill()
        os.close(reader)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_requests_during_the_start_get_503_and_a_second_server_ends(model: str) -> None:
    port = free_port()
    server = Process(model, port=port)
    url = f"http://127.0.0.1:{port}"
    try:
        begin = time.monotonic()
        while True:
            assert time.monotonic() - begin < 60
            with contextlib.suppress(urllib.error.URLError):
                status, body = call(f"{url}/ready")
                break
            time.sleep(0.02)
        assert (status, json.loads(body)["error"]["code"]) == (503, "starting")
        assert call(f"{url}/v1/completions", {"prompt": "Hello"})[0] == call(f"{url}/health")[0] == 503
        second = Process(model, port=port)
        assert second.wait() == 1 and f"error: address in use: 127.0.0.1:{port}; " in second.log
        server.wait_ready()
        assert call(f"{url}/health")[0] == call(f"{url}/ready")[0] == 200
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize("max_files", [16, 95])
def test_too_few_open_files_fail_at_once(model: str, max_files: int) -> None:
    server = Process(model, before=f"ulimit -n {max_files}")
    assert server.wait() == 1
    needed = f"error: the limit of open files is {max_files}; a server needs 96; raise the limit: ulimit -n 4096"
    assert server.log.strip().splitlines() == [needed]


def test_health_is_answered_with_few_open_files(model: str) -> None:
    server = Process(model, "--max-body-bytes", "1000000", before="ulimit -n 96")
    try:
        url = server.wait_ready()
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(socket.create_connection(address))
            for _ in range(20):
                assert call(f"{url}/health")[0] == 200
            assert call(f"{url}/version")[0] == 503
        body = b'{"prompt": "Hello", "max_tokens": 2}' + b" " * 300_000
        begin = time.monotonic()
        while call(f"{url}/v1/completions", body)[0] != 200:  # needs a JSON worker process
            assert time.monotonic() - begin < 60
    finally:
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["--port", "70000"], 2, "port is 70000"),
        (["--host", "0.0.0.0"], 2, "insecure"),
        (["--api-key", ""], 2, "api_key"),
        (["--max-model-len", "0"], 2, "max_model_len"),
        (["--tool-call-parser", "x"], 2, "tool-call-parser"),
        (["--lora-modules", "x"], 2, "--lora-modules: lora_modules is 'x': LoRA adapters are not supported"),
    ],
)
def test_invalid_command_lines(
    model: str, capsys: pytest.CaptureFixture[str], args: list[str], code: int, text: str
) -> None:
    from octavo.cli.main import run as command

    assert command(["serve", model, *args]) == code
    error = capsys.readouterr().err.strip().splitlines()
    assert error[-1].startswith("error: ") and text in error[-1]


@pytest.mark.parametrize("more", [[], ["-dp", "2"]], ids=["one engine", "two engines"])
def test_address_in_use_fails_before_the_model_is_loaded(
    model: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    from octavo.cli.main import run as command

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command(["serve", model, "--port", str(port), *more]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error == f"error: address in use: 127.0.0.1:{port}; choose another port, or 0 for a free one"
    assert command(["serve", "/nonexistent/model", "--port", "0"]) == 1


def test_unix_socket_in_use_is_kept(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from octavo.cli.main import run as command

    path = str(tmp_path / "octavo.sock")
    with contextlib.closing(bind("", 0, path)) as sock:
        sock.listen()
        assert command(["serve", model, "--uds", path]) == 1
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error == f"error: address in use: {path}; choose another path"
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as caller:
            caller.connect(path)
    with contextlib.closing(bind("", 0, path)):  # the socket of a dead server is replaced
        assert Path(path).is_socket()


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (["--ssl-certfile", "none.pem", "--ssl-keyfile", "none.pem"], "ssl_certfile none.pem: No such file"),
        (["--ssl-certfile", "junk.pem", "--ssl-keyfile", "none.pem"], "ssl_keyfile none.pem: No such file"),
        (["--ssl-certfile", "junk.pem", "--ssl-keyfile", "junk.pem"], "ssl_certfile junk.pem: "),
        (["--ssl-ca-certs", "junk.pem"], "ssl_ca_certs needs TLS"),
    ],
)
def test_tls_files_are_checked_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], files: list[str], text: str
) -> None:
    from octavo.cli.main import run as command

    monkeypatch.chdir(tmp_path)
    Path("junk.pem").write_text("junk")
    assert command(["serve", "/nonexistent/model", "--port", "0", *files]) == 2
    assert text in capsys.readouterr().err.strip().splitlines()[-1]


def test_help_does_not_import_the_server() -> None:
    code = "import sys; sys.argv = ['octavo', 'serve', '--help']\nfrom octavo.cli.main import run\nrun(sys.argv[1:])\n"
    code += "print([m for m in ('torch', 'starlette', 'uvicorn', 'tokenizers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "--served-model-name" in done.stdout and done.stdout.strip().endswith("[]")
