"""Debug queries to the engine are rate-limited per tenant and shared by concurrent callers."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from octavo.serve import debug_rate_limit, view_routes
from octavo.serve.debug_rate_limit import MAX_WAITING, CoalescedQuery, EngineQueries
from octavo.serve.openai.errors import ApiError
from octavo.serve.tenants import Tenant
from octavo.serve.view_routes import View
from octavo.view.live.hub import Hub
from tests.serve.in_process_server import serving
from tests.serve.test_view_routes import Listener


class Engine:
    """Counts its queries, in all and at once."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.num_queries = self.num_running = self.max_running = 0
        self.cost_s = cost_s

    async def query(self) -> dict[str, Any]:
        self.num_queries += 1
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        number = self.num_queries
        await asyncio.sleep(0.02)
        self.num_running -= 1
        return {"number": number, "cost_s": self.cost_s}


async def test_concurrent_callers_share_a_query_that_starts_after_their_call() -> None:
    engine = Engine()
    shared = CoalescedQuery(engine.query)
    first = asyncio.ensure_future(shared.get())
    await asyncio.sleep(0.01)  # the query is running
    others = [asyncio.ensure_future(shared.get()) for _ in range(500)]
    assert (await first)["number"] == 1
    assert {answer["number"] for answer in await asyncio.gather(*others)} == {2}
    assert (engine.num_queries, engine.max_running) == (2, 1)
    cancelled = asyncio.ensure_future(shared.get())
    await asyncio.sleep(0.001)
    cancelled.cancel()
    assert (await shared.get())["number"] >= 3


async def test_expensive_queries_are_spaced_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    for cost_s, min_pause_s in ((0.01, 0.1), (10.0, 0.9)):
        engine = Engine(cost_s)
        shared = CoalescedQuery(engine.query)
        monkeypatch.setattr(debug_rate_limit.asyncio, "sleep", sleep)
        await shared.get()
        await shared.get()
        monkeypatch.undo()
        assert min_pause_s < max(pauses) <= debug_rate_limit.MAX_PAUSE_S


async def test_a_failed_query_is_repeated_for_the_next_caller() -> None:
    answers: list[Any] = [OSError("away"), {"cost_s": 0.0}]

    async def query() -> dict[str, Any]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    shared = CoalescedQuery(query)
    with pytest.raises(OSError, match="away"):
        await shared.get()
    assert await shared.get() == {"cost_s": 0.0}


async def test_queries_take_turns_between_tenants() -> None:
    engine, queries = Engine(), EngineQueries()
    many = [asyncio.ensure_future(queries.run(engine.query, 1)) for _ in range(200)]
    await asyncio.sleep(0.01)
    assert (await asyncio.wait_for(queries.run(engine.query, 2), 5))["number"] == 2
    results = await asyncio.gather(*many, return_exceptions=True)
    refused = [result for result in results if isinstance(result, ApiError)]
    assert len(refused) == 200 - MAX_WAITING + 1
    assert {(error.status, error.code) for error in refused} == {(429, "queue_full")}
    assert (engine.max_running, engine.num_queries) == (1, MAX_WAITING)


async def test_viewers_of_one_key_are_limited(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_routes, "MAX_VIEWERS", 3)
    async with serving(model, keys=("one", "two")) as server:
        one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        viewers = [Listener(server.app.asgi, one) for _ in range(3)]
        for viewer in viewers:
            await viewer.event()
        refused = await server.client.get("/view/events", headers=one)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_viewers")
        assert refused.headers["retry-after"]
        other = Listener(server.app.asgi, two)
        await other.event()
        await viewers.pop().leave()
        viewers.append(Listener(server.app.asgi, one))
        await viewers[-1].event()
        for viewer in (*viewers, other):
            await viewer.leave()


async def test_histories_are_computed_one_at_a_time_in_turns_between_tenants() -> None:
    order: list[str] = []

    class FakePlaygrounds:
        def answer(self, history: str, action: str | None) -> dict[str, Any]:
            assert threading.current_thread() is not threading.main_thread()
            time.sleep(0.002)
            order.append(history)
            return {}

    page = View()
    page._playgrounds = FakePlaygrounds()  # type: ignore[assignment]

    def ask(history: str, number: int) -> asyncio.Future[Any]:
        body = json.dumps({"history": history}).encode()
        context: Any = type("RequestContext", (), {"body": body, "tenant": Tenant(number=number)})()
        return asyncio.ensure_future(page._play(context))

    await asyncio.gather(*[ask("one", 1) for _ in range(50)], ask("two", 2))
    assert order.index("two") == 1


async def test_a_server_with_an_engine_has_no_playground() -> None:
    async def query(question: str, argument: str) -> Any:
        return None

    paths = [path for _, path, _ in View(hubs=[Hub(query)], playground=False).routes()]
    assert not [path for path in paths if "play" in path]
