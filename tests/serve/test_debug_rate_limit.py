"""Debug queries to the engine are rate-limited per tenant and shared by concurrent callers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from octavo.serve import debug_rate_limit, view_routes
from octavo.serve.debug_rate_limit import MAX_WAITING, CoalescedQuery, TenantRateLimiter
from octavo.serve.openai.errors import ApiError
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


async def test_one_tenants_queries_do_not_delay_another_tenants() -> None:
    engine, limiter = Engine(), TenantRateLimiter(interval_s=0.0)

    async def query(tenant: str) -> None:
        async with limiter.acquire(tenant):
            await engine.query()

    many = [asyncio.ensure_future(query("one")) for _ in range(200)]
    await asyncio.sleep(0.01)
    await asyncio.wait_for(query("two"), 5)
    results = await asyncio.gather(*many, return_exceptions=True)
    refused = [result for result in results if result is not None]
    assert len(refused) == 200 - MAX_WAITING
    assert {(p.status, p.code) for p in refused if isinstance(p, ApiError)} == {(429, "too_many_questions")}
    assert engine.max_running == 2
    await query("one")  # no query is left waiting


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


async def test_the_playground_has_its_own_thread() -> None:
    """The event loop's thread pool is for chat templates and tokenising."""
    threads: list[str] = []

    class FakePlaygrounds:
        def answer(self, history: str, action: str | None) -> dict[str, Any]:
            threads.append(threading.current_thread().name)
            return {}

    page = View()
    page._playgrounds = FakePlaygrounds()  # type: ignore[assignment]
    context: Any = type("RequestContext", (), {"body": b'{"history": "64x16"}'})()
    await asyncio.gather(*[page._play(context) for _ in range(50)])
    assert set(threads) == {"octavo-playground_0"}

    async def query(question: str, argument: str) -> Any:
        return None

    paths = [path for _, path, _ in View(hub=Hub(query), playground=False).routes()]
    assert not [path for path in paths if "play" in path]
