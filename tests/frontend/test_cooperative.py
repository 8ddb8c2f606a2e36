"""Cooperative work and engine messages on the event loop: order is kept, and other tasks run in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.engine.process import ipc
from octavo.engine.process.ipc import Channel, endpoint_in
from octavo.frontend import cooperative as slices
from octavo.frontend.cooperative import YIELD_POINT, iter_cooperatively, run_cooperatively


class Log(list[Any]):
    """Events in order."""

    @contextlib.asynccontextmanager
    async def with_another_task(self) -> AsyncIterator[None]:
        async def other() -> None:
            while True:
                self.append("other")
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def results(self) -> list[Any]:
        return [item for item in self if item != "other"]


def work(num_items: int) -> Iterator[Any]:
    for i in range(num_items):
        yield i
        yield YIELD_POINT


@pytest.mark.parametrize(("slice_s", "num_turns"), [(-1.0, 10), (1e6, 0)])
async def test_results_keep_their_order_and_other_tasks_run_between_slices(
    monkeypatch: pytest.MonkeyPatch, slice_s: float, num_turns: int
) -> None:
    monkeypatch.setattr(slices, "SLICE_S", slice_s)
    log = Log()
    async with log.with_another_task():
        async for item in iter_cooperatively(work(10)):
            log.append(item)
        assert log.results == list(range(10))
        assert log.count("other") == num_turns  # one between any two slices, none within a slice
    assert await run_cooperatively(work(5)) == [0, 1, 2, 3, 4]


async def test_exception_of_the_work_reaches_the_caller() -> None:
    def failing() -> Iterator[Any]:
        yield 1
        yield YIELD_POINT
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_cooperatively(failing())


@pytest.mark.parametrize("drain_s", [-1.0, 1e6])
async def test_messages_keep_their_order_and_other_tasks_run_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drain_s: float
) -> None:
    """With a time slice of 0, messages arrive one per turn of the loop, without waiting for another signal."""
    monkeypatch.setattr(ipc, "DRAIN_S", drain_s)
    log, arrived = Log(), asyncio.Event()
    other_end, here = Channel(bind=endpoint_in(str(tmp_path))), Channel(connect=endpoint_in(str(tmp_path)))
    try:
        here.send("hello")
        assert other_end.receive(30.0) is not None  # earlier messages may be lost
        for i in range(50):
            other_end.send(i)

        def take(data: bytes) -> None:
            log.append(msgspec.msgpack.decode(data))
            if len(log.results) == 50:
                arrived.set()

        async with log.with_another_task():
            here.attach(asyncio.get_running_loop(), take)
            async with asyncio.timeout(30):
                await arrived.wait()
        assert log.results == list(range(50))
    finally:
        here.close()
        other_end.close()
    turns = "".join("." if item == "other" else "m" for item in log)
    if drain_s < 0:
        assert "mm" not in turns
