"""A server with a tiny model in the test process, and an HTTP client for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from octavo.config import EngineArgs
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.build import BuiltEngine, build
from octavo.serve.app import App
from octavo.serve.args import ServeArgs
from octavo.serve.http.middleware import ApiKeys
from octavo.serve.http.server import HTTPServer, bind
from octavo.serve.service import EngineLimits, Service
from octavo.serve.tracing import Tracing
from tests.serve.event_loop import run as run  # re-exported for tests of the server

NAME = "tiny"
OPTIONS: dict[str, Any] = {"block_size": 4, "num_gpu_blocks_override": 300, "max_num_seqs": 16}
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
LONGEST = 128
"""The context length of the tiny model."""


@dataclass
class Server:
    app: App
    engine: AsyncLLM
    client: httpx.AsyncClient
    built: BuiltEngine

    async def post(self, path: str, /, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body)

    async def complete(self, prompt: Any = "Hello", /, **body: Any) -> dict[str, Any]:
        """A completion that must succeed; by default greedy, with eight tokens."""
        payload = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
        return good(await self.post("/v1/completions", **payload))

    async def chat(self, content: str = "Hello", /, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}]
        payload = {"messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
        return good(await self.post("/v1/chat/completions", **payload))

    async def events(self, path: str, /, **body: Any) -> list[Any]:
        """The events of a stream, without the final `[DONE]`, which is checked."""
        async with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            text = (await response.aread()).decode()
            assert response.status_code == 200, text
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return events_of(text)

    async def at_rest(self) -> None:
        """Waits until no request and no block is left."""
        for _ in range(5000):
            if (await self.engine.kv_stats()).num_used == 0 and not self.app.service.admission.num_requests:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"blocks are still held: {await self.engine.debug_kv()}")


def good(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def events_of(text: str) -> list[Any]:
    frames = text.split("\n\n")
    assert frames.pop() == "" and frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


@contextlib.asynccontextmanager
async def serving(
    model: str,
    *,
    keys: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    engine_options: dict[str, Any] | None = None,
    tracing: Tracing | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    options = OPTIONS | (engine_options or {})
    args = EngineArgs(model=model, **({"chat_template": TEMPLATE} | options))
    built = build(args)
    async with AsyncLLM(built.engine, built.tokenizer) as engine:
        engine.cuts_max_tokens = False  # as the client of `octavo serve`
        limits = EngineLimits(args.max_num_seqs, args.max_logprobs, args.scheduling_policy == "priority")
        serve_args = ServeArgs(**({"served_model_name": [NAME]} | settings))
        service = Service(engine, serve_args, model, limits, tracing)
        app = App(service, ApiKeys(keys, admin_keys))
        transport = httpx.ASGITransport(app.asgi, raise_app_exceptions=True)
        headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            yield Server(app, engine, client, built)
        await app.close()


@contextlib.asynccontextmanager
async def listening(
    model: str, *, max_connections: int | None = None, **settings: Any
) -> AsyncIterator[tuple[Server, HTTPServer, int]]:
    """`serving` on a port of this machine: the server, its HTTP server, and the port."""
    async with serving(model, **({"disable_log_stats": True} | settings)) as server:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        http = HTTPServer(server.app, ready.set_result, max_connections=max_connections)
        sock = bind("127.0.0.1", 0)
        task = asyncio.ensure_future(http.run_on(sock))
        await ready
        try:
            yield server, http, sock.getsockname()[1]
        finally:
            http.stop()
            http.stop()
            await asyncio.wait_for(task, 50)
            sock.close()
