"""Full garbage collections run only while the server is idle."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from octavo.serve.http import gc_tuning
from octavo.serve.http.gc_tuning import defer_full_gc


class Cycle:
    """A reference cycle: only the collector frees it."""

    num_alive = 0

    def __init__(self) -> None:
        self.itself = self
        Cycle.num_alive += 1

    def __del__(self) -> None:
        Cycle.num_alive -= 1


@pytest.fixture(autouse=True)
def _restores_the_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gc_tuning, "CHECK_S", 0.001)
    monkeypatch.setattr(gc_tuning, "MIN_IDLE", 0)
    before = gc.get_threshold(), gc.get_freeze_count()
    yield
    assert before == (gc.get_threshold(), gc.get_freeze_count())


async def test_full_collection_waits_for_an_idle_server() -> None:
    idle = False
    async with defer_full_gc(lambda: idle):
        Cycle()
        gc.collect(1)  # frees young objects and promotes the others
        assert not Cycle.num_alive
        cycle = Cycle()
        gc.collect(1)
        del cycle  # in generation 2 by now
        for _ in range(20):
            await asyncio.sleep(0.002)
        assert Cycle.num_alive == 1
        idle = True
        while Cycle.num_alive:
            await asyncio.sleep(0.002)


async def test_full_collection_runs_on_a_busy_server_after_many_young_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async with defer_full_gc(lambda: False):
        cycle = Cycle()
        gc.collect(1)
        del cycle
        monkeypatch.setattr(gc_tuning, "MIN_BUSY", 0)
        while Cycle.num_alive:
            await asyncio.sleep(0.002)
