"""Hostile clients, one at a time, during 64 streams of another key (`make reliability`).

Each client runs in its own niced process and repeats one request over a few connections as fast as it is answered.
The streams and probes of /health run meanwhile. A trial passes if the streams lose at most a tenth of their tokens a
second and the 99th percentile of /health stays under 100 ms.

    python -m tests.proof.hostile_clients NAME PORT     one client, until killed
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from tests.engine.models import make_talking_checkpoint
from tests.proof.tally import LONG_S, Tally, World
from tests.serve.event_loop import run
from tests.serve.raw_client import RawClient, request_once

HOSTILE_KEY = "hostile"
NUM_STREAMS, PACE_S = 64, 0.025
"""The tokens per second of a model with a few billion parameters on a GPU, so that the API process is busy."""
NUM_CONNECTIONS = 4
HEALTH_P99_S, STREAMS_SHARE = 0.1, 0.9
PROBE_PERIOD_S = 0.02
BEFORE_S, DURING_S, SETTLE_S = 6.0, 10.0, 1.0
MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 256
OPTIONS = (
    "--dtype float32 --num-gpu-blocks-override 8000 --max-body-bytes 1000000 --max-num-batched-tokens 256 "
    f"--trust-request-chat-template --max-model-len {MAX_MODEL_LEN} --max-num-seqs {MAX_NUM_SEQS} "
    f"--api-key {HOSTILE_KEY}"
).split()
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}a:"
SLOW_TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i * j }}{% endfor %}{% endfor %}"
ESCAPES = "[" * 70 + '"' + '\\"' * 50_000


def _chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


def _call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def requests() -> dict[str, tuple[str, bytes]]:
    """The request of each hostile client: path and body."""
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
        "a slow template": ("/v1/chat/completions", _chat(chat_template=SLOW_TEMPLATE)),
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
        "a large logit_bias": (
            "/v1/completions",
            {"prompt": [5], "max_tokens": 4, "logit_bias": {str(i): 1 for i in range(97)}},
        ),
        "bad words by the hundred": (
            "/v1/completions",
            {"prompt": [5], "max_tokens": 100, "n": 64, "bad_words": [f"w{i}{words[:50]}" for i in range(60)]},
        ),
    }
    return {
        name: (path, body if isinstance(body, bytes) else json.dumps(body).encode())
        for name, (path, body) in bodies.items()
    }


async def attack(name: str, port: int) -> None:
    """Repeats one client's request. Prints the status and code of every response."""
    path, body = requests()[name]

    async def connection() -> None:
        client = RawClient(port, key=HOSTILE_KEY)
        while True:
            try:
                answer = await client.ask(path=path, raw=body)
                print(answer.status, answer.code or "", flush=True)
            except OSError:
                print("closed", flush=True)
                await asyncio.sleep(0.05)

    await asyncio.gather(*(connection() for _ in range(NUM_CONNECTIONS)))


@dataclass(slots=True)
class Neighbours:
    """The streams and the probes of /health during an attack.

    token_at  arrival of each token, on the monotonic clock
    health_s  duration of each probe in seconds
    """

    tally: Tally
    port: int
    token_at: list[float] = field(default_factory=list)
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
            answer = await asyncio.wait_for(client.ask(body, on_data=self._count), LONG_S)
            if answer.status != 200 or not answer.is_whole:
                self.tally.lost += 1
                self.tally.notes.append(f"a stream got {answer.status} {answer.code}: {answer.body[-200:]!r}")
                await asyncio.sleep(0.1)

    def _count(self, data: bytes) -> None:
        now = time.monotonic()
        for line in data.split(b"\n"):
            if line.startswith(b"data: {"):
                self.token_at += [now] * sum(len(c.get("token_ids", ())) for c in json.loads(line[6:])["choices"])

    async def probe(self) -> None:
        while True:
            begin = time.monotonic()
            answer = await asyncio.wait_for(request_once(self.port, path="/health"), LONG_S)
            self.health_s.append(time.monotonic() - begin)
            if answer.status != 200:
                self.tally.miss(f"/health answered {answer.status}")
            await asyncio.sleep(max(0.0, begin + PROBE_PERIOD_S - time.monotonic()))

    async def rate(self, seconds: float) -> float:
        """Tokens per second over the next `seconds`."""
        begin = time.monotonic()
        await asyncio.sleep(seconds)
        end = time.monotonic()
        return sum(begin < at <= end for at in self.token_at) / (end - begin)


async def hostile(tally: Tally, world: World) -> None:
    """Each hostile client in turn."""
    from tests.proof.server_trials import serving  # server_trials imports this module

    names = list(requests())[:: max(1, round(1 / world.scale))]
    model = make_talking_checkpoint(world.folder / "long", max_position_embeddings=MAX_MODEL_LEN)
    (template := world.folder / "template.jinja").write_text(TEMPLATE)
    options = [*OPTIONS, "--chat-template", str(template)]
    figures = []
    async with serving(tally, replace(world, model=str(model)), *options, faults={"pace_s": PACE_S}) as server:
        for name in names:
            figures.append(await measure(tally, server.port, name))
    tally.figures = "\n    ".join(figures)


async def measure(tally: Tally, port: int, name: str) -> str:
    """Runs one hostile client during the streams; returns a line with its cost."""
    neighbours = Neighbours(tally, port)
    tasks = [asyncio.ensure_future(neighbours.stream(number)) for number in range(NUM_STREAMS)]
    tasks.append(asyncio.ensure_future(neighbours.probe()))
    try:
        await asyncio.sleep(SETTLE_S)
        before = await neighbours.rate(BEFORE_S)
        command = [sys.executable, "-m", __name__, name, str(port)]
        client = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert client.stdout is not None
        answers = asyncio.ensure_future(client.stdout.read())
        try:
            await asyncio.sleep(SETTLE_S)
            neighbours.health_s.clear()
            during = await neighbours.rate(DURING_S)
            health_s = sorted(neighbours.health_s)
        finally:
            client.kill()
            await client.wait()
        lines = (await answers).decode().splitlines()
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                tally.hung += isinstance(result, TimeoutError)
                tally.lost += not isinstance(result, TimeoutError)
                tally.notes.append(f"{name}: {result!r}")
    p99_s = health_s[int(0.99 * len(health_s))] if health_s else LONG_S
    if p99_s > HEALTH_P99_S:
        tally.miss(f"{name}: the 99th percentile of /health is {1000 * p99_s:.0f} ms")
    if during < STREAMS_SHARE * before:
        tally.miss(f"{name}: the streams get {during:.0f} tokens/s, {before:.0f} before")
    kinds = ", ".join(f"{lines.count(kind)} x {kind.strip()}" for kind in sorted(set(lines))) or "no answer"
    shares = f"streams {during / before:.2f} of {before:,.0f} tokens/s"
    return f"{name:<40} {shares}, /health p99 {1000 * p99_s:.0f} ms, at most {1000 * max(health_s):.0f}; {kinds}"


if __name__ == "__main__":
    os.nice(19)
    with contextlib.suppress(KeyboardInterrupt):
        run(attack(sys.argv[1], int(sys.argv[2])), None)
