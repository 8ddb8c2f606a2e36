"""The collector of the server's process: whole collections only where no request runs."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from octavo.serve.http import gc_tuning
from octavo.serve.http.gc_tuning import defer_full_gc
from tests.serve.event_loop import run


class Knot:
    """Garbage that only the collector frees."""

    num_alive = 0

    def __init__(self) -> None:
        self.own = self
        Knot.num_alive += 1

    def __del__(self) -> None:
        Knot.num_alive -= 1


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gc_tuning, "CHECK_S", 0.001)
    monkeypatch.setattr(gc_tuning, "DUE", 0)
    before = gc.get_threshold(), gc.get_freeze_count()
    yield
    assert before == (gc.get_threshold(), gc.get_freeze_count())


def test_old_garbage_is_collected_while_no_request_runs() -> None:
    async def main() -> None:
        idle = False
        async with defer_full_gc(lambda: idle):
            Knot()
            gc.collect(1)  # of the young, which also moves those that stay; this one goes at once
            assert not Knot.num_alive
            knot = Knot()
            gc.collect(1)
            del knot  # old by now
            for _ in range(20):
                await asyncio.sleep(0.002)
            assert Knot.num_alive == 1
            idle = True
            while Knot.num_alive:
                await asyncio.sleep(0.002)

    run(main())


def test_old_garbage_is_collected_at_last_though_requests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with defer_full_gc(lambda: False):
            knot = Knot()
            gc.collect(1)
            del knot
            monkeypatch.setattr(gc_tuning, "OVERDUE", 0)
            while Knot.num_alive:
                await asyncio.sleep(0.002)

    run(main())
