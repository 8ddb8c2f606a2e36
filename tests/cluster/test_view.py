"""The page, /debug/kv and `octavo top` on a front: every replica, and replicas that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from octavo import SamplingParams
from octavo.cli.main import run as command
from octavo.cluster.options import ClusterArgs
from octavo.cluster.replica import EngineReplica
from octavo.cluster.transport import ClusterTransport
from octavo.frontend.engine_client import EngineClient
from octavo.serve.app import App
from octavo.serve.args import ServeArgs
from octavo.serve.http.server import HTTPServer
from octavo.serve.service import EngineLimits, Service
from tests.cluster.test_transport import ENGINE, front, text_of

ABSENT, SILENT = "no replica 1 is ready; try again later", "replica 1 does not answer; try again later"


@contextlib.asynccontextmanager
async def serving(client: EngineClient[ClusterTransport]) -> AsyncIterator[tuple[str, httpx.AsyncClient]]:
    """The address of the front's server, and a client for it."""
    service = Service(client, ServeArgs(disable_log_stats=True), "tiny", EngineLimits())
    app = App(service, engines=client.transport.pool.slots)
    await app.start()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        http = HTTPServer(app)
        task = asyncio.create_task(http.run_on(sock))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=60) as requests:
                yield url, requests
        finally:
            http.stop()
            await task
            await app.close()


class Page:
    """A page that shows one replica, in place of the browser's."""

    def __init__(self, client: httpx.AsyncClient, replica: int) -> None:
        self._client, self._path = client, f"/view/events?replica={replica}"

    async def events(self) -> AsyncIterator[tuple[str, Any]]:
        """The names and data of the events, of which each frame follows the last. It connects again after a `bye`."""
        while True:
            async with self._client.stream("GET", self._path) as response:
                assert response.status_code == 200
                name, last = "", ("", 0)
                async for line in response.aiter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        data = msgspec.json.decode(line.removeprefix("data: "))
                        if name in ("snapshot", "delta"):
                            place = data["epoch"], data["frame"]
                            assert name == "snapshot" or place == (last[0], last[1] + 1)
                            last = place
                        yield name, data


async def next_of(events: AsyncIterator[tuple[str, Any]], kind: str) -> Any:
    """The data of the next event of a kind."""
    async for name, data in events:
        if name == kind:
            return data


async def started(model: str, num_blocks: int) -> EngineReplica:
    """A replica that no front knows yet. Each replica of a test has another number of blocks."""
    replica = EngineReplica(
        ClusterArgs(model=model, engine=ENGINE | {"num_gpu_blocks_override": num_blocks}).engine_args()
    )
    await replica.start()
    return replica


FEW = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


async def test_each_replica_is_shown(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with front(model, 2) as (client, calls), serving(client) as (url, http):
        await text_of(client, "hello", FEW)
        user = client.transport.pool.replicas[calls.sent[0][0]].number
        kv = [(await http.get(f"/debug/kv?replica={i}")).json() for i in range(2)]
        assert [each["num_cached"] > 0 for each in kv] == [i == user for i in range(2)]
        assert (await http.get("/debug/kv")).json()["num_cached"] == kv[0]["num_cached"]
        assert (await http.get("/view/config")).json()["num_replicas"] == 2
        for i in range(2):
            events = Page(http, i).events()
            assert (await next_of(events, "snapshot"))["stats"]["num_cached"] == kv[i]["num_cached"]
            assert await next_of(events, "engines") == {"num_replicas": 2}
            blocks = [(await http.get(f"/view/blocks/{j}?replica={i}")).json() for j in range(1, 5)]
            assert any(block["sealed"] for block in blocks) == (i == user)
            await events.aclose()
        assert (await http.get("/debug/kv?replica=2")).json()["error"][
            "message"
        ] == "replica is '2'; the server has 0 to 1"
        assert await asyncio.to_thread(command, ["top", url, "--once"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].strip() == "2 engines"
        assert [line.split()[:2] for line in lines if line.startswith("engine ")] == [["engine", "0"], ["engine", "1"]]
        assert (await http.get("/metrics")).text.count("\nvllm:num_requests_running{") == 1


async def test_replicas_come_and_go(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with front(model, 1) as (client, calls), serving(client) as (url, http):
        pool, first = client.transport.pool, Page(http, 0).events()
        assert (await next_of(first, "snapshot"))["num_blocks"] == 256
        assert (await http.get("/debug/kv?replica=1")).status_code == 400

        calls.replicas["second"] = await started(model, 128)
        while len(pool.up) < 2:
            await asyncio.sleep(0.05)
        await asyncio.gather(*(text_of(client, letter * 40, FEW) for letter in "ab"))
        assert await next_of(first, "engines") == {"num_replicas": 2}
        second = Page(http, 1).events()
        snapshot = await next_of(second, "snapshot")
        assert snapshot["num_blocks"] == 128 and snapshot["stats"]["num_cached"] > 0

        third = await started(model, 64)
        calls.replicas["third"], _ = third, calls.lost.add("second")
        snapshot = await next_of(second, "snapshot")
        assert (snapshot["num_blocks"], snapshot["frame"]) == (64, 0)
        assert (await http.get("/debug/kv?replica=1")).json()["num_blocks"] == 64

        calls.lost.add("third")
        while (reason := (await next_of(second, "bye"))["reason"]) != ABSENT:
            assert reason == SILENT
        answer = await http.get("/debug/kv?replica=1")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, ABSENT)
        assert answer.json()["error"]["code"] == "no_replica" and answer.headers["retry-after"] == "1"
        assert await asyncio.to_thread(command, ["top", url, "--once"]) == 0
        out = capsys.readouterr().out
        assert "2 engines, 1 without data" in out and f"engine 1   no data: {ABSENT}" in out

        calls.replicas["fourth"] = await started(model, 32)
        epoch = (await next_of(second, "snapshot"))["epoch"]
        os.kill(calls.replicas["fourth"].supervisor.pid or 0, signal.SIGKILL)
        while (answer := await http.get("/debug/kv?replica=1")).status_code != 200:
            assert answer.json()["error"]["message"] in (ABSENT, SILENT)
            await asyncio.sleep(0.05)
        snapshot = await next_of(second, "snapshot")
        assert snapshot["num_blocks"] == 32 and snapshot["epoch"] != epoch
        for events in (first, second):
            await events.aclose()
