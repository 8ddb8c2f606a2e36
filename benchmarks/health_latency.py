"""How fast /health is answered while a server is being harassed.

    python benchmarks/health_latency.py [--seconds 10]

A server with a tiny model generates for four streams all the while. A process of its own, niced, does the harm; this
one asks for /health fifty times a second, each time over a new connection, as probes do. Bounds, with two cores to
themselves: p99 50 ms, worst 200 ms. Exit code 1 beyond them.
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
P99_MS, WORST_MS = 50.0, 200.0
PROBES_PER_S = 50
STREAMS = 4
BAD_PER_S = 1000
HALF_OPEN = 5000
UNDER_CAP_BYTES = 80_000
"""The server's model has a context of 512 tokens, so that 80 KiB is the most that it takes."""
OVER_CAP_BYTES = 100_000_000

# -- harm, in a process of its own -------------------------------------------------------------------------------------


def head(length: int) -> bytes:
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer key\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


async def send(port: int, *parts: bytes) -> int:
    """A request; its status, 0 if the server hung up."""
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


async def callers(number: int, one: Callable[[], Awaitable[object]]) -> None:
    async def caller() -> None:
        while True:
            count[0] += 1
            await one()

    await asyncio.gather(*(caller() for _ in range(number)))


async def under_the_cap(port: int) -> None:
    """Lists of numbers that are no token ids: all of the body must be read to see it."""
    body = json.dumps({"prompt": [0.5] * (UNDER_CAP_BYTES // 5 - 50)}).encode()
    await callers(4, lambda: send(port, head(len(body)), body))


async def over_the_cap(port: int) -> None:
    piece = b" " * (1 << 20)
    pieces = [piece] * (OVER_CAP_BYTES // len(piece))
    await callers(4, lambda: send(port, head(len(piece) * len(pieces)), *pieces))


async def bad_requests(port: int) -> None:
    """So many a second, over connections that stay."""
    body = b'{"prompt": "a", "temperature": 9}'
    each_s = 16 / BAD_PER_S

    async def caller() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        due = time.monotonic()
        while True:
            writer.write(head(len(body)) + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.split()[1] == b"400", answer
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
            await reader.readexactly(int(length.split()[1]))
            count[0] += 1
            due = max(due + each_s, time.monotonic() - 1)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    await asyncio.gather(*(caller() for _ in range(16)))


async def half_open(port: int) -> None:
    """Headers that never end. The server hangs up after ten seconds, and the caller comes again."""

    async def one() -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n")
            await reader.read()
            writer.close()

    await callers(HALF_OPEN, one)


HARM: dict[str, Callable[[int], Awaitable[None]]] = {
    "bodies just under the cap": under_the_cap,
    "bodies far over the cap": over_the_cap,
    f"{BAD_PER_S:,} bad requests a second": bad_requests,
    f"{HALF_OPEN:,} half-open connections": half_open,
}
count = [0]


def do_harm(name: str, port: int, seconds: float) -> None:
    """Prints how many requests or connections that were."""
    os.nice(10)

    async def for_a_while() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(HARM[name](port), seconds)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(for_a_while())
    print(count[0])


# -- probes ------------------------------------------------------------------------------------------------------------


async def probe(port: int, seconds: float) -> list[float]:
    """Milliseconds of each."""
    begin, took, tasks = time.monotonic(), [], set()

    async def one() -> None:
        at = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        took.append(1000 * (time.perf_counter() - at))
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer

    while (elapsed := time.monotonic() - begin) < seconds:
        tasks.add(asyncio.create_task(one()))
        await asyncio.sleep(max(0.0, len(tasks) / PROBES_PER_S - elapsed))
    await asyncio.gather(*tasks)
    return took


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
    print(f"{'':<32} {'probes':>7} {'p50 ms':>8} {'p99 ms':>8} {'worst ms':>9} {'requests':>10}", flush=True)
    good = True
    for name in ("nothing else", *HARM):
        harm = None
        if name in HARM:
            command = [sys.executable, __file__, "--harm", name, "--port", str(port), "--seconds", str(seconds + 1)]
            harm = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            await asyncio.sleep(1)
        took = sorted(await probe(port, seconds))
        done = "-" if harm is None else f"{int((await asyncio.to_thread(harm.communicate))[0] or 0):,}"
        p99, worst = took[int(0.99 * len(took))], took[-1]
        good &= p99 < P99_MS and worst < WORST_MS
        print(
            f"{name:<32} {len(took):>7} {statistics.median(took):>8.1f} {p99:>8.1f} {worst:>9.1f} {done:>10}",
            flush=True,
        )
    for task in streams:
        task.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each kind of harm")
    parser.add_argument("--harm", choices=HARM, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if args.harm is not None:
        do_harm(args.harm, args.port, args.seconds)
        return 0
    sys.path.insert(0, str(ROOT))
    from tests.clients.tiny_server import serving

    quiet = [part for path in ("/health", "/v1/completions") for part in ("--disable-access-log-for-endpoints", path)]
    with tempfile.TemporaryDirectory() as name, serving(Path(name), *quiet) as url:
        return 0 if asyncio.run(measure(urlsplit(url).port or 0, args.seconds)) else 1


if __name__ == "__main__":
    sys.exit(main())
