"""Hostile clients, one at a time, during 64 streams of another tenant (`make reliability`).

Each client runs in its own niced process, mostly over a few connections that repeat one request as fast as it is
answered. The streams and probes of /health run meanwhile. A trial passes if

    tokens       the streams lose at most a tenth of their tokens a second
    gap          between two chunks of a stream is at most `GAP_S` (99.9th percentile)
    first token  of a stream comes at most `FIRST_S` later than without the client (99th percentile)
    /health      answers within `HEALTH_S` (99th percentile)
    afterwards   the server's memory and open files are back within a minute

    python -m tests.proof.hostile_clients NAME PORT ADDRESS     one client, until killed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, cycle
from typing import TYPE_CHECKING, Any

from tests.engine.models import make_talking_checkpoint
from tests.proof.tally import LONG_S, Tally, World
from tests.serve.event_loop import run
from tests.serve.raw_client import RawClient, request_once

if TYPE_CHECKING:
    from tests.proof.server_trials import Server

HOSTILE_KEY = "hostile"
NUM_STREAMS, PACE_S = 64, 0.025
"""The tokens per second of a model with a few billion parameters on a GPU, so that the API process is busy."""
NUM_CONNECTIONS = 4
HEALTH_S, GAP_S, FIRST_S, STREAMS_SHARE = 0.1, 0.25, 1.0, 0.9
PROBE_PERIOD_S = 0.02
BEFORE_S, DURING_S, SETTLE_S = 3.0, 6.0, 1.0
MEMORY_SHARE, MORE_FILES, AFTERWARDS_S = 1.1, 4, 60.0
UPGRADE_S = 5.0
OTHER_ADDRESS = "127.0.0.2"
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 256
MAX_BODY_BYTES = 4_000_000
OPTIONS = (
    f"--dtype float32 --num-gpu-blocks-override 8000 --max-body-bytes {MAX_BODY_BYTES} --max-num-batched-tokens 256 "
    f"--trust-request-chat-template --max-model-len {MAX_MODEL_LEN} --max-num-seqs {MAX_NUM_SEQS}"
).split()
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
SLOW_TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i * j }}{% endfor %}{% endfor %}"
ESCAPES = "[" * 70 + '"' + '\\"' * 50_000


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


SLOW_CHAT = _chat(chat_template=SLOW_TEMPLATE)
AMBIGUOUS = "start: e\ne: e e e | e e | A\nA: /[a-z ]/"


def _completion(**more: Any) -> dict[str, Any]:
    return {"prompt": [5], "max_tokens": 40, **more}


def _json(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def repeated_requests() -> dict[str, tuple[str, bytes]]:
    """The requests of clients that repeat one: path and body."""
    schema: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(24):
        nested = {"type": "object", "properties": {"a": nested}}
    words = "a" * 60_000
    bodies: dict[str, tuple[str, Any]] = {
        "300 kB of white space": ("/v1/completions", b'{"prompt": [5, 6, 7]' + b" " * 300_000 + b', "max_tokens": 1}'),
        "brackets, and an open string": ("/v1/completions", ESCAPES.encode()),
        "the same in a tool call's arguments": (
            "/v1/chat/completions",
            _chat(messages=[{"role": "assistant", "content": None, "tool_calls": [_call(ESCAPES)]}]),
        ),
        "the same in a function call's arguments": (
            "/v1/responses",
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": ESCAPES}]},
        ),
        "a playground's longest history": (
            "/view/play",
            {"history": "4096x16;new,4000" + ";fork,A,2;fill;free,A;new,4000" * 4, "action": "beam,A,64,16"},
        ),
        "256 prompts, n = 128": ("/v1/completions", {"prompt": [[5, 6, 7]] * 256, "n": 128, "max_tokens": 1400}),
        "256 prompts": ("/v1/completions", {"prompt": [[5, 6, i % 50 + 5] for i in range(256)], "max_tokens": 64}),
        "log-probabilities of 256 prompts": (
            "/v1/completions",
            {"prompt": [[5 + i % 90] * 200 for i in range(256)], "max_tokens": 1, "prompt_logprobs": 20},
        ),
        "log-probabilities of long answers": (
            "/v1/completions",
            {"prompt": [5], "n": 64, "max_tokens": 1000, "logprobs": 20, "ignore_eos": True},
        ),
        "64 long stop strings, n = 128": (
            "/v1/completions",
            {"prompt": [5], "n": 128, "max_tokens": 200, "stop": ["a" * 3900 + chr(33 + i) for i in range(64)]},
        ),
        "a slow template": ("/v1/chat/completions", SLOW_CHAT),
        "ten thousand messages": (
            "/v1/chat/completions",
            _chat(messages=[{"role": "user", "content": "a"}] * 10_000),
        ),
        "tokenizing": ("/tokenize", {"prompt": words[: MAX_MODEL_LEN - 8]}),
        "detokenizing": ("/detokenize", {"tokens": [5 + i % 90 for i in range(30_000)]}),
        "prompts of the whole context": (
            "/v1/completions",
            {"prompt": [5 + i % 90 for i in range(MAX_MODEL_LEN - 8)], "max_tokens": 1, "cache_salt": "x"},
        ),
        "a regex that explodes": (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 20, "structured_outputs": {"regex": "(a?){9999}[ab]*a[ab]{20}"}},
        ),
        "a schema of 2,000 properties": (
            "/v1/chat/completions",
            _chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}),
        ),
        "a deep schema": (
            "/v1/chat/completions",
            _chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": nested}}),
        ),
        "an ambiguous grammar": (
            "/v1/completions",
            _completion(structured_outputs={"grammar": AMBIGUOUS}, ignore_eos=True),
        ),
        "bodies of 4 MB": ("/v1/completions", {"prompt": [5] * (MAX_BODY_BYTES // 3 - 20)}),
        "a large logit_bias": (
            "/v1/completions",
            {"prompt": [5], "max_tokens": 4, "logit_bias": {str(i): 1 for i in range(97)}},
        ),
        "bad words by the hundred": (
            "/v1/completions",
            {"prompt": [5], "max_tokens": 100, "n": 64, "bad_words": [f"w{i}{words[:50]}" for i in range(60)]},
        ),
    }
    return {name: (path, _json(body)) for name, (path, body) in bodies.items()}


@dataclass(frozen=True)
class Hostile:
    """One hostile client, at an address of its own."""

    port: int
    address: str

    async def run(self, name: str) -> None:
        """Runs until cancelled. Prints the status and code of every response."""
        if name in OTHERS:
            number, connection = OTHERS[name]
        else:
            path, body = repeated_requests()[name]
            number, connection = NUM_CONNECTIONS, lambda c: c.repeat(path, cycle([body]))

        async def again() -> None:
            while True:
                try:
                    await connection(self)
                except OSError:
                    print("closed", flush=True)
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(again() for _ in range(number)))

    async def repeat(self, path: str, bodies: Iterator[bytes]) -> None:
        client = RawClient(self.port, key=HOSTILE_KEY, address=self.address)
        for body in bodies:
            answer = await client.ask(path=path, raw=body)
            print(answer.status, answer.code or "", flush=True)

    @contextlib.asynccontextmanager
    async def sending(
        self, path: str, length: str, more: str = ""
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Context manager: a connection after the head of a request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=(self.address, 0))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {HOSTILE_KEY}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n{length}\r\n{more}\r\n".encode())
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def leave(self, path: str, body: bytes) -> None:
        async with self.sending(path, f"Content-Length: {len(body)}") as (_, writer):
            writer.write(body)
            await writer.drain()
            await asyncio.sleep(0.05)
        print("left", flush=True)

    async def stall(self) -> None:
        """Sends all of a body but its last byte."""
        body = b'{"prompt": "' + b"a" * (MAX_BODY_BYTES - 20)
        async with self.sending("/v1/completions", f"Content-Length: {len(body) + 1}") as (reader, writer):
            writer.write(body)
            await writer.drain()
            print((await reader.readline()).decode()[9:12], flush=True)

    async def send_tiny_chunks(self) -> None:
        async with self.sending("/v1/completions", "Transfer-Encoding: chunked") as (reader, writer):
            for _ in range(200):
                writer.write(b"1\r\na\r\n" * 2000)
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            print((await reader.readline()).decode()[9:12], flush=True)

    async def upgrade(self) -> None:
        """Asks for another protocol, on a connection that has to be closed."""
        more = "Connection: Upgrade, close\r\nUpgrade: h2c\r\n"
        async with self.sending("/health", "Content-Length: 0", more) as (reader, _):
            async with asyncio.timeout(UPGRADE_S):
                print((await reader.read()).decode()[9:12], flush=True)

    async def read_nothing(self) -> None:
        """Leaves a long response in the socket."""
        body = _json(_completion(n=8, max_tokens=1400, stream=True, logprobs=20, ignore_eos=True))
        async with self.sending("/v1/completions", f"Content-Length: {len(body)}") as (_, writer):
            writer.write(body)
            await writer.wait_closed()


def _patterns() -> Iterator[bytes]:
    """Patterns with large automata, each another."""
    for i in count():
        yield _json(_completion(structured_outputs={"regex": f"[ab]*{i}a[ab]{{18}}"}))


PATTERNS = _patterns()
OTHERS: dict[str, tuple[int, Callable[[Hostile], Awaitable[None]]]] = {
    "patterns whose callers leave": (60, lambda c: c.leave("/v1/completions", next(PATTERNS))),
    "templates whose callers leave": (60, lambda c: c.leave("/v1/chat/completions", _json(SLOW_CHAT))),
    "many heavy patterns": (4, lambda c: c.repeat("/v1/completions", PATTERNS)),
    "bodies that stall": (300, Hostile.stall),
    "bodies in chunks of one byte": (12, Hostile.send_tiny_chunks),
    "upgrades that close": (120, Hostile.upgrade),
    "unread answers": (64, Hostile.read_nothing),
}
"""Clients that do more than to repeat one request: how many connections do what, again and again."""


@dataclass(slots=True)
class Neighbours:
    """The streams and the probes of /health during an attack. All times are in seconds.

    token_at  arrival of each token, on the monotonic clock
    gap_s     time between two chunks of one stream
    first_s   time until a request's first token
    health_s  duration of each probe
    """

    tally: Tally
    port: int
    token_at: list[float] = field(default_factory=list)
    gap_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)

    async def stream(self, number: int) -> None:
        client = RawClient(self.port)
        while True:
            self.tally.runs += 1
            body = {
                "prompt": [5 + number, 6, 7],
                "max_tokens": 20 + 7 * number % 41,
                "stream": True,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            begin, arrivals = time.monotonic(), []
            async with asyncio.timeout(LONG_S):  # Python 3.11's `wait_for` may swallow the cancellation at the end
                answer = await client.ask(body, on_data=partial(self._count, arrivals))
            if answer.status != 200 or not answer.is_whole:
                self.tally.lost += 1
                self.tally.notes.append(f"a stream got {answer.status} {answer.code}: {answer.body[-200:]!r}")
                await asyncio.sleep(0.1)
            self.first_s.append(answer.head_at - begin)

    def _count(self, arrivals: list[float], data: bytes) -> None:
        now = time.monotonic()
        if arrivals:
            self.gap_s.append(now - arrivals[-1])
        arrivals.append(now)
        for line in data.split(b"\n"):
            if line.startswith(b"data: {"):
                self.token_at += [now] * sum(len(c.get("token_ids", ())) for c in json.loads(line[6:])["choices"])

    async def probe(self) -> None:
        while True:
            begin = time.monotonic()
            async with asyncio.timeout(LONG_S):
                answer = await request_once(self.port, path="/health")
            self.health_s.append(time.monotonic() - begin)
            if answer.status != 200:
                self.tally.miss(f"/health answered {answer.status}")
            await asyncio.sleep(max(0.0, begin + PROBE_PERIOD_S - time.monotonic()))

    async def measure(self, seconds: float) -> Measured:
        """What they get in the next `seconds`."""
        for values in (self.token_at, self.gap_s, self.first_s, self.health_s):
            values.clear()
        await asyncio.sleep(seconds)
        return Measured(
            tokens_per_s=len(self.token_at) / seconds,
            gap_s=_quantile(self.gap_s, 0.999),
            first_s=_quantile(self.first_s, 0.99),
            health_s=_quantile(self.health_s, 0.99),
            longest_health_s=max(self.health_s, default=LONG_S),
        )


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))] if values else LONG_S


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    gap_s: float
    first_s: float
    health_s: float
    longest_health_s: float


async def hostile(tally: Tally, world: World) -> None:
    """Each hostile client in turn, with a key of its own."""
    await _all_clients(tally, world, [*repeated_requests(), *OTHERS], keys=True)


async def hostile_addresses(tally: Tally, world: World) -> None:
    """Without keys, from an address of their own: those that fill what tenants share."""
    shared = ["256 prompts, n = 128", "bodies of 4 MB", "an ambiguous grammar", "a regex that explodes"]
    await _all_clients(tally, world, [*shared, *OTHERS], keys=False)


async def _all_clients(tally: Tally, world: World, names: Sequence[str], *, keys: bool) -> None:
    from tests.proof.server_trials import serving  # server_trials imports this module

    model = make_talking_checkpoint(world.folder / "long", max_position_embeddings=MAX_MODEL_LEN)
    (template := world.folder / "template.jinja").write_text(TEMPLATE)
    options = [*OPTIONS, "--chat-template", str(template)]
    if keys:
        options += ["--api-key", HOSTILE_KEY]
    faults = {"pace_s": PACE_S}
    figures = []
    async with serving(tally, replace(world, model=str(model)), *options, faults=faults, keys=keys) as server:
        for name in names[:: max(1, round(1 / world.scale))]:
            figures.append(await measure(tally, server, name, "127.0.0.1" if keys else OTHER_ADDRESS))
    tally.figures = "\n    ".join(figures)


async def measure(tally: Tally, server: Server, name: str, address: str) -> str:
    """Runs one hostile client during the streams; returns a line with its cost."""
    neighbours = Neighbours(tally, server.port)
    tasks = [asyncio.ensure_future(neighbours.stream(number)) for number in range(NUM_STREAMS)]
    tasks.append(asyncio.ensure_future(neighbours.probe()))
    try:
        await asyncio.sleep(SETTLE_S)
        alone = await neighbours.measure(BEFORE_S)
        num_bytes, num_files = server.resident_bytes, server.num_files
        command = [sys.executable, "-m", __name__, name, str(server.port), address]
        client = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert client.stdout is not None
        answers = asyncio.ensure_future(client.stdout.read())
        try:
            await asyncio.sleep(SETTLE_S)
            during = await neighbours.measure(DURING_S)
            most_bytes = server.resident_bytes
        finally:
            client.kill()
            await client.wait()
        lines = (await answers).decode().splitlines()
        begin = time.monotonic()
        while server.resident_bytes > MEMORY_SHARE * num_bytes or server.num_files > num_files + MORE_FILES:
            if time.monotonic() - begin > AFTERWARDS_S:
                left = f"{server.resident_bytes / num_bytes:.2f} of the memory, {server.num_files} of {num_files} files"
                tally.miss(f"{name}: a minute later it has {left}")
                break
            await asyncio.sleep(0.5)
        afterwards_s = time.monotonic() - begin
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                tally.hung += isinstance(result, TimeoutError)
                tally.lost += not isinstance(result, TimeoutError)
                tally.notes.append(f"{name}: {result!r}")
    for what, got, bound in (
        ("/health takes", during.health_s, HEALTH_S),
        ("a gap in a stream is", during.gap_s, GAP_S),
        ("a first token takes", during.first_s, alone.first_s + FIRST_S),
    ):
        if got > bound:
            tally.miss(f"{name}: {what} {1000 * got:.0f} ms, the bound is {1000 * bound:.0f} ms")
    if during.tokens_per_s < STREAMS_SHARE * alone.tokens_per_s:
        tally.miss(f"{name}: the streams get {during.tokens_per_s:.0f} tokens/s, {alone.tokens_per_s:.0f} before")
    kinds = ", ".join(f"{lines.count(kind)} x {kind.strip()}" for kind in sorted(set(lines))) or "no answer"
    return (
        f"{name:<36} streams {during.tokens_per_s / alone.tokens_per_s:.2f} of {alone.tokens_per_s:,.0f} tokens/s, "
        f"gap {1000 * during.gap_s:.0f} ms, first token {1000 * during.first_s:.0f} ms ({1000 * alone.first_s:.0f}), "
        f"/health {1000 * during.health_s:.0f} ms, at most {1000 * during.longest_health_s:.0f}; "
        f"memory {most_bytes / num_bytes:.2f}, back in {afterwards_s:.0f} s; {kinds}"
    )


if __name__ == "__main__":
    os.nice(19)
    with contextlib.suppress(KeyboardInterrupt):
        run(Hostile(int(sys.argv[2]), sys.argv[3]).run(sys.argv[1]), None)
