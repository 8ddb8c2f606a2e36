"""What callers ask of the engine is bounded, however many they are."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from octavo.serve import debug_rate_limit
from octavo.serve import view_routes as view
from octavo.serve.debug_rate_limit import MAX_WAITING, CoalescedQuery, TenantRateLimiter
from octavo.serve.openai.errors import ApiError
from octavo.serve.view_routes import View
from octavo.view.live.hub import Hub
from tests.serve.in_process_server import run, serving
from tests.serve.test_view_routes import Listener


class Engine:
    """It counts what it is asked, and how much of that at once."""

    def __init__(self, cost_s: float = 0.0) -> None:
        self.num_asked = self.num_now = self.most = 0
        self.cost_s = cost_s

    async def ask(self) -> dict[str, Any]:
        self.num_asked += 1
        self.num_now += 1
        self.most = max(self.most, self.num_now)
        number = self.num_asked
        await asyncio.sleep(0.02)
        self.num_now -= 1
        return {"number": number, "cost_s": self.cost_s}


def test_callers_share_an_answer_that_is_not_older_than_their_call() -> None:
    async def main() -> None:
        engine = Engine()
        shared = CoalescedQuery(engine.ask)
        first = asyncio.ensure_future(shared.get())
        await asyncio.sleep(0.01)  # it is being asked
        others = [asyncio.ensure_future(shared.get()) for _ in range(500)]
        assert (await first)["number"] == 1
        assert {answer["number"] for answer in await asyncio.gather(*others)} == {2}
        assert (engine.num_asked, engine.most) == (2, 1)
        gone = asyncio.ensure_future(shared.get())
        await asyncio.sleep(0.001)
        gone.cancel()
        assert (await shared.get())["number"] >= 3

    run(main())


def test_an_engine_that_was_busy_with_an_answer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def main() -> None:
        for cost_s, least in ((0.01, 0.1), (10.0, 0.9)):
            engine = Engine(cost_s)
            shared = CoalescedQuery(engine.ask)
            monkeypatch.setattr(debug_rate_limit.asyncio, "sleep", sleep)
            await shared.get()
            await shared.get()
            monkeypatch.undo()
            assert least < max(pauses) <= debug_rate_limit.MAX_PAUSE_S

    run(main())


def test_an_answer_that_fails_is_asked_again() -> None:
    async def main() -> None:
        answers: list[Any] = [OSError("away"), {"cost_s": 0.0}]

        async def ask() -> dict[str, Any]:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        shared = CoalescedQuery(ask)
        with pytest.raises(OSError, match="away"):
            await shared.get()
        assert await shared.get() == {"cost_s": 0.0}

    run(main())


def test_a_tenant_has_one_question_at_a_time_and_keeps_nobody_from_asking() -> None:
    async def main() -> None:
        engine, turns = Engine(), TenantRateLimiter(interval_s=0.0)

        async def ask(tenant: str) -> None:
            async with turns.of(tenant):
                await engine.ask()

        many = [asyncio.ensure_future(ask("one")) for _ in range(200)]
        await asyncio.sleep(0.01)
        await asyncio.wait_for(ask("two"), 5)
        results = await asyncio.gather(*many, return_exceptions=True)
        refused = [result for result in results if result is not None]
        assert len(refused) == 200 - MAX_WAITING
        assert {(p.status, p.code) for p in refused if isinstance(p, ApiError)} == {(429, "too_many_questions")}
        assert engine.most == 2
        await ask("one")  # all turns are over

    run(main())


def test_a_key_has_so_many_viewers_and_no_more(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "MAX_VIEWERS", 3)

    async def main() -> None:
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

    run(main())


def test_the_playground_works_on_a_thread_of_its_own() -> None:
    """The event loop's own pool is for chat templates and tokenising."""
    threads: list[str] = []

    class Recording:
        def answer(self, history: str, action: str | None) -> dict[str, Any]:
            threads.append(threading.current_thread().name)
            return {}

    async def main() -> None:
        shown = View()
        shown._playgrounds = Recording()  # type: ignore[assignment]
        context: Any = type("Exchange", (), {"body": {"history": "64x16"}})()
        await asyncio.gather(*[shown._play(context) for _ in range(50)])
        assert set(threads) == {"octavo-playground_0"}

        async def ask(question: str, argument: str) -> Any:
            return None

        paths = [path for _, path, _ in View(hub=Hub(ask), playground=False).routes()]
        assert not [path for path in paths if "play" in path]

    run(main())
