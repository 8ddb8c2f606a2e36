"""Latency of /health while hostile clients attack the server.

    python benchmarks/health_latency.py [--seconds 10]

A server with a tiny model serves four streams throughout. A separate niced process runs the attack. This process
requests /health fifty times a second, each time over a new connection, as probes do. Limits on two otherwise idle
cores: p99 50 ms, maximum 200 ms. The exit code is 1 if either is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
P99_MS, MAX_MS = 50.0, 200.0
PROBES_PER_S = 50
STREAMS = 4
BAD_PER_S = 1000
HALF_OPEN = 5000
UNDER_CAP_BYTES = 80_000
"""The server accepts bodies of at most 80 KiB, since its model has a context of 512 tokens."""
OVER_CAP_BYTES = 100_000_000

# -- attacks, in a separate process -----------------------------------------------------------------------------------


def head(length: int) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def send(port: int, *parts: bytes) -> int:
    """Send a request and return its status, 0 if the server closed the connection."""
    with contextlib.suppress(OSError):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            line = await reader.readline()
            return int(line.split()[1]) if line else 0
        finally:
            writer.close()
    return 0


async def run_callers(number: int, attack: Callable[[], Awaitable[object]]) -> None:
    async def caller() -> None:
        while True:
            count[0] += 1
            await attack()

    await asyncio.gather(*(caller() for _ in range(number)))


async def under_the_cap(port: int) -> None:
    """Lists of numbers that are not token ids, which only shows after reading the whole body."""
    body = json.dumps({"prompt": [0.5] * (UNDER_CAP_BYTES // 5 - 50)}).encode()
    await run_callers(4, lambda: send(port, head(len(body)), body))


async def over_the_cap(port: int) -> None:
    chunk = b" " * (1 << 20)
    chunks = [chunk] * (OVER_CAP_BYTES // len(chunk))
    await run_callers(4, lambda: send(port, head(len(chunk) * len(chunks)), *chunks))


async def bad_requests(port: int) -> None:
    """BAD_PER_S invalid requests a second over kept-alive connections."""
    body = b'{"prompt": "a", "temperature": 9}'
    interval_s = 16 / BAD_PER_S

    async def caller() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        due = time.monotonic()
        while True:
            writer.write(head(len(body)) + body)
            response = await reader.readuntil(b"\r\n\r\n")
            assert response.split()[1] == b"400", response
            length = next(line for line in response.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split()[1]))
            count[0] += 1
            due = max(due + interval_s, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    await asyncio.gather(*(caller() for _ in range(16)))


async def half_open(port: int) -> None:
    """Headers that never end. The server closes the connection after ten seconds, and the caller reconnects."""

    async def connect() -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
            await reader.read()
            writer.close()

    await run_callers(HALF_OPEN, connect)


ATTACKS: dict[str, Callable[[int], Awaitable[None]]] = {
    "bodies just under the cap": under_the_cap,
    "bodies far over the cap": over_the_cap,
    f"{BAD_PER_S:,} bad requests a second": bad_requests,
    f"{HALF_OPEN:,} half-open connections": half_open,
}
count = [0]


def attack(name: str, port: int, seconds: float) -> None:
    """Run an attack and print its number of requests or connections."""
    os.nice(10)

    async def run_limited() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ATTACKS[name](port), seconds)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run_limited())
    print(count[0])


# -- probes ------------------------------------------------------------------------------------------------------------


async def probe(port: int, seconds: float) -> list[float]:
    """Latency of each probe, in milliseconds."""
    begin, latencies, tasks = time.monotonic(), [], set()

    async def request_health() -> None:
        start = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        response = await reader.read()
        latencies.append(1000 * (time.perf_counter() - start))
        writer.close()
        assert response.startswith(b"HTTP/1.1 200"), response

    while (elapsed := time.monotonic() - begin) < seconds:
        tasks.add(asyncio.create_task(request_health()))
        await asyncio.sleep(max(0.0, len(tasks) / PROBES_PER_S - elapsed))
    await asyncio.gather(*tasks)
    return latencies


async def stream(port: int) -> None:
    body = b'{"prompt": "Hello", "max_tokens": 400, "ignore_eos": true, "stream": true}'
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(len(body)) + body)
        while b"[DONE]" not in await reader.readline():
            pass
        writer.close()


async def measure(port: int, seconds: float) -> bool:
    streams = [asyncio.create_task(stream(port)) for _ in range(STREAMS)]
    print(f"{'':<32} {'probes':>7} {'p50 ms':>8} {'p99 ms':>8} {'max ms':>9} {'requests':>10}", flush=True)
    within_limits = True
    for name in ("nothing else", *ATTACKS):
        attacker = None
        if name in ATTACKS:
            command = [sys.executable, __file__, "--harm", name, "--port", str(port), "--seconds", str(seconds + 1)]
            attacker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            await asyncio.sleep(1)
        latencies = sorted(await probe(port, seconds))
        done = "-" if attacker is None else f"{int((await asyncio.to_thread(attacker.communicate))[0] or 0):,}"
        p50, p99, maximum = statistics.median(latencies), latencies[int(0.99 * len(latencies))], latencies[-1]
        within_limits &= p99 < P99_MS and maximum < MAX_MS
        print(
            f"{name:<32} {len(latencies):>7} {p50:>8.1f} {p99:>8.1f} {maximum:>9.1f} {done:>10}",
            flush=True,
        )
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return within_limits


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of each attack")
    parser.add_argument("--harm", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
    if args.harm is not None:
        attack(args.harm, args.port, args.seconds)
        return 0
    sys.path.insert(0, str(ROOT))
    from tests.clients.tiny_server import serving

    logging = [part for path in ("/health", "/v1/completions") for part in ("--disable-access-log-for-endpoints", path)]
    with tempfile.TemporaryDirectory() as name, serving(Path(name), *logging) as url:
        return 0 if asyncio.run(measure(urlsplit(url).port or 0, args.seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
