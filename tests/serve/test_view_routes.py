"""The view of a running server: its events, and who may see what."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from typing import Any

import httpx
import msgspec
import numpy as np

import octavo
from octavo import SamplingParams
from octavo.core.policy import PreemptionMode
from octavo.serve.view_routes import View
from octavo.serve.view_server import ViewApp
from octavo.view.live.hub import Hub
from octavo.view.live.messages import Frame
from octavo.view.live.state import PoolState
from tests.engine.process.engines import last_of, oracle_client
from tests.serve.in_process_server import Server, serving
from tests.view.live.test_hub import frame_of

KEY = "sk-secret"


class Listener:
    """A browser that listens to /view/events; `leave` closes its tab."""

    def __init__(self, app: Any, headers: dict[str, str] | None = None, query: str = "") -> None:
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self.left = asyncio.Event()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.state: PoolState | None = None
        self.rest = b""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": "/view/events",
            "raw_path": b"/view/events",
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode()) for k, v in ({"host": "localhost"} | (headers or {})).items()],
        }
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.parts.put_nowait(message["body"])

    async def event(self) -> tuple[str, bytes]:
        event = b":"
        while event.startswith(b":"):  # a keep-alive comment
            while b"\n\n" not in self.rest:
                self.rest += await self.parts.get()
            event, _, self.rest = self.rest.partition(b"\n\n")
        kind, data = event.split(b"\n")
        return kind.removeprefix(b"event: ").decode(), data.removeprefix(b"data: ")

    async def read(self) -> PoolState:
        kind, data = await self.event()
        frame = msgspec.json.decode(data, type=Frame)  # type: ignore[arg-type]
        if self.state is None:
            assert kind == "snapshot"
            self.state = PoolState(frame)
        else:
            self.state.apply(frame)
        return self.state

    async def leave(self) -> None:
        self.left.set()
        await self.task


async def agrees(listener: Listener, server: Server) -> None:
    """Reads until the state equals the pool of an idle engine."""
    stats = (await server.engine.kv_stats()).as_dict()
    state = listener.state or await listener.read()
    while state.stats != stats or state.requests:
        state = await listener.read()
    pool = server.built.engine.scheduler.cache.pool
    assert np.array_equal(state.words & 0x7FFF, np.array(pool.refs))
    assert np.array_equal(state.words >> 15 == 1, np.array(pool.seal_id) != 0)


async def test_view_shows_a_running_server(model: str) -> None:
    options = {"num_gpu_blocks_override": 40, "preemption_mode": PreemptionMode.RECOMPUTE.value}
    async with serving(model, engine_options=options, view_text=True) as server:
        listeners = server.built.engine.scheduler.events._listeners
        num_listeners = len(listeners)
        early, late = Listener(server.app.asgi), None
        await early.read()
        assert (early.status, early.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        work = [asyncio.create_task(server.complete(f"Hello {i}", max_tokens=40)) for i in range(8)]
        while early.state is None or not early.state.events:  # the requests may have finished by then
            await early.read()
        late = Listener(server.app.asgi)
        await asyncio.gather(*work)
        await server.at_rest()
        for listener in (early, late):
            await agrees(listener, server)
        assert {e["event"] for e in early.state.events} >= {"arrived", "admitted", "finished"}
        sealed = int(np.nonzero(early.state.words)[0][0])
        found = (await server.client.get(f"/view/blocks/{sealed}")).json()
        assert (found["id"], found["sealed"], len(found["token_ids"])) == (sealed, True, 4) and found["text"]
        assert (await server.client.get("/view/blocks/x")).status_code == 404
        await early.leave()
        assert len(listeners) == num_listeners + 1
        await late.leave()
        while server.built.engine.scheduler.events.blocks:
            await asyncio.sleep(0.01)
        assert not server.app.active_requests


async def test_text_is_shown_only_with_view_text(model: str) -> None:
    async with serving(model) as server:
        assert (await server.client.get("/view/config")).json() == {
            "uses": ["live"],
            "num_replicas": 1,
            "title": "tiny",
            "version": octavo.__version__,
            "text": False,
            "only_own": False,
        }
        listener = Listener(server.app.asgi)
        await listener.read()
        await server.complete("Hello, hello, hello, hello")
        await agrees(listener, server)
        assert listener.state is not None
        sealed = int(np.nonzero(listener.state.words)[0][0])
        found = (await server.client.get(f"/view/blocks/{sealed}")).json()
        assert found["token_ids"] is None and found["text"] is None and len(found["name"]) == 32
        await listener.leave()


async def test_each_replica_has_its_own_stream_and_blocks(model: str) -> None:
    async with serving(model) as first, serving(model, engine_options={"num_gpu_blocks_override": 40}) as second:
        app = ViewApp(View("tiny", hubs=[Hub(server.engine.query) for server in (first, second)]))
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/view/config")).json()["num_replicas"] == 2
            listeners = [Listener(app, query=query) for query in ("", "replica=0", "replica=1")]
            assert [(await listener.read()).num_blocks for listener in listeners] == [300, 300, 40]
            assert [await listener.event() for listener in listeners] == 3 * [("engines", b'{"num_replicas":2}')]
            await second.complete("Hello, hello, hello, hello")
            await agrees(listeners[2], second)
            assert listeners[2].state is not None
            sealed = int(np.nonzero(listeners[2].state.words)[0][0])
            found = [(await client.get(f"/view/blocks/{sealed}?replica={i}")).json() for i in range(2)]
            assert [each["sealed"] for each in found] == [False, True]
            for listener in listeners:
                await listener.leave()
            for wrong in ("2", "-1", "x", "%C2%B2", "1e0", "9" * 20):
                for path in ("events", "blocks/1"):
                    answer = await client.get(f"/view/{path}?replica={wrong}")
                    error = answer.json()["error"]
                    assert (answer.status_code, error["param"]) == (400, "replica"), (path, wrong)
                    assert "the server has 0 to 1" in error["message"]


async def test_a_server_of_one_engine_has_replica_0_alone(model: str) -> None:
    async with serving(model) as server:
        assert (await server.client.get("/debug/kv?replica=0")).status_code == 200
        for path in ("/view/events", "/view/blocks/1", "/debug/kv"):
            answer = await server.client.get(f"{path}?replica=1")
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "replica"), path
            assert "the server has 0 alone" in answer.json()["error"]["message"]


async def test_view_needs_the_key(model: str) -> None:
    async with serving(model, keys=(KEY,)) as server:
        basic = lambda text: {"authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}  # noqa: E731
        paths = ["", "/", "/config", "/play", "/events", "/blocks/1", "/static/index.html"]
        for path in paths:
            answer = await server.client.get(f"/view{path}", headers={"authorization": ""})
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == 'Basic realm="octavo", charset="UTF-8"'
        answer = await server.client.get("/", headers=basic(f"me:{KEY}"))
        assert (answer.status_code, answer.headers["location"]) == (307, "view/")
        for given, status in [
            (basic(f"me:{KEY}"), 200),
            (basic(f":{KEY}"), 200),
            ({"authorization": f"Bearer {KEY}"}, 200),
            (basic("me:sk-other"), 401),
            (basic(KEY), 401),
            ({"authorization": "Basic %%%"}, 401),
            ({"authorization": f"Basic {KEY}"}, 401),
        ]:
            assert (await server.client.get("/view/config", headers=given)).status_code == status, given
        for path in (
            "/v1/models",
            "/viewer",
            "/metrics",
            "/debug/kv",
        ):  # browsers remember such keys, so only the view accepts them
            answer = await server.client.get(path, headers=basic(f"me:{KEY}"))
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path


async def test_invalid_file_name_is_not_found(model: str) -> None:
    async with serving(model) as server:
        assert (await server.client.get("/view/static/index.html")).status_code == 200
        for name in ("%00.js", "a%00.js", "x" * 5000 + ".js", "%C3%A9" * 200 + ".js", "a/" * 3000 + "b.js"):
            answer = await server.client.get(f"/view/static/{name}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), name[:20]


async def test_view_follows_an_engine_process_across_a_restart(model: str) -> None:
    """Frames of an engine process; after it is killed, the snapshot of its successor comes in the same stream."""
    client = oracle_client(model)
    async with client:
        hub = Hub(client.query)
        stream = hub.watch()
        state = PoolState(frame_of(await anext(stream)))
        assert state.num_blocks == 200

        async def until(name: str) -> None:
            while name not in {e.get("request_id") for e in state.events if e["event"] == "finished"}:
                state.apply(frame_of(await anext(stream)))

        params = SamplingParams(max_tokens=30, ignore_eos=True)
        await last_of(client, [1, 2, 3], params, request_id="first")
        await until("first")
        assert state.num_used == 0 and state.num_cached == 8  # the last of 33 tokens is never computed
        epoch = state.epoch
        os.kill(client.transport.pid or 0, signal.SIGKILL)
        while state.epoch == epoch:
            state.apply(frame_of(await anext(stream)))
        assert state.num_free == 200
        await last_of(client, [1, 2, 3], params, request_id="second")
        await until("second")
        assert state.stats == (await client.kv_stats()).as_dict()
        await stream.aclose()
